#include "server/job/job_slab.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardd {

std::string JobSlab::backing() const {
  if (on_host()) {
    return absl::StrCat(SlabBackingName(host_->backing()), host_->huge_pages() ? " (huge pages)" : "");
  }
  const std::vector<DeviceSlab::Piece>& pieces = device_->pieces();
  const bool on_one =
      std::all_of(pieces.begin(), pieces.end(), [&](const auto& piece) { return piece.on == pieces.front().on; });
  return on_one ? pieces.front().on->backing() : "cuda";
}

int64_t JobSlab::allocated_bytes() const {
  struct stat object {};
  constexpr int64_t kBlockBytes = 512;  // of st_blocks, whatever the file system's own are
  return on_host() && fstat(host_->fd(), &object) == 0 ? std::min(size_bytes(), int64_t{object.st_blocks} * kBlockBytes)
                                                       : size_bytes();
}

absl::StatusOr<UniqueFd> JobSlab::ReadOnlyFd() const {
  if (on_host()) {
    return host_->ReadOnlyFd();
  }
  UniqueFd copy(fcntl(fd(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("duplicate the descriptor of a slab: ", std::strerror(errno)));
  }
  return copy;
}

absl::Status JobSlab::Write(int64_t offset_bytes, const void* from, int64_t size_bytes) const {
  if (!on_host()) {
    return memory_->Write(At(offset_bytes), from, size_bytes);
  }
  std::memcpy(At(offset_bytes), from, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status JobSlab::Read(int64_t offset_bytes, void* to, int64_t size_bytes) const {
  if (!on_host()) {
    return memory_->Read(to, At(offset_bytes), size_bytes);
  }
  std::memcpy(to, At(offset_bytes), static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status JobSlab::Zero(int64_t offset_bytes, int64_t size_bytes) const {
  if (!on_host()) {
    return memory_->Zero(At(offset_bytes), size_bytes);
  }
  std::memset(At(offset_bytes), 0, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

}  // namespace shardd
