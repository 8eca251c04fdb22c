// What of a job's memory outlives its daemon, and how it is handed over.

#include "common/status/status_macros.h"
#include "server/loop/in_parallel.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/old_values_plan.h"
#include "server/storage/undo_slab.h"

namespace shardd {

std::vector<std::pair<const char*, const JobSlab*>> JobMemory::Surviving() const {
  std::vector<std::pair<const char*, const JobSlab*>> slabs;
  const auto add = [&](const char* name, const JobSlab* slab) {
    if (slab != nullptr) slabs.emplace_back(name, slab);
  };
  add("shards", shards());
  add("optimizer", optimizer());
  add("parameters", parameters());
  add("gradients", gradients());
  add("snapshot", kept());
  add(kOldValuesName, old_values());
  // Trainers have it mapped until they come again: another one beside it might find no room.
  if (place_.memory != nullptr) add(kUnshardedPoolName, pool());
  return slabs;
}

absl::Status JobMemory::HandOverSlab(const char* name, const JobSlab& slab) const {
  if (slab.on_host()) return hand_over_(name, slab.fd());
  const std::vector<DeviceSlab::Piece>& pieces = slab.on_devices()->pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].on != nullptr) SHARDD_RETURN_IF_ERROR(hand_over_(PieceName(name, i), pieces[i].fd));
  }
  return absl::OkStatus();
}

absl::Status JobMemory::KeepBy(HandOver hand_over) {
  hand_over_ = std::move(hand_over);
  for (const auto& [name, slab] : Surviving()) SHARDD_RETURN_IF_ERROR(HandOverSlab(name, *slab));
  if (undo_ != nullptr) SHARDD_RETURN_IF_ERROR(hand_over_(kUndoName, undo_->fd()));
  return rank_slots_ == nullptr ? absl::OkStatus() : rank_slots_->KeepBy(hand_over_);
}

void JobMemory::MapTakenUp(const std::vector<const Slab*>& slabs) {
  constexpr int64_t kPieceBytes = int64_t{64} << 20;
  std::vector<std::pair<const Slab*, Slab::Range>> pieces;
  for (const Slab* slab : slabs) {
    for (const Slab::Range& range : slab->Allocated(kPieceBytes)) pieces.emplace_back(slab, range);
  }
  InParallel(pieces.size(), [&](size_t i) { pieces[i].first->MapPages(pieces[i].second); });
}

void JobMemory::DescribeKept(CustodySlabs* slabs) const {
  for (const auto& [name, slab] : Surviving()) {
    if (!slab->on_host()) DescribePieces(name, *slab->on_devices(), slabs);
  }
}

Logged JobMemory::LoggedBy(UpdateLog* log, int rank) const {
  Logged logged{log};
  if (log != nullptr && old_values_ != nullptr) {
    logged.place = {old_values_->At(rank * old_values_plan_->stride_bytes), old_values_plan_->numel};
  }
  return logged;
}

void JobMemory::SetKept(std::unique_ptr<JobSlab> kept) { kept_ = std::move(kept); }

std::unique_ptr<JobSlab> JobMemory::SetGradients(std::unique_ptr<JobSlab> gradients) {
  return std::exchange(gradients_, std::move(gradients));
}

void JobMemory::FreeOldValues() { old_values_ = nullptr; }

}  // namespace shardd
