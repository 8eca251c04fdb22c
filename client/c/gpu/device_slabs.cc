#include "client/c/gpu/device_slabs.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/plan/slab_spread.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int64_t kSpareFiles = 4;  // a socket to the daemon, what the driver opens

constexpr const char* kNames[kSessionFdCount] = {"the session memory",  "the daemon's page",   "the doorbell",
                                                 "the shards",          "the cast parameters", "the unsharded pool",
                                                 "the gradient shards", "the optimizer state", "the gradient slots"};

// One for the process, loaded when the first job on a GPU attaches: it outlives every slab.
const absl::StatusOr<CudaDriver>& Driver() {
  static const auto& driver = *new absl::StatusOr<CudaDriver>(CudaDriver::Load());
  return driver;
}

// The GPU of that UUID: CUDA_VISIBLE_DEVICES may hide some of those that the daemon has, and number the others anew.
absl::StatusOr<int> FindGpu(const CudaDriver& driver, const std::string& name, const std::string& uuid) {
  int count = 0;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGetCount(&count), "cuDeviceGetCount", ""));
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    CUuuid found = {};
    SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGet(&device, i), "cuDeviceGet", absl::StrCat(i)));
    SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGetUuid(&found, device), "cuDeviceGetUuid", absl::StrCat(i)));
    if (uuid.size() == sizeof(found.bytes) && std::memcmp(uuid.data(), found.bytes, sizeof(found.bytes)) == 0) {
      return i;
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("attach: this process does not see the rank's GPU (got ", count, " others, want the daemon's ", name,
                   ", UUID ", absl::BytesToHexString(uuid), "); do not hide it with CUDA_VISIBLE_DEVICES"));
}

// What the plan says of each.
int64_t PlannedBytes(const MemoryPlan& memory, int which) {
  switch (which) {
    case kFdShards:
      return memory.shards_bytes;
    case kFdParameters:
      return memory.parameters_bytes;
    case kFdPool:
      return memory.unsharded_pool_bytes;
    case kFdGradients:
      return memory.gradients_bytes;
    case kFdOptimizer:
      return memory.optimizer_bytes;
    case kFdGradientSlots:
      return memory.gradient_slots_bytes;
    default:
      return 0;
  }
}

// Descriptors behind the places of SessionFd, in their order, so many at once as a message holds and this process has
// room for: each is closed when its piece is mapped.
class FurtherPieces {
 public:
  FurtherPieces(const DeviceSlabs::Fetch& fetch, size_t count) : fetch_(fetch), left_(count) {}
  absl::StatusOr<UniqueFd> Next() {
    if (next_ == batch_.size()) {
      const OpenFiles files = CountOpenFiles();
      const int64_t room = files.left() - kSpareFiles;
      if (room <= 0) {
        return absl::ResourceExhaustedError(
            absl::StrCat("attach: this process may not open the files that the job's memory takes (got ", files.open,
                         " open of ", files.limit, ", ", left_,
                         " pieces to map); raise its limit of open files "
                         "(ulimit -n)"));
      }
      const auto count = static_cast<uint32_t>(std::min<int64_t>({static_cast<int64_t>(left_), room, kMaxFdsAtOnce}));
      SHARDD_ASSIGN_OR_RETURN(batch_, fetch_(FdRange{first_, count}));
      first_ += count;
      left_ -= count;
      next_ = 0;
    }
    return std::move(batch_[next_++]);
  }

 private:
  const DeviceSlabs::Fetch& fetch_;
  uint32_t first_ = kSessionFdCount;
  size_t left_;
  std::vector<UniqueFd> batch_;
  size_t next_ = 0;
};

// How many descriptors follow behind the places, or what is wrong with the description.
absl::StatusOr<size_t> CheckDescription(const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                        const std::vector<UniqueFd>& fds) {
  size_t further = 0;
  std::array<bool, kSessionFdCount> seen = {};
  for (const v1::DeviceSlab& slab : attach.device_slabs()) {
    const int which = slab.descriptor_index();
    if (which < kFdShards || which >= kSessionFdCount || !fds[static_cast<size_t>(which)].valid() ||
        seen[static_cast<size_t>(which)]) {
      return absl::InternalError(
          absl::StrCat("attach: no descriptor of a slab on ", attach.device(), " (got index ", which,
                       which >= 0 && which < kSessionFdCount && seen[which] ? " twice" : "", ")"));
    }
    seen[static_cast<size_t>(which)] = true;
    if (slab.piece_bytes_size() > kMaxSlabPieces) {
      return absl::InternalError(absl::StrCat("attach: ", kNames[which], ": too many pieces (got ",
                                              slab.piece_bytes_size(), ", want at most ", kMaxSlabPieces, ")"));
    }
    int64_t left_bytes = slab.size_bytes();
    size_t with_memory = 0;
    for (const int64_t piece_bytes : slab.piece_bytes()) {  // negative: of other nodes, without memory here
      const bool may_be = piece_bytes > 0 || (piece_bytes < 0 && with_memory > 0);
      const bool fits = may_be && piece_bytes <= left_bytes && piece_bytes >= -left_bytes;
      left_bytes = fits ? left_bytes - std::abs(piece_bytes) : -1;
      if (left_bytes < 0) break;
      with_memory += piece_bytes > 0 ? 1 : 0;
    }
    const int64_t want_bytes = PlannedBytes(plan.memory, which);
    if (slab.size_bytes() < want_bytes || want_bytes == 0 || (slab.piece_bytes_size() > 0 && left_bytes != 0)) {
      return absl::InternalError(
          absl::StrCat("attach: ", kNames[which], ": wrong size (got ", slab.size_bytes(), " bytes in ",
                       std::max(1, slab.piece_bytes_size()), " pieces",
                       left_bytes != 0 && slab.piece_bytes_size() > 0 ? " that do not add up to that" : "", ", want ",
                       want_bytes, ")"));
    }
    further += std::max<size_t>(with_memory, 1) - 1;
  }
  return further;
}

}  // namespace

const CudaDriver& DeviceSlabs::driver() { return *Driver(); }

absl::StatusOr<DeviceSlabs> DeviceSlabs::Map(const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                             std::vector<UniqueFd>& fds, const Fetch& fetch) {
  DeviceSlabs result;
  if (attach.device_slabs().empty()) {
    return result;
  }
  SHARDD_ASSIGN_OR_RETURN(const size_t further, CheckDescription(attach, plan, fds));
  FurtherPieces behind(fetch, further);
  if (!Driver().ok()) {
    return absl::Status(Driver().status().code(),
                        absl::StrCat("attach: the job lies on ", attach.device(), ": ", Driver().status().message()));
  }
  const CudaDriver& driver = *Driver();
  SHARDD_ASSIGN_OR_RETURN(result.ordinal_, FindGpu(driver, attach.device(), attach.device_uuid()));
  const bool trainers_write = !plan.config.trainers_never_write();
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  for (const v1::DeviceSlab& slab : attach.device_slabs()) {
    const int which = slab.descriptor_index();
    const bool writable = which == kFdGradients || which == kFdGradientSlots ||
                          (which == kFdShards && trainers_write) || (which == kFdOptimizer && in_trainers);
    std::vector<int64_t> piece_bytes(slab.piece_bytes().begin(), slab.piece_bytes().end());
    if (piece_bytes.empty()) piece_bytes.push_back(slab.size_bytes());
    UniqueFd& first = fds[static_cast<size_t>(which)];
    absl::Status fetched;
    auto mapped = CudaSlab::ImportSpread(
        &driver, result.ordinal_, piece_bytes,
        [&]() -> absl::StatusOr<UniqueFd> {
          if (first.valid()) return std::move(first);
          absl::StatusOr<UniqueFd> next = behind.Next();
          fetched = next.status();
          return next;
        },
        writable ? CudaSlab::Access::kReadWrite : CudaSlab::Access::kReadOnly, kNames[which]);
    if (!fetched.ok()) return fetched;  // says by itself what it is
    if (!mapped.ok()) {
      return absl::Status(
          mapped.status().code(),
          absl::StrCat("attach: cannot map ", kNames[which], " of ", attach.device(), ": ", mapped.status().message(),
                       "; this process must see the GPUs of all ranks of the job"));
    }
    result.slabs_[static_cast<size_t>(which)] = *std::move(mapped);
  }
  return result;
}

}  // namespace shardd
