#ifndef SHARDD_SERVER_JOB_WAIT_H_
#define SHARDD_SERVER_JOB_WAIT_H_

#include <string>

namespace shardd {

// Who a rank cannot go on without, and the call of that rank that it needs.
struct Wait {
  int rank = -1;  // -1: nobody
  std::string call;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WAIT_H_
