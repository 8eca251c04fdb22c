#include "server/job/step/step_decision.h"

#include <cmath>

#include "common/clock/monotonic_now.h"
#include "server/multinode/param_mask.h"
#include "server/optimizer/optimizer.h"

namespace shardd {
namespace {

double Unscale(const v1::Step& step) { return step.loss_scale() > 0 ? 1 / step.loss_scale() : 1; }

}  // namespace

void StepDecision::BeginMeasuring() {
  state_ = State::kMeasuring;
  measuring_since_ = MonotonicNow();
}

void StepDecision::Applied() {
  state_ = State::kApplied;
  applied_since_ = MonotonicNow();
}

void StepDecision::Measured(double norm, const v1::Step& step) {
  // A gradient that is not finite makes the norm so, whichever rank it comes from.
  skipped_ = step.loss_scale() > 0 && !std::isfinite(norm);
  grad_norm_ = norm * Unscale(step);
  clip_factor_ = ClipFactor(grad_norm_, step.max_grad_norm());
}

void StepDecision::Heard(const v1::PeerMessage::Decided& decided) {
  skipped_ = decided.skipped();
  grad_norm_ = decided.grad_norm();
  clip_factor_ = decided.clip_factor();
}

void StepDecision::Fix(const v1::Step& step, const std::vector<bool>& present,
                       const std::vector<int64_t>& step_counts) {
  step_.groups.assign(step.groups().begin(), step.groups().end());
  step_.clip_factor = clip_factor_ * Unscale(step);
  step_.present = skipped_ ? std::vector<bool>(present.size(), false) : present;
  step_.step_counts = step_counts;
  step_.is_part = step.part();
}

void StepDecision::EndEpoch() {
  parts_ = 0;
  if (!committing()) {
    state_ = State::kOpen;
  }
}

void StepDecision::Describe(v1::DecidedStepRecord* out) const {
  out->mutable_groups()->Assign(step_.groups.begin(), step_.groups.end());
  out->set_clip_factor(step_.clip_factor);
  out->set_grad_norm(grad_norm_);
  out->set_step_clip_factor(clip_factor_);
  out->set_skipped(skipped_);
  out->set_present(MaskOf(step_.present));
  out->mutable_step_counts()->Assign(step_.step_counts.begin(), step_.step_counts.end());
}

void StepDecision::Describe(v1::PeerMessage::Decided* out) const {
  out->set_grad_norm(grad_norm_);
  out->set_clip_factor(clip_factor_);
  out->set_skipped(skipped_);
}

void StepDecision::Describe(v1::SessionEvent::Committed* out) const {
  out->set_parts(parts_);
  out->set_grad_norm(grad_norm_);
  out->set_clip_factor(skipped_ ? 0 : clip_factor_);
  out->set_skipped(skipped_);
}

}  // namespace shardd
