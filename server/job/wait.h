#ifndef SHARDD_SERVER_JOB_WAIT_H_
#define SHARDD_SERVER_JOB_WAIT_H_

#include <string>

namespace shardd {

// Who a rank cannot go on without, and the call of that rank that it needs.
struct Wait {
  int rank = -1;  // -1: nobody
  std::string call;
};

// The first rank other than `rank` of which `lacks` says that it has not done `call`.
template <typename Lacks>
Wait FirstOther(int ranks, int rank, const char* call, const Lacks& lacks) {
  for (int other = 0; other < ranks; ++other) {
    if (other != rank && lacks(other)) {
      return {other, call};
    }
  }
  return {};
}

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WAIT_H_
