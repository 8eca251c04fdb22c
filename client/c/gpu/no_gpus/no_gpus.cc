// In the place of this folder's sources in a build without NVIDIA's headers: a session whose slabs lie on a GPU is
// refused when they are to be mapped, so nothing else here is ever called.

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "client/c/gpu/device_slabs.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/gpu/trainer_sums.h"
#include "common/cuda/no_kernels.h"

namespace shardd {
namespace {

absl::Status NoGpus() { return absl::UnimplementedError(kNoGpuCode); }

}  // namespace

absl::StatusOr<DeviceSlabs> DeviceSlabs::Map(const v1::AttachRankResponse& attach, const ShardPlan&,
                                             std::vector<UniqueFd>&, const Fetch&) {
  if (attach.device_slabs().empty()) return DeviceSlabs();
  return absl::UnimplementedError(absl::StrCat("attach: the job lies on ", attach.device(), ": ", kNoGpuCode,
                                               "; run deploy/nvidia_headers.sh and build the client library again"));
}
const CudaDriver& DeviceSlabs::driver() { std::abort(); }

absl::StatusOr<std::unique_ptr<GraphWords>> GraphWords::Make(const CudaDriver&) { return NoGpus(); }
GraphWords::~GraphWords() = default;
bool GraphWords::idle() const { return true; }
absl::StatusOr<int> GraphWords::AddWait(CUstream) { return NoGpus(); }
absl::StatusOr<int> GraphWords::AddSignal(CUstream) { return NoGpus(); }
absl::Status GraphWords::Release(int, const std::function<absl::Status()>&) { return NoGpus(); }
absl::Status GraphWords::Await(int, const std::function<absl::Status()>&) { return NoGpus(); }
void GraphWords::End() {}

absl::StatusOr<std::unique_ptr<StreamOrder>> StreamOrder::Create(const Options&) { return NoGpus(); }
StreamOrder::~StreamOrder() = default;
absl::Status StreamOrder::Use(CUstream) { return NoGpus(); }
void StreamOrder::Forget() {}
absl::StatusOr<uint64_t> StreamOrder::Signal(const std::string&, const std::function<absl::Status()>&) {
  return NoGpus();
}
bool StreamOrder::MayAwait() { return false; }
absl::Status StreamOrder::Await(const TimelineWord&, uint64_t, std::string) { return NoGpus(); }
absl::Status StreamOrder::CheckNotCapturing(const char*, CUstream) const { return NoGpus(); }
absl::StatusOr<GraphWords*> StreamOrder::MakeGraphWords() { return NoGpus(); }
bool StreamOrder::FreeGraphWords(GraphWords*) { return true; }
absl::StatusOr<int> StreamOrder::AddToGraph(GraphWords*, bool) { return NoGpus(); }
absl::Status StreamOrder::LaunchGraph(CUgraphExec, GraphWords*) { return NoGpus(); }
absl::Status StreamOrder::launch_status() const { return NoGpus(); }
absl::Status StreamOrder::AwaitLaunch(const std::function<absl::Status()>&) { return NoGpus(); }
void StreamOrder::EndGraph() {}
absl::Status StreamOrder::expired() const { return NoGpus(); }
bool StreamOrder::Drain(bool, absl::Duration, const std::function<bool()>&) { return true; }

bool CanAddGradients() { return false; }
absl::StatusOr<CUkernel> LoadReduceKernel(const CudaDriver&) { return NoGpus(); }
absl::StatusOr<std::unique_ptr<TrainerSums>> TrainerSums::Start(Options) { return NoGpus(); }
TrainerSums::~TrainerSums() = default;
bool TrainerSums::Stop(absl::Duration) { return true; }

}  // namespace shardd
