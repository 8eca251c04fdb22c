// Streams, memory operations, events.

#include <chrono>
#include <thread>
#include <utility>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {
namespace {

const void* Pointer(CUdeviceptr address) { return reinterpret_cast<const void*>(address); }
void* MutablePointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

CUresult Driver::StreamCreateWithPriority(CUstream* stream, unsigned, int priority) {
  const Call call = EnterContext("cuStreamCreateWithPriority");
  if (!call) return call.result;
  Machine& m = *call.machine;
  std::lock_guard lock(m.mutex_);
  const uintptr_t id = m.next_object_++;
  *stream = reinterpret_cast<CUstream>(id);
  m.streams_[*stream] = m.NewStreamLocked(call.gpu, priority, id);
  return CUDA_SUCCESS;
}
CUresult Driver::StreamDestroy(CUstream stream) {
  const Call call = Enter("cuStreamDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->streams_.find(stream);
  if (it == call.machine->streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
  call.machine->destroyed_streams_.push_back(std::move(it->second));  // what is queued still runs
  call.machine->streams_.erase(it);
  return CUDA_SUCCESS;
}
CUresult Driver::StreamQuery(CUstream stream) {
  const Call call = EnterStream("cuStreamQuery", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return call.stream->Idle() ? Outcome(call) : CUDA_ERROR_NOT_READY;  // asked behind the work: it may have lost the GPU
}
CUresult Driver::StreamSynchronize(CUstream stream) {
  const Call call = EnterStream("cuStreamSynchronize", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  call.stream->WaitUntilIdle();
  return Outcome(call);
}

bool Driver::IsWord(const Call& call, CUdeviceptr address, bool write) {
  return address % 8 == 0 && call.machine->memory_.Reaches(call.gpu, Pointer(address), 8, write);
}
CUresult Driver::StreamWriteValue64(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
  const Call call = EnterStream("cuStreamWriteValue64", stream);
  if (!call) return call.result;
  if (!IsWord(call, address, false) || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  // What may only be read is seen when it is too late.
  if (!call.machine->memory_.Reaches(call.gpu, Pointer(address), 8, true)) {
    return Enqueue(call, [](Stream&) { return CUDA_ERROR_LAUNCH_FAILED; });
  }
  return Enqueue(call, [&m = *call.machine, late = call.machine->late_writes_.get(), address, value](Stream& on) {
    if (m.DiesIn("cuStreamWriteValue64")) Machine::Die();
    auto* const word = static_cast<uint64_t*>(MutablePointer(address));
    if (late == nullptr) {
      __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
      return CUDA_SUCCESS;
    }
    const uint64_t number = late->Hand(word, value);
    PollUntil(on, [&] { return late->Landed(number); });
    return CUDA_SUCCESS;
  });
}
CUresult Driver::StreamWaitValue64(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
  const Call call = EnterStream("cuStreamWaitValue64", stream);
  if (!call) return call.result;
  if (!IsWord(call, address, false) || flags > CU_STREAM_WAIT_VALUE_EQ) return CUDA_ERROR_INVALID_VALUE;
  return Enqueue(call, [address, value, flags](Stream& on) {
    PollUntil(on, [&] {
      const uint64_t word = __atomic_load_n(static_cast<const uint64_t*>(Pointer(address)), __ATOMIC_ACQUIRE);
      return flags == CU_STREAM_WAIT_VALUE_EQ ? word == value : static_cast<int64_t>(word - value) >= 0;
    });
    return CUDA_SUCCESS;
  });
}

CUresult Driver::EventCreate(CUevent* event, unsigned) {
  const Call call = EnterContext("cuEventCreate");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  *event = reinterpret_cast<CUevent>(call.machine->next_object_++);
  call.machine->events_[*event] = std::make_shared<Event>();
  return CUDA_SUCCESS;
}
std::shared_ptr<Event> Driver::Find(const Call& call, CUevent event) {
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->events_.find(event);
  return it == call.machine->events_.end() ? nullptr : it->second;
}
CUresult Driver::EventDestroy(CUevent event) {
  const Call call = Enter("cuEventDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->events_.erase(event) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult Driver::EventRecord(CUevent event, CUstream stream) {
  const Call call = EnterStream("cuEventRecord", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;  // forks of a capture are not done
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  found->Recorded();
  return Enqueue(call, [found, record = found->last_record()](Stream&) {
    found->Reached(record);
    return CUDA_SUCCESS;
  });
}
CUresult Driver::StreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  const Call call = EnterStream("cuStreamWaitEvent", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;  // forks of a capture are not done
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr || flags != 0) return found == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
  return Enqueue(call, [found, record = found->last_record()](Stream& on) {
    PollUntil(on, [&] { return found->Done(record); });
    return CUDA_SUCCESS;
  });
}
CUresult Driver::EventQuery(CUevent event) {
  const Call call = EnterContext("cuEventQuery");
  if (!call) return call.result;
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return found->Done(found->last_record()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult Driver::EventSynchronize(CUevent event) {
  const Call call = EnterContext("cuEventSynchronize");
  if (!call) return call.result;
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  while (!found->Done(found->last_record()) && Outcome(call) == CUDA_SUCCESS) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return Outcome(call);
}

}  // namespace shardd::fake_cuda
