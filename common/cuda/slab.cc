#include "common/cuda/slab.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

std::string DeviceLabel(CUdevice device) { return absl::StrCat("cuda:", device); }

absl::StatusOr<bool> HasAttribute(const CudaDriver& driver, CUdevice_attribute attribute, CUdevice device) {
  int value = 0;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute",
                                      absl::StrCat(attribute), DeviceLabel(device)));
  return value != 0;
}

// Allocation properties of slabs on `device`. RDMA capability comes first because it may change the granularity.
absl::StatusOr<CUmemAllocationProp> AllocationProp(const CudaDriver& driver, CUdevice device, const std::string& name) {
  SHARDD_ASSIGN_OR_RETURN(const bool vmm,
                          HasAttribute(driver, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device));
  SHARDD_ASSIGN_OR_RETURN(
      const bool posix_fd,
      HasAttribute(driver, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device));
  if (!vmm || !posix_fd) {
    return absl::UnimplementedError(absl::StrCat("create ", name, ": the GPU has no ",
                                                 vmm ? "POSIX descriptors for memory" : "virtual memory management",
                                                 " (device=", DeviceLabel(device), ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(const bool rdma,
                          HasAttribute(driver, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device));
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  prop.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  return prop;
}

absl::StatusOr<size_t> GranularityOf(const CudaDriver& driver, const CUmemAllocationProp& prop,
                                     absl::string_view name) {
  size_t granularity = 0;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->MemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                   "cuMemGetAllocationGranularity", name, DeviceLabel(prop.location.id)));
  return granularity;
}

// Total size of all pieces; INVALID_ARGUMENT if one is empty, or if the total exceeds any address space.
template <typename SizeOf>
absl::StatusOr<size_t> TotalBytes(absl::string_view operation, const std::string& name, size_t pieces,
                                  const SizeOf& size_of) {
  constexpr int64_t kMostBytes = int64_t{1} << 56;
  int64_t total_bytes = 0;
  for (size_t i = 0; i < pieces; ++i) {
    const int64_t size_bytes = size_of(i);
    if (size_bytes <= 0 || size_bytes > kMostBytes - total_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(operation, " ", name, ": size is ",
                                                     size_bytes <= 0 ? "not positive" : "too large", " (got ",
                                                     size_bytes, " bytes)"));
    }
    total_bytes += size_bytes;
  }
  if (pieces == 0) return absl::InvalidArgumentError(absl::StrCat(operation, " ", name, ": it has no pieces"));
  return static_cast<size_t>(total_bytes);
}

}  // namespace

absl::StatusOr<CudaSlab> CudaSlab::Create(const CudaDriver* driver, CUdevice device, int64_t size_bytes,
                                          std::string name, absl::Span<const CUdevice> peers) {
  if (size_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("create ", name, ": size is not positive (got ", size_bytes, " bytes)"));
  }
  SHARDD_ASSIGN_OR_RETURN(const CUmemAllocationProp prop, AllocationProp(*driver, device, name));
  SHARDD_ASSIGN_OR_RETURN(const size_t granularity, GranularityOf(*driver, prop, name));
  const size_t rounded = (static_cast<size_t>(size_bytes) + granularity - 1) / granularity * granularity;
  const Piece piece = {device, static_cast<int64_t>(rounded)};
  std::vector<CUdevice> users = {device};
  users.insert(users.end(), peers.begin(), peers.end());
  CudaSlab slab;
  slab.driver_ = driver;
  slab.name_ = std::move(name);
  slab.gpu_direct_rdma_ = true;
  SHARDD_RETURN_IF_ERROR(slab.Reserve(rounded, device));
  SHARDD_RETURN_IF_ERROR(slab.CreatePiece(piece, prop));
  SHARDD_RETURN_IF_ERROR(slab.SetAccess(Access::kReadWrite, users));
  return slab;
}

absl::StatusOr<CudaSlab> CudaSlab::CreateSpread(const CudaDriver* driver, absl::Span<const Piece> pieces,
                                                std::string name, absl::Span<const CUdevice> users) {
  CudaSlab slab;
  slab.driver_ = driver;
  slab.name_ = std::move(name);
  slab.gpu_direct_rdma_ = true;
  SHARDD_ASSIGN_OR_RETURN(const size_t size_bytes, TotalBytes("create", slab.name_, pieces.size(),
                                                              [&](size_t i) { return pieces[i].size_bytes; }));
  std::vector<CUmemAllocationProp> props;
  for (const Piece& piece : pieces) {
    const CUdevice device = piece.device == kHole ? pieces.front().device : piece.device;
    if (device == kHole)
      return absl::InvalidArgumentError(absl::StrCat("create ", slab.name_, ": it begins with a hole"));
    SHARDD_ASSIGN_OR_RETURN(const CUmemAllocationProp prop, AllocationProp(*driver, device, slab.name_));
    SHARDD_ASSIGN_OR_RETURN(const size_t granularity, GranularityOf(*driver, prop, slab.name_));
    if (static_cast<size_t>(piece.size_bytes) % granularity != 0) {
      return absl::InvalidArgumentError(absl::StrCat("create ", slab.name_, ": a piece is not whole pages (got ",
                                                     piece.size_bytes, " bytes, want a multiple of ", granularity,
                                                     "; device=", DeviceLabel(device), ")"));
    }
    props.push_back(prop);
  }
  SHARDD_RETURN_IF_ERROR(slab.Reserve(size_bytes, pieces.front().device));
  for (size_t i = 0; i < pieces.size(); ++i) SHARDD_RETURN_IF_ERROR(slab.CreatePiece(pieces[i], props[i]));
  SHARDD_RETURN_IF_ERROR(slab.SetAccess(Access::kReadWrite, users));
  return slab;
}

absl::StatusOr<int64_t> CudaSlab::Granularity(const CudaDriver& driver, CUdevice device) {
  SHARDD_ASSIGN_OR_RETURN(const CUmemAllocationProp prop, AllocationProp(driver, device, "slabs"));
  SHARDD_ASSIGN_OR_RETURN(const size_t granularity, GranularityOf(driver, prop, "slabs"));
  return static_cast<int64_t>(granularity);
}

absl::StatusOr<CudaSlab> CudaSlab::Import(const CudaDriver* driver, CUdevice device, int fd, int64_t size_bytes,
                                          Access access, std::string name) {
  return ImportSpread(
      driver, device, {size_bytes},
      [fd, &name]() -> absl::StatusOr<UniqueFd> {
        UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (copy.valid()) return copy;
        return absl::InvalidArgumentError(
            absl::StrCat("import ", name, ": descriptor ", fd, ": ", std::strerror(errno)));
      },
      access, name);
}

absl::StatusOr<CudaSlab> CudaSlab::ImportSpread(const CudaDriver* driver, CUdevice device,
                                                absl::Span<const int64_t> piece_bytes, const NextFd& next,
                                                Access access, std::string name, absl::Span<const CUdevice> peers) {
  CudaSlab slab;
  slab.driver_ = driver;
  slab.name_ = std::move(name);
  SHARDD_ASSIGN_OR_RETURN(const size_t size_bytes, TotalBytes("import", slab.name_, piece_bytes.size(),
                                                              [&](size_t i) { return std::abs(piece_bytes[i]); }));
  if (piece_bytes.front() < 0) {
    return absl::InvalidArgumentError(absl::StrCat("import ", slab.name_, ": it begins with a hole"));
  }
  for (const int64_t bytes : piece_bytes) {
    if (bytes < 0) {
      slab.pieces_.push_back({kHole, static_cast<size_t>(-bytes), 0, false});
      continue;
    }
    SHARDD_ASSIGN_OR_RETURN(const UniqueFd fd, next());
    CUmemGenericAllocationHandle handle = 0;
    void* const os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
    SHARDD_RETURN_IF_ERROR(driver->Check(
        (*driver)->MemImportFromShareableHandle(&handle, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle", absl::StrCat(slab.name_, " from descriptor ", fd.get()),
        DeviceLabel(device)));
    slab.pieces_.push_back({device, static_cast<size_t>(bytes), handle, false});
    if (slab.address_ == 0) SHARDD_RETURN_IF_ERROR(slab.Reserve(size_bytes, device));
    SHARDD_RETURN_IF_ERROR(slab.MapLast());
  }
  SHARDD_RETURN_IF_ERROR(slab.SetAccess(access, {device}));
  SHARDD_RETURN_IF_ERROR(slab.SetAccess(access, peers));
  return slab;
}

absl::Status CudaSlab::Reserve(size_t size_bytes, CUdevice device) {
  SHARDD_RETURN_IF_ERROR(driver_->Check((*driver_)->MemAddressReserve(&address_, size_bytes, 0, 0, 0),
                                        "cuMemAddressReserve", absl::StrCat(name_, " of ", size_bytes, " bytes"),
                                        DeviceLabel(device)));
  size_bytes_ = size_bytes;
  return absl::OkStatus();
}

absl::Status CudaSlab::CreatePiece(const Piece& piece, const CUmemAllocationProp& prop) {
  const auto bytes = static_cast<size_t>(piece.size_bytes);
  if (piece.device == kHole) {
    pieces_.push_back({kHole, bytes, 0, false});
    return absl::OkStatus();
  }
  CUmemGenericAllocationHandle handle = 0;
  SHARDD_RETURN_IF_ERROR(driver_->Check((*driver_)->MemCreate(&handle, bytes, &prop, 0), "cuMemCreate",
                                        bytes == size_bytes_ ? absl::StrCat(name_, " of ", bytes, " bytes")
                                                             : absl::StrCat("piece ", pieces_.size(), " of ", name_,
                                                                            ", ", bytes, " of ", size_bytes_, " bytes"),
                                        DeviceLabel(piece.device)));
  pieces_.push_back({piece.device, bytes, handle, false});
  gpu_direct_rdma_ = gpu_direct_rdma_ && prop.allocFlags.gpuDirectRDMACapable != 0;
  return MapLast();
}

absl::Status CudaSlab::MapLast() {
  size_t offset = 0;
  for (const Mapped& piece : pieces_) offset += piece.size_bytes;
  Mapped& last = pieces_.back();
  offset -= last.size_bytes;
  SHARDD_RETURN_IF_ERROR(driver_->Check((*driver_)->MemMap(address_ + offset, last.size_bytes, 0, last.handle, 0),
                                        "cuMemMap", name_, DeviceLabel(last.device)));
  last.is_mapped = true;
  return absl::OkStatus();
}

absl::Status CudaSlab::SetAccessOfRuns(const CUmemAccessDesc& desc, CUdevice user) {
  size_t first = 0;
  size_t end = 0;
  for (size_t i = 0; i <= pieces_.size(); ++i) {
    const bool is_mapped = i < pieces_.size() && pieces_[i].is_mapped;
    if (!is_mapped && end > first) {
      SHARDD_RETURN_IF_ERROR(driver_->Check((*driver_)->MemSetAccess(address_ + first, end - first, &desc, 1),
                                            "cuMemSetAccess", name_, DeviceLabel(user)));
    }
    if (i < pieces_.size()) end += pieces_[i].size_bytes;
    if (!is_mapped) first = end;
  }
  return absl::OkStatus();
}

absl::Status CudaSlab::SetAccess(Access access, absl::Span<const CUdevice> users) {
  CUmemAccessDesc desc;
  desc.flags = access == Access::kReadOnly ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  for (const CUdevice user : users) {
    desc.location = {CU_MEM_LOCATION_TYPE_DEVICE, user};
    const absl::Status status = SetAccessOfRuns(desc, user);
    if (status.ok()) continue;
    std::vector<CUdevice> others;
    for (const Mapped& piece : pieces_) {
      if (piece.device != user && piece.device != kHole &&
          std::find(others.begin(), others.end(), piece.device) == others.end()) {
        others.push_back(piece.device);
      }
    }
    if (absl::IsDataLoss(status) || others.empty()) return status;
    return absl::FailedPreconditionError(absl::StrCat(
        "map ", name_, ": ", DeviceLabel(user), " does not reach the memory of ",
        absl::StrJoin(others, ", ", [](std::string* out, CUdevice other) { out->append(DeviceLabel(other)); }),
        " (got no peer access, want NVLink or PCIe peer-to-peer between all GPUs of a job: ", status.message(), ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> CudaSlab::ExportFd(size_t piece) const {
  const CudaDriver& driver = *driver_;
  const Mapped& of = pieces_[piece];
  int fd = -1;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->MemExportToShareableHandle(&fd, of.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                   "cuMemExportToShareableHandle", name_, DeviceLabel(of.device)));
  UniqueFd owned(fd);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return owned;
}

void CudaSlab::Free() {
  // Undoes in this order every step that was reached; nobody could repair a failure here. It unmaps each mapping by
  // itself, because cuMemUnmap takes exactly what cuMemMap mapped.
  CUdeviceptr at = address_;
  for (const Mapped& piece : pieces_) {
    if (piece.is_mapped) (void)(*driver_)->MemUnmap(at, piece.size_bytes);
    at += piece.size_bytes;
  }
  if (address_ != 0) (void)(*driver_)->MemAddressFree(address_, size_bytes_);
  for (const Mapped& piece : pieces_) {
    if (piece.device != kHole) (void)(*driver_)->MemRelease(piece.handle);
  }
  pieces_.clear();
  address_ = 0;
}

void CudaSlab::Abandon() {
  pieces_.clear();
  address_ = 0;
}

void CudaSlab::Take(CudaSlab& other) {
  driver_ = other.driver_;
  name_ = std::move(other.name_);
  pieces_ = std::move(other.pieces_);
  other.pieces_.clear();
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = other.size_bytes_;
  gpu_direct_rdma_ = other.gpu_direct_rdma_;
}

}  // namespace shardd
