// Graphs by capture of one stream: what would be queued is noted instead, and launched as often as one likes.

#include <utility>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {

cu::Result Driver::StreamIsCapturing(cu::Stream stream, int* status) {
  const Call call = EnterStream("cuStreamIsCapturing", stream);
  if (!call) return call.result;
  *status = call.stream->Capturing() ? cu::kCaptureActive : cu::kCaptureNone;
  return cu::kSuccess;
}
cu::Result Driver::StreamBeginCapture(cu::Stream stream, int mode) {
  const Call call = EnterStream("cuStreamBeginCapture", stream);
  if (!call) return call.result;
  if (stream == nullptr || stream == cu::kStreamLegacy) return cu::kStreamCaptureUnsupported;
  if (mode < 0 || mode > 2) return cu::kInvalidValue;
  return call.stream->BeginCapture() ? cu::kSuccess : cu::kStreamCaptureUnsupported;
}
cu::Result Driver::StreamEndCapture(cu::Stream stream, cu::Graph* graph) {
  const Call call = EnterStream("cuStreamEndCapture", stream);
  if (!call) return call.result;
  std::vector<Stream::Item> items;
  if (!call.stream->EndCapture(&items)) return cu::kInvalidValue;
  std::lock_guard lock(call.machine->mutex_);
  *graph = reinterpret_cast<cu::Graph>(call.machine->next_object_++);
  call.machine->graphs_[*graph] = std::make_shared<std::vector<Stream::Item>>(std::move(items));
  return cu::kSuccess;
}
cu::Result Driver::GraphInstantiateWithFlags(cu::GraphExec* exec, cu::Graph graph, unsigned long long flags) {
  const Call call = EnterContext("cuGraphInstantiateWithFlags");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->graphs_.find(graph);
  if (it == call.machine->graphs_.end() || flags != 0) return cu::kInvalidValue;
  *exec = reinterpret_cast<cu::GraphExec>(call.machine->next_object_++);
  call.machine->execs_[*exec] = it->second;
  return cu::kSuccess;
}
cu::Result Driver::GraphLaunch(cu::GraphExec exec, cu::Stream stream) {
  const Call call = EnterStream("cuGraphLaunch", stream);
  if (!call) return call.result;
  std::shared_ptr<const std::vector<Stream::Item>> items;
  {
    std::lock_guard lock(call.machine->mutex_);
    const auto it = call.machine->execs_.find(exec);
    if (it == call.machine->execs_.end()) return cu::kInvalidValue;
    items = it->second;
  }
  if (call.stream->Capturing()) return cu::kStreamCaptureUnsupported;  // of a child graph: not done
  // One by one: a queue that is full keeps the call.
  for (const Stream::Item& item : *items) {
    if (const cu::Result result = Enqueue(call, item); result != cu::kSuccess) return result;
  }
  return cu::kSuccess;
}
cu::Result Driver::GraphExecDestroy(cu::GraphExec exec) {
  const Call call = Enter("cuGraphExecDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->execs_.erase(exec) == 1 ? cu::kSuccess : cu::kInvalidValue;
}
cu::Result Driver::GraphDestroy(cu::Graph graph) {
  const Call call = Enter("cuGraphDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->graphs_.erase(graph) == 1 ? cu::kSuccess : cu::kInvalidValue;
}

}  // namespace shardd::fake_cuda
