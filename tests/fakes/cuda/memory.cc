#include "tests/fakes/cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

namespace shardd::fake_cuda {
namespace {

// What tells an exported descriptor from any other: readlink of a memfd gives "/memfd:NAME (deleted)".
constexpr char kMemfdFormat[] = "fake-cuda-%d";

void* At(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Nothing there, as the GPU sees it: a touch by the host is a SIGSEGV too.
bool Fence(CUdeviceptr address, size_t size_bytes) {
  return mmap(At(address), size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
         MAP_FAILED;
}

// Whether all of the mappings of [begin, end) may be written, as the kernel lists them.
bool HostMayWrite(uintptr_t begin, uintptr_t end) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, last = 0;
    char may_read = 0, may_write = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %c%c", &first, &last, &may_read, &may_write) != 4) continue;
    if (first < end && last > begin && may_write != 'w') return false;
  }
  return true;
}

// The entry of `ranges` that holds `address`, or end.
template <typename Map, typename SizeOf>
auto Holding(const Map& ranges, uintptr_t address, SizeOf size_of) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return ranges.end();
  --it;
  return address - it->first < size_of(it->second) ? it : ranges.end();
}
constexpr auto kSizeItself = [](size_t size_bytes) { return size_bytes; };
constexpr auto kSizeOfRange = [](const auto& range) { return range.size_bytes; };

}  // namespace

Memory::Physical::~Physical() {
  if (counted) memory->used_[static_cast<size_t>(gpu)] -= size_bytes;
  close(fd);
}

Memory::~Memory() {
  std::lock_guard lock(mutex_);
  mappings_.clear();
  handles_.clear();
  for (const auto& [address, size_bytes] : reservations_) munmap(At(address), size_bytes);
}

bool Memory::PropIsValid(const CUmemAllocationProp* prop) const {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return false;
  if (prop->requestedHandleTypes != 0 && prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return false;
  if (prop->win32HandleMetaData != nullptr || prop->allocFlags.compressionType != 0) return false;
  return prop->location.id >= 0 && prop->location.id < options_.gpus;
}

CUresult Memory::Granularity(const CUmemAllocationProp* prop, int option, size_t* granularity) const {
  if (!PropIsValid(prop) || granularity == nullptr || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
  *granularity = option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED ? kRecommendedGranularity : kMinimumGranularity;
  return CUDA_SUCCESS;
}

size_t Memory::FreeBytes(int gpu) const {
  std::lock_guard lock(mutex_);
  return options_.bytes_per_gpu - used_[static_cast<size_t>(gpu)];
}

CUresult Memory::Create(size_t size_bytes, const CUmemAllocationProp* prop, CUmemGenericAllocationHandle* handle) {
  if (!PropIsValid(prop) || size_bytes == 0 || size_bytes % kMinimumGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !options_.posix_fd)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (prop->allocFlags.gpuDirectRDMACapable != 0 && !options_.rdma) return CUDA_ERROR_NOT_SUPPORTED;
  const int gpu = prop->location.id;
  std::lock_guard lock(mutex_);
  if (size_bytes > options_.bytes_per_gpu - used_[static_cast<size_t>(gpu)]) return CUDA_ERROR_OUT_OF_MEMORY;
  char name[32];
  std::snprintf(name, sizeof(name), kMemfdFormat, gpu);
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  // Sealed, because who has the descriptor of a GPU's memory cannot change its size either.
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size_bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used_[static_cast<size_t>(gpu)] += size_bytes;
  *handle = next_handle_++;
  handles_[*handle] = std::make_shared<Physical>(this, gpu, fd, size_bytes, true);
  return CUDA_SUCCESS;
}

CUresult Memory::Release(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(mutex_);
  return handles_.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Memory::Export(CUmemGenericAllocationHandle handle, int handle_type, int* fd) {
  std::lock_guard lock(mutex_);
  const auto it = handles_.find(handle);
  if (it == handles_.end() || handle_type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fd == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  *fd = dup(it->second->fd);  // without CLOEXEC, as the driver's
  return *fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult Memory::Import(int fd, int handle_type, CUmemGenericAllocationHandle* handle) {
  if (handle_type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  char path[32], target[64] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  int gpu = -1;
  if (readlink(path, target, sizeof(target) - 1) < 0 || std::strncmp(target, "/memfd:", 7) != 0 ||
      std::sscanf(target + 7, kMemfdFormat, &gpu) != 1) {
    return CUDA_ERROR_INVALID_VALUE;  // no memory of a GPU
  }
  if (gpu >= options_.gpus) return CUDA_ERROR_INVALID_DEVICE;  // of one that this process does not see
  struct stat about;
  const int copy = dup(fd);
  if (copy < 0 || fstat(copy, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  *handle = next_handle_++;
  handles_[*handle] = std::make_shared<Physical>(this, gpu, copy, static_cast<size_t>(about.st_size), false);
  return CUDA_SUCCESS;
}

CUresult Memory::Reserve(size_t size_bytes, size_t alignment, CUdeviceptr* address) {
  if (size_bytes == 0 || size_bytes % kRecommendedGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((alignment & (alignment - 1)) != 0 || alignment > kRecommendedGranularity) return CUDA_ERROR_INVALID_VALUE;
  // Aligned to the granularity, as real ones: more is taken, and what is over is given back.
  const size_t taken_bytes = size_bytes + kRecommendedGranularity;
  void* const taken = mmap(nullptr, taken_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto base = reinterpret_cast<CUdeviceptr>(taken);
  *address = (base + kRecommendedGranularity - 1) / kRecommendedGranularity * kRecommendedGranularity;
  if (*address > base) munmap(taken, *address - base);
  const CUdeviceptr end = *address + size_bytes;
  if (base + taken_bytes > end) munmap(At(end), base + taken_bytes - end);
  std::lock_guard lock(mutex_);
  reservations_[*address] = size_bytes;
  return CUDA_SUCCESS;
}

CUresult Memory::Free(CUdeviceptr address, size_t size_bytes) {
  std::lock_guard lock(mutex_);
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second != size_bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + size_bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(At(address), size_bytes);
  reservations_.erase(it);
  return CUDA_SUCCESS;
}

CUresult Memory::Map(CUdeviceptr address, size_t size_bytes, size_t offset, CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(mutex_);
  const auto physical = handles_.find(handle);
  if (physical == handles_.end() || offset != 0 || size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (address % kMinimumGranularity != 0 || size_bytes % kMinimumGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (size_bytes > physical->second->size_bytes) return CUDA_ERROR_NOT_SUPPORTED;
  const auto reservation = Holding(reservations_, address, kSizeItself);
  if (reservation == reservations_.end() || address + size_bytes > reservation->first + reservation->second) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = mappings_.lower_bound(address);
  const bool overlaps = Holding(mappings_, address, kSizeOfRange) != mappings_.end() ||
                        (next != mappings_.end() && next->first < address + size_bytes);
  if (overlaps) return CUDA_ERROR_INVALID_VALUE;
  mappings_[address] = {size_bytes, offset, physical->second, {}};
  return CUDA_SUCCESS;  // nobody may touch it before SetAccess
}

CUresult Memory::Unmap(CUdeviceptr address, size_t size_bytes) {
  std::lock_guard lock(mutex_);
  const auto it = mappings_.find(address);
  if (it == mappings_.end() || it->second.size_bytes != size_bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!Fence(address, size_bytes)) return CUDA_ERROR_UNKNOWN;
  mappings_.erase(it);
  return CUDA_SUCCESS;
}

CUresult Memory::SetAccess(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc* descs, size_t count) {
  std::lock_guard lock(mutex_);
  if (count == 0 || size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    const CUmemLocation at = descs[i].location;
    const bool valid_flags =
        descs[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ || descs[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (at.type != CU_MEM_LOCATION_TYPE_DEVICE || !valid_flags) return CUDA_ERROR_INVALID_VALUE;
    if (at.id < 0 || at.id >= options_.gpus) return CUDA_ERROR_INVALID_DEVICE;
  }
  // Whole mappings, side by side without a gap.
  const auto first = mappings_.find(address);
  CUdeviceptr end = address;
  for (auto it = first; it != mappings_.end() && it->first == end && end < address + size_bytes; ++it) {
    end += it->second.size_bytes;
  }
  if (end != address + size_bytes) return CUDA_ERROR_INVALID_VALUE;
  for (auto it = first; it != mappings_.end() && it->first < end; ++it) {
    Mapping& mapping = it->second;
    bool writable = false;
    for (size_t i = 0; i < count; ++i) mapping.access[descs[i].location.id] = descs[i].flags;
    for (const auto& [gpu, flags] : mapping.access) writable |= flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const void* const mapped = mmap(At(it->first), mapping.size_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                                    MAP_SHARED | MAP_FIXED, mapping.physical->fd, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_UNKNOWN;
  }
  return CUDA_SUCCESS;
}

CUresult Memory::HostRegister(void* p, size_t size_bytes, unsigned flags) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (p == nullptr || size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  const auto next = registered_.lower_bound(address);
  if (Holding(registered_, address, kSizeOfRange) != registered_.end() ||
      (next != registered_.end() && next->first < address + size_bytes)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  // Pinning fails where nothing is mapped.
  const uintptr_t first = address / 4096 * 4096;
  std::vector<unsigned char> resident((address + size_bytes - first + 4095) / 4096);
  if (mincore(reinterpret_cast<void*>(first), address + size_bytes - first, resident.data()) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // What the host may not write is registered as read-only or not at all.
  const bool read_only = (flags & kHostRegisterReadOnly) != 0;
  if (!read_only && !HostMayWrite(first, address + size_bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (size_bytes > options_.pinned_bytes - pinned_bytes_) return CUDA_ERROR_OUT_OF_MEMORY;
  pinned_bytes_ += size_bytes;
  registered_[address] = {size_bytes, !read_only};
  return CUDA_SUCCESS;
}

CUresult Memory::HostUnregister(void* p) {
  std::lock_guard lock(mutex_);
  const auto found = registered_.find(reinterpret_cast<uintptr_t>(p));
  if (found == registered_.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  pinned_bytes_ -= found->second.size_bytes;
  registered_.erase(found);
  return CUDA_SUCCESS;
}

CUresult Memory::HostDevicePointer(void* p, CUdeviceptr* address) const {
  std::lock_guard lock(mutex_);
  const auto host = reinterpret_cast<uintptr_t>(p);
  if (Holding(registered_, host, kSizeOfRange) == registered_.end()) return CUDA_ERROR_INVALID_VALUE;
  *address = host;
  return CUDA_SUCCESS;
}

bool Memory::Reaches(int gpu, const void* p, size_t size_bytes, bool write) const {
  std::lock_guard lock(mutex_);
  auto at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = at + size_bytes;
  while (at < end) {
    if (const auto host = Holding(registered_, at, kSizeOfRange); host != registered_.end()) {
      if (write && !host->second.writable) return false;
      at = host->first + host->second.size_bytes;
      continue;
    }
    const auto mapping = Holding(mappings_, at, kSizeOfRange);
    if (mapping == mappings_.end()) return false;
    const auto access = mapping->second.access.find(gpu);
    if (access == mapping->second.access.end() || (write && access->second != CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
      return false;
    at = mapping->first + mapping->second.size_bytes;
  }
  return true;
}

bool Memory::IsReadOnly(int gpu, const void* p, size_t size_bytes) const {
  std::lock_guard lock(mutex_);
  const auto first = reinterpret_cast<uintptr_t>(p);
  for (const auto& [address, mapping] : mappings_) {
    if (address >= first + size_bytes || address + mapping.size_bytes <= first) continue;
    const auto access = mapping.access.find(gpu);
    if (access != mapping.access.end() && access->second != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return true;
  }
  return false;
}

bool Memory::Knows(const void* p, size_t size_bytes) const {
  std::lock_guard lock(mutex_);
  const auto at = reinterpret_cast<uintptr_t>(p);
  const auto touches = [&](const auto& ranges, auto size_of) {
    const auto next = ranges.lower_bound(at);
    return Holding(ranges, at, size_of) != ranges.end() || (next != ranges.end() && next->first < at + size_bytes);
  };
  return touches(registered_, kSizeOfRange) || touches(reservations_, kSizeItself);
}

bool Memory::IsOnGpu(const void* p) const {
  std::lock_guard lock(mutex_);
  return Holding(reservations_, reinterpret_cast<uintptr_t>(p), kSizeItself) != reservations_.end();
}

Memory::Live Memory::live() const {
  std::lock_guard lock(mutex_);
  return {handles_.size(), reservations_.size(), mappings_.size(), registered_.size()};
}

}  // namespace shardd::fake_cuda
