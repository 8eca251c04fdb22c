#ifndef SHARDD_SERVER_SERVICE_VIEW_GROUP_H_
#define SHARDD_SERVER_SERVICE_VIEW_GROUP_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/shm/fd_channel.h"

namespace shardd {

// The group whose members may ask for the jobs of all users, and change none: `name` is a group's, or a number. Empty:
// nobody may, because the name is empty or there is no such group (here; it may be made later). INVALID_ARGUMENT, with
// `flag`, where it comes from: a number out of range. Asks the system's data base of groups, which may block.
absl::StatusOr<std::optional<uint32_t>> FindViewGroup(const std::string& flag, const std::string& name);

// Whether the process at the other end of `socket` had group `gid`, its own or a supplementary one, when it connected.
bool IsPeerInGroup(int socket, const PeerCredentials& peer, uint32_t gid);

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_VIEW_GROUP_H_
