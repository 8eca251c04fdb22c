#include "tests/fakes/cuda/calls.h"

#include <algorithm>
#include <utility>

namespace shardd::fake_cuda {

ThreadState& ThisThread() {
  thread_local ThreadState state;
  return state;
}

Driver::Call Driver::Enter(const char* name) {
  Call call;
  call.machine = Machine::Get();
  if (call.machine == nullptr) return call;
  Machine& m = *call.machine;
  std::lock_guard lock(m.mutex_);
  ++m.calls_[name];
  if (ThisThread().in_host_function) {
    call.result = CUDA_ERROR_NOT_PERMITTED;
    return call;
  }
  if (const auto it = m.failures_.find(name); it != m.failures_.end() && --it->second.first == 0) {
    call.result = it->second.second;
    m.failures_.erase(it);
    if (call.result == CUDA_ERROR_ECC_UNCORRECTABLE || call.result == CUDA_ERROR_ILLEGAL_ADDRESS)
      m.LoseLocked(0, call.result);
    return call;
  }
  call.result = m.initialised_ ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
  return call;
}
Driver::Call Driver::EnterContext(const char* name) {
  Call call = Enter(name);
  if (!call) return call;
  if (ThisThread().machine != call.machine->number_ || ThisThread().contexts.empty() ||
      ThisThread().contexts.back() == nullptr) {
    call.result = CUDA_ERROR_INVALID_CONTEXT;
    return call;
  }
  call.gpu = GpuOf(ThisThread().contexts.back());
  std::lock_guard lock(call.machine->mutex_);
  const Machine::Gpu& gpu = call.machine->gpus_[static_cast<size_t>(call.gpu)];
  call.result = gpu.lost != CUDA_SUCCESS ? gpu.lost
                : gpu.context_users == 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED
                                         : CUDA_SUCCESS;
  return call;
}
Driver::Call Driver::EnterStream(const char* name, CUstream stream) {
  Call call = EnterContext(name);
  if (!call) return call;
  std::lock_guard lock(call.machine->mutex_);
  if (stream == nullptr || stream == CU_STREAM_LEGACY) {
    std::shared_ptr<Stream>& legacy = call.machine->legacy_streams_[call.gpu];
    if (legacy == nullptr) legacy = call.machine->NewStreamLocked(call.gpu, /*priority=*/0, /*seed=*/0);
    call.stream = legacy;
    return call;
  }
  const auto it = call.machine->streams_.find(stream);
  // Of another context too.
  if (it == call.machine->streams_.end() || it->second->gpu() != call.gpu) {
    call.result = CUDA_ERROR_INVALID_HANDLE;
    return call;
  }
  call.stream = it->second;
  return call;
}
CUresult Driver::Enqueue(const Call& call, Stream::Item item) {
  size_t length = 0;
  if (!call.stream->Enqueue(std::move(item), &length)) {
    std::lock_guard lock(call.machine->mutex_);
    return call.machine->gpus_[static_cast<size_t>(call.gpu)].lost;
  }
  std::lock_guard lock(call.machine->mutex_);
  call.machine->longest_queue_ = std::max(call.machine->longest_queue_, length);
  return CUDA_SUCCESS;
}
CUresult Driver::Outcome(const Call& call) {
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->gpus_[static_cast<size_t>(call.gpu)].lost;
}

cu::DriverTable Table() {
  cu::DriverTable table;
#define SHARDD_FAKE_ENTRY(name, version) table.name = &Driver::name;
  SHARDD_CU_FUNCTIONS(SHARDD_FAKE_ENTRY)
#undef SHARDD_FAKE_ENTRY
  return table;
}

}  // namespace shardd::fake_cuda
