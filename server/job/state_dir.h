#ifndef SHARDD_SERVER_JOB_STATE_DIR_H_
#define SHARDD_SERVER_JOB_STATE_DIR_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Makes `path` (0700) if absent, checks that it is a directory of ours that nobody else can write, locks it for this
// daemon and removes job directories that a dead daemon left. The lock lasts as long as the returned descriptor.
// ALREADY_EXISTS: another daemon uses it.
absl::StatusOr<UniqueFd> PrepareStateDir(const std::string& path);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STATE_DIR_H_
