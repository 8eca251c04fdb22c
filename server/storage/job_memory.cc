#include "server/storage/job_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/slab_holes.h"
#include "common/plan/slab_spread.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "server/storage/device_room.h"
#include "server/storage/host_slabs.h"
#include "server/storage/job_slab.h"
#include "server/storage/kept_pieces.h"
#include "server/storage/old_values_plan.h"
#include "server/storage/slab_pieces.h"
#include "server/storage/take_up_log.h"
#include "server/storage/undo_slab.h"

namespace shardd {

int64_t WritebackUndoBytes(const ShardPlan& plan) {
  if (plan.cut_over_nodes) {  // of what this node holds
    return HeldChunksBytes(plan, HeldSlab::kShards) + HeldChunksBytes(plan, HeldSlab::kOptimizer);
  }
  if (plan.memory.undo_bytes > 0) return plan.memory.undo_bytes;  // parts of steps change all copies
  const bool updates = plan.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  if (!updates) return plan.shards_stride_bytes;
  const bool holes = HasHoles(plan, HeldSlab::kOptimizer);
  return plan.shards_stride_bytes + (holes ? HeldChunksBytes(plan, HeldSlab::kOptimizer) : plan.optimizer_stride_bytes);
}

int64_t HostSessionBytes(const ShardPlan& plan, const SlabPlace& place) {
  return plan.memory.session_bytes - (place.memory == nullptr ? 0 : plan.memory.gradient_slots_bytes);
}

namespace {

// Whether some optimizer group has the kind.
bool HasKind(const ShardPlan& plan, v1::OptimizerKind kind) {
  const v1::OptimizerConfig& optimizer = plan.config.optimizer();
  for (int group = 0; group <= optimizer.groups_size(); ++group) {
    if (OptimizerKindOf(optimizer, group) == kind) return true;
  }
  return false;
}

}  // namespace

absl::Status CheckServedOn(const DeviceMemory& memory, const ShardPlan& plan) {
  if (IsOffloaded(plan) && plan.config.replica_copies()) {
    return absl::UnimplementedError(
        "copies of gradients for replicas are not served with offload to the host (got replica_copies true, want "
        "false); clip by shardd_step's max_grad_norm, or use OFFLOAD_NONE");
  }
  if (DaemonUpdates(plan) && plan.optimizer_states > 2 && !IsOffloaded(plan)) {
    return absl::UnimplementedError(
        "optimizers with three states for each element are not served on GPUs (got amsgrad, or centered RMSprop with "
        "momentum); offload to the host, or let the optimizer step in the trainers (OPTIMIZER_KIND_TRAINER)");
  }
  if (plan.workspace_stride_bytes > 0) {
    const bool muon = HasKind(plan, v1::OPTIMIZER_KIND_MUON);
    return absl::UnimplementedError(
        absl::StrCat(muon ? "Muon" : "Adafactor", " is not served where ranks train on GPUs (got OPTIMIZER_KIND_",
                     muon ? "MUON" : "ADAFACTOR", "); let torch.optim.", muon ? "Muon" : "Adafactor",
                     " step in the trainers (OPTIMIZER_KIND_TRAINER), or use another kind"));
  }
  for (const FlatParamPlan& flat : plan.flat_params) {
    if (plan.groups[flat.group].mixed_precision.float8_gathers()) {
      return absl::UnimplementedError("float8_gathers is not served where ranks train on GPUs (got true for group \"" +
                                      plan.groups[flat.group].name + "\", want false); use param_dtype bfloat16");
    }
    if (flat.requires_grad && !IsTrainable(flat.unsharded_dtype)) {
      return absl::UnimplementedError(
          absl::StrCat("gradients of ", DTypeName(flat.unsharded_dtype), " are not added on GPUs (got it for group \"",
                       plan.groups[static_cast<size_t>(flat.group)].name, "\", want float32, bfloat16 or float16)"));
    }
  }
  if (plan.world_size > memory.max_reduce_sources()) {
    return absl::UnimplementedError(absl::StrCat("so many ranks are not served on one node's GPUs (got ",
                                                 plan.world_size, ", want at most ", memory.max_reduce_sources(), ")"));
  }
  return absl::OkStatus();
}

namespace {

absl::StatusOr<std::vector<DeviceMemory::Part>> PartsOnDevices(const ShardPlan& plan, SpreadSlab which,
                                                               const SlabPlace& place, int max_pieces) {
  int64_t page_bytes = 1;
  for (const DeviceMemory* memory : place.users) {
    SHARDD_ASSIGN_OR_RETURN(const int64_t bytes, memory->PageBytes());
    page_bytes = std::max(page_bytes, bytes);  // powers of two
  }
  std::vector<DeviceMemory::Part> parts;
  for (const SlabPiece& piece :
       SpreadOverGpus(plan, which, static_cast<int>(place.users.size()), page_bytes, max_pieces)) {
    parts.push_back({piece.gpu == kNoGpu ? nullptr : place.users[static_cast<size_t>(piece.gpu)], piece.size_bytes});
  }
  return parts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobMemory>> JobMemory::Create(const ShardPlan& plan, const std::string& job,
                                                             int64_t reserved_bytes, const SlabPlace& place,
                                                             bool extends, bool outlives) {
  return Make(plan, job, reserved_bytes, place, extends, outlives, {}, {});
}

absl::StatusOr<std::unique_ptr<JobMemory>> JobMemory::TakeUp(const ShardPlan& plan, const std::string& job, Kept kept,
                                                             const SlabPlace& place, const CustodySlabs& slabs) {
  return Make(plan, job, /*reserved_bytes=*/0, place, /*extends=*/false, /*outlives=*/true, std::move(kept), slabs);
}

int64_t PlannedHostBytes(const ShardPlan& plan, const SlabPlace& place, bool outlives) {
  const MemoryPlan& want = plan.memory;
  const bool on_host = place.memory == nullptr;
  int64_t bytes = want.journal_bytes + HostSessionBytes(plan, place) * static_cast<int64_t>(plan.world_size) +
                  PromisedUndoBytes(plan, place);
  if (outlives) bytes += TakeUpLog::SizeBytes(TakeUpLog::SizesFor(plan));
  if (on_host || IsOffloaded(plan)) {
    bytes += want.held_shards_bytes + want.held_gradients_bytes + want.held_optimizer_bytes +
             want.held_parameters_bytes + want.held_kept_bytes;
  }
  if (on_host) {
    bytes += want.unsharded_pool_bytes + want.gradient_staging_bytes + want.node_receive_bytes + want.workspace_bytes;
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<JobMemory>> JobMemory::Make(const ShardPlan& plan, const std::string& job,
                                                           int64_t reserved_bytes, const SlabPlace& place, bool extends,
                                                           bool outlives, Kept kept, const CustodySlabs& slabs) {
  const MemoryPlan& want = plan.memory;
  const bool on_host = place.memory == nullptr;
  const bool offloaded = !on_host && IsOffloaded(plan);
  const bool takes_up = !kept.empty();
  absl::Status status;
  if (!takes_up) {  // what another daemon has left is there
    SHARDD_ASSIGN_OR_RETURN(const MemoryLimits limits, GetMemoryLimits());
    status = CheckMemory(limits, PlannedHostBytes(plan, place, outlives) + reserved_bytes);
  }
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("open job \"", job, "\": ", status.message(), " (counted: the job's plan, ",
                                     PromisedUndoBytes(plan, place), " bytes for the undo of a writeback, ",
                                     reserved_bytes, " promised to others)"));
  }
  std::unique_ptr<JobMemory> memory(new JobMemory(place));
  memory->planned_ = on_host ? want : MemoryOnGpus(plan, static_cast<int>(place.users.size()));
  memory->quota_bytes_ = QuotaBytesOf(plan, !on_host);
  struct Purpose {
    std::unique_ptr<JobSlab>* slab;
    const char* name;
    int64_t size_bytes;
    SpreadSlab spread;
  };
  const auto lies_on_gpus = [&](const Purpose& purpose) {
    const bool of_gpus = purpose.spread == SpreadSlab::kPool || purpose.spread == SpreadSlab::kStaging ||
                         purpose.spread == SpreadSlab::kGather;
    return !on_host && (of_gpus || !offloaded);
  };
  const Purpose purposes[] = {
      // Some of it goes at once.
      {&memory->gradients_, "gradients", want.gradients_bytes, SpreadSlab::kGradients},
      {&memory->shards_, "shards", want.shards_bytes, SpreadSlab::kShards},
      {&memory->optimizer_, "optimizer", want.optimizer_bytes, SpreadSlab::kOptimizer},
      {&memory->parameters_, "parameters", want.parameters_bytes, SpreadSlab::kParameters},
      {&memory->pool_, kUnshardedPoolName, want.unsharded_pool_bytes, SpreadSlab::kPool},
      {&memory->staging_, "gradient staging", want.gradient_staging_bytes, SpreadSlab::kStaging},
      // No other daemon needs it.
      {&memory->workspace_, "update workspace", want.workspace_bytes, SpreadSlab::kStaging},
      {&memory->gather_staging_, "gather staging", on_host ? 0 : plan.world_size * want.gather_staging.stride_bytes,
       SpreadSlab::kGather},
      // Taken with the first commit; else before the first hand-in, which most jobs never see.
      {&memory->kept_, "snapshot", plan.config.pass_copies() || kept.contains("snapshot") ? want.kept_bytes : 0,
       SpreadSlab::kKept},
  };
  const auto sections_of = [&](SpreadSlab slab) { return MaxPieces(plan, slab) / kMaxSlabPieces; };
  int max_pieces = 1;  // of a section
  if (!on_host) {
    int slabs = 0;
    int sections = 0;
    for (const Purpose& purpose : purposes) {
      if (purpose.size_bytes == 0 || !lies_on_gpus(purpose)) continue;
      ++slabs;
      sections += sections_of(purpose.spread);
    }
    const auto pieces = PiecesPerSection(CountOpenFiles(), std::max(1, slabs), sections,
                                         static_cast<int>(place.users.size()), plan.world_size);
    if (!pieces.ok()) {
      return absl::Status(pieces.status().code(), absl::StrCat("open job \"", job, "\": ", pieces.status().message()));
    }
    max_pieces = *pieces;
  }
  const auto named = [&job](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("open job \"", job, "\": ", status.message()));
  };
  std::vector<const Slab*> taken_up;
  if (on_host && want.gradient_slots_bytes > 0) {
    memory->rank_slots_ = std::make_shared<RankSlots>(plan.world_size, want.gradient_slots_bytes);
    memory->rank_slots_->TakeUp(kept, &taken_up);
    memory->taken_up_bytes_ += memory->rank_slots_->allocated_bytes();
  }
  std::map<SpreadSlab, std::vector<DeviceMemory::Part>> parts;
  DeviceRoom room;
  if (!extends && !takes_up) room.AddSlots(plan, place);  // whoever has them maps them until it comes again
  for (const Purpose& purpose : purposes) {
    if (purpose.size_bytes == 0 || !lies_on_gpus(purpose)) continue;
    if (kept.contains(PieceName(purpose.name, 0))) {
      auto of_before = TakeUpPieces(purpose.name, slabs, place, &kept);
      if (!of_before.ok()) return named(of_before.status());
      *purpose.slab = std::make_unique<JobSlab>(*std::move(of_before));
      continue;
    }
    absl::StatusOr<std::vector<DeviceMemory::Part>> of = PartsOf(purpose.name, slabs, place);
    if (absl::IsNotFound(of.status())) {
      const int gpus = static_cast<int>(place.users.size());
      of = PartsOnDevices(plan, purpose.spread, place, std::max(gpus, sections_of(purpose.spread) * max_pieces));
    }
    if (!of.ok()) return named(of.status());
    room.Add(*of);
    parts.emplace(purpose.spread, *std::move(of));
  }
  if (!on_host && !offloaded && outlives) {
    absl::StatusOr<OldValuesPlan> old_values = PlanOldValues(plan, place);
    if (!old_values.ok()) return named(old_values.status());
    memory->old_values_plan_ = std::make_unique<const OldValuesPlan>(*std::move(old_values));
    if (!takes_up) room.Add(memory->old_values_plan_->parts);
  }
  if (absl::Status has_room = room.Check(); !has_room.ok()) return named(has_room);
  for (const Purpose& purpose : purposes) {
    if (purpose.size_bytes == 0) {
      continue;
    }
    if (*purpose.slab != nullptr) continue;  // taken up
    if (lies_on_gpus(purpose)) {
      auto slab =
          place.memory->MakeSpreadSlab(absl::StrCat("slab \"", purpose.name, "\""), parts[purpose.spread], place.users);
      if (!slab.ok()) {
        return absl::Status(slab.status().code(), absl::StrCat("open job \"", job, "\": ", slab.status().message()));
      }
      *purpose.slab = std::make_unique<JobSlab>(*std::move(slab));
      continue;
    }
    if (auto of_before = kept.find(purpose.name); of_before != kept.end()) {
      auto taken = Slab::TakeUp(purpose.name, std::move(of_before->second), purpose.size_bytes);
      if (!taken.ok()) return named(taken.status());
      taken_up.push_back(taken->get());
      auto slab = ForGpusToo(purpose.name, *std::move(taken), place);
      if (!slab.ok()) return named(slab.status());
      *purpose.slab = *std::move(slab);
      memory->taken_up_bytes_ += (*purpose.slab)->allocated_bytes();
      continue;
    }
    const bool was_kept = purpose.spread == SpreadSlab::kGradients || purpose.spread == SpreadSlab::kShards ||
                          purpose.spread == SpreadSlab::kOptimizer;
    if (takes_up && was_kept && on_host) {  // as many pages have just become free
      auto late = Slab::CreateLate(purpose.name, SlabBacking::kSealedMemfd, purpose.size_bytes);
      if (!late.ok()) return named(late.status());
      *purpose.slab = std::make_unique<JobSlab>(*std::move(late));
      continue;
    }
    auto slab = MakeHostJobSlab(plan, purpose.spread, purpose.name, purpose.size_bytes, place);
    if (!slab.ok()) return named(slab.status());
    *purpose.slab = *std::move(slab);
  }
  if (memory->old_values_plan_ != nullptr && memory->old_values_plan_->numel > 0) {
    auto slab = takes_up ? TakeUpPieces(kOldValuesName, slabs, place, &kept)
                         : place.memory->MakeSpreadSlab(absl::StrCat("slab \"", kOldValuesName, "\""),
                                                        memory->old_values_plan_->parts, place.users);
    if (!slab.ok()) return named(slab.status());
    memory->old_values_ = std::make_unique<JobSlab>(*std::move(slab));
  }
  MapTakenUp(taken_up);
  if (memory->shards_ != nullptr) {
    const UndoSlab::Slabs undone = {memory->shards_.get(), memory->optimizer_.get()};
    const auto of_before = kept.find(kUndoName);
    auto slab = of_before == kept.end() ? UndoSlab::Create(plan, undone)
                                        : UndoSlab::TakeUp(std::move(of_before->second), plan, undone);
    if (!slab.ok()) return named(slab.status());
    memory->undo_ = *std::move(slab);
  }
  int64_t end_bytes = 0;
  const DeviceSlab* const spread = memory->shards_ == nullptr ? nullptr : memory->shards_->on_devices();
  for (size_t i = 0; spread != nullptr && i < spread->pieces().size(); ++i) {
    if (i > 0) memory->shards_boundaries_.push_back(end_bytes);
    end_bytes += spread->pieces()[i].size_bytes;
  }
  const auto elsewhere_bytes = [](const JobSlab* slab, int64_t size_bytes, int64_t held_bytes) {
    // On GPUs its pages are larger.
    return slab == nullptr || slab->on_host() ? size_bytes - held_bytes : slab->size_bytes() - slab->allocated_bytes();
  };
  memory->elsewhere_gradients_bytes_ =
      elsewhere_bytes(memory->gradients(), want.gradients_bytes, want.held_gradients_bytes);
  memory->elsewhere_bytes_ = elsewhere_bytes(memory->shards(), want.shards_bytes, want.held_shards_bytes) +
                             elsewhere_bytes(memory->optimizer(), want.optimizer_bytes, want.held_optimizer_bytes) +
                             elsewhere_bytes(memory->parameters(), want.parameters_bytes, want.held_parameters_bytes) +
                             memory->elsewhere_gradients_bytes_;
  return memory;
}

absl::StatusOr<std::unique_ptr<JobSlab>> JobMemory::MakeGradientsAgain(const ShardPlan& plan) const {
  gradients_->Discard();
  const int64_t size_bytes = plan.memory.gradients_bytes;
  if (gradients_->on_host()) {
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<JobSlab> made,
                            MakeHostJobSlab(plan, SpreadSlab::kGradients, "gradients", size_bytes, place_));
    if (hand_over_ != nullptr) SHARDD_RETURN_IF_ERROR(hand_over_(made->name(), made->fd()));
    return made;
  }
  std::vector<DeviceMemory::Part> parts;  // as before: the custodian has a description of them
  for (const DeviceSlab::Piece& piece : gradients_->on_devices()->pieces())
    parts.push_back({piece.on, piece.size_bytes});
  DeviceRoom room;
  room.Add(parts);
  SHARDD_RETURN_IF_ERROR(room.Check());
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSlab> slab,
                          place_.memory->MakeSpreadSlab("slab \"gradients\"", parts, place_.users));
  auto made = std::make_unique<JobSlab>(std::move(slab));
  if (hand_over_ != nullptr) SHARDD_RETURN_IF_ERROR(HandOverSlab("gradients", *made));
  return made;
}

absl::StatusOr<std::unique_ptr<JobSlab>> JobMemory::MakeKept(const ShardPlan& plan) const {
  SHARDD_ASSIGN_OR_RETURN(auto kept, Slab::Create("snapshot", SlabBacking::kSealedMemfd, plan.memory.kept_bytes));
  if (hand_over_ != nullptr) SHARDD_RETURN_IF_ERROR(hand_over_(kept->name(), kept->fd()));
  return std::make_unique<JobSlab>(std::move(kept));
}

SlabPointers JobMemory::pointers() const {
  auto base = [](const std::unique_ptr<JobSlab>& slab) { return slab == nullptr ? nullptr : slab->At(0); };
  return SlabPointers{base(shards_), base(parameters_), base(gradients_), base(optimizer_), base(workspace_)};
}

std::vector<char*> JobMemory::StagingByRank(const ShardPlan& plan) const {
  std::vector<char*> staging;
  for (int rank = 0; staging_ != nullptr && rank < plan.world_size; ++rank) {
    staging.push_back(staging_->At(rank % plan.staging_count() * plan.staging_stride_bytes));
  }
  return staging;
}

std::vector<char*> JobMemory::GatherStagingByRank(const ShardPlan& plan) const {
  std::vector<char*> staging;
  const int64_t stride_bytes = plan.memory.gather_staging.stride_bytes;
  for (int rank = 0; gather_staging_ != nullptr && rank < plan.world_size; ++rank) {
    staging.push_back(gather_staging_->At(rank * stride_bytes));
  }
  return staging;
}

JobMemory::JobMemory(SlabPlace place) : place_(std::move(place)) {}

JobMemory::~JobMemory() = default;

}  // namespace shardd
