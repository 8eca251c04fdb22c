#include "client/c/session/session_memory.h"

#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

absl::Status MapOne(std::vector<UniqueFd>& fds, SessionFd which, const char* name, int64_t size_bytes, bool writable,
                    MappedSlab* slab, bool keep_descriptor = false, MappedPages pages = MappedPages::kAny) {
  auto mapped = MappedSlab::Map(std::move(fds[which]), size_bytes, writable, keep_descriptor, pages);
  if (!mapped.ok()) {
    return absl::Status(mapped.status().code(),
                        absl::StrCat("attach: cannot map ", name, ": ", mapped.status().message()));
  }
  *slab = *std::move(mapped);
  return absl::OkStatus();
}

// Else trainers store into the shards themselves, at any time.
bool HandsInEdits(const v1::JobConfig& config) { return !config.trainers_never_write() && !config.pass_copies(); }

}  // namespace

absl::Status SessionMemory::Map(std::vector<UniqueFd> fds, const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                const DeviceSlabs::Fetch& fetch) {
  if (fds.size() != kSessionFdCount) {
    return absl::InternalError(
        absl::StrCat("attach: wrong number of descriptors (got ", fds.size(), ", want ", int{kSessionFdCount}, ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(device_, DeviceSlabs::Map(attach, plan, fds, fetch));
  const bool slots_apart = attach.slots_apart() && !on_device();
  const SessionLayout layout = MakeSessionLayout(plan, /*slots_elsewhere=*/on_device() || slots_apart);
  doorbell_ = std::move(fds[kFdDoorbell]);
  SHARDD_RETURN_IF_ERROR(
      MapOne(fds, kFdSessionMemory, "the session memory", layout.memory_bytes, /*writable=*/true, &session_slab_));
  SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdDaemonPage, "the daemon's page", layout.daemon_page_bytes,
                                /*writable=*/on_device(),
                                &daemon_slab_));  // DaemonPage says why
  if (slots_apart) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdGradientSlots, "the gradient slots", plan.memory.gradient_slots_bytes,
                                  /*writable=*/true, &slots_));
  }
  view_ = SessionMemoryView(session_slab_.data(), layout.ring_offset_bytes, layout.masks_offset_bytes);
  SHARDD_RETURN_IF_ERROR(MapOnHost(fds, plan));
  const auto base = [this](SessionFd which, const MappedSlab& host) {
    return device_.has(which) ? device_.at(which) : host.At<char>(0);
  };
  bases_ = {base(kFdShards, shards_), base(kFdParameters, parameters_), base(kFdPool, pool_),
            base(kFdGradients, gradients_),
            on_device()   ? device_.at(kFdGradientSlots)
            : slots_apart ? slots_.At<char>(0)
                          : view_.At<char>(layout.slots_offset_bytes)};
  trace_ring_ = view_.At<TraceRecord>(layout.trace_offset_bytes);
  daemon_page_ = ReadOnlyDaemonPageView(daemon_slab_.data(), static_cast<int64_t>(plan.gradient_slots.size()),
                                        static_cast<int64_t>(plan.groups.size()));
  if (page().magic != DaemonPage::kMagic) {
    return absl::InternalError(absl::StrCat("attach: the daemon's page has a wrong magic (got ",
                                            absl::Hex(page().magic), ", want ", absl::Hex(DaemonPage::kMagic), ")"));
  }
  view_.page().magic = ClientPage::kMagic;
  EnlistStores();
  return absl::OkStatus();
}

absl::Status SessionMemory::MapOnHost(std::vector<UniqueFd>& fds, const ShardPlan& plan) {
  trainers_write_ = !plan.config.trainers_never_write();
  if (!device_.has(kFdShards)) {
    const bool hands_in = HandsInEdits(plan.config);
    UniqueFd of_view(hands_in ? fcntl(fds[kFdShards].get(), F_DUPFD_CLOEXEC, 0) : -1);
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdShards, "the shards", plan.memory.shards_bytes, /*writable=*/trainers_write_,
                                  &shards_, /*keep_descriptor=*/true,
                                  hands_in ? MappedPages::kSmall : MappedPages::kAny));
    if (hands_in) {
      if (const absl::Status status = PrivateView::Supported(); !status.ok()) {
        return absl::UnimplementedError(
            absl::StrCat("attach: ", status.message(), "; set JobConfig.passCopies, or trainersNeverWrite"));
      }
      SHARDD_ASSIGN_OR_RETURN(shards_view_, PrivateView::Of(shards_, std::move(of_view)));
    }
  }
  if (plan.memory.optimizer_bytes > 0 && !device_.has(kFdOptimizer)) {
    optimizer_fd_ = std::move(fds[kFdOptimizer]);
    optimizer_bytes_ = plan.memory.optimizer_bytes;
    optimizer_writable_ = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  }
  // Of a GPU's rank, where they are the host's, it is the daemon that reads them.
  if (plan.memory.parameters_bytes > 0 && !on_device()) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdParameters, "the cast parameters", plan.memory.parameters_bytes,
                                  /*writable=*/false, &parameters_, /*keep_descriptor=*/true));
  }
  if (plan.memory.unsharded_pool_bytes > 0 && !device_.has(kFdPool)) {
    SHARDD_RETURN_IF_ERROR(
        MapOne(fds, kFdPool, "the unsharded pool", plan.memory.unsharded_pool_bytes, /*writable=*/false, &pool_));
  }
  if (plan.memory.gradients_bytes > 0 && !device_.has(kFdGradients)) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdGradients, "the gradient shards", plan.memory.gradients_bytes,
                                  /*writable=*/true, &gradients_, /*keep_descriptor=*/true));
  }
  return absl::OkStatus();
}

SessionMemory::NamedByStreams SessionMemory::ReleaseNamedByStreams() {
  return {std::move(session_slab_), std::move(daemon_slab_), std::move(device_)};
}

}  // namespace shardd
