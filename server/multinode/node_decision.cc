// How node 0 decides a step, and how every node comes to hold the decision; and agrees on values that ranks write.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/multinode/backwards.h"
#include "server/multinode/node_coordinator.h"
#include "server/multinode/reduced_steps.h"
#include "server/optimizer/step_difference.h"

namespace shardd {

void NodeCoordinator::ForgetPart() {
  pending_.clear();
  gone_.clear();
  all_closed_ = 0;
  deciding_ = false;
  for (Node& node : nodes_) {
    node.closed = 0;
    node.step.reset();
    node.reduced.reset();
  }
}

void NodeCoordinator::ForgetStep() {
  ForgetPart();
  parts_ = 0;
  may_write_times_ = 0;
  extending_ = false;
  for (Node& node : nodes_) {
    node.extends.reset();
    node.asks_to_write.Clear();
    node.values.reset();
  }
}

absl::Status NodeCoordinator::CompareSteps() const {
  for (size_t node = 1; node < nodes_.size(); ++node) {
    const std::string difference = StepDifference(*nodes_[node].step, *nodes_[0].step);
    if (!difference.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("Step ", decided_.step() + 1, ": hyperparameters of ",
                                                        NodeText(static_cast<int>(node)),
                                                        " differ from node 0's: ", difference));
    }
  }
  return absl::OkStatus();
}

absl::Status NodeCoordinator::OnReduced(int node, const v1::PeerMessage::Reduced& reduced) {
  const std::string what = absl::StrCat(NodeText(node), ", a reduced step");
  SHARDD_RETURN_IF_ERROR(CheckStep(what, reduced.step()));
  Node& from = nodes_[static_cast<size_t>(node)];
  if (all_closed_ != kAllBackwards || from.reduced.has_value() || reduced.part() != nodes_[0].step->part() ||
      reduced.present().size() != (plan_->params.size() + 7) / 8 ||
      (!reduced.digests().empty() && reduced.digests_size() != DigestsOfNode(*plan_))) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": not its turn, or a mask of another size (got ",
                                                      reduced.present().size(), " bytes, want ",
                                                      (plan_->params.size() + 7) / 8, ")"));
  }
  from.reduced = reduced;
  if (Missing([](const Node& n) { return n.reduced.has_value(); }) >= 0) {
    return absl::OkStatus();
  }
  std::vector<const v1::PeerMessage::Reduced*> of_nodes;
  for (const Node& each : nodes_) {
    of_nodes.push_back(&*each.reduced);
  }
  SHARDD_RETURN_IF_ERROR(CompareReduced(*plan_, of_nodes));
  deciding_ = true;
  decide_();
  return absl::OkStatus();
}

void NodeCoordinator::Decide(const v1::PeerMessage::Decided& decided) {
  decided_ = decided;
  decided_.set_generation(generation_);
  decided_known_ = true;
  version_generation_ = generation_;
  v1::PeerMessage message;
  message.set_generation(generation_);
  *message.mutable_decided() = decided_;
  leaving_ = !decided.ends_attempt().empty();
  for (Node& node : nodes_) node.leaves = leaving_ && !node.reduced->ends_attempt().empty();
  ForgetStep();
  for (size_t node = 1; node < nodes_.size(); ++node) {
    if (nodes_[node].takes_part) {
      send_(static_cast<int>(node), message);
    }
  }
  showing_ = true;
  progress_ = MonotonicNow();
  OnHeld(0, decided.step());
}

void NodeCoordinator::DecidePart(const v1::PeerMessage::Decided& decided) {
  v1::PeerMessage message;
  message.set_generation(generation_);
  *message.mutable_decided() = decided;
  ForgetPart();
  ++parts_;
  for (size_t node = 1; node < nodes_.size(); ++node) {
    if (nodes_[node].takes_part) send_(static_cast<int>(node), message);
  }
  progress_ = MonotonicNow();
}

absl::Status NodeCoordinator::CheckBetweenParts(int node, const v1::PeerMessage& message) const {
  const bool goes_on = message.has_reduced() || (message.has_closed() && message.closed().has_ranks_step());
  const auto* const kind = v1::PeerMessage::descriptor()->FindFieldByNumber(message.kind_case());
  return goes_on ? absl::OkStatus()
                 : absl::FailedPreconditionError(absl::StrCat(
                       NodeText(node), " says something else than the next part of step ", decided_.step() + 1,
                       " (got ", kind == nullptr ? "nothing" : kind->name(), ", ", parts_,
                       " parts of it are made); ranks of all nodes make the same parts, in the same order"));
}

void NodeCoordinator::OnHeld(int node, int64_t step) {
  if (initialized_ && step <= decided_.step()) {
    int64_t& held_step = nodes_[static_cast<size_t>(node)].held_step;
    held_step = std::max(held_step, step);
    MaybeAllHold();
  }
}

void NodeCoordinator::MaybeAllHold() {
  if (!initialized_ || held_step_ >= decided_.step() || !Unheld().empty()) {
    return;
  }
  held_step_ = decided_.step();
  showing_ = false;
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_all_hold()->set_step(held_step_);
  SendAll(message);
}

std::string NodeCoordinator::Unheld() const {
  const auto holds = [this](const Node& n) { return n.finished || n.held_step >= decided_.step(); };
  const int missing = held_step_ >= decided_.step() ? -1 : Missing(holds);
  return missing < 0
             ? ""
             : absl::StrCat(NodeText(missing), nodes_[static_cast<size_t>(missing)].up ? "" : ", which has no link,",
                            " has not said that it holds step ", decided_.step(), ", which is decided");
}

bool NodeCoordinator::AllServed() const {
  return held_step_ >= decided_.step() && std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
           return node.finished || (node.up && node.takes_part && !node.fetching);
         });
}

absl::Status NodeCoordinator::OnAsksToWrite(int node, const v1::PeerMessage::AsksToWrite& asks) {
  Node& from = nodes_[static_cast<size_t>(node)];
  const bool in_turn = plan_->cut_over_nodes && initialized_ && Version() > 0 && asks.version() == Version() + 1 &&
                       from.closed != kAllBackwards && !from.values.has_value();
  if (!in_turn || asks.times() != from.asks_to_write.times() + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat(NodeText(node), asks.of_pass() ? " enters a pass" : " asks to write values",
                     ": not its turn (got version ", asks.version(), ", time ", asks.times(), ", want version ",
                     Version() + 1, ", time ", from.asks_to_write.times() + 1, ")"));
  }
  from.asks_to_write = asks;
  SHARDD_RETURN_IF_ERROR(CheckSameCommit(node));
  SHARDD_RETURN_IF_ERROR(CheckNoneComputes());
  const auto fewest = std::min_element(nodes_.begin(), nodes_.end(), [](const Node& one, const Node& other) {
    return one.asks_to_write.times() < other.asks_to_write.times();
  });
  if (fewest->asks_to_write.times() == may_write_times_) return absl::OkStatus();
  SHARDD_RETURN_IF_ERROR(CompareAsks());
  may_write_times_ = fewest->asks_to_write.times();
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_may_write()->set_times(may_write_times_);
  message.mutable_may_write()->set_edited(
      std::any_of(nodes_.begin(), nodes_.end(), [](const Node& each) { return each.asks_to_write.edited(); }));
  SendAll(message);
  return absl::OkStatus();
}

// Nobody asks again before all have asked as often, so what was said last is of the same time.
absl::Status NodeCoordinator::CompareAsks() const {
  const auto text = [this](const v1::PeerMessage::AsksToWrite& asks) {
    if (asks.of_pass()) return std::string("none, and enters a pass");
    return absl::StrCat(asks.group() >= 0 && asks.group() < static_cast<int>(plan_->groups.size())
                            ? absl::StrCat("group \"", plan_->groups[static_cast<size_t>(asks.group())].name, "\"")
                            : absl::StrCat("group ", asks.group()),
                        ", recurse ", asks.recurse() ? "true" : "false", ", rank0_only ",
                        asks.rank0_only() ? "true" : "false", asks.of_edits() ? ", of edits in place" : "");
  };
  const std::string want = text(nodes_[0].asks_to_write);
  for (size_t node = 1; node < nodes_.size(); ++node) {
    const std::string got = text(nodes_[node].asks_to_write);
    if (got != want) {
      return absl::FailedPreconditionError(
          absl::StrCat("EnterFullParams: ", NodeText(static_cast<int>(node)), " asks to write others than node 0 (got ",
                       got, ", want ", want, "); the ranks of all nodes write the same parameters together"));
    }
  }
  return absl::OkStatus();
}

absl::Status NodeCoordinator::OnValues(int node, const v1::PeerMessage::Values& values) {
  Node& from = nodes_[static_cast<size_t>(node)];
  // Between steps alone: what a step sums, or has decided, is of the values before.
  const bool of_pass = values.of_pass() && plan_->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool may_write =
      !plan_->cut_over_nodes || of_pass ||
      (may_write_times_ > 0 && from.asks_to_write.times() == may_write_times_ && !from.asks_to_write.of_pass());
  const bool in_turn = !initialized_ || (may_write && Version() > 0 && values.version() == Version() + 1 &&
                                         all_closed_ != kAllBackwards);
  if (!in_turn || from.values.has_value() || values.digests_size() != DigestsOfNode(*plan_)) {
    return absl::FailedPreconditionError(absl::StrCat(
        NodeText(node), values.of_pass() ? ", a pass without a step" : ", initial values or later ones",
        ": not its turn, or not of all parameters (got version ", values.version(), " and ", values.digests_size(),
        " digests, want version ", Version() + 1, " and ", DigestsOfNode(*plan_), ")"));
  }
  from.values = values;
  SHARDD_RETURN_IF_ERROR(CheckSameCommit(node));
  SHARDD_RETURN_IF_ERROR(CheckNoneComputes());
  if (Missing([](const Node& n) { return n.values.has_value(); }) >= 0) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(CompareValues());
  values_agreed_ = initialized_ ? values_agreed_ + 1 : 1;
  initialized_ = true;
  agreed_generation_ = version_generation_ = generation_;
  for (Node& each : nodes_) {
    each.values.reset();
    each.asks_to_write.Clear();
    each.has_state = true;
  }
  may_write_times_ = 0;
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_values_agreed();
  SendAll(message);
  return absl::OkStatus();
}

// What makes the next version is alike on all nodes: a step, values that ranks write, or, with an optimizer in the
// trainers, a pass. Nodes that differ would wait for each other.
absl::Status NodeCoordinator::CheckSameCommit(int node) const {
  constexpr absl::string_view kWrites = "values, which they write";
  constexpr absl::string_view kEnters = "no step, and enter a pass";
  const bool in_trainers = plan_->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const auto what = [&](const Node& of) -> absl::string_view {
    if (of.closed == kAllBackwards) return in_trainers ? "a step, and enter the pass behind it" : "a step";
    if (of.values.has_value()) return of.values->of_pass() ? kEnters : kWrites;
    if (of.asks_to_write.times() > may_write_times_) return of.asks_to_write.of_pass() ? kEnters : kWrites;
    return "";
  };
  const Node& from = nodes_[static_cast<size_t>(node)];
  const absl::string_view got = what(from);
  for (size_t other = 0; other < nodes_.size(); ++other) {
    const absl::string_view want = what(nodes_[other]);
    if (want.empty() || want == got) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        got == kWrites ? "CommitParameters" : (in_trainers || got == kEnters ? "EnterPass" : "OptimizerStep"),
        ": nodes differ in what their ranks commit (got ", got, ", on ", NodeText(node), ", and ", want, ", on ",
        NodeText(static_cast<int>(other)), "); ranks of all nodes step, ",
        in_trainers || !plan_->config.trainers_never_write() ? "enter passes " : "", "and write together"));
  }
  return absl::OkStatus();
}

// A node writes, or asks to, or enters a pass that all enter together, and another is in a backward that the first has
// not begun, so that each would wait for the other. Nobody comes to either before its own parts of sums have gone.
absl::Status NodeCoordinator::CheckNoneComputes() const {
  for (size_t writer = 0; writer < nodes_.size() && initialized_; ++writer) {
    const Node& of = nodes_[writer];
    const bool asks = !of.values.has_value() && of.asks_to_write.times() > may_write_times_;
    if (!asks && (!of.values.has_value() || of.values->of_pass())) continue;
    const bool enters = asks && of.asks_to_write.of_pass();
    for (const auto& [key, gives] : pending_) {
      const auto other = std::find_if(gives.begin(), gives.end(), [](const auto& given) { return given.has_value(); });
      if (std::get<0>(key) < of.closed || gives[writer].has_value() || other == gives.end()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          enters ? "EnterPass" : "CommitParameters", ": nodes differ in what their ranks do (got ",
          enters ? "a pass, which they enter" : "values, which they write", ", on ", NodeText(static_cast<int>(writer)),
          ", and backward ", std::get<0>(key), " of step ", decided_.step() + 1, ", on ",
          NodeText(static_cast<int>(other - gives.begin())),
          "); ranks of all nodes run the same passes, and load, and edit parameters in place, between the same"));
    }
  }
  return absl::OkStatus();
}

absl::Status NodeCoordinator::CompareValues() const {
  const int params = static_cast<int>(plan_->params.size());
  for (size_t node = 1; node < nodes_.size(); ++node) {
    for (int at = 0; at < nodes_[0].values->digests_size(); ++at) {
      const bool of_values = !plan_->cut_over_nodes || at >= params;
      const size_t other = of_values ? node % static_cast<size_t>(NodesOfRow(*plan_)) : 0;
      const uint64_t got = nodes_[node].values->digests(at);
      const uint64_t want = nodes_[other].values->digests(at);
      if (got != want && (of_values || (got != 0 && want != 0))) {
        const std::string& fqn = plan_->params[static_cast<size_t>(at % params)].fqn;
        if (!of_values && initialized_) {
          return absl::FailedPreconditionError(absl::StrCat(
              "CommitParameters: of \"", fqn, "\", the ranks of ", NodeText(static_cast<int>(node)),
              " wrote other parts than those of node 0 (its value, its optimizer state), or another update count; all "
              "nodes write the same parts of a parameter, each of what it holds"));
        }
        return absl::FailedPreconditionError(
            absl::StrCat("CommitParameters: the ", initialized_ ? "value" : "initial value", " of \"", fqn, "\" on ",
                         NodeText(static_cast<int>(node)), " differs from node ", other,
                         "'s; give all nodes the same (the same seed, the same checkpoint, or a broadcast)"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
