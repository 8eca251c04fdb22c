#include "server/device/cuda/norm_slots.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr size_t kStrideBytes = 64;  // no two slots share a cache line

}  // namespace

absl::StatusOr<std::unique_ptr<CudaNormSlots>> CudaNormSlots::Create(const CudaDriver* driver, size_t count,
                                                                     const std::string& device) {
  auto slots = absl::WrapUnique(new CudaNormSlots(driver, count));
  const size_t size_bytes = (count * kStrideBytes + 4095) / 4096 * 4096;
  void* const memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("map norms of ", device, ": ", strerror(errno), " (got ", size_bytes, " bytes)"));
  }
  slots->memory_ = static_cast<char*>(memory);
  slots->size_bytes_ = size_bytes;
  SHARDD_RETURN_IF_ERROR(driver->Check(
      (*driver)->MemHostRegister(memory, size_bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
      "cuMemHostRegister", "norms", device));
  slots->registered_ = true;
  CUdeviceptr address = 0;
  SHARDD_RETURN_IF_ERROR(driver->Check((*driver)->MemHostGetDevicePointer(&address, memory, 0),
                                       "cuMemHostGetDevicePointer", "norms", device));
  for (size_t i = 0; i < count; ++i) {
    slots->free_.push_back({reinterpret_cast<NormState*>(slots->memory_ + i * kStrideBytes),
                            reinterpret_cast<NormState*>(address + i * kStrideBytes)});
  }
  return slots;
}

CudaNormSlots::~CudaNormSlots() {
  if (registered_) (void)(*driver_)->MemHostUnregister(memory_);
  if (memory_ != nullptr) munmap(memory_, size_bytes_);
}

CudaNormSlots::Slot CudaNormSlots::Take() {
  const Slot slot = free_.back();
  free_.pop_back();
  return slot;
}

void CudaNormSlots::GiveBack(Slot slot) { free_.push_back(slot); }

}  // namespace shardd
