#include "client/c/device_slabs.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

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
    cu::Ordinal device = 0;
    cu::Uuid found = {};
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

}  // namespace

const CudaDriver& DeviceSlabs::driver() { return *Driver(); }

absl::StatusOr<DeviceSlabs> DeviceSlabs::Map(const v1::AttachRankResponse& attach, std::vector<UniqueFd>& fds) {
  DeviceSlabs result;
  if (attach.device_slabs().empty()) {
    return result;
  }
  if (!Driver().ok()) {
    return absl::Status(Driver().status().code(),
                        absl::StrCat("attach: the job lies on ", attach.device(), ": ", Driver().status().message()));
  }
  const CudaDriver& driver = *Driver();
  SHARDD_ASSIGN_OR_RETURN(result.ordinal_, FindGpu(driver, attach.device(), attach.device_uuid()));
  for (const v1::DeviceSlab& slab : attach.device_slabs()) {
    const int which = slab.descriptor_index();
    if (which < kFdShards || which >= kSessionFdCount || !fds[static_cast<size_t>(which)].valid()) {
      return absl::InternalError(
          absl::StrCat("attach: no descriptor of a slab on ", attach.device(), " (got index ", which, ")"));
    }
    const bool writable = which == kFdGradients || which == kFdGradientSlots;
    const UniqueFd fd = std::move(fds[static_cast<size_t>(which)]);
    auto mapped =
        CudaSlab::Import(&driver, result.ordinal_, fd.get(), slab.size_bytes(),
                         writable ? CudaSlab::Access::kReadWrite : CudaSlab::Access::kReadOnly, kNames[which]);
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
