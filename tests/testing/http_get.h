#ifndef SHARDD_TESTS_TESTING_HTTP_GET_H_
#define SHARDD_TESTS_TESTING_HTTP_GET_H_

#include <string>

namespace shardd::testing {

struct HttpAnswer {
  int status = 0;  // 0: nobody listens, or what came was no answer
  std::string headers;
  std::string body;
};
// One request to 127.0.0.1 with a connection of its own. Blocks for ten seconds at most.
HttpAnswer HttpGet(int port, const std::string& target, const std::string& method = "GET");

// A port of 127.0.0.1 that nobody listened on just now. 0: there is none.
int FreePort();

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_HTTP_GET_H_
