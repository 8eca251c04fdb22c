#ifndef SHARDD_SERVER_DEVICE_CUDA_CUDA_MEMORY_H_
#define SHARDD_SERVER_DEVICE_CUDA_CUDA_MEMORY_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/cuda/driver.h"
#include "common/cuda/slab.h"
#include "server/device/cuda/kernels.h"
#include "server/device/device_memory.h"

namespace shardd {

// Memory of one GPU. A copy that has not ended after `limit` is abandoned, and with it this object: the GPU hangs and
// may still write into the staging, so every later call fails at once with DATA_LOSS. Copies run on a separate stream
// of the highest priority and through a small piece of registered host memory, because the driver would stage pageable
// memory a piece at a time, on the GPU's time slices. Stream and staging are made at the first use.
class CudaMemory final : public DeviceMemory {
 public:
  // Calls only cuDeviceGetUuid.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(const CudaDriver& driver, CUdevice device,
                                                            absl::Duration limit);
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  ~CudaMemory() override;

  const std::string& device() const override { return name_; }
  const std::string& device_uuid() const override { return uuid_; }
  std::string backing() const override { return name_; }
  int max_reduce_sources() const override { return cuda::kMaxReduceSources; }
  absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSlab(const std::string& name, int64_t size_bytes,
                                                       const std::vector<DeviceMemory*>& users) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSpreadSlab(const std::string& name, const std::vector<Part>& parts,
                                                             const std::vector<DeviceMemory*>& users) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::unique_ptr<DeviceSlab>> TakeUpSlab(const std::string& name, const std::vector<Part>& parts,
                                                         std::vector<UniqueFd> fds,
                                                         const std::vector<DeviceMemory*>& users) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::unique_ptr<PinnedMemory>> RegisterHost(const std::string& name, void* p, int64_t size_bytes,
                                                             const std::vector<DeviceMemory*>& users) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<Room> GetRoom() override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<int64_t> PageBytes() const override { return CudaSlab::Granularity(driver_, device_); }
  absl::Status Write(char* device_to, const void* from, int64_t size_bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Read(void* to, const char* device_from, int64_t size_bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Zero(char* device_to, int64_t size_bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Copy(const std::vector<Copied>& copies) override ABSL_LOCKS_EXCLUDED(mutex_);
  // True after an abandoned copy: calls of the driver may not return. Any thread.
  bool hangs() const { return hangs_.load(std::memory_order_acquire); }

 private:
  CudaMemory(const CudaDriver& driver, CUdevice device, std::string uuid, absl::Duration limit);
  absl::Status Check(CUresult result, const char* operation, absl::string_view object = "") const {
    return driver_.Check(result, operation, object, name_);
  }
  // Runs `body` with the context current, after making stream and staging.
  absl::Status Run(const std::function<absl::Status()>& body) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Usable() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<CUcontext> Context() ABSL_LOCKS_EXCLUDED(mutex_);
  class Registered;
  class Exported;
  // The GPUs of parts and users, each once. DATA_LOSS: one of the parts' is lost.
  static absl::StatusOr<std::vector<CUdevice>> OrdinalsOf(const std::vector<Part>& parts,
                                                          const std::vector<DeviceMemory*>& users);
  // "; cuda:0 has 12 of 34 bytes free, ..." for each device of these parts.
  static std::string RoomText(const std::vector<Part>& parts);
  absl::Status Prepare() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyAndWait(CUdeviceptr to, CUdeviceptr from, int64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const CudaDriver driver_;
  const CUdevice device_;
  const std::string name_;
  const std::string uuid_;
  const absl::Duration limit_;

  std::atomic<bool> hangs_ = false;  // set with lost_
  std::atomic<int64_t> slab_bytes_ = 0;

  // Guarded.
  absl::Mutex mutex_;  // serialises copies
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  CUcontext context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  CUstream stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  char* staging_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;
  CUdeviceptr staging_address_ ABSL_GUARDED_BY(mutex_) = 0;  // the GPU's address
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_CUDA_MEMORY_H_
