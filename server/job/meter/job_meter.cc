#include "server/job/meter/job_meter.h"

#include "common/clock/monotonic_now.h"
#include "server/device/device_op.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"

namespace shardd {
namespace {

v1::InterruptionCause CauseOf(const absl::Status& cause, bool lost, bool behind_commit) {
  if (behind_commit) return v1::INTERRUPTION_CAUSE_PLANNED;
  switch (cause.code()) {
    case absl::StatusCode::kDeadlineExceeded:
      return v1::INTERRUPTION_CAUSE_SILENCE;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kResourceExhausted:
      return v1::INTERRUPTION_CAUSE_MISTAKE;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kInternal:
      return v1::INTERRUPTION_CAUSE_DEVICE;
    default:
      return lost ? v1::INTERRUPTION_CAUSE_RANK_LOST : v1::INTERRUPTION_CAUSE_OTHER;
  }
}

}  // namespace

JobMeter::JobMeter(int ranks, bool trainers_update, Facts facts, std::function<void(const v1::StepRecord&)> on_step)
    : see_(facts),
      on_step_(std::move(on_step)),
      count_(ranks),
      goodput_(MonotonicNow()),
      waits_(ranks),
      phases_(ranks, trainers_update) {}

void JobMeter::Review() {
  goodput_.TakenBack(see_.committed->step());
  if (goodput_.running() || see_.committed->version() == 0 || see_.sessions->attached() < count_) return;
  const absl::Time now = MonotonicNow();
  goodput_.Begin(now);
  phases_.Begin(now);
  waits_.Drop();
}

void JobMeter::Begins(int rank, Opcode opcode, int64_t phase) {
  const bool backward =
      opcode == Opcode::kSubmitGradients || (opcode == Opcode::kUnshard && phase == v1::PHASE_BACKWARD);
  if (backward && !phases_.in_backward(rank)) phases_.BeginBackward(rank, MonotonicNow());
  if (waits_.any_sleeps() && opcode != Opcode::kWaitGradientSlot) waits_.GoOn(rank, MonotonicNow());
}

void JobMeter::Executed(int rank, Opcode opcode, bool stepped, absl::FunctionRef<bool(int rank)> sleeps_for_turn) {
  switch (opcode) {
    case Opcode::kWaitGradientSlot:
      if (sleeps_for_turn(rank)) waits_.Sleep(rank, MonotonicNow());
      return;
    case Opcode::kBackwardDone:
      phases_.CloseBackward(rank, MonotonicNow());
      break;
    case Opcode::kStep:
    case Opcode::kEnterPass:
      if (stepped || opcode == Opcode::kStep) phases_.CloseStep(rank, MonotonicNow());
      waits_.Arrive(rank, MonotonicNow());
      break;
    case Opcode::kEnterFullParams:
    case Opcode::kCommitParameters:
      waits_.Arrive(rank, MonotonicNow());
      return;
    case Opcode::kSubmitGradients:
      break;
    default:
      return;
  }
  if (waits_.any_sleeps()) waits_.Wake(rank, MonotonicNow(), sleeps_for_turn);
}

void JobMeter::EpochEnds(const absl::Status& cause, bool lost, bool behind_commit, bool dropped) {
  drops_ = dropped;
  ++interruptions_[static_cast<size_t>(CauseOf(cause, lost, behind_commit))];
}

void JobMeter::StepCommitted() {
  const absl::Time now = MonotonicNow();
  const bool runs = goodput_.running();
  goodput_.Committed(see_.committed->step(), waits_.for_one_in_step(), !see_.decision->skipped(), now);
  if (runs) {
    last_ = phases_.Commit(now, {waits_.in_step(), waits_.asleep_in_step()},
                           {see_.decision->measuring_since(), see_.decision->applied_since()});
    last_.set_step(see_.committed->step());
    const int awaited = waits_.most_awaited_in_step();
    last_.set_slowest_rank(awaited);
    last_.set_slowest_rank_ns(awaited < 0 ? 0 : absl::ToInt64Nanoseconds(waits_.awaited_in_step(awaited)));
    if (on_step_ != nullptr) on_step_(last_);
  }
  waits_.BeginStep();
}

void JobMeter::EndEpoch() {
  goodput_.EpochEnds(drops_, MonotonicNow());
  goodput_.TakenBack(see_.committed->step());
  drops_ = false;
  waits_.Drop();
}

void JobMeter::Describe(v1::JobMetrics* out) const {
  goodput_.Describe(MonotonicNow(), out->mutable_time(), out->mutable_steps());
  phases_.Describe(out->mutable_steps());
  if (last_.step() > 0) *out->mutable_steps()->mutable_last() = last_;
  waits_.Describe(out);
  for (size_t cause = 0; cause < interruptions_.size(); ++cause) {
    if (interruptions_[cause] == 0) continue;
    v1::InterruptionCount* const count = out->add_interruptions();
    count->set_cause(static_cast<v1::InterruptionCause>(cause));
    count->set_count(interruptions_[cause]);
  }
}

}  // namespace shardd
