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

// Where the gradient slots lie, if not in the session's memory.
bool SlotsOnDevice(const v1::AttachRankResponse& attach) { return !attach.device_slabs().empty(); }
bool SlotsApart(const v1::AttachRankResponse& attach) { return attach.slots_apart() && !SlotsOnDevice(attach); }
SessionLayout LayoutOf(const v1::AttachRankResponse& attach, const ShardPlan& plan) {
  return MakeSessionLayout(plan, /*slots_elsewhere=*/SlotsOnDevice(attach) || SlotsApart(attach));
}

}  // namespace

void SessionMemory::LayOut(const v1::AttachRankResponse& attach, const ShardPlan& plan) {
  const SessionLayout layout = LayoutOf(attach, plan);
  view_ = SessionMemoryView(session_slab_.data(), layout.ring_offset_bytes, layout.masks_offset_bytes);
  trace_ring_ = view_.At<TraceRecord>(layout.trace_offset_bytes);
  daemon_page_ = ReadOnlyDaemonPageView(daemon_slab_.data(), static_cast<int64_t>(plan.gradient_slots.size()),
                                        static_cast<int64_t>(plan.groups.size()));
  view_.page().magic = ClientPage::kMagic;
}

absl::Status SessionMemory::MapWords(std::vector<UniqueFd>& fds, const v1::AttachRankResponse& attach,
                                     const ShardPlan& plan) {
  const SessionLayout layout = LayoutOf(attach, plan);
  doorbell_ = std::move(fds[kFdDoorbell]);
  SHARDD_RETURN_IF_ERROR(
      MapOne(fds, kFdSessionMemory, "the session memory", layout.memory_bytes, /*writable=*/true, &session_slab_));
  SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdDaemonPage, "the daemon's page", layout.daemon_page_bytes,
                                /*writable=*/SlotsOnDevice(attach),
                                &daemon_slab_));  // DaemonPage says why
  LayOut(attach, plan);
  if (page().magic != DaemonPage::kMagic) {
    return absl::InternalError(absl::StrCat("attach: the daemon's page has a wrong magic (got ",
                                            absl::Hex(page().magic), ", want ", absl::Hex(DaemonPage::kMagic), ")"));
  }
  return absl::OkStatus();
}

namespace {

absl::Status ControlRefused(absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat("attach: control by gRPC alone: ", why));
}

}  // namespace

absl::Status SessionMemory::CheckOwnWords(const ShardPlan& plan) {
  return plan.config.trainer_sums()
             ? ControlRefused(
                   "trainers add gradients (got trainerSums true, want false), and hear of them in shared memory; open "
                   "the job with trainerSums false in its spec's config, or set SHARDD_CONTROL=ring")
             : absl::OkStatus();
}

absl::StatusOr<ToldWords> SessionMemory::MakeOwnWords(const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                                      int protocol_version, const std::string& job) {
  if (!attach.tells_words()) {
    return ControlRefused("the daemon is of a version that does not serve it; upgrade it, or set SHARDD_CONTROL=ring");
  }
  SHARDD_RETURN_IF_ERROR(CheckOwnWords(plan));
  if (!SlotsOnDevice(attach) && !SlotsApart(attach) && plan.memory.gradient_slots_bytes > 0) {
    return ControlRefused("the gradient slots lie in the session's memory; set SHARDD_CONTROL=ring");
  }
  const SessionLayout layout = LayoutOf(attach, plan);
  SHARDD_ASSIGN_OR_RETURN(session_slab_, MappedSlab::MakeOwn(layout.memory_bytes));
  SHARDD_ASSIGN_OR_RETURN(daemon_slab_, MappedSlab::MakeOwn(layout.daemon_page_bytes));
  job_ = job;
  LayOut(attach, plan);
  return ToldWords(DaemonPageView(daemon_slab_.data(), daemon_page_.slots(), daemon_page_.groups()),
                   &view_.page().waiting, epoch_, protocol_version);
}

absl::Status SessionMemory::MapSlabs(std::vector<UniqueFd> fds, const v1::AttachRankResponse& attach,
                                     const ShardPlan& plan, const DeviceSlabs::Fetch& fetch) {
  SHARDD_ASSIGN_OR_RETURN(device_, DeviceSlabs::Map(attach, plan, fds, fetch));
  const bool slots_apart = SlotsApart(attach);
  if (slots_apart) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdGradientSlots, "the gradient slots", plan.memory.gradient_slots_bytes,
                                  /*writable=*/true, &slots_));
  }
  SHARDD_RETURN_IF_ERROR(MapOnHost(fds, plan));
  const auto base = [this](SessionFd which, const MappedSlab& host) {
    return device_.has(which) ? device_.at(which) : host.At<char>(0);
  };
  bases_ = {base(kFdShards, shards_), base(kFdParameters, parameters_), base(kFdPool, pool_),
            base(kFdGradients, gradients_),
            on_device()   ? device_.at(kFdGradientSlots)
            : slots_apart ? slots_.At<char>(0)
                          : view_.At<char>(LayoutOf(attach, plan).slots_offset_bytes)};
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
