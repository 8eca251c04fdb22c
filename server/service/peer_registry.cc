#include "server/service/peer_registry.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/process/namespaces.h"

namespace shardd {
namespace {

std::optional<uint64_t> SocketInode(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISSOCK(info.st_mode)) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(info.st_ino);
}

}  // namespace

absl::Status PeerRegistry::Register(int fd, const PeerCredentials& peer, UniqueFd pidfd, bool in_view_group) {
  const std::optional<uint64_t> inode = SocketInode(fd);
  if (!inode.has_value()) {
    return absl::InternalError(absl::StrCat("register peer: descriptor is no open socket (fd=", fd, ")"));
  }
  // Others have no powers by it, and a flood of connections is not to cost this.
  const bool shares_namespaces =
      (peer.uid == 0 || peer.uid == geteuid() || in_view_group) && SharesNamespaces(peer.pid, pidfd.get());
  absl::MutexLock lock(&mutex_);
  entries_.insert_or_assign(fd, Entry{*inode, peer, std::move(pidfd), shares_namespaces, in_view_group});
  return absl::OkStatus();
}

void PeerRegistry::Forget(int fd) {
  absl::MutexLock lock(&mutex_);
  entries_.erase(fd);
}

const PeerRegistry::Entry* PeerRegistry::FindLocked(absl::string_view grpc_peer) const {
  int fd = -1;
  if (!absl::ConsumePrefix(&grpc_peer, "fd:") || !absl::SimpleAtoi(grpc_peer, &fd)) {
    return nullptr;
  }
  const auto it = entries_.find(fd);
  if (it == entries_.end() || SocketInode(fd) != it->second.inode) {
    return nullptr;
  }
  return &it->second;
}

absl::StatusOr<PeerCredentials> PeerRegistry::Lookup(absl::string_view grpc_peer) const {
  absl::ReaderMutexLock lock(&mutex_);
  const Entry* entry = FindLocked(grpc_peer);
  if (entry == nullptr) {
    return absl::UnauthenticatedError(
        absl::StrCat("identify caller: connection is closed or did not come through the daemon's socket (got \"",
                     grpc_peer, "\", want \"fd:<number>\")"));
  }
  return entry->peer;
}

bool PeerRegistry::MayAdminister(absl::string_view grpc_peer) const {
  absl::ReaderMutexLock lock(&mutex_);
  const Entry* entry = FindLocked(grpc_peer);
  return entry != nullptr && entry->shares_namespaces;
}

bool PeerRegistry::MayView(absl::string_view grpc_peer) const {
  absl::ReaderMutexLock lock(&mutex_);
  const Entry* entry = FindLocked(grpc_peer);
  return entry != nullptr && entry->in_view_group && entry->shares_namespaces;
}

UniqueFd PeerRegistry::DupPidfd(absl::string_view grpc_peer) const {
  absl::ReaderMutexLock lock(&mutex_);
  const Entry* entry = FindLocked(grpc_peer);
  if (entry == nullptr || !entry->pidfd.valid()) {
    return UniqueFd();
  }
  return UniqueFd(::fcntl(entry->pidfd.get(), F_DUPFD_CLOEXEC, 0));
}

size_t PeerRegistry::Sweep() {
  absl::MutexLock lock(&mutex_);
  absl::erase_if(entries_, [](const auto& entry) { return SocketInode(entry.first) != entry.second.inode; });
  return entries_.size();
}

size_t PeerRegistry::CountOfUid(uint32_t uid) const {
  absl::ReaderMutexLock lock(&mutex_);
  return static_cast<size_t>(std::count_if(entries_.begin(), entries_.end(),
                                           [uid](const auto& entry) { return entry.second.peer.uid == uid; }));
}

}  // namespace shardd
