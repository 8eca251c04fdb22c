// How an exchange takes turns with another job's (nccl_exchange.h).

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"

namespace shardd {

namespace {

TurnReport ReportOf(const v1::PeerMessage::Exchange::Turns& turns) {
  TurnReport report;
  report.round = turns.round();
  report.ready = {turns.ready_sums(), turns.ready_moves()};
  report.issued = {turns.issued_sums(), turns.issued_moves()};
  report.done = {turns.done_sums(), turns.done_moves()};
  return report;
}

void SetReport(const TurnReport& report, v1::PeerMessage::Exchange::Turns* turns) {
  turns->set_round(report.round);
  turns->set_ready_sums(report.ready.sums);
  turns->set_ready_moves(report.ready.moves);
  turns->set_issued_sums(report.issued.sums);
  turns->set_issued_moves(report.issued.moves);
  turns->set_done_sums(report.done.sums);
  turns->set_done_moves(report.done.moves);
}

void SetLimit(const TurnLimit& limit, v1::PeerMessage::Exchange::Turns* turns) {
  turns->set_round(limit.round);
  turns->set_limited(limit.limited);
  turns->set_sums_below(limit.below.sums);
  turns->set_moves_below(limit.below.moves);
}

}  // namespace

bool NcclExchange::MayIssueLocked(const Queue& queue) const {
  const TurnLimit& limit = turns_.limit;
  const bool moves = &queue == &moves_waiting_;
  // On node 0, from where the turn is given: what is issued behind it would wait on the GPU before the other job's.
  const bool has_turn = turns_.view.mine && (turns_.view.alone || !turns_.ended);
  if (options_.node == 0 && options_.seat != nullptr && !has_turn) return false;
  return queue.ready() && (!limit.limited || queue.next < (moves ? limit.below.moves : limit.below.sums));
}

TurnReport NcclExchange::OwnReportLocked() const {
  TurnReport own;
  own.round = turns_.limit.round;
  own.ready = {sums_waiting_.ready_below(), moves_waiting_.ready_below()};
  own.issued = {sums_waiting_.next, moves_waiting_.next};
  own.done = turns_.done;
  return own;
}

bool NcclExchange::MayDecideLocked() const {
  return phase_ == Phase::kAsked && HaveAllAskedLocked() && turns_.gone.empty() &&
         !(sums_waiting_.waiting.empty() && moves_waiting_.waiting.empty());
}

void NcclExchange::BeginTurnsLocked(bool obeyed, v1::PeerMessage::Exchange* message) {
  if (!turns_.of_job.has_value()) turns_.of_job.emplace(options_.nodes);
  turns_.limit = turns_.of_job->Begin(options_.seat == nullptr || turns_.view.alone, obeyed);
  if (turns_.limit.limited) SetLimit(turns_.limit, message->mutable_turns());
}

// Node 0 only. A generation that has no communicators, or has failed, needs no turn once nothing of it is under way
// here: other nodes abort what they have by themselves, and wait for nobody. Nor does one whose node is gone, which
// ends, unless that node's ranks have all finished: then everything of it is done.
JobTurns::Step NcclExchange::NextTurnLocked() const {
  if (phase_ == Phase::kAgreed && !turns_.ended) return turns_.of_job->Next(turns_.view, OwnReportLocked());
  JobTurns::Step step;
  const bool decides = MayDecideLocked();
  step.releases = turns_.view.mine && !turns_.view.alone && !decides && under_way_ == 0;
  step.wants = decides || (turns_.view.mine && !step.releases);
  return step;
}

bool NcclExchange::HasTurnWorkLocked() const {
  if (options_.node != 0) {
    if (!turns_.limit.limited || phase_ != Phase::kAgreed) return false;
    TurnReport own = OwnReportLocked();
    own.issued = turns_.reported.issued;  // follows from the limit
    return own != turns_.reported;
  }
  if (options_.seat == nullptr) return false;
  const JobTurns::Step step = NextTurnLocked();
  return step.releases || step.tells.has_value() || step.wants != turns_.wanted ||
         (step.state != JobTurns::State::kFree && step.state != turns_.of_job->state());
}

void NcclExchange::DoTurnWork() {
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_exchange()->set_generation(generation_);
  if (options_.node != 0) {
    turns_.reported = OwnReportLocked();
    SetReport(turns_.reported, message.mutable_exchange()->mutable_turns());
    mutex_.Unlock();
    options_.send(0, std::move(message));
    mutex_.Lock();
    return;
  }
  const JobTurns::Step step = NextTurnLocked();
  if (phase_ == Phase::kAgreed && !turns_.ended) turns_.of_job->Take(step);
  if (step.tells.has_value()) {
    turns_.limit = *step.tells;
    SetLimit(turns_.limit, message.mutable_exchange()->mutable_turns());
  }
  const bool wants_otherwise = step.wants != turns_.wanted;
  turns_.wanted = step.wants;
  mutex_.Unlock();
  for (int node = 1; step.tells.has_value() && node < options_.nodes; ++node) options_.send(node, message);
  if (step.releases) {
    options_.seat->Release();
  } else if (wants_otherwise) {
    options_.seat->Want(step.wants);
  }
  mutex_.Lock();
}

void NcclExchange::HearTurns(int node, uint64_t generation, const v1::PeerMessage::Exchange::Turns& turns) {
  absl::MutexLock lock(&mutex_);
  // This node has begun the generation: it has said what it has, or node 0 what to use.
  if (generation != generation_ || ends_) return;
  if (options_.node != 0) {
    turns_.limit.round = turns.round();
    turns_.limit.limited = turns.limited();
    turns_.limit.below = {turns.sums_below(), turns.moves_below()};
    return;
  }
  const TurnReport report = ReportOf(turns);
  if (phase_ != Phase::kAgreed && phase_ != Phase::kAsked) return;
  if (!turns_.of_job.has_value() || !turns_.of_job->MayBe(report)) {
    return FailLocked(absl::InvalidArgumentError(absl::StrCat(
        "node ", node, " says of its turn what cannot be (got ", report.done.sums, " sums done of ", report.issued.sums,
        " issued of ", report.ready.sums, " ready, ", report.done.moves, " moves done of ", report.issued.moves,
        " issued of ", report.ready.moves, " ready, in round ", report.round, ")")));
  }
  turns_.of_job->OnReport(node, report);
}

void NcclExchange::OnDown(int node, const absl::Status& /*why*/) {
  absl::MutexLock lock(&mutex_);
  if (options_.node != 0) return;
  turns_.gone.insert(node);
  turns_.ended = turns_.ended || phase_ == Phase::kAgreed;
}

std::string NcclExchange::DescribeTurns() const {
  const std::string other = options_.seat == nullptr ? "" : options_.seat->Other();
  absl::MutexLock lock(&mutex_);
  if (other.empty()) return "";
  const bool waits = turns_.wanted && !turns_.view.mine;
  return absl::StrCat("; takes turns with job \"", other, "\"", waits ? ", and waits for the next" : "");
}

}  // namespace shardd
