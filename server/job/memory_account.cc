#include "server/job/memory_account.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/device_memory.h"
#include "server/job/full_params/full_params.h"
#include "server/job/membership/gradient_writers.h"
#include "server/job/membership/sessions.h"
#include "server/job/writes/snapshot.h"
#include "server/observe/duration_histogram.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/undo_slab.h"

namespace shardd {

int64_t MemoryAccount::reserved_bytes() const {
  int64_t kept = see_.plan->memory.held_kept_bytes;
  if (see_.memory->kept() != nullptr) {  // it may have no shards yet (SnapshotMayBeInCopies)
    kept = std::max<int64_t>(kept - see_.memory->kept()->allocated_bytes(), 0);
  } else if (see_.snapshot->exists()) {
    kept = 0;
  }
  return (see_.plan->world_size - see_.sessions->attached()) * HostSessionBytes(*see_.plan, see_.memory->place()) +
         kept + reserved_undo_bytes() + see_.memory->given_back_bytes();
}

int64_t MemoryAccount::reserved_undo_bytes() const {
  const int64_t promised = see_.full_params->AnyWrites() ? WritebackUndoBytes(*see_.plan)
                                                         : PromisedUndoBytes(*see_.plan, see_.memory->place());
  return std::max<int64_t>(promised - allocated_undo_bytes(), 0);
}

int64_t MemoryAccount::allocated_undo_bytes() const {
  return see_.memory->undo() == nullptr ? 0 : see_.memory->undo()->bytes();
}

void MemoryAccount::Describe(v1::Memory* out) const {
  out->set_job(see_.spec->name());
  see_.memory->Describe(*see_.plan, out);
  if (const JobSlab* slab = see_.gradient_writers->left();
      slab != nullptr) {  // planned for nobody: on the host, what processes have stored since
    v1::Purpose* left = out->add_purposes();
    left->set_purpose("gradients left to processes of ended epochs");
    left->set_allocated_bytes(slab->allocated_bytes());
    left->set_backing(slab->backing());
    if (!slab->on_host()) AddDeviceBytes(*slab->on_devices(), left);
  }
  DescribeSessions(out);
  const int64_t undo_bytes = allocated_undo_bytes();
  if (undo_bytes > 0 || see_.plan->memory.undo_bytes > 0) {
    v1::Purpose* undo = out->add_purposes();
    undo->set_purpose("writeback undo");
    undo->set_backing(std::string(SlabBackingName(SlabBacking::kSealedMemfd)));
    undo->set_planned_bytes(WritebackUndoBytes(*see_.plan));
    undo->set_allocated_bytes(undo_bytes);
  }
  int64_t planned = 0;
  int64_t total = 0;
  for (const v1::Purpose& purpose : out->purposes()) {
    planned += purpose.planned_bytes();
    total += purpose.allocated_bytes();
  }
  out->set_planned_bytes(planned);
  out->set_allocated_bytes(total);
}

absl::Status MemoryAccount::CheckUndoFits() const {
  const int64_t whole_bytes = WritebackUndoBytes(*see_.plan);
  const int64_t undo_bytes = std::max<int64_t>(whole_bytes - allocated_undo_bytes(), 0);
  const bool promised = PromisedUndoBytes(*see_.plan, see_.memory->place()) == whole_bytes;
  const int64_t want_bytes = promised                      ? undo_bytes
                             : reserved_by_all_ == nullptr ? reserved_bytes()
                                                           : reserved_by_all_();
  SHARDD_ASSIGN_OR_RETURN(const MemoryLimits limits, GetMemoryLimits());
  const absl::Status status = CheckMemory(limits, want_bytes);
  if (status.ok()) {
    return absl::OkStatus();
  }
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), " (counted: ", undo_bytes, " bytes of the host for the undo of the writeback, ",
                   want_bytes - undo_bytes, " promised to jobs); ",
                   see_.plan->cut_over_nodes ? "free memory of this host, or load before the job is opened"
                                             : "without writeback it is served"));
}

void MemoryAccount::DescribeSessions(v1::Memory* out) const {
  v1::Purpose* sessions = out->add_purposes();
  sessions->set_purpose("session");
  sessions->set_backing(std::string(SlabBackingName(SlabBacking::kSealedMemfd)));
  const bool on_host = see_.memory->place().memory == nullptr;
  sessions->set_planned_bytes(HostSessionBytes(*see_.plan, see_.memory->place()) * see_.plan->world_size);
  // Slots are there between sessions, too.
  int64_t allocated = see_.memory->rank_slots() == nullptr ? 0 : see_.memory->rank_slots()->allocated_bytes();
  int64_t slots_allocated = 0;
  v1::Purpose on_devices;
  for (const auto& session : *see_.sessions) {
    if (session != nullptr) {
      if (session->memory()->slots != nullptr) AddDeviceBytes(*session->memory()->slots, &on_devices);
      allocated += session->memory()->memory->size_bytes() + session->memory()->daemon_page->size_bytes();
      slots_allocated += session->memory()->slots == nullptr ? 0 : session->memory()->slots->size_bytes();
    }
  }
  sessions->set_allocated_bytes(allocated);
  if (!on_host) {
    v1::Purpose* slots = out->add_purposes();
    slots->set_purpose("gradient slots");
    slots->set_backing("cuda");
    *slots->mutable_devices() = on_devices.devices();
    slots->set_planned_bytes(see_.plan->memory.gradient_slots_bytes * see_.plan->world_size);
    slots->set_allocated_bytes(slots_allocated);
  }
}

}  // namespace shardd
