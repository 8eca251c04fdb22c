// What a job's memory is, in words and bytes.

#include <algorithm>
#include <map>
#include <string>

#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/old_values_plan.h"
#include "server/storage/take_up_log.h"
#include "server/storage/undo_slab.h"

namespace shardd {

void AddDeviceBytes(const DeviceSlab& slab, v1::Purpose* purpose) {
  std::map<std::string, int64_t> bytes;
  for (const v1::DeviceBytes& before : purpose->devices()) bytes[before.device()] = before.allocated_bytes();
  for (const DeviceSlab::Piece& piece : slab.pieces()) {
    if (piece.on != nullptr) bytes[piece.on->device()] += piece.size_bytes;
  }
  purpose->clear_devices();
  for (const auto& [device, allocated_bytes] : bytes) {
    v1::DeviceBytes* entry = purpose->add_devices();
    entry->set_device(device);
    entry->set_allocated_bytes(allocated_bytes);
  }
}

int64_t UnusedHostBytes(const ShardPlan& plan, const JobMemory& memory) {
  const int64_t kept = memory.kept() == nullptr ? 0 : memory.kept()->allocated_bytes();
  return plan.world_size * HostSessionBytes(plan, memory.place()) +
         std::max<int64_t>(plan.memory.held_kept_bytes - kept, 0) + PromisedUndoBytes(plan, memory.place()) +
         memory.given_back_bytes();
}

int64_t JobMemory::allocated_bytes() const {
  int64_t total = 0;
  for (const JobSlab* slab : {shards(), parameters(), gradients(), optimizer(), pool(), staging(),
                              static_cast<const JobSlab*>(gather_staging_.get()), old_values(),
                              static_cast<const JobSlab*>(workspace_.get())}) {
    total += slab == nullptr ? 0 : slab->size_bytes();
  }
  // Shards of the snapshot may come later, or never.
  return total - elsewhere_bytes_ + (kept() == nullptr ? 0 : kept()->allocated_bytes());
}

int64_t JobMemory::given_back_bytes() const {
  if (gradients_ == nullptr) {
    return 0;
  }
  // Trainers may have touched what is other nodes'.
  return std::max<int64_t>(0, gradients_->size_bytes() - elsewhere_gradients_bytes_ - gradients_->allocated_bytes());
}

void JobMemory::Describe(const ShardPlan& plan, v1::Memory* out) const {
  auto add = [out](const char* name, int64_t planned, const JobSlab* slab) {
    v1::Purpose* purpose = out->add_purposes();
    purpose->set_purpose(name);
    purpose->set_planned_bytes(planned);
    if (slab != nullptr) {
      purpose->set_allocated_bytes(slab->allocated_bytes());
      purpose->set_backing(slab->backing());
      if (!slab->on_host()) AddDeviceBytes(*slab->on_devices(), purpose);
    }
  };
  add("shards", planned_.held_shards_bytes, shards());
  add("parameters", planned_.held_parameters_bytes, parameters());
  add("gradients", planned_.held_gradients_bytes, gradients());
  add("optimizer", planned_.held_optimizer_bytes, optimizer());
  add(kUnshardedPoolName, plan.memory.unsharded_pool_bytes, pool());
  if (plan.memory.gradient_staging_bytes > 0) {
    add("gradient staging", plan.memory.gradient_staging_bytes, staging());
  }
  if (gather_staging_ != nullptr) {
    add("gather staging", plan.world_size * plan.memory.gather_staging.stride_bytes, gather_staging_.get());
  }
  if (workspace_ != nullptr) add("update workspace", plan.memory.workspace_bytes, workspace_.get());
  if (plan.memory.node_receive_bytes > 0 && place_.memory == nullptr) {  // the exchange's own
    add("node receive", plan.memory.node_receive_bytes, nullptr);
    out->mutable_purposes()->rbegin()->set_allocated_bytes(plan.memory.node_receive_bytes);
  }
  if (plan.memory.kept_bytes > 0) {
    add("snapshot", planned_.held_kept_bytes, kept());
  }
  if (old_values_ != nullptr) {
    add(kOldValuesName, static_cast<int64_t>(plan.world_size) * old_values_plan_->stride_bytes, old_values_.get());
  }
  v1::Purpose* journal = out->add_purposes();
  journal->set_purpose("journal");
  journal->set_planned_bytes(plan.memory.journal_bytes);
  journal->set_allocated_bytes(plan.memory.journal_bytes);  // allocated with the job
  journal->set_backing(std::string(SlabBackingName(SlabBacking::kSealedMemfd)));
  if (hand_over_ == nullptr) return;
  v1::Purpose* log = out->add_purposes();
  log->set_backing(journal->backing());
  log->set_purpose("take-up log");
  log->set_planned_bytes(TakeUpLog::SizeBytes(TakeUpLog::SizesFor(plan)));
  log->set_allocated_bytes(log->planned_bytes());
}

}  // namespace shardd
