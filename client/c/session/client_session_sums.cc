// What of a session's gradients this process adds itself: see trainer_sums.h.

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/session/client_session.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status ClientSession::StartSums(const Target& target, const ShardPlan& plan) {
  if (!device_.has(kFdGradients) || !device_.has(kFdGradientSlots)) {
    return absl::OkStatus();  // nothing is trained
  }
  const SessionLayout layout = MakeSessionLayout(plan, /*slots_elsewhere=*/true);
  TrainerSums::Options options;
  options.driver = &DeviceSlabs::driver();
  options.ordinal = device_.ordinal();
  options.epoch = epoch_;
  options.memory = {bases_.gradients,
                    plan.memory.gradients_bytes,
                    bases_.gradient_slots,
                    plan.memory.gradient_slots_bytes,
                    device_.size_bytes(kFdGradientSlots),
                    rank_,
                    plan.world_size};
  options.ring = daemon_slab_.At<const SumRing>(layout.sum_ring_offset_bytes);
  options.words = session_slab_.At<SumWords>(layout.sum_words_offset_bytes);
  // By value: the thread may outlive this.
  options.fetch = [socket = target.socket_path, id = id_, token = token_, timeout = timeout_](
                      int rank, const std::function<bool()>& stopped) -> absl::StatusOr<UniqueFd> {
    SHARDD_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds,
                            FetchSessionFds(socket, id, token, timeout, stopped,
                                            FdRange{kFdFirstPeerSlots + static_cast<uint32_t>(rank), 1}));
    return std::move(fds.front());
  };
  const absl::StatusOr<cu::Kernel> kernel = LoadReduceKernel(DeviceSlabs::driver());
  options.kernel = kernel.ok() ? *kernel : nullptr;
  auto sums = kernel.ok() ? TrainerSums::Start(std::move(options)) : kernel.status();
  if (!sums.ok()) {
    return absl::Status(sums.status().code(),
                        absl::StrCat("attach: the sums of rank ", rank_, ": ", sums.status().message()));
  }
  sums_ = *std::move(sums);
  return absl::OkStatus();
}

}  // namespace shardd
