// Streams, memory operations, events.

#include <chrono>
#include <thread>
#include <utility>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {
namespace {

const void* Pointer(cu::DevicePtr address) { return reinterpret_cast<const void*>(address); }
void* MutablePointer(cu::DevicePtr address) { return reinterpret_cast<void*>(address); }

}  // namespace

cu::Result Driver::StreamCreateWithPriority(cu::Stream* stream, unsigned, int priority) {
  const Call call = EnterContext("cuStreamCreateWithPriority");
  if (!call) return call.result;
  Machine& m = *call.machine;
  std::lock_guard lock(m.mutex_);
  const uintptr_t id = m.next_object_++;
  *stream = reinterpret_cast<cu::Stream>(id);
  m.streams_[*stream] = m.NewStreamLocked(call.gpu, priority, id);
  return cu::kSuccess;
}
cu::Result Driver::StreamDestroy(cu::Stream stream) {
  const Call call = Enter("cuStreamDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->streams_.find(stream);
  if (it == call.machine->streams_.end()) return cu::kInvalidHandle;
  call.machine->destroyed_streams_.push_back(std::move(it->second));  // what is queued still runs
  call.machine->streams_.erase(it);
  return cu::kSuccess;
}
cu::Result Driver::StreamQuery(cu::Stream stream) {
  const Call call = EnterStream("cuStreamQuery", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return cu::kStreamCaptureUnsupported;
  return call.stream->Idle() ? Outcome(call) : cu::kNotReady;  // asked behind the work: it may have lost the GPU
}
cu::Result Driver::StreamSynchronize(cu::Stream stream) {
  const Call call = EnterStream("cuStreamSynchronize", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return cu::kStreamCaptureUnsupported;
  call.stream->WaitUntilIdle();
  return Outcome(call);
}

bool Driver::IsWord(const Call& call, cu::DevicePtr address, bool write) {
  return address % 8 == 0 && call.machine->memory_.Reaches(call.gpu, Pointer(address), 8, write);
}
cu::Result Driver::StreamWriteValue64(cu::Stream stream, cu::DevicePtr address, uint64_t value, unsigned flags) {
  const Call call = EnterStream("cuStreamWriteValue64", stream);
  if (!call) return call.result;
  if (!IsWord(call, address, false) || flags != cu::kWriteValueDefault) return cu::kInvalidValue;
  // What may only be read is seen when it is too late.
  if (!call.machine->memory_.Reaches(call.gpu, Pointer(address), 8, true)) {
    return Enqueue(call, [](Stream&) { return cu::kLaunchFailed; });
  }
  return Enqueue(call, [&m = *call.machine, late = call.machine->late_writes_.get(), address, value](Stream& on) {
    if (m.DiesIn("cuStreamWriteValue64")) Machine::Die();
    auto* const word = static_cast<uint64_t*>(MutablePointer(address));
    if (late == nullptr) {
      __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
      return cu::kSuccess;
    }
    const uint64_t number = late->Hand(word, value);
    PollUntil(on, [&] { return late->Landed(number); });
    return cu::kSuccess;
  });
}
cu::Result Driver::StreamWaitValue64(cu::Stream stream, cu::DevicePtr address, uint64_t value, unsigned flags) {
  const Call call = EnterStream("cuStreamWaitValue64", stream);
  if (!call) return call.result;
  if (!IsWord(call, address, false) || flags > cu::kWaitValueEq) return cu::kInvalidValue;
  return Enqueue(call, [address, value, flags](Stream& on) {
    PollUntil(on, [&] {
      const uint64_t word = __atomic_load_n(static_cast<const uint64_t*>(Pointer(address)), __ATOMIC_ACQUIRE);
      return flags == cu::kWaitValueEq ? word == value : static_cast<int64_t>(word - value) >= 0;
    });
    return cu::kSuccess;
  });
}

cu::Result Driver::EventCreate(cu::Event* event, unsigned) {
  const Call call = EnterContext("cuEventCreate");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  *event = reinterpret_cast<cu::Event>(call.machine->next_object_++);
  call.machine->events_[*event] = std::make_shared<Event>();
  return cu::kSuccess;
}
std::shared_ptr<Event> Driver::Find(const Call& call, cu::Event event) {
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->events_.find(event);
  return it == call.machine->events_.end() ? nullptr : it->second;
}
cu::Result Driver::EventDestroy(cu::Event event) {
  const Call call = Enter("cuEventDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->events_.erase(event) == 1 ? cu::kSuccess : cu::kInvalidHandle;
}
cu::Result Driver::EventRecord(cu::Event event, cu::Stream stream) {
  const Call call = EnterStream("cuEventRecord", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return cu::kStreamCaptureUnsupported;  // forks of a capture are not done
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return cu::kInvalidHandle;
  found->Recorded();
  return Enqueue(call, [found, record = found->last_record()](Stream&) {
    found->Reached(record);
    return cu::kSuccess;
  });
}
cu::Result Driver::StreamWaitEvent(cu::Stream stream, cu::Event event, unsigned flags) {
  const Call call = EnterStream("cuStreamWaitEvent", stream);
  if (!call) return call.result;
  if (call.stream->Capturing()) return cu::kStreamCaptureUnsupported;  // forks of a capture are not done
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr || flags != 0) return found == nullptr ? cu::kInvalidHandle : cu::kInvalidValue;
  return Enqueue(call, [found, record = found->last_record()](Stream& on) {
    PollUntil(on, [&] { return found->Done(record); });
    return cu::kSuccess;
  });
}
cu::Result Driver::EventQuery(cu::Event event) {
  const Call call = EnterContext("cuEventQuery");
  if (!call) return call.result;
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return cu::kInvalidHandle;
  return found->Done(found->last_record()) ? cu::kSuccess : cu::kNotReady;
}
cu::Result Driver::EventSynchronize(cu::Event event) {
  const Call call = EnterContext("cuEventSynchronize");
  if (!call) return call.result;
  const std::shared_ptr<Event> found = Find(call, event);
  if (found == nullptr) return cu::kInvalidHandle;
  while (!found->Done(found->last_record()) && Outcome(call) == cu::kSuccess) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return Outcome(call);
}

}  // namespace shardd::fake_cuda
