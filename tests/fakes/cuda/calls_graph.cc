// Graphs by capture of one stream: what would be queued is noted instead, and launched as often as one likes.

#include <utility>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {

CUresult Driver::StreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  const Call call = EnterStream("cuStreamIsCapturing", stream);
  if (!call) return call.result;
  *status = call.stream->Capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult Driver::StreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  const Call call = EnterStream("cuStreamBeginCapture", stream);
  if (!call) return call.result;
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  return call.stream->BeginCapture() ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult Driver::StreamEndCapture(CUstream stream, CUgraph* graph) {
  const Call call = EnterStream("cuStreamEndCapture", stream);
  if (!call) return call.result;
  std::vector<Stream::Item> items;
  if (!call.stream->EndCapture(&items)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(call.machine->mutex_);
  *graph = reinterpret_cast<CUgraph>(call.machine->next_object_++);
  call.machine->graphs_[*graph] = std::make_shared<std::vector<Stream::Item>>(std::move(items));
  return CUDA_SUCCESS;
}
CUresult Driver::GraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  const Call call = EnterContext("cuGraphInstantiateWithFlags");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  const auto it = call.machine->graphs_.find(graph);
  if (it == call.machine->graphs_.end() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *exec = reinterpret_cast<CUgraphExec>(call.machine->next_object_++);
  call.machine->execs_[*exec] = it->second;
  return CUDA_SUCCESS;
}
CUresult Driver::GraphLaunch(CUgraphExec exec, CUstream stream) {
  const Call call = EnterStream("cuGraphLaunch", stream);
  if (!call) return call.result;
  std::shared_ptr<const std::vector<Stream::Item>> items;
  {
    std::lock_guard lock(call.machine->mutex_);
    const auto it = call.machine->execs_.find(exec);
    if (it == call.machine->execs_.end()) return CUDA_ERROR_INVALID_VALUE;
    items = it->second;
  }
  if (call.stream->Capturing()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;  // of a child graph: not done
  // One by one: a queue that is full keeps the call.
  for (const Stream::Item& item : *items) {
    if (const CUresult result = Enqueue(call, item); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
CUresult Driver::GraphExecDestroy(CUgraphExec exec) {
  const Call call = Enter("cuGraphExecDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->execs_.erase(exec) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult Driver::GraphDestroy(CUgraph graph) {
  const Call call = Enter("cuGraphDestroy");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->graphs_.erase(graph) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace shardd::fake_cuda
