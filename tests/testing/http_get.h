#ifndef SHARDD_TESTS_TESTING_HTTP_GET_H_
#define SHARDD_TESTS_TESTING_HTTP_GET_H_

#include <string>

namespace shardd::testing {

struct HttpAnswer {
  int status = 0;  // 0: nobody listens, or what came was no answer
  std::string headers;
  std::string body;
  bool closed = false;  // the server has closed the connection
};
// One request to 127.0.0.1 with a connection of its own. Blocks for ten seconds at most. `keep_alive`: asks the server
// to leave it open; the answer is read until that closes it all the same, or for four seconds.
HttpAnswer HttpGet(int port, const std::string& target, const std::string& method = "GET", bool keep_alive = false);

// A port of 127.0.0.1 that nobody listened on just now. 0: there is none.
int FreePort();

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_HTTP_GET_H_
