#include "server/multinode/node_coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/multinode/backwards.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {
namespace {

// A daemon that stops waits for steps of its other jobs, and for its threads.
constexpr absl::Duration kLeave = absl::Minutes(1);

}  // namespace

absl::StatusCode NodeErrorCode(int code) {
  const auto known = static_cast<absl::StatusCode>(code);
  switch (known) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnavailable:
      return known;
    default:
      return absl::StatusCode::kAborted;
  }
}

NodeCoordinator::NodeCoordinator(std::shared_ptr<const ShardPlan> plan, uint64_t generation, Send send,
                                 std::function<void()> decide, std::function<void(int node)> recover)
    : plan_(std::move(plan)),
      send_(std::move(send)),
      decide_(std::move(decide)),
      recover_(std::move(recover)),
      nodes_(plan_->nodes()),
      generation_(generation) {}

std::string NodeCoordinator::NodeText(int node) const { return shardd::NodeText(*plan_, node); }

int NodeCoordinator::Missing(const std::function<bool(const Node&)>& has) const {
  const auto found = std::find_if_not(nodes_.begin(), nodes_.end(), has);
  return found == nodes_.end() ? -1 : static_cast<int>(found - nodes_.begin());
}

void NodeCoordinator::SendAll(const v1::PeerMessage& message) {
  for (size_t node = nodes_.size(); node-- > 0;) {
    if (nodes_[node].takes_part) {
      send_(static_cast<int>(node), message);
    }
  }
}

// Of rows nodes ask each other, and node 0 knows of it because it has told them what was decided.
bool NodeCoordinator::SomeFetch() const {
  const bool of_rows = HasRows(*plan_) && initialized_;
  return std::any_of(nodes_.begin(), nodes_.end(), [of_rows](const Node& node) {
    return node.up && (node.fetching || (of_rows && node.takes_part && !node.has_state));
  });
}

void NodeCoordinator::SetFetching(int node, bool fetching, int64_t step) {
  nodes_[static_cast<size_t>(node)].fetching = fetching;
  nodes_[static_cast<size_t>(node)].has_state = !fetching;
  if (!fetching) OnHeld(node, step);
}

uint64_t NodeCoordinator::Version() const {
  return values_agreed_ == 0 ? 0 : values_agreed_ + static_cast<uint64_t>(decided_.step());
}

void NodeCoordinator::NextGeneration(const absl::Status& cause) {
  ++generation_;
  sequence_ = 0;
  showing_ = false;
  if (std::exchange(leaving_, false)) {  // who has come meanwhile has waited
    for (Node& node : nodes_) node.takes_part = node.takes_part || node.holds.has_value();
  }
  ForgetStep();
  for (size_t node = nodes_.size(); node-- > 0;) {
    if (nodes_[node].takes_part) {
      SendBegin(static_cast<int>(node), cause);
    }
  }
}

bool NodeCoordinator::AwaitsLeaver() const {
  return leaving_ && held_step_ >= decided_.step() &&
         std::any_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.leaves && node.up; });
}

void NodeCoordinator::OnFinished(int node) {
  nodes_[static_cast<size_t>(node)].finished = true;
  const bool others_go_on = std::any_of(nodes_.begin(), nodes_.end(), [](const Node& other) {
    return !other.finished && (other.closed > 0 || other.step.has_value() || other.extends.has_value());
  });
  if (others_go_on || parts_ > 0 || !pending_.empty()) {
    NextGeneration(absl::FailedPreconditionError(
        absl::StrCat(NodeText(node), " has finished and takes part in nothing any more, while others are in step ",
                     decided_.step() + 1)));
  }
  MaybeAllHold();
  MaybeRecover();
}

void NodeCoordinator::OnMessage(int node, const v1::PeerMessage& message) {
  if (message.has_holds()) {
    OnHolds(node, message.holds());
    return;
  }
  if (message.has_held()) {  // a fact of the node, not of an attempt
    OnHeld(node, message.held().step());
    return;
  }
  if (message.generation() != generation_) {
    return;  // of an attempt that has ended; nobody can know of a later one
  }
  progress_ = MonotonicNow();
  if (message.kind_case() == v1::PeerMessage::kAbandoned) {
    if (AwaitsLeaver()) return;
    NextGeneration(absl::Status(NodeErrorCode(message.abandoned().code()),
                                absl::StrCat(NodeText(node), ": ", message.abandoned().message())));
    return;
  }
  absl::Status status = Handle(node, message);
  status.Update(CheckAllCanCome());
  if (!status.ok()) {
    NextGeneration(status);
  }
}

// Whoever says something waits for all nodes.
absl::Status NodeCoordinator::CheckAllCanCome() const {
  if (const int gone = Missing([](const Node& n) { return !n.finished; }); gone >= 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(NodeText(gone), " has finished and takes part in nothing any more"));
  }
  if (const int gone = Missing([](const Node& n) { return n.refused.empty(); }); gone >= 0) {
    return absl::FailedPreconditionError(absl::StrCat(NodeText(gone), ": ", nodes_[static_cast<size_t>(gone)].refused));
  }
  return absl::OkStatus();
}

void NodeCoordinator::OnRefused(int node, const absl::Status& why) {
  nodes_[static_cast<size_t>(node)].refused = std::string(why.message());
  if (!Waiting().empty()) {
    NextGeneration(CheckAllCanCome());
  }
  MaybeRecover();
}

absl::Status NodeCoordinator::Handle(int node, const v1::PeerMessage& message) {
  if (!message.has_extends()) SHARDD_RETURN_IF_ERROR(CheckNobodyExtends(node));
  if (parts_ > 0) SHARDD_RETURN_IF_ERROR(CheckBetweenParts(node, message));
  switch (message.kind_case()) {
    case v1::PeerMessage::kReady:
      return OnReady(node, message.ready());
    case v1::PeerMessage::kClosed:
      return OnClosed(node, message.closed());
    case v1::PeerMessage::kReduced:
      return OnReduced(node, message.reduced());
    case v1::PeerMessage::kAsksToWrite:
      return OnAsksToWrite(node, message.asks_to_write());
    case v1::PeerMessage::kValues:
      return OnValues(node, message.values());
    case v1::PeerMessage::kExtends:
      return OnExtends(node, message.extends());
    default:
      return absl::InvalidArgumentError(absl::StrCat(NodeText(node), " said what is not for node 0 (got kind ",
                                                     static_cast<int>(message.kind_case()), ")"));
  }
}

absl::Status NodeCoordinator::CheckStep(absl::string_view what, int64_t step) const {
  if (step == decided_.step() + 1 && initialized_) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, ": another step than the one that runs (got ", step, ", want ",
                   initialized_ ? absl::StrCat(decided_.step() + 1) : std::string("initial values first"), ")"));
}

absl::Status NodeCoordinator::OnReady(int node, const v1::PeerMessage::Ready& ready) {
  const v1::SumKey& sum = ready.key();
  const std::string what = absl::StrCat(NodeText(node), ", a part of a sum");
  SHARDD_RETURN_IF_ERROR(CheckStep(what, sum.step()));
  if (sum.group() < 0 || sum.group() >= static_cast<int>(plan_->groups.size()) || sum.backward() < 0 ||
      sum.backward() == kAllBackwards) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": no such group or backward (got ", sum.group(), " and ",
                                                   sum.backward(), ", want a group below ", plan_->groups.size(), ")"));
  }
  const GroupPlan& group = plan_->groups[sum.group()];
  const auto mask_bytes = (group.params.size() + 7) / 8;
  if (ready.gives().present().size() != mask_bytes || ready.gives().fresh().size() != mask_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " of group \"", group.name, "\": masks of another size (got ",
                                                   ready.gives().present().size(), " and ",
                                                   ready.gives().fresh().size(), " bytes, want ", mask_bytes, ")"));
  }
  const auto gone = gone_.find({sum.backward(), sum.group()});
  const int next = gone == gone_.end() ? 0 : gone->second;
  const Key key(sum.backward(), sum.group(), sum.occurrence());
  const auto found = pending_.find(key);
  const bool twice = found != pending_.end() && found->second[static_cast<size_t>(node)].has_value();
  if (sum.occurrence() != next || sum.backward() < nodes_[static_cast<size_t>(node)].closed || twice) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " of group \"", group.name, "\", backward ", sum.backward(),
                     ": it is closed, was given already, or is not the next (got occurrence ", sum.occurrence(),
                     ", want ", next, ")"));
  }
  Gives& gives = pending_.try_emplace(key, Gives(nodes_.size())).first->second;
  gives[static_cast<size_t>(node)] = ready.gives();
  SHARDD_RETURN_IF_ERROR(CheckNoneComputes());
  return TryGo(key);
}

absl::Status NodeCoordinator::TryGo(const Key& key) {
  const auto found = pending_.find(key);
  const auto [backward, group, occurrence] = key;
  v1::PeerMessage message;
  message.set_generation(generation_);
  v1::PeerMessage::Go* go = message.mutable_go();
  const std::string none((plan_->groups[group].params.size() + 7) / 8, '\0');
  int missing = -1;
  int gave = -1;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    v1::NodeGives* gives = go->add_gives();
    if (const auto& given = found->second[node]; given.has_value()) {
      *gives = *given;
      gave = static_cast<int>(node);
    } else if (nodes_[node].closed > backward) {
      gives->set_present(none);
      gives->set_fresh(none);
      missing = static_cast<int>(node);
    } else {
      return absl::OkStatus();  // its part may still come
    }
  }
  // A second submission in one backward that only some make is how the group was used there.
  if (missing >= 0 && occurrence == 0 && !plan_->config.allow_missing_contribution()) {
    return absl::FailedPreconditionError(absl::StrCat(
        NodeText(missing), " closed backward ", backward, " without SubmitGradients for group \"",
        plan_->groups[group].name, "\", which node ", gave,
        " gave; submit it (with an empty presence mask if there is no gradient), or set allow_missing_contribution"));
  }
  go->mutable_key()->set_step(decided_.step() + 1);
  go->mutable_key()->set_backward(backward);
  go->mutable_key()->set_group(group);
  go->mutable_key()->set_occurrence(occurrence);
  go->set_sequence(sequence_++);
  gone_[{backward, group}] = occurrence + 1;
  pending_.erase(found);
  SendAll(message);
  return absl::OkStatus();
}

absl::Status NodeCoordinator::OnClosed(int node, const v1::PeerMessage::Closed& closed) {
  const std::string what = absl::StrCat(NodeText(node), ", a closed backward");
  SHARDD_RETURN_IF_ERROR(CheckStep(what, closed.step()));
  Node& from = nodes_[static_cast<size_t>(node)];
  if (closed.backwards() <= from.closed || closed.has_ranks_step() != (closed.backwards() == kAllBackwards)) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": out of order (got ", closed.backwards(), ", want more than ", from.closed, ")"));
  }
  from.closed = closed.backwards();
  if (closed.has_ranks_step()) {
    from.step = closed.ranks_step();
    SHARDD_RETURN_IF_ERROR(CheckSameCommit(node));
  }
  for (auto it = pending_.begin(); it != pending_.end() && std::get<0>(it->first) < from.closed;) {
    const Key key = (it++)->first;
    SHARDD_RETURN_IF_ERROR(TryGo(key));
  }
  return MaybeAllClosed();
}

absl::Status NodeCoordinator::MaybeAllClosed() {
  int closed = kAllBackwards;
  for (const Node& node : nodes_) {
    closed = std::min(closed, node.closed);
  }
  if (closed <= all_closed_) {
    return absl::OkStatus();
  }
  if (closed == kAllBackwards) {
    SHARDD_RETURN_IF_ERROR(CompareSteps());
  }
  all_closed_ = closed;
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_all_closed()->set_step(decided_.step() + 1);
  message.mutable_all_closed()->set_backwards(closed);
  SendAll(message);
  return absl::OkStatus();
}

std::string NodeCoordinator::Waiting() const {
  if (showing_) {
    return Unheld();
  }
  if (std::string unextended = UnextendedText(); !unextended.empty()) {
    return unextended;
  }
  if (!pending_.empty()) {
    const auto& [key, gives] = *pending_.begin();
    const auto [backward, group, occurrence] = key;
    for (size_t node = 0; node < gives.size(); ++node) {
      if (!gives[node].has_value() && nodes_[node].closed <= backward) {
        return absl::StrCat(NodeText(static_cast<int>(node)), nodes_[node].up ? "" : ", which has no link,",
                            " has not given its part of the sum of group \"", plan_->groups[group].name,
                            "\", backward ", backward);
      }
    }
  }
  const auto any = [this](const auto& has) { return std::any_of(nodes_.begin(), nodes_.end(), has); };
  const auto closed = [this](const Node& n) { return n.closed > all_closed_; };
  const auto reduced = [](const Node& n) { return n.reduced.has_value(); };
  const auto given = [](const Node& n) { return n.values.has_value(); };
  const auto text = [this](int node, absl::string_view what) {
    return absl::StrCat(NodeText(node), nodes_[static_cast<size_t>(node)].up ? "" : ", which has no link,", what);
  };
  if (any(closed)) {
    return text(Missing(closed), absl::StrCat(" has not closed backward ", all_closed_, " of step ",
                                              decided_.step() + 1, ", or not sent Step"));
  }
  if (all_closed_ == kAllBackwards && !deciding_) {
    return text(Missing(reduced), absl::StrCat(" has not all sums of step ", decided_.step() + 1));
  }
  if (!initialized_ && any(given) && Latest() >= 0) {
    return Lacking();
  }
  const auto asked = [this](const Node& n) { return n.asks_to_write.times() > may_write_times_; };
  if (any(asked)) {
    const bool enters = any([&](const Node& n) { return asked(n) && n.asks_to_write.of_pass(); });
    return text(Missing(asked), enters ? " has not entered the pass that others enter"
                                       : " has not asked to write values, which all nodes do together");
  }
  if (any(given) && Missing(given) >= 0) {
    const bool of_pass = any([](const Node& n) { return n.values.has_value() && n.values->of_pass(); });
    return text(Missing(given), of_pass        ? " has not entered the pass that others enter"
                                : initialized_ ? " has not given the values that others write"
                                               : " has not given its initial values");
  }
  return "";
}

void NodeCoordinator::CheckSilence(absl::Time now, absl::Duration limit) {
  std::string waiting = Waiting();
  // Ranks that were let in write for as long as their values take; their own calls are bounded.
  const bool some_write =
      may_write_times_ > 0 && std::all_of(nodes_.begin(), nodes_.end(), [this](const Node& node) {
        return node.up && node.asks_to_write.times() == may_write_times_ && !node.asks_to_write.of_pass();
      });
  if (source_ >= 0 || SomeFetch() || some_write) {
    progress_ = now;
  }
  if (AwaitsLeaver() && now - progress_ >= std::min(kLeave, limit)) {
    NextGeneration(absl::AbortedError("a node's daemon was to be replaced, and its link has not gone"));
    return;
  }
  limit = PatienceOf(limit);
  if (waiting.empty() || now - progress_ < limit) return;
  NextGeneration(
      absl::DeadlineExceededError(absl::StrCat(waiting, " for ", absl::FormatDuration(now - progress_), " (limit ",
                                               absl::FormatDuration(limit), "); other nodes wait for it")));
}

}  // namespace shardd
