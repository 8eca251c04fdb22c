#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_ATTACH_ANSWER_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_ATTACH_ANSWER_H_

#include <string>

#include "absl/status/status.h"

namespace shardd {

// Whether what earlier processes of a rank may still write lets it attach.
struct AttachAnswer {
  absl::Status status;      // ABORTED: not yet, the client must attach again
  std::string renew;        // not empty: why the job needs new gradient shards for it
  absl::Status not_killed;  // `replace` was asked for and the daemon could not kill the process
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_ATTACH_ANSWER_H_
