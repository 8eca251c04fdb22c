#include "server/storage/rank_slots.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/process/process_stat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

std::string NameOf(int rank) { return absl::StrCat("gradient slots ", rank); }

bool Lives(const RankSlots::Process& process) {
  const std::optional<ProcessStat> found = process.pid > 0 ? ReadProcessStat(process.pid) : std::nullopt;
  return found.has_value() && process.start_ticks != 0 && found->start_ticks == process.start_ticks;
}

}  // namespace

RankSlots::~RankSlots() {
  for (const OfRank& of_rank : by_rank_) {
    if (of_rank.slab != nullptr && hand_over_ == nullptr) of_rank.slab->Discard();
  }
}

absl::StatusOr<std::shared_ptr<Slab>> RankSlots::For(int rank, const Process& process) {
  std::shared_ptr<Slab> of_another;
  HandOver hand_over;
  {
    absl::MutexLock lock(&mutex_);
    OfRank& of_rank = by_rank_[static_cast<size_t>(rank)];
    if (of_rank.slab != nullptr && process.start_ticks != 0 && of_rank.process.pid == process.pid &&
        of_rank.process.start_ticks == process.start_ticks) {
      return of_rank.slab;
    }
    of_another = std::exchange(of_rank.slab, nullptr);
    hand_over = hand_over_;
  }
  if (of_another != nullptr) of_another->Discard();  // device work of an epoch that has ended may still read it
  SHARDD_ASSIGN_OR_RETURN(std::shared_ptr<Slab> slab,
                          Slab::Create(NameOf(rank), SlabBacking::kSealedMemfd, size_bytes_));
  if (hand_over != nullptr) SHARDD_RETURN_IF_ERROR(hand_over(NameOf(rank), slab->fd()));
  absl::MutexLock lock(&mutex_);
  by_rank_[static_cast<size_t>(rank)] = {process, slab};
  return slab;
}

void RankSlots::FreeOfEnded() {
  std::vector<std::shared_ptr<Slab>> freed;
  {
    absl::MutexLock lock(&mutex_);
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
      OfRank& of_rank = by_rank_[rank];
      // Whoever asked for this may have waited behind other work, and ranks have sessions again. Their slots have other
      // holders, which are asked for under this lock: For gives out a reference under it, too.
      if (of_rank.slab == nullptr || of_rank.slab.use_count() > 1 || Lives(of_rank.process)) continue;
      freed.push_back(std::exchange(of_rank.slab, nullptr));
    }
  }
  for (const std::shared_ptr<Slab>& slab : freed) slab->Discard();
}

int64_t RankSlots::allocated_bytes() const {
  absl::MutexLock lock(&mutex_);
  int64_t total = 0;
  for (const OfRank& of_rank : by_rank_) total += of_rank.slab == nullptr ? 0 : of_rank.slab->size_bytes();
  return total;
}

absl::Status RankSlots::KeepBy(HandOver hand_over) {
  absl::MutexLock lock(&mutex_);
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
    const Slab* const slab = by_rank_[rank].slab.get();
    if (slab != nullptr) SHARDD_RETURN_IF_ERROR(hand_over(NameOf(static_cast<int>(rank)), slab->fd()));
  }
  hand_over_ = std::move(hand_over);
  return absl::OkStatus();
}

void RankSlots::EndCustody() {
  absl::MutexLock lock(&mutex_);
  hand_over_ = nullptr;
}

void RankSlots::TakeUp(std::map<std::string, UniqueFd>& kept, std::vector<const Slab*>* taken_up) {
  absl::MutexLock lock(&mutex_);
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
    const std::string name = NameOf(static_cast<int>(rank));
    const auto it = kept.find(name);
    if (it == kept.end()) continue;
    auto slab = Slab::TakeUp(name, std::move(kept.extract(it).mapped()), size_bytes_);
    if (!slab.ok()) continue;
    taken_up->push_back(slab->get());
    by_rank_[rank] = {Process(), *std::move(slab)};
  }
}

void RankSlots::SetProcess(int rank, const Process& process) {
  absl::MutexLock lock(&mutex_);
  by_rank_[static_cast<size_t>(rank)].process = process;
}

void RankSlots::Drop(int rank) {
  std::shared_ptr<Slab> dropped;
  {
    absl::MutexLock lock(&mutex_);
    dropped = std::exchange(by_rank_[static_cast<size_t>(rank)].slab, nullptr);
  }
  if (dropped != nullptr) dropped->Discard();
}

}  // namespace shardd
