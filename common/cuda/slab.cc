#include "common/cuda/slab.h"

#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

std::string DeviceLabel(cu::Ordinal device) { return absl::StrCat("cuda:", device); }

absl::StatusOr<bool> HasAttribute(const CudaDriver& driver, cu::Attribute attribute, cu::Ordinal device) {
  int value = 0;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute",
                                      absl::StrCat(attribute), DeviceLabel(device)));
  return value != 0;
}

// What slabs on `device` are made with. RDMA capability may change the granularity, so it is settled first.
absl::StatusOr<cu::MemAllocationProp> AllocationProp(const CudaDriver& driver, cu::Ordinal device,
                                                     const std::string& name) {
  SHARDD_ASSIGN_OR_RETURN(const bool vmm, HasAttribute(driver, cu::kVirtualMemoryManagementSupported, device));
  SHARDD_ASSIGN_OR_RETURN(const bool posix_fd, HasAttribute(driver, cu::kHandleTypePosixFdSupported, device));
  if (!vmm || !posix_fd) {
    return absl::UnimplementedError(absl::StrCat("create ", name, ": the GPU has no ",
                                                 vmm ? "POSIX descriptors for memory" : "virtual memory management",
                                                 " (device=", DeviceLabel(device), ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(const bool rdma, HasAttribute(driver, cu::kGpuDirectRdmaWithVmmSupported, device));
  cu::MemAllocationProp prop = {};
  prop.type = cu::kAllocationPinned;
  prop.requested_handle_types = cu::kHandlePosixFd;
  prop.location = {cu::kLocationDevice, device};
  prop.alloc_flags.gpu_direct_rdma_capable = rdma ? 1 : 0;
  return prop;
}

}  // namespace

absl::StatusOr<CudaSlab> CudaSlab::Create(const CudaDriver* driver, cu::Ordinal device, int64_t size_bytes,
                                          std::string name, absl::Span<const cu::Ordinal> peers) {
  if (size_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("create ", name, ": size is not positive (got ", size_bytes, " bytes)"));
  }
  SHARDD_ASSIGN_OR_RETURN(const cu::MemAllocationProp prop, AllocationProp(*driver, device, name));
  CudaSlab slab;
  slab.driver_ = driver;
  slab.device_ = device;
  slab.name_ = std::move(name);
  slab.gpu_direct_rdma_ = prop.alloc_flags.gpu_direct_rdma_capable != 0;
  size_t granularity = 0;
  SHARDD_RETURN_IF_ERROR(
      driver->Check((*driver)->MemGetAllocationGranularity(&granularity, &prop, cu::kGranularityRecommended),
                    "cuMemGetAllocationGranularity", slab.name_, DeviceLabel(device)));
  slab.size_bytes_ = (static_cast<size_t>(size_bytes) + granularity - 1) / granularity * granularity;
  SHARDD_RETURN_IF_ERROR(driver->Check((*driver)->MemCreate(&slab.handle_, slab.size_bytes_, &prop, 0), "cuMemCreate",
                                       absl::StrCat(slab.name_, " of ", slab.size_bytes_, " bytes"),
                                       DeviceLabel(device)));
  slab.has_handle_ = true;
  SHARDD_RETURN_IF_ERROR(slab.Map(Access::kReadWrite, peers));
  return slab;
}

absl::StatusOr<CudaSlab> CudaSlab::Import(const CudaDriver* driver, cu::Ordinal device, int fd, int64_t size_bytes,
                                          Access access, std::string name) {
  if (size_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("import ", name, ": size is not positive (got ", size_bytes, " bytes)"));
  }
  CudaSlab slab;
  slab.driver_ = driver;
  slab.device_ = device;
  slab.name_ = std::move(name);
  slab.size_bytes_ = static_cast<size_t>(size_bytes);
  void* const os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  SHARDD_RETURN_IF_ERROR(driver->Check(
      (*driver)->MemImportFromShareableHandle(&slab.handle_, os_handle, cu::kHandlePosixFd),
      "cuMemImportFromShareableHandle", absl::StrCat(slab.name_, " from descriptor ", fd), DeviceLabel(device)));
  slab.has_handle_ = true;
  SHARDD_RETURN_IF_ERROR(slab.Map(access, {}));
  return slab;
}

absl::Status CudaSlab::Map(Access access, absl::Span<const cu::Ordinal> peers) {
  const CudaDriver& driver = *driver_;
  const std::string device = DeviceLabel(device_);
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->MemAddressReserve(&address_, size_bytes_, 0, 0, 0), "cuMemAddressReserve", name_, device));
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->MemMap(address_, size_bytes_, 0, handle_, 0), "cuMemMap", name_, device));
  mapped_ = true;
  cu::MemAccessDesc desc;
  desc.location = {cu::kLocationDevice, device_};
  desc.flags = access == Access::kReadOnly ? cu::kAccessRead : cu::kAccessReadWrite;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->MemSetAccess(address_, size_bytes_, &desc, 1), "cuMemSetAccess", name_, device));
  for (const cu::Ordinal peer : peers) {
    desc.location.id = peer;
    const absl::Status status =
        driver.Check(driver->MemSetAccess(address_, size_bytes_, &desc, 1), "cuMemSetAccess", name_, DeviceLabel(peer));
    if (status.ok()) continue;
    if (absl::IsDataLoss(status)) return status;
    return absl::FailedPreconditionError(absl::StrCat(
        "map ", name_, ": ", DeviceLabel(peer), " does not reach the memory of ", device,
        " (got no peer access, want NVLink or PCIe peer-to-peer between all GPUs of a job: ", status.message(), ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> CudaSlab::ExportFd() const {
  const CudaDriver& driver = *driver_;
  int fd = -1;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->MemExportToShareableHandle(&fd, handle_, cu::kHandlePosixFd, 0),
                                      "cuMemExportToShareableHandle", name_, DeviceLabel(device_)));
  UniqueFd owned(fd);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return owned;
}

void CudaSlab::Free() {
  // In this order, and each that was reached: what fails here cannot be given back by anybody.
  if (mapped_) (void)(*driver_)->MemUnmap(address_, size_bytes_);
  if (address_ != 0) (void)(*driver_)->MemAddressFree(address_, size_bytes_);
  if (has_handle_) (void)(*driver_)->MemRelease(handle_);
  mapped_ = false;
  has_handle_ = false;
  address_ = 0;
}

void CudaSlab::Take(CudaSlab& other) {
  driver_ = other.driver_;
  device_ = other.device_;
  name_ = std::move(other.name_);
  handle_ = other.handle_;
  has_handle_ = std::exchange(other.has_handle_, false);
  address_ = std::exchange(other.address_, 0);
  mapped_ = std::exchange(other.mapped_, false);
  size_bytes_ = other.size_bytes_;
  gpu_direct_rdma_ = other.gpu_direct_rdma_;
}

}  // namespace shardd
