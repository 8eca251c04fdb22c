#include "server/session/session.h"

#include <sys/eventfd.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "server/collective/trainers/sum_channel.h"
#include "server/device/device_memory.h"
#include "server/loop/core_loop.h"

namespace shardd {
namespace {

SessionMemoryView ViewOf(const SessionMemory& memory, const SessionLayout& layout) {
  return {memory.memory->data(), layout.ring_offset_bytes, layout.masks_offset_bytes};
}

DaemonPageView PageOf(const SessionMemory& memory, const ShardPlan& plan) {
  return {memory.daemon_page->data(), static_cast<int64_t>(plan.gradient_slots.size()),
          static_cast<int64_t>(plan.groups.size())};
}

// Null: the daemon's devices add.
std::shared_ptr<SumChannel> SumsOf(const std::shared_ptr<SessionMemory>& memory, const SessionLayout& layout,
                                   const ShardPlan& plan, uint64_t epoch, int rank) {
  return plan.config.trainer_sums()
             ? std::make_shared<SumChannel>(memory->daemon_page->At<SumRing>(layout.sum_ring_offset_bytes),
                                            memory->memory->At<const SumWords>(layout.sum_words_offset_bytes), epoch,
                                            rank, memory)
             : nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Create(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank,
                                                         uint64_t epoch, const SlabPlace& place,
                                                         std::shared_ptr<Slab> host_slots, int protocol_version) {
  SessionLayout layout = MakeSessionLayout(*plan, /*slots_elsewhere=*/place.memory != nullptr || host_slots != nullptr);
  std::string token(kTokenBytes, '\0');
  if (getrandom(token.data(), kTokenBytes, 0) != kTokenBytes) {
    return absl::InternalError(absl::StrCat("attach rank ", rank, ": getrandom: ", std::strerror(errno)));
  }
  auto memory = std::make_shared<SessionMemory>();
  memory->host_slots = std::move(host_slots);
  SHARDD_ASSIGN_OR_RETURN(memory->memory,
                          Slab::Create(absl::StrCat("session-", id), SlabBacking::kSealedMemfd, layout.memory_bytes));
  // Whose GPU may wait for words of the page has to be able to end such waits itself (page.h).
  SHARDD_ASSIGN_OR_RETURN(memory->daemon_page,
                          Slab::Create(absl::StrCat("page-", id),
                                       place.memory != nullptr ? SlabBacking::kSealedMemfd : SlabBacking::kFrozenMemfd,
                                       layout.daemon_page_bytes));
  if (const int64_t bytes = plan->memory.gradient_slots_bytes; place.memory != nullptr && bytes > 0) {
    SHARDD_ASSIGN_OR_RETURN(memory->slots,
                            place.memory->MakeSlab(absl::StrCat("gradient slots of rank ", rank), bytes, place.users));
  }
  UniqueFd doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell.valid()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("attach rank ", rank, ": eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  }
  return std::unique_ptr<Session>(new Session(std::move(plan), id, rank, epoch, std::move(token), protocol_version,
                                              std::move(layout), std::move(memory), std::move(doorbell)));
}

Session::Session(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank, uint64_t epoch, std::string token,
                 int protocol_version, SessionLayout layout, std::shared_ptr<SessionMemory> memory, UniqueFd doorbell)
    : handles(plan->groups.size()),
      plan_(std::move(plan)),
      id_(id),
      rank_(rank),
      epoch_(epoch),
      token_(std::move(token)),
      layout_(std::move(layout)),
      memory_(std::move(memory)),
      doorbell_(std::move(doorbell)),
      sums_(SumsOf(memory_, layout_, *plan_, epoch, rank)),
      decoder_(plan_, rank),
      words_(ViewOf(*memory_, layout_), PageOf(*memory_, *plan_), epoch, protocol_version),
      ring_(*plan_, layout_, decoder_, ViewOf(*memory_, layout_), PageOf(*memory_, *plan_), rank, epoch),
      trace_(ViewOf(*memory_, layout_), PageOf(*memory_, *plan_), layout_.trace_offset_bytes) {}

char* Session::slot(int group) const {
  const int slot = plan_->groups[group].gradient_slot;
  const int64_t offset_bytes = plan_->gradient_slots[slot].offset_bytes;
  return memory_->slots != nullptr        ? memory_->slots->data() + offset_bytes
         : memory_->host_slots != nullptr ? memory_->host_slots->At<char>(offset_bytes)
                                          : memory_->memory->At<char>(layout_.slots_offset_bytes + offset_bytes);
}

absl::StatusOr<RankCommand> Session::NextFromRing() {
  if (!MayReadRing()) {
    return absl::NotFoundError("");
  }
  return ring_.Next();
}

void Session::PublishConsumed() {
  if (words_.told() != nullptr) {
    words_.told()->CountConsumed();
  } else {
    ring_.PublishConsumed();
  }
}

absl::Status Session::TellWords(CoreLoop* loop, uint64_t version) {
  if (words_.told() != nullptr) {
    return absl::OkStatus();
  }
  if (commands > 0 || sums_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session ", id_, ": TellWords ",
        sums_ != nullptr ? "of a job whose trainers add gradients, of which their pages tell them; open the job with "
                           "trainerSums false in its spec's config"
                         : absl::StrCat("comes before the first command (got ", commands, " commands, want 0)"),
        " (rank=", rank_, ")"));
  }
  words_.Tell(loop, stream);
  words_.PublishVersion(version);
  return absl::OkStatus();
}

void Session::Poison(uint64_t epoch) {
  words_.Poison(epoch);
  if (sums_ != nullptr) {
    sums_->Poison(epoch);
  }
}

std::string Session::last_command() const {
  const auto [what, group] = last_command_;
  return group < 0 ? std::string(what) : absl::StrCat(what, " ", plan_->groups[static_cast<size_t>(group)].name);
}

}  // namespace shardd
