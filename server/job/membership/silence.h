#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_SILENCE_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_SILENCE_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/job/wait.h"

namespace shardd {

class Committed;
class Sessions;

// DEADLINE_EXCEEDED: a rank has sent nothing for `limit`, less where its program gave up a forward or backward, and
// another rank waits for it, as `waiting_for` says; *silent is that rank. Asks for each rank once, and only where one
// is silent; a rank without a session has finished, and is not asked. Pure.
absl::Status CheckSilentRanks(const Sessions& sessions, const Committed& committed, absl::Duration limit,
                              absl::Time now, absl::FunctionRef<Wait(int rank)> waiting_for, int* silent);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_SILENCE_H_
