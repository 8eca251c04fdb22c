#include "server/collective/nodes/nccl/nccl_exchange.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "server/observe/log.h"

namespace shardd {
NcclExchange::NcclExchange(const NcclLibrary& library, const CudaDriver& driver, Options options)
    : library_(library),
      driver_(driver),
      options_(std::move(options)),
      reports_(static_cast<size_t>(options_.nodes)),
      thread_([this] { Run(); }) {
  if (options_.seat == nullptr || options_.node != 0) return;
  options_.seat->Watch([this](const NodeTurns::View& view) {
    absl::MutexLock lock(&mutex_);
    turns_.view = view;
  });
}

NcclExchange::~NcclExchange() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
    const absl::Status why = absl::AbortedError("sums between nodes: the job ends here");
    RefuseLocked(why);
    DropLocked(why);
  }
  thread_.join();
  {
    absl::MutexLock lock(&mutex_);
    const auto all_done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unreported_ == 0; };
    mutex_.Await(absl::Condition(&all_done));
  }
  if (options_.seat != nullptr) options_.seat->Leave();  // nothing of this job waits on the GPUs any more
}

absl::Status NcclExchange::Check(const Queue& queue, uint64_t sequence, const Sum& sum) const {
  const char* const what = sum.is_move ? "move between nodes" : "sum between nodes";
  if (sequence < queue.next || queue.waiting.contains(sequence)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the sequence has been (got ", sequence, ", want ", queue.next, " or later)"));
  }
  const auto ranks = static_cast<int>(options_.devices.size());
  for (const NodePart& part : sum.parts) {
    if (part.rank < 0 || part.rank >= ranks || part.data == nullptr || part.numel < 1) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": no such part (got rank ", part.rank, ", ", part.numel,
                                                     " elements, want rank 0 to ", ranks - 1,
                                                     " and at least one element)"));
    }
  }
  if (sum.is_move && !options_.moves)
    return absl::InternalError("move between nodes: there are no communicators for it");
  for (const NodeMove& move : sum.moves) {
    if (move.rank < 0 || move.rank >= ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": no such rank (got ", move.rank, ", want 0 to ", ranks - 1, ")"));
    }
  }
  return absl::OkStatus();
}

void NcclExchange::Enter(Queue* queue, uint64_t sequence, Sum sum) {
  BeginLocked(sum.generation);
  absl::Status refused = failed_;
  if (sum.generation < generation_) {
    refused = absl::AbortedError(
        absl::StrCat(sum.label, ": the generation has ended (got ", sum.generation, ", want ", generation_, ")"));
  }
  if (refused.ok()) refused = Check(*queue, sequence, sum);
  if (!refused.ok()) {
    refused_.emplace_back(std::move(sum.done), std::move(refused));
    return;
  }
  // All nodes use the order of ranks, and the caller's order for the parts of one rank.
  std::stable_sort(sum.parts.begin(), sum.parts.end(),
                   [](const NodePart& a, const NodePart& b) { return a.rank < b.rank; });
  queue->waiting[sequence] = std::make_shared<Sum>(std::move(sum));
}

void NcclExchange::AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                             Done done) {
  for (NodePart& part : parts) part.node = kAllMembers;
  ReduceScatter(generation, sequence, std::move(parts), std::move(label), std::move(done));
}

void NcclExchange::ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                                 Done done) {
  Sum sum;
  sum.generation = generation;
  sum.parts = std::move(parts);
  sum.label = std::move(label);
  sum.done = std::move(done);
  absl::MutexLock lock(&mutex_);
  Enter(&sums_waiting_, sequence, std::move(sum));
}

void NcclExchange::Move(uint64_t generation, uint64_t sequence, std::vector<NodeMove> moves, std::string label,
                        Done done) {
  Sum move;
  move.generation = generation;
  move.is_move = true;
  move.moves = std::move(moves);
  move.label = std::move(label);
  move.done = std::move(done);
  absl::MutexLock lock(&mutex_);
  Enter(&moves_waiting_, sequence, std::move(move));
}

void NcclExchange::Begin(uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  BeginLocked(generation);
}

void NcclExchange::BeginLocked(uint64_t generation) {
  if (generation <= generation_) return;
  const absl::Status why =
      absl::AbortedError(absl::StrCat("sums between nodes: generation ", generation, " has begun"));
  RefuseLocked(why);
  // What was under way may have ended on other nodes or not: after dropping it, the nodes report what they have.
  if (under_way_ > 0 || !being_made_.empty() || UsableNumberLocked() == 0) DropLocked(why);
  generation_ = generation;
  phase_ = Phase::kUnasked;
  failed_ = absl::OkStatus();
  sums_waiting_.next = 0;
  moves_waiting_.next = 0;
  turns_.limit = TurnLimit();
  turns_.reported = TurnReport();
  turns_.done = TurnCounts();
  turns_.ended = false;
}

void NcclExchange::RefuseLocked(const absl::Status& why) {
  for (Queue* const queue : {&sums_waiting_, &moves_waiting_}) {
    for (auto& [sequence, sum] : queue->waiting) refused_.emplace_back(std::move(sum->done), why);
    queue->waiting.clear();
  }
}

void NcclExchange::DropLocked(const absl::Status& why) {
  if (!communicators_.empty() || !being_made_.empty()) dropped_ = std::string(why.message());
  for (const auto& communicator : communicators_) communicator->Break(why);
  for (const auto& communicator : being_made_) communicator->Break(why);
  communicators_.clear();
  being_made_.clear();
  number_ = 0;
}

void NcclExchange::FailLocked(const absl::Status& why) {
  phase_ = Phase::kFailed;
  // This code means only that a generation has ended; here it has yet to end.
  failed_ = absl::Status(absl::IsAborted(why) ? absl::StatusCode::kUnavailable : why.code(),
                         absl::StrCat("sums between nodes: ", why.message()));
  LogWarning(failed_.message());
  RefuseLocked(failed_);
  DropLocked(failed_);
}

uint64_t NcclExchange::UsableNumberLocked() const {
  const bool works = std::all_of(communicators_.begin(), communicators_.end(),
                                 [](const auto& communicator) { return communicator->broken().ok(); });
  return works ? number_ : 0;
}

void NcclExchange::OnMessage(int node, const v1::PeerMessage::Exchange& message) {
  if (node < 0 || node >= options_.nodes || node == options_.node || (options_.node != 0 && node != 0)) return;
  if (message.turns().round() > 0) {
    HearTurns(node, message.generation(), message.turns());
    if (message.attempt() == 0) return;
  }
  Report report;
  report.takes_turns = message.has_turns();
  report.generation = message.generation();
  report.number = message.attempt();
  for (const std::string& bytes : message.nccl_ids()) {
    if (bytes.size() != sizeof(ncclUniqueId)) {
      report.malformed = absl::InvalidArgumentError(
          absl::StrCat("an id of NCCL's is malformed (got ", bytes.size(), " bytes, want ", sizeof(ncclUniqueId), ")"));
      break;
    }
    std::memcpy(report.ids.emplace_back().internal, bytes.data(), bytes.size());
  }
  if (report.malformed.ok() && !report.ids.empty() && report.ids.size() != CommunicatorCount()) {
    report.malformed = absl::InvalidArgumentError(absl::StrCat(
        "nodes have other numbers of ranks (got ", report.ids.size(), " ids, want ", CommunicatorCount(), ")"));
  }
  absl::MutexLock lock(&mutex_);
  turns_.gone.erase(node);
  // May belong to a generation that this node has not begun yet; an older one is obsolete.
  Report& last = reports_[static_cast<size_t>(node)];
  if (report.generation >= generation_ && report.generation >= last.generation) last = std::move(report);
}

bool NcclExchange::HaveAllAskedLocked() const {
  return std::all_of(reports_.begin(), reports_.end(),
                     [this](const Report& report)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return report.generation == generation_; });
}

bool NcclExchange::HasWorkLocked() const {
  return ends_ || !refused_.empty() || HasTurnWorkLocked() || HasStepLocked();
}

bool NcclExchange::HasStepLocked() const {
  if (sums_waiting_.waiting.empty() && moves_waiting_.waiting.empty()) return false;
  switch (phase_) {
    case Phase::kUnasked:
      return true;
    case Phase::kAsked:
      return options_.node == 0 ? MayDecideLocked() && (options_.seat == nullptr || turns_.view.mine)
                                : reports_[0].generation == generation_;
    case Phase::kAgreed:
      return MayIssueLocked(sums_waiting_) || MayIssueLocked(moves_waiting_);
    case Phase::kFailed:
      return false;  // what arrived then was refused
  }
  return false;
}

void NcclExchange::Run() {
  absl::MutexLock lock(&mutex_);
  while (!ends_ || !refused_.empty()) {
    const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return HasWorkLocked(); };
    mutex_.AwaitWithTimeout(absl::Condition(&has_work), under_way_ > 0 ? kAskInterval : absl::InfiniteDuration());
    RefuseWaiting();
    if (under_way_ > 0 && MonotonicNow() - asked_library_ > kAskInterval) AskLibrary();
    if (!ends_ && refused_.empty() && HasTurnWorkLocked()) DoTurnWork();
    if (!ends_ && refused_.empty() && HasStepLocked()) Step();
  }
}

void NcclExchange::RefuseWaiting() {
  const auto refused = std::exchange(refused_, {});
  if (refused.empty()) return;
  mutex_.Unlock();
  for (const auto& [done, why] : refused) done(why);
  mutex_.Lock();
}

void NcclExchange::AskLibrary() {
  asked_library_ = MonotonicNow();
  const Communicators asked = communicators_;
  mutex_.Unlock();
  absl::Status status;
  for (const auto& communicator : asked) status.Update(communicator->Ask());
  mutex_.Lock();
  if (!status.ok() && !asked.empty() && asked == communicators_) FailLocked(status);
}

void NcclExchange::Step() {
  switch (phase_) {
    case Phase::kUnasked:
      return SendReport();
    case Phase::kAsked:
      return options_.node == 0 ? Decide() : UseOrMake();
    case Phase::kAgreed:
      return IssueNext(MayIssueLocked(moves_waiting_) ? moves_waiting_ : sums_waiting_);
    case Phase::kFailed:
      return;
  }
}

void NcclExchange::SendReport() {
  phase_ = Phase::kAsked;
  Report own;
  own.generation = generation_;
  own.number = UsableNumberLocked();
  if (options_.node == 0) {
    reports_[0] = std::move(own);
    return;
  }
  v1::PeerMessage message;
  message.set_generation(own.generation);
  message.mutable_exchange()->set_generation(own.generation);
  message.mutable_exchange()->set_attempt(own.number);
  message.mutable_exchange()->mutable_turns();  // this node knows of limits
  mutex_.Unlock();
  options_.send(0, std::move(message));
  mutex_.Lock();
}

// Node 0 only.
void NcclExchange::Decide() {
  const uint64_t generation = generation_;
  bool all_have_them = true;
  const bool all_take_turns =
      std::all_of(reports_.begin() + 1, reports_.end(), [](const Report& report) { return report.takes_turns; });
  for (const Report& report : reports_) {
    highest_ = std::max(highest_, report.number);
    all_have_them = all_have_them && report.number != 0 && report.number == reports_[0].number;
  }
  Report decided;
  decided.generation = generation;
  decided.number = all_have_them ? reports_[0].number : ++highest_;
  v1::PeerMessage message;
  message.set_generation(generation);
  message.mutable_exchange()->set_generation(generation);
  message.mutable_exchange()->set_attempt(decided.number);
  BeginTurnsLocked(all_take_turns, message.mutable_exchange());
  mutex_.Unlock();
  absl::Status status;
  for (size_t rank = 0; !all_have_them && status.ok() && rank < CommunicatorCount(); ++rank) {
    ncclUniqueId& id = decided.ids.emplace_back();
    status = library_.Check(library_->GetUniqueId(&id), "ncclGetUniqueId", absl::StrCat("of rank ", rank));
    message.mutable_exchange()->add_nccl_ids(id.internal, sizeof(id.internal));
  }
  for (int node = 1; status.ok() && node < options_.nodes; ++node) options_.send(node, message);
  mutex_.Lock();
  if (generation != generation_ || ends_) return;
  if (!status.ok()) return FailLocked(status);
  reports_[0] = std::move(decided);
  UseOrMake();
}

void NcclExchange::UseOrMake() {
  const Report& wanted = reports_[0];
  if (!wanted.malformed.ok()) return FailLocked(wanted.malformed);
  if (wanted.ids.empty()) {
    if (wanted.number != 0 && wanted.number == UsableNumberLocked()) {
      phase_ = Phase::kAgreed;
      return;
    }
    return FailLocked(
        absl::UnavailableError(absl::StrCat("communicators broke as they were to be used (got those of attempt ",
                                            UsableNumberLocked(), ", want ", wanted.number, ")")));
  }
  const uint64_t number = wanted.number;
  DropLocked(absl::AbortedError(absl::StrCat("attempt ", number, " replaces it")));
  for (size_t rank = 0; rank < CommunicatorCount(); ++rank) {
    NcclCommunicator::Share share;
    share.id = wanted.ids[rank];
    share.members = options_.nodes;
    share.first_member = options_.node;
    share.ordinals = {options_.ordinals[rank % options_.ordinals.size()]};
    being_made_.push_back(NcclCommunicator::Prepare(library_, driver_, std::move(share), options_.communicators));
  }
  const Communicators made = being_made_;
  mutex_.Unlock();
  const absl::Time begin = MonotonicNow();
  absl::Status status = NcclCommunicator::Join(made);
  mutex_.Lock();
  if (status.ok() && being_made_ == made) status = Greet(made);
  const absl::Duration took = MonotonicNow() - begin;
  if (being_made_ != made) return;  // dropped meanwhile, because it was to end
  being_made_.clear();
  if (!status.ok()) {
    for (const auto& communicator : made) communicator->Break(status);
    if (absl::IsDeadlineExceeded(status)) {
      status = absl::UnavailableError(absl::StrCat(status.message(), ": not all nodes have joined"));
    }
    return FailLocked(status);
  }
  communicators_ = made;
  number_ = number;
  ++made_;
  took_ = took;
  phase_ = Phase::kAgreed;
}

std::string NcclExchange::Describe() const {
  std::vector<std::string> devices;
  for (const int ordinal : options_.ordinals) devices.push_back(absl::StrCat("cuda:", ordinal));
  const std::string turns = DescribeTurns();
  absl::MutexLock lock(&mutex_);
  const uint64_t usable = UsableNumberLocked();
  std::string text = absl::StrCat(
      "nccl ", library_.version(),
      options_.moves ? ", two communicators for each rank over " : ", a communicator for each rank over ",
      options_.nodes, " nodes (this is ", options_.node, "), members here ", absl::StrJoin(devices, ", "), ": ");
  if (!failed_.ok()) {
    absl::StrAppend(&text, "not in this generation, ", failed_.message());
  } else if (!being_made_.empty()) {
    absl::StrAppend(&text, "being made");
  } else if (usable == 0) {
    absl::StrAppend(&text, "made with the next sum");
  } else {
    absl::StrAppend(&text, "attempt ", usable, ", made in ",
                    absl::FormatDuration(absl::Trunc(took_, absl::Milliseconds(1))), ", ",
                    communicators_[0]->details());
  }
  absl::StrAppend(&text, "; ", sums_, " sum(s)");
  if (made_ > 1 || (made_ == 1 && usable == 0)) absl::StrAppend(&text, "; made ", made_, " time(s)");
  if (!dropped_.empty()) absl::StrAppend(&text, "; last given up because ", dropped_);
  return absl::StrCat(text, turns);
}

}  // namespace shardd
