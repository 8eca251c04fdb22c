#include "server/collective/nodes/nccl/job_turns.h"

#include <algorithm>

namespace shardd {

TurnLimit JobTurns::Begin(bool alone, bool obeyed) {
  std::fill(reports_.begin(), reports_.end(), TurnReport());
  limit_ = TurnLimit();
  obeyed_ = obeyed;
  state_ = alone || !obeyed ? State::kFree : State::kClosing;
  uses_ = true;  // communicators are made
  if (state_ == State::kClosing) {
    limit_.round = 1;
    limit_.limited = true;
  }
  return limit_;
}

bool JobTurns::MayBe(const TurnReport& report) const {
  if (!report.IsPossible() || report.round > limit_.round) return false;
  return state_ != State::kLimited || report.round < limit_.round ||
         (report.issued.sums <= limit_.below.sums && report.issued.moves <= limit_.below.moves);
}

void JobTurns::Take(const Step& step) {
  if (step.tells.has_value()) limit_ = *step.tells;
  state_ = step.state;
  uses_ = step.uses;
}

JobTurns::Step JobTurns::Next(const NodeTurns::View& view, const TurnReport& own) const {
  Step step;
  step.wants = view.mine;
  step.state = state_;
  step.uses = uses_;
  if (state_ == State::kFree) {
    if (!view.wanted || !obeyed_) return step;
    step.tells = {limit_.round + 1, true, own.issued};
    step.state = State::kClosing;
    step.uses = true;
    return step;
  }
  std::vector<const TurnReport*> nodes = {&own};
  for (size_t node = 1; node < reports_.size(); ++node) nodes.push_back(&reports_[node]);
  if (state_ == State::kLimited) return NextOfTurn(view, nodes);
  if (view.alone) {  // there is nobody to close for
    step.tells = {limit_.round + 1, false, {}};
    step.state = State::kFree;
    return step;
  }
  TurnCounts furthest = limit_.below;
  for (const TurnReport* const node : nodes) {
    if (node->round != limit_.round) return step;
    furthest.sums = std::max(furthest.sums, node->issued.sums);
    furthest.moves = std::max(furthest.moves, node->issued.moves);
  }
  step.tells = {limit_.round, true, furthest};
  if (furthest == limit_.below) step.tells.reset();
  step.state = State::kLimited;
  return step;
}

JobTurns::Step JobTurns::NextOfTurn(const NodeTurns::View& view, const std::vector<const TurnReport*>& nodes) const {
  Step step;
  step.state = state_;
  step.uses = uses_;
  bool idle = true;
  TurnCounts ready = nodes[0]->ready;
  for (const TurnReport* const node : nodes) {
    idle = idle && node->done == limit_.below;
    ready.sums = std::min(ready.sums, node->ready.sums);
    ready.moves = std::min(ready.moves, node->ready.moves);
  }
  if (!view.mine) {
    step.wants = view.alone || OneMore(ready, true, true).has_value();
    return step;
  }
  step.wants = true;
  if (uses_ && !idle) {
    // What some node issued while it was free may need moves, or sums, that the limit keeps back: its ranks come to a
    // sum behind what they gather.
    const bool sums_lack = ready.sums < limit_.below.sums;
    const bool moves_lack = ready.moves < limit_.below.moves;
    step.tells = OneMore(ready, moves_lack && !sums_lack, sums_lack && !moves_lack);
    return step;
  }
  step.uses = false;
  if (view.alone) {
    step.tells = {limit_.round + 1, false, {}};
    step.state = State::kFree;
    return step;
  }
  const bool has_had_it = uses_ && view.wanted;
  if (!has_had_it) step.tells = OneMore(ready, true, true);
  step.uses = step.tells.has_value();
  step.releases = !step.uses;
  step.wants = step.uses;
  return step;
}

std::optional<TurnLimit> JobTurns::OneMore(const TurnCounts& ready, bool sums, bool moves) const {
  TurnLimit more = limit_;
  if (moves && ready.moves > limit_.below.moves) {
    ++more.below.moves;
  } else if (sums && ready.sums > limit_.below.sums) {
    ++more.below.sums;
  } else {
    return std::nullopt;
  }
  return more;
}

}  // namespace shardd
