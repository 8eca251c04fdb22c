// Gradients that a rank gives up, drops or gives back: after an exception in user code, where a step has none for a
// parameter, and where nobody needs their memory; and those that only other ranks have given.

#include <sys/mman.h>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "client/c/attachment/shards.h"
#include "client/c/daemon/unary_call.h"
#include "client/c/job/gradients.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kSessionEndIsKnown = absl::Seconds(1);
constexpr int64_t kLeastGivenBackBytes = int64_t{1} << 17;  // less is not worth the calls

}  // namespace

void* Gradients::ShardData(int param) const {
  const RankPlan& plan = attachment_.plan();
  return ReducedGradientAt(attachment_, param, plan.copy_of(plan.plan().gradient_copies));
}

// This rank alone goes back; the session lives.
absl::Status Gradients::AbandonBackward() {
  CallSpan span(attachment_, v1::TRACE_CALL_ABANDON_BACKWARD);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  if (handles_.in_full_params()) {
    return absl::FailedPreconditionError(absl::StrCat("abandon_backward job \"", attachment_.plan().job(),
                                                      "\": full parameters are entered (rank=", attachment_.rank(),
                                                      "); call shardd_leave_full_params first"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitPassBegun("abandon_backward", nullptr));
  const WaitFor reason{"abandon_backward", nullptr, "space in the command ring"};
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kAbandonBackward, 1, reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kAbandon));
  // At once: others may wait for what this rank holds, and what is not added up by then is taken back.
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  backward_open_ = false;
  for (Slot& slot : slots_) {
    slot.holder = -1;  // the gradients that were being written are of no use
    slot.told = false;
  }
  return span.Of(absl::OkStatus());
}

absl::Status Gradients::SetPresence(int index, bool present) {
  const ParamPlan& param = attachment_.plan().param(index);
  CallSpan span(attachment_, v1::TRACE_CALL_SET_GRADIENT_PRESENCE, param.group);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const auto refuse = [&](const char* fact, const char* remedy) {
    return absl::FailedPreconditionError(
        absl::StrCat("set_gradient_presence \"", param.fqn, "\": ", fact, " (rank=", attachment_.rank(), ")", remedy));
  };
  if (!param.requires_grad) {
    return refuse("the parameter is frozen", "");
  }
  if (backward_open_) {
    return refuse("gradients were submitted in a backward that is not closed", "; call shardd_backward_done first");
  }
  if (attachment_.ledger().entering_pass()) {  // what it enters may be committing the step by now
    return refuse("the rank is entering a pass", "; call shardd_enter_pass again until it is inside");
  }
  if (handles_.in_full_params()) {
    return refuse("full parameters are entered", "; call shardd_leave_full_params first");
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("set_gradient_presence", &param.fqn));
  has_gradients_ = has_gradients_ || present;
  CommandRecord record = {};
  record.opcode = Opcode::kSetGradientPresence;
  record.group = index;
  record.arg0 = present ? 1 : 0;
  return span.Of(attachment_.Send(record, /*act=*/false, {"set_gradient_presence", &param.fqn, "space in the ring"}));
}

absl::StatusOr<const std::vector<int32_t>*> Gradients::GivenByOthers() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  ClientSession& session = attachment_.session();
  const WordWaits& waits = session.waits();
  given_by_others_.clear();
  asks_for_others_ = true;
  if (waits.Reducing(attachment_.page()) < backwards_closed_) {
    SHARDD_RETURN_IF_ERROR(attachment_.Live());
    return absl::FailedPreconditionError(absl::StrCat("given_by_others job \"", attachment_.plan().job(),
                                                      "\": a closed backward is not reduced (rank=", attachment_.rank(),
                                                      "); call shardd_wait_gradients first"));
  }
  // The daemon has written it before both.
  const uint64_t others_gave = waits.SequenceOf(attachment_.page().others_gave);
  if (others_gave <= others_seen_) {
    others_seen_ = backwards_closed_;
    return &given_by_others_;
  }
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_GRADIENTS);
  v1::OthersGradientsRequest request;
  request.set_session_id(session.id());
  request.set_token(session.token());
  request.set_since(others_seen_);
  v1::OthersGradientsResponse response;
  const absl::Status asked = AsUnavailable(
      UnaryCall("given_by_others", session.life().stream().stub(), &v1::TrainerService::Stub::AsyncOthersGradients,
                request, Deadline::In(attachment_.timeout()), attachment_.interrupt(), &response));
  if (!asked.ok()) {
    // What ended the session says more than that the call has failed.
    const bool over = absl::IsUnavailable(asked) || absl::IsUnauthenticated(asked);
    SHARDD_RETURN_IF_ERROR(
        over ? session.life().stream().EndStatus(Deadline::In(kSessionEndIsKnown), attachment_.interrupt())
             : absl::OkStatus());
    return asked;
  }
  for (const int32_t param : response.params()) {
    if (param < 0 || static_cast<size_t>(param) >= attachment_.plan().plan().params.size()) {
      return absl::InternalError(absl::StrCat("given_by_others job \"", attachment_.plan().job(),
                                              "\": the daemon names no parameter (got ", param, ", want 0 to ",
                                              attachment_.plan().plan().params.size() - 1, ")"));
    }
    given_by_others_.push_back(param);
  }
  others_seen_ = backwards_closed_;
  return span.Of(absl::StatusOr<const std::vector<int32_t>*>(&given_by_others_));
}

absl::Status Gradients::GiveBack(int index) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const ParamPlan& param = attachment_.plan().param(index);
  const auto refuse = [&](const char* fact) {
    return absl::FailedPreconditionError(
        absl::StrCat("give_back_gradient \"", param.fqn, "\": ", fact, " (rank=", attachment_.rank(), ")"));
  };
  if (has_gradients_) {
    return refuse("the running step has gradients; give them back between a step and the next backward");
  }
  if (handles_.in_full_params()) {
    return refuse("full parameters are entered; call shardd_leave_full_params first");
  }
  const ShardPlan& plan = attachment_.plan().plan();
  char* const gradient = ReducedGradientAt(attachment_, index, 0);
  // Rows that several ranks hold are not this one's to drop, and a GPU's memory stays where it is.
  if (gradient == nullptr || attachment_.memory().on_device() ||
      plan.placement.pieces(Purpose::kGradients) < plan.world_size) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("give_back_gradient", &param.fqn));
  const ParamRange range = OwnedRange(plan, Purpose::kGradients, index, attachment_.rank());
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(float));
  const auto begin = reinterpret_cast<uintptr_t>(gradient + range.first * kElementBytes);
  const auto first = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto end = (begin + static_cast<uintptr_t>(range.numel * kElementBytes)) / kPageBytes * kPageBytes;
  if (range.numel * kElementBytes < kLeastGivenBackBytes || first >= end) {
    return absl::OkStatus();
  }
  // A kernel that cannot keeps them: nothing else changes.
  (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_REMOVE);
  return absl::OkStatus();
}

}  // namespace shardd
