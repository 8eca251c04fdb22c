#include "server/job/writes/snapshot.h"

#include "absl/strings/str_cat.h"
#include "common/plan/pass_copies.h"
#include "common/shm/slab.h"
#include "server/job/work/optimizer_devices.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

Snapshot::Snapshot(const ShardPlan* plan, const JobMemory* memory, const OptimizerDevices* devices)
    : plan_(plan),
      memory_(memory),
      devices_(devices),
      may_be_in_copies_(SnapshotMayBeInCopies(*plan) && (memory == nullptr || memory->place().memory == nullptr)) {}

// Stores into pages that are not there yet would end the daemon where memory is short.
bool Snapshot::HasRoomForShards() const {
  const JobSlab* const kept = memory_ == nullptr ? nullptr : memory_->kept();
  if (kept == nullptr) return true;
  const absl::StatusOr<MemoryLimits> limits = GetMemoryLimits();
  return limits.ok() && CheckMemory(*limits, kept->size_bytes() - kept->allocated_bytes()).ok();
}

void Snapshot::ChooseInCopies(bool due, bool may_be) {
  may_be_in_copies_ = may_be_in_copies_ && may_be;
  early_ = due ? 0 : early_ + 1;
  if (may_be_in_copies_ && early_ > kMostEarly && !HasRoomForShards()) early_ = kMostEarly;  // the next pass asks again
  may_be_in_copies_ = may_be_in_copies_ && early_ <= kMostEarly;
  in_copies_ = may_be_in_copies_;
}

void Snapshot::Taken(int64_t step, const std::vector<std::string>& trainer_states) {
  taking_ = false;
  whole_ = true;
  OfCommitted(step, trainer_states);
}

void Snapshot::OfCommitted(int64_t step, const std::vector<std::string>& trainer_states) {
  step_ = step;
  trainer_states_ = trainer_states;
  age_ = 0;
  due_ = false;
}

void Snapshot::TakeNext(int64_t step, const std::vector<std::string>& trainer_states) {
  second_ = !second_;
  has_next_ = false;
  Taken(step, trainer_states);
}

SlabPointers Snapshot::NextPointers() const {
  SlabPointers pointers = memory_->pointers();
  pointers.shards = memory_->kept()->At(next_offset_bytes());
  return pointers;
}

void Snapshot::Submit(bool back, KeptPart part, int64_t step, const std::function<void(absl::Status)>& done) const {
  // The plan lays out what passes read as the shards where that is the copy.
  const JobSlab* const copy = memory_->kept() != nullptr ? memory_->kept() : memory_->parameters();
  char* const at = copy->At(back ? offset_bytes() : next_offset_bytes());
  DeviceOps ops(plan_->world_size);
  for (int rank = 0; rank < plan_->world_size; ++rank) {
    ops[rank] = KeepOps(*plan_, memory_->pointers(), at, back, rank, part);
  }
  devices_->Submit(absl::StrCat(back ? "go back to step " : "keep step ", step), devices_->Divide(std::move(ops)),
                   done);
}

}  // namespace shardd
