#ifndef SHARDD_COMMON_PROCESS_SPAWN_H_
#define SHARDD_COMMON_PROCESS_SPAWN_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// A process that is nobody's child here.
struct DetachedProcess {
  pid_t pid = 0;
  UniqueFd pidfd;  // invalid: it had already ended
};

// Runs argv[0] (a path) in a session and process group of its own, working folder `folder`, no descriptors but standard
// input
// (/dev/null), output and error (`output`), default signal dispositions, nothing blocked. It is a child of init, so the
// caller never sees its end as a child's. Returns after its exec; NOT_FOUND naming the error where that fails.
// Runs no pthread_atfork handlers; safe in a process with threads.
absl::StatusOr<DetachedProcess> SpawnDetached(const std::vector<std::string>& argv, int output,
                                              const char* folder = "/");

// SIGTERM, by pidfd.
void TerminateDetached(const DetachedProcess& process);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_SPAWN_H_
