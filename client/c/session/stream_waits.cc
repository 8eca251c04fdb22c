#include "client/c/session/stream_waits.h"

#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status StreamWaits::Use(void* stream) {
  if (order_ == nullptr) {
    StreamOrder::Options options;
    options.driver = &DeviceSlabs::driver();
    options.ordinal = memory_.device().ordinal();
    options.rank = life_.rank();
    options.epoch = life_.epoch();
    options.client_page = &memory_.view().page();
    options.daemon_page = memory_.daemon_slab().data();
    options.daemon_page_bytes = memory_.daemon_page().size_bytes();
    options.timeout = waits_.timeout();
    options.over = [&life = life_] { return life.Ended(); };
    if (memory_.own_words()) {
      options.words = absl::FailedPreconditionError(
          "control is by gRPC alone, and the daemon sees no signal of a GPU; set SHARDD_CONTROL=ring");
    }
    SHARDD_ASSIGN_OR_RETURN(order_, StreamOrder::Create(options));
    life_.set_order(order_.get());
  }
  SHARDD_RETURN_IF_ERROR(order_->Use(static_cast<CUstream>(stream)));
  by_stream_ = true;
  return absl::OkStatus();
}

absl::Status StreamWaits::Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
  if (waits_.Reached(word, sequence)) {
    return absl::OkStatus();
  }
  if (ordered() && needs_sums_ != 0) {
    SHARDD_RETURN_IF_ERROR(waits_.Wait(memory_.page().reduced, needs_sums_, reason));
  }
  return ordered() && order_->MayAwait() ? order_->Await(word, TimelineValue(life_.epoch(), sequence), WaitText(reason))
                                         : waits_.Wait(word, sequence, reason);
}

absl::StatusOr<uint64_t> StreamWaits::SignalDone(const WaitFor& reason) {
  if (!by_stream_ || waits_on_host_) {
    return 0;
  }
  return order_->Signal(reason.call, [&]() -> absl::Status {
    return life_.interrupt().Raised()
               ? absl::CancelledError(absl::StrCat(reason.call, ": interrupted (rank=", life_.rank(), ")"))
               : absl::OkStatus();
  });
}

void StreamWaits::End(absl::Duration limit) {
  if (sums_ != nullptr && sums_->Stop(limit)) {
    sums_ = nullptr;
  }
  if (order_ != nullptr && order_->Drain(/*release=*/true, limit)) {
    life_.set_order(nullptr);
    order_ = nullptr;
  }
}

absl::Status StreamWaits::StartSums(const Target& target, uint64_t id, const std::string& token, int protocol_version,
                                    const ShardPlan& plan) {
  const DeviceSlabs& device = memory_.device();
  if (!device.has(kFdGradients) || !device.has(kFdGradientSlots)) {
    return absl::OkStatus();  // nothing is trained
  }
  const SessionLayout layout = MakeSessionLayout(plan, /*slots_elsewhere=*/true);
  TrainerSums::Options options;
  options.driver = &DeviceSlabs::driver();
  options.ordinal = device.ordinal();
  options.epoch = life_.epoch();
  options.memory = {memory_.gradients(),
                    plan.memory.gradients_bytes,
                    memory_.gradient_slots(),
                    plan.memory.gradient_slots_bytes,
                    device.size_bytes(kFdGradientSlots),
                    life_.rank(),
                    plan.world_size};
  options.ring = memory_.daemon_slab().At<const SumRing>(layout.sum_ring_offset_bytes);
  options.words = memory_.session_slab().At<SumWords>(layout.sum_words_offset_bytes);
  // By value: the thread may outlive this.
  options.fetch = [socket = target.socket_path, id, token, protocol_version, timeout = waits_.timeout()](
                      int rank, const std::function<bool()>& stopped) -> absl::StatusOr<UniqueFd> {
    SHARDD_ASSIGN_OR_RETURN(
        std::vector<UniqueFd> fds,
        FetchSessionFds(socket, id, token, timeout, stopped,
                        FdRange{kFdFirstPeerSlots + static_cast<uint32_t>(rank), 1}, protocol_version));
    return std::move(fds.front());
  };
  const absl::StatusOr<CUkernel> kernel = LoadReduceKernel(DeviceSlabs::driver());
  options.kernel = kernel.ok() ? *kernel : nullptr;
  auto sums = kernel.ok() ? TrainerSums::Start(std::move(options)) : kernel.status();
  if (!sums.ok()) {
    return absl::Status(sums.status().code(),
                        absl::StrCat("attach: the sums of rank ", life_.rank(), ": ", sums.status().message()));
  }
  sums_ = *std::move(sums);
  return absl::OkStatus();
}

}  // namespace shardd
