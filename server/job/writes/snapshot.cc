#include "server/job/writes/snapshot.h"

#include "absl/strings/str_cat.h"
#include "server/job/work/optimizer_devices.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

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

void Snapshot::Submit(bool back, KeptPart part, int64_t step, const std::function<void(absl::Status)>& done) const {
  // The plan lays out what passes read as the shards where that is the copy.
  const JobSlab* const copy = memory_->kept() != nullptr ? memory_->kept() : memory_->parameters();
  DeviceOps ops(plan_->world_size);
  for (int rank = 0; rank < plan_->world_size; ++rank) {
    ops[rank] = KeepOps(*plan_, memory_->pointers(), copy->At(0), back, rank, part);
  }
  devices_->Submit(absl::StrCat(back ? "go back to step " : "keep step ", step), devices_->Divide(std::move(ops)),
                   done);
}

}  // namespace shardd
