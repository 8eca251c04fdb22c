#include "server/storage/job_slab.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/device_memory.h"

namespace shardd {

JobSlab::JobSlab(std::unique_ptr<Slab> host) : host_(std::move(host)) {}
JobSlab::JobSlab(std::unique_ptr<Slab> host, std::unique_ptr<PinnedMemory> pinned)
    : host_(std::move(host)), pinned_(std::move(pinned)) {}
JobSlab::JobSlab(std::unique_ptr<DeviceSlab> device) : device_(std::move(device)) {}
JobSlab::~JobSlab() = default;

int64_t JobSlab::size_bytes() const { return on_host() ? host_->size_bytes() : device_->size_bytes(); }

int JobSlab::fd() const { return on_host() ? host_->fd() : device_->pieces().front().fd; }

char* JobSlab::base() const { return on_host() ? static_cast<char*>(host_->data()) : device_->data(); }

std::string JobSlab::backing() const {
  if (on_host()) {
    return absl::StrCat(SlabBackingName(host_->backing()), host_->huge_pages() ? " (huge pages)" : "",
                        pinned_ != nullptr ? ", pinned" : "");
  }
  const std::vector<DeviceSlab::Piece>& pieces = device_->pieces();
  const bool on_one = std::all_of(pieces.begin(), pieces.end(), [&](const auto& piece) {
    return piece.on == nullptr || piece.on == pieces.front().on;
  });
  return on_one ? pieces.front().on->backing() : "cuda";
}

int64_t JobSlab::allocated_bytes() const {
  if (!on_host()) return device_->allocated_bytes();
  struct stat object {};
  constexpr int64_t kBlockBytes = 512;  // of st_blocks, whatever the file system's own are
  return fstat(host_->fd(), &object) == 0 ? std::min(size_bytes(), int64_t{object.st_blocks} * kBlockBytes)
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

// Each piece's bytes by its own GPU: one that hangs is then the one that is given up. What this node does not hold has
// no memory.
absl::Status JobSlab::ByPiece(int64_t offset_bytes, int64_t size_bytes,
                              absl::FunctionRef<absl::Status(DeviceMemory*, int64_t, int64_t)> copy) const {
  int64_t begin = 0;
  for (const DeviceSlab::Piece& piece : device_->pieces()) {
    const int64_t first = std::max(offset_bytes, begin);
    const int64_t end = std::min(offset_bytes + size_bytes, begin + piece.size_bytes);
    begin += piece.size_bytes;
    if (first < end && piece.on == nullptr) {
      return absl::InternalError(absl::StrCat("bytes ", first, " to ", end, " of a slab are on other nodes"));
    }
    if (first < end) {
      SHARDD_RETURN_IF_ERROR(copy(piece.on, first, end - first));
    }
  }
  return absl::OkStatus();
}

absl::Status JobSlab::Write(int64_t offset_bytes, const void* from, int64_t size_bytes) const {
  if (!on_host()) {
    return ByPiece(offset_bytes, size_bytes, [&](DeviceMemory* on, int64_t first, int64_t count) {
      return on->Write(At(first), static_cast<const char*>(from) + (first - offset_bytes), count);
    });
  }
  std::memcpy(At(offset_bytes), from, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status JobSlab::Read(int64_t offset_bytes, void* to, int64_t size_bytes) const {
  if (!on_host()) {
    return ByPiece(offset_bytes, size_bytes, [&](DeviceMemory* on, int64_t first, int64_t count) {
      return on->Read(static_cast<char*>(to) + (first - offset_bytes), At(first), count);
    });
  }
  std::memcpy(to, At(offset_bytes), static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status JobSlab::Zero(int64_t offset_bytes, int64_t size_bytes) const {
  if (!on_host()) {
    return ByPiece(offset_bytes, size_bytes,
                   [&](DeviceMemory* on, int64_t first, int64_t count) { return on->Zero(At(first), count); });
  }
  std::memset(At(offset_bytes), 0, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

}  // namespace shardd
