#ifndef SHARDD_SERVER_DEVICE_CUDA_ENGINE_H_
#define SHARDD_SERVER_DEVICE_CUDA_ENGINE_H_

#include <array>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "common/cuda/slab.h"
#include "server/device/cuda/kernels.h"
#include "server/device/cuda/norm_slots.h"
#include "server/device/device_op.h"

namespace shardd {

// Driver objects of one GPU's device (the primary context, three streams, the kernels, scratch), and the translation of
// operations into calls. Loop-confined: one thread at a time calls it, with the context current. Only Create,
// SynchroniseStream and the destructor wait for the GPU.
class CudaEngine {
 public:
  // Loads the kernels from `image` (a fat binary) and runs each once, so that none is loaded lazily later, which may
  // synchronise the context and hangs if a stream waits for later work. Takes about a second at the first use of a GPU.
  // UNIMPLEMENTED: the image has no code for the GPU, or the GPU lacks what slabs and timelines need. Preserves the
  // calling thread's current context.
  static absl::StatusOr<std::unique_ptr<CudaEngine>> Create(const CudaDriver& driver, int ordinal,
                                                            absl::Span<const unsigned char> image);
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;
  // REQUIRES: the streams are drained, or the device is lost.
  ~CudaEngine();

  const std::string& name() const { return name_; }                // "cuda:0"
  const std::string& description() const { return description_; }  // "NVIDIA H200, 139 GiB, 132 multiprocessors"
  CudaNormSlots& norm_slots() { return *norm_slots_; }

  // Makes the context current on this thread until the thread ends.
  absl::Status EnterThread();

  // INTERNAL: CheckOp or a kernel refuses it.
  static absl::Status Check(const DeviceOp& op);
  // Number of driver calls that Issue makes.
  int CallsOf(const DeviceOp& op) const;
  // Enqueues `op`. Adds a norm to *slot.device. DATA_LOSS: the device is lost. After any error, some of the operation's
  // calls may be enqueued. REQUIRES: Check(op) is OK.
  absl::Status Issue(StreamId stream, const DeviceOp& op, CudaNormSlots::Slot slot);
  absl::Status IssueHostFunction(StreamId stream, CUhostFn function, void* user_data);
  // DATA_LOSS: the device is lost. OK whether the stream is idle or not.
  absl::Status QueryStream(StreamId stream);
  absl::Status SynchroniseStream(StreamId stream);

 private:
  struct Calls;  // one method per kind of operation

  CudaEngine(const CudaDriver& driver, int ordinal);
  absl::Status Init(absl::Span<const unsigned char> image);
  absl::Status InitDevice();
  absl::Status InitStreams();
  absl::Status InitKernels(absl::Span<const unsigned char> image);
  absl::Status WarmUp();
  absl::Status CheckCall(CUresult result, absl::string_view operation, absl::string_view object) const {
    return driver_.Check(result, operation, object, name_);
  }

  const CudaDriver driver_;
  const int ordinal_;
  const std::string name_;
  std::string description_;
  CUdevice device_ = 0;
  int multiprocessors_ = 0;
  CUcontext context_ = nullptr;
  std::array<CUstream, kStreamCount> streams_ = {};
  CUlibrary library_ = nullptr;
  struct {
    CUkernel cast = nullptr, reduce = nullptr, norm = nullptr, norm_finish = nullptr, adamw = nullptr, sgd = nullptr;
    CUkernel rule = nullptr;
  } kernels_;
  CudaSlab scratch_;  // kScratchBytes per stream: the operations of one stream do not overlap
  std::unique_ptr<CudaNormSlots> norm_slots_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_ENGINE_H_
