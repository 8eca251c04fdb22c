#include "server/storage/rank_slots.h"

#include <fcntl.h>

#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/process/process_stat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr char kOwnersName[] = "slot owners";
constexpr int64_t kOther = -1;

std::string NameOf(int rank) { return absl::StrCat("gradient slots ", rank); }

bool Lives(const RankSlots::Process& process) {
  const std::optional<ProcessStat> found = process.pid > 0 ? ReadProcessStat(process.pid) : std::nullopt;
  return found.has_value() && process.start_ticks != 0 && found->start_ticks == process.start_ticks;
}

UniqueFd Take(std::map<std::string, UniqueFd>& kept, const std::string& name) {
  const auto it = kept.find(name);
  return it == kept.end() ? UniqueFd() : std::move(kept.extract(it).mapped());
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
    Note(rank, {kOther});  // until there are some
    of_another = std::exchange(of_rank.slab, nullptr);
    hand_over = hand_over_;
  }
  if (of_another != nullptr) of_another->Discard();  // device work of an epoch that has ended may still read it
  SHARDD_ASSIGN_OR_RETURN(std::shared_ptr<Slab> slab,
                          Slab::Create(NameOf(rank), SlabBacking::kSealedMemfd, size_bytes_));
  if (hand_over != nullptr) SHARDD_RETURN_IF_ERROR(hand_over(NameOf(rank), slab->fd()));
  absl::MutexLock lock(&mutex_);
  by_rank_[static_cast<size_t>(rank)] = {process, slab};
  Note(rank, {process.pid, process.start_ticks});
  return slab;
}

void RankSlots::FreeOfEnded() {
  std::vector<std::shared_ptr<Slab>> freed;
  {
    absl::MutexLock lock(&mutex_);
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
      OfRank& of_rank = by_rank_[rank];
      if (of_rank.slab == nullptr || Lives(of_rank.process)) continue;
      Note(static_cast<int>(rank), {of_rank.process.start_ticks == 0 ? kOther : 0});
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
  if (owners_ == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(owners_, Slab::Create(kOwnersName, SlabBacking::kSealedMemfd,
                                                  static_cast<int64_t>(by_rank_.size() * sizeof(Owner))));
  }
  SHARDD_RETURN_IF_ERROR(hand_over(kOwnersName, owners_->fd()));
  hand_over_ = std::move(hand_over);
  return absl::OkStatus();
}

void RankSlots::EndCustody() {
  absl::MutexLock lock(&mutex_);
  hand_over_ = nullptr;
}

void RankSlots::TakeUp(std::map<std::string, UniqueFd>& kept) {
  absl::MutexLock lock(&mutex_);
  if (UniqueFd owners = Take(kept, kOwnersName); owners.valid()) {
    auto slab = Slab::TakeUp(kOwnersName, std::move(owners), static_cast<int64_t>(by_rank_.size() * sizeof(Owner)));
    if (slab.ok()) owners_ = *std::move(slab);
  }
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
    const std::string name = NameOf(static_cast<int>(rank));
    UniqueFd fd = Take(kept, name);
    if (owners_ == nullptr || !fd.valid()) continue;
    const Owner owner = owners_->At<Owner>(0)[rank];
    auto slab = Slab::TakeUp(name, std::move(fd), size_bytes_);
    if (owner.pid <= 0 || !slab.ok()) continue;
    by_rank_[rank] = {{static_cast<int32_t>(owner.pid), owner.start_ticks}, *std::move(slab)};
  }
}

void RankSlots::NoteOther(int rank) {
  std::shared_ptr<Slab> of_another;
  absl::MutexLock lock(&mutex_);
  Note(rank, {kOther});
  of_another = std::exchange(by_rank_[static_cast<size_t>(rank)].slab, nullptr);
  if (of_another != nullptr) of_another->Discard();
}

std::optional<std::vector<RankSlots::Process>> RankSlots::LastProcesses(const std::map<std::string, UniqueFd>& kept,
                                                                        int world_size) {
  const auto it = kept.find(kOwnersName);
  if (it == kept.end()) return std::nullopt;
  const auto slab = Slab::TakeUp(kOwnersName, UniqueFd(fcntl(it->second.get(), F_DUPFD_CLOEXEC, 0)),
                                 static_cast<int64_t>(world_size * sizeof(Owner)));
  if (!slab.ok()) return std::nullopt;
  std::vector<Process> processes;
  for (int rank = 0; rank < world_size; ++rank) {
    const Owner& owner = (*slab)->At<Owner>(0)[rank];
    if (owner.pid < 0 || (owner.pid > 0 && owner.start_ticks == 0)) return std::nullopt;
    processes.push_back({static_cast<int32_t>(owner.pid), owner.start_ticks});
  }
  return processes;
}

void RankSlots::Note(int rank, const Owner& owner) {
  if (owners_ == nullptr) return;
  Owner& noted = owners_->At<Owner>(0)[rank];
  noted.pid = kOther;  // a daemon that is killed here leaves nobody's
  std::atomic_signal_fence(std::memory_order_seq_cst);
  noted.start_ticks = owner.start_ticks;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  noted.pid = owner.pid;
}

}  // namespace shardd
