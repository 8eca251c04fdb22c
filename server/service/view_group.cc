#include "server/service/view_group.h"

#include <grp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardd {

absl::StatusOr<std::optional<uint32_t>> FindViewGroup(const std::string& flag, const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (std::all_of(name.begin(), name.end(), absl::ascii_isdigit)) {
    uint32_t gid = 0;
    if (absl::SimpleAtoi(name, &gid) && gid != std::numeric_limits<uint32_t>::max()) return gid;
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": no number of a group (got ", name, ", want 0 to 4294967294, or a name)"));
  }
  group entry;
  group* found = nullptr;
  std::vector<char> buffer(size_t{1} << 20);  // a group's members may be many
  if (getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) {
    return std::nullopt;
  }
  return entry.gr_gid;
}

bool IsPeerInGroup(int socket, const PeerCredentials& peer, uint32_t gid) {
  if (peer.gid == gid) return true;
  std::vector<gid_t> groups(32);
  socklen_t size_bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size_bytes) != 0) {
    if (errno != ERANGE) return false;
    groups.resize(size_bytes / sizeof(gid_t));  // they are what they were when it connected: so many
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size_bytes) != 0) return false;
  }
  groups.resize(size_bytes / sizeof(gid_t));
  return std::find(groups.begin(), groups.end(), gid) != groups.end();
}

}  // namespace shardd
