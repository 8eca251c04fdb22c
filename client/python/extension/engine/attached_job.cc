#include "client/python/extension/engine/attached_job.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "client/python/extension/errors.h"
#include "client/torch/stream_wait.h"

namespace shardd::python {
namespace {

// CUDA's stream. torch 2.10 tells it in Python alone. Needs the GIL.
template <typename Stream>
void* NativeHandle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    const pybind11::object same = pybind11::module_::import("torch").attr("cuda").attr("Stream")(
        pybind11::arg("stream_id") = stream.id(),
        pybind11::arg("device_index") = static_cast<int>(stream.device_index()),
        pybind11::arg("device_type") = static_cast<int>(stream.device_type()));
    return reinterpret_cast<void*>(same.attr("cuda_stream").template cast<uintptr_t>());
  }
}

constexpr int64_t kDefaultTimeoutMs = 300'000;  // the library's own (shardd_attach_options.timeout_ms)

c10::Stream CurrentStream(at::Device device) { return c10::impl::getDeviceGuardImpl(device.type())->getStream(device); }

}  // namespace

std::unique_ptr<AttachedJob> AttachedJob::Attach(const std::string& spec_json, int rank, int node,
                                                 const std::string& address, bool resumes, int64_t timeout_ms, int gpu,
                                                 bool alone) {
  Job::Options options;
  options.spec_json = spec_json;
  options.rank = rank;
  options.node = node;
  options.address = address;
  options.replace = options.adopt = resumes;
  options.timeout_ms = timeout_ms;
  options.device_memory = gpu >= 0;
  options.ends_with_launcher = alone;
  const at::Device device = gpu < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  std::unique_ptr<Job> job;
  {
    const NoGil no_gil;
    Check(Job::Attach(options, &job));
  }
  Check(Status::Take(shardd_set_interrupt(job->c_job(), &PendingSignal, nullptr)));
  std::vector<int32_t> none;
  Check(GivenByOthers(*job, &none));  // from now on the job knows that this rank will ask
  try {
    CheckDevice(job->info(), gpu);
  } catch (...) {
    (void)job->Finish();  // it was made for nothing
    throw;
  }
  const std::chrono::milliseconds limit(timeout_ms > 0 ? timeout_ms : kDefaultTimeoutMs);
  return std::unique_ptr<AttachedJob>(new AttachedJob(std::move(job), device, limit));
}

AttachedJob::AttachedJob(std::unique_ptr<Job> job, at::Device device, std::chrono::milliseconds stream_limit)
    : job_(std::move(job)),
      device_(device),
      state_device_(job_->info().offloaded == 0 ? device : at::Device(at::kCPU)),
      stream_limit_(stream_limit) {}

void AttachedJob::CheckDevice(const shardd_job_info& info, int gpu) {
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

Job& AttachedJob::job() {
  Job& job = unordered();
  if (!device_.is_cpu()) {
    FollowStream();
  }
  return job;
}

Job& AttachedJob::unordered() {
  if (job_ == nullptr) {
    Check(Status(Code::kFailedPrecondition, "use of a fully sharded module: its job is closed"));
  }
  return *job_;
}

void AttachedJob::Reattach() {
  SynchroniseStream();  // with what was copied out
  settled_ = awaited_ = false;
  {
    const NoGil no_gil;
    Check(unordered().Reattach());
  }
  stream_.reset();
}

void AttachedJob::FollowStream() {
  if (device_.is_cpu()) {
    return;
  }
  const c10::Stream current = CurrentStream(device_);
  if (current != stream_) {
    Check(job_->SetCudaStream(NativeHandle(current)));
    stream_ = current;
  }
}

void AttachedJob::AwaitHostState() const {
  if (device_ != state_device_) {
    SynchroniseStream();
  }
}

void AttachedJob::SynchroniseStream() const {
  if (!device_.is_cpu()) {
    const NoGil no_gil;
    Check(WaitForStream(CurrentStream(device_), stream_limit_, job_->info().rank,
                        [] { return PendingSignal(nullptr) != 0; }));
  }
}

void AttachedJob::AwaitPassCopies() {
  AwaitHostState();
  settled_ = settled_ && device_.is_cpu();
}

AttachedJob::StepResult AttachedJob::Step(const shardd_step_options& options, const std::function<void()>& sent) {
  const NoGil no_gil;
  Check(job().StepWith(options));
  sent();
  const bool tells = options.max_grad_norm > 0 || options.loss_scale > 0;
  if (!tells && !device_.is_cpu() && device_ == state_device_ && job().info().stream_ordered != 0) {
    Check(job().AwaitStep());
    awaited_ = true;
    settled_ = false;
    return {};
  }
  shardd_step_result result{};
  result.struct_size = sizeof(result);
  Check(job().WaitStep(&result));
  settled_ = true;
  return {result.committed_step, result.grad_norm, result.clip_factor, result.skipped != 0};
}

void AttachedJob::WaitForCommit() {
  if (awaited_) {
    const NoGil no_gil;
    Check(unordered().WaitStep());
    awaited_ = false;
  }
}

std::string AttachedJob::Describe() {
  WaitForCommit();
  char* json = nullptr;
  {
    const NoGil no_gil;
    Check(Status::Take(shardd_describe_job(unordered().c_job(), &json)));
  }
  std::string text = json;
  shardd_string_free(json);
  return text;
}

std::string AttachedJob::trainer_state() {
  WaitForCommit();
  return unordered().trainer_state();
}

shardd_job_info AttachedJob::info() {
  if (awaited_) {
    const NoGil no_gil;
    awaited_ = !unordered().WaitStep().ok();  // who asks after a failure is told of what was committed
  }
  return unordered().info();
}

shardd_counters AttachedJob::client_counters() {
  shardd_counters counters{};
  counters.struct_size = sizeof(counters);
  Check(Status::Take(shardd_get_counters(job().c_job(), &counters)));
  return counters;
}

}  // namespace shardd::python
