#ifndef SHARDD_SERVER_DEVICE_CUDA_NORM_SLOTS_H_
#define SHARDD_SERVER_DEVICE_CUDA_NORM_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/driver.h"
#include "common/tensor/norm.h"

namespace shardd {

// Memory in which kernels leave norms for the host, as no kernel can reach a Norm in the daemon's own memory. One
// registered range, allocated with the device because registering synchronises. Thread-compatible; `driver` must
// outlive it.
class CudaNormSlots {
 public:
  struct Slot {
    NormState* host = nullptr;
    NormState* device = nullptr;
  };

  // REQUIRES: the device's context is current, here and at destruction.
  static absl::StatusOr<std::unique_ptr<CudaNormSlots>> Create(const CudaDriver* driver, size_t count,
                                                               const std::string& device);
  CudaNormSlots(const CudaNormSlots&) = delete;
  CudaNormSlots& operator=(const CudaNormSlots&) = delete;
  ~CudaNormSlots();

  bool available() const { return !free_.empty(); }
  size_t count() const { return count_; }
  Slot Take();  // REQUIRES: available()
  void GiveBack(Slot slot);

 private:
  CudaNormSlots(const CudaDriver* driver, size_t count) : driver_(driver), count_(count) {}

  const CudaDriver* const driver_;
  const size_t count_;
  char* memory_ = nullptr;
  size_t size_bytes_ = 0;
  bool registered_ = false;
  std::vector<Slot> free_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_NORM_SLOTS_H_
