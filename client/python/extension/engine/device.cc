// A job and a model on a GPU: on the same one, and in the order of torch's current stream.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/torch/stream_wait.h"

namespace shardd::python {

void Engine::CheckDevice(const shardd_job_info& info, int gpu) {
  const auto name = [](int index) { return index < 0 ? std::string("the CPU") : "cuda:" + std::to_string(index); };
  if (info.cuda_device == gpu) {
    return;
  }
  std::string text = "register model: it is on " + name(gpu) + " and the daemon has rank " + std::to_string(info.rank) +
                     " on " + info.device + " (got " + name(gpu) + ", want " + name(info.cuda_device) +
                     " as this process numbers GPUs; daemon " + info.address + "); ";
  text += info.cuda_device < 0 ? "start the daemon with --devices=cuda:all, or leave the model on the CPU"
                               : "call torch.cuda.set_device(" + std::to_string(info.cuda_device) +
                                     ") before fully_shard, or name the GPUs in the order of the ranks in --devices";
  Check(Status(Code::kFailedPrecondition, text));
}

void Engine::FollowStream() {
  const c10::Stream current = c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_);
  if (current != stream_) {
    Check(job_->SetCudaStream(current.native_handle()));
    stream_ = current;
  }
}

void Engine::AwaitHostState() const {
  if (device_ != state_device_) {
    SynchroniseStream();
  }
}

void Engine::SynchroniseStream() const {
  if (!device_.is_cpu()) {
    const NoGil no_gil;
    Check(WaitForStream(c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_), stream_limit_,
                        job_->info().rank, [] { return PendingSignal(nullptr) != 0; }));
  }
}

}  // namespace shardd::python
