#include "client/c/job/passes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/status/status_macros.h"

namespace shardd {

void Passes::Reset() {
  inside_ = paused_ = false;
  written_.clear();
}

absl::Status Passes::CheckWrites(const char* call) const {
  const RankPlan& plan = attachment_.plan();
  if (!plan.trainers_write()) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " job \"", plan.job(),
                     "\": its trainers never write (got trainersNeverWrite true, want false; rank=", plan.rank(), ")"));
  }
  if (attachment_.ledger().expected_version() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        call, " job \"", plan.job(), "\": the parameters have no values yet (version 0; rank=", plan.rank(),
        "); call shardd_commit_parameters first"));
  }
  return absl::OkStatus();
}

absl::Status Passes::NotInside(const char* call) const {
  return absl::FailedPreconditionError(absl::StrCat(
      call, " job \"", attachment_.plan().job(), "\": the rank is not inside a pass (rank=", attachment_.rank(), ")"));
}

absl::Status Passes::SendEnter(bool stepped, absl::string_view state, const WaitFor& reason) {
  const auto object = [this] { return absl::StrCat("enter_pass job \"", attachment_.plan().job(), "\": "); };
  if (inside()) {
    return absl::FailedPreconditionError(
        absl::StrCat(object(), "the rank is inside one (rank=", attachment_.rank(), "); call shardd_leave_pass first"));
  }
  if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(object(), "trainer state is too large (got ", state.size(),
                                                   " bytes, want at most ", kMaxTrainerStateBytes,
                                                   "; rank=", attachment_.rank(), ")"));
  }
  if (stepped && gradients_.backward_open()) {
    return absl::FailedPreconditionError(absl::StrCat(object(), "a backward is not closed (rank=", attachment_.rank(),
                                                      "); call shardd_backward_done first"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitPassBegun("enter_pass", nullptr));
  SHARDD_RETURN_IF_ERROR(HandInEdits("enter_pass"));
  SHARDD_RETURN_IF_ERROR(staging_.WaitTaken(reason));
  SHARDD_RETURN_IF_ERROR(attachment_.WaitSpace(1, reason));
  CommandRecord record = {};
  SHARDD_ASSIGN_OR_RETURN(record.done, attachment_.GiveBack(reason));
  hand_ins_.End();
  staging_.PutMessage(state);
  attachment_.memory().view().page().pass.store(static_cast<uint32_t>(PassWord::kReading), std::memory_order_release);
  record.opcode = Opcode::kEnterPass;
  record.flags = stepped ? kStepped : 0;
  record.arg0 = static_cast<int64_t>(state.size());
  inside_ = false;  // of one that another rank's edits have ended
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  staging_.MessageSent();
  attachment_.ledger().PassSent(stepped, std::string(state));
  return absl::OkStatus();
}

absl::Status Passes::Enter(bool stepped, absl::string_view state) {
  CallSpan span(attachment_, v1::TRACE_CALL_ENTER_PASS);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("enter_pass"));
  const WaitFor reason{"enter_pass", nullptr, "all ranks in the pass"};
  const bool copies = attachment_.plan().pass_copies();
  if (copies) {
    SHARDD_RETURN_IF_ERROR(hand_ins_.AwaitOthersLeave());  // of an interrupted leave_full_params
  }
  StepLedger& ledger = attachment_.ledger();
  if (!ledger.entering_pass()) {
    SHARDD_RETURN_IF_ERROR(SendEnter(stepped, state, reason));
  }
  const DaemonPage& page = attachment_.page();
  if (copies && attachment_.session().stream_waits().ordered()) {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.passes_issued, ledger.passes(), reason));
    SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(page.passes, ledger.passes(), reason));
    ledger.StreamAwaits(ledger.expected_version());
  } else {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.passes, ledger.passes(), reason));
  }
  Reset();
  inside_ = true;
  ledger.PassEntered();
  if (ledger.entering_stepped()) {
    gradients_.BeginStep();
  }
  attachment_.Retire();  // what has come with it, if it has begun
  return span.Of(absl::OkStatus());
}

absl::Status Passes::Leave() {
  CallSpan span(attachment_, v1::TRACE_CALL_LEAVE_PASS);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("leave_pass"));
  const bool reads = !paused_;
  if (paused_ && !EndPause()) {
    return span.Of(absl::OkStatus());  // another rank's edits have ended it
  }
  if (!inside_) {
    return NotInside("leave_pass");
  }
  SHARDD_RETURN_IF_ERROR(reads ? CheckNotStored() : absl::OkStatus());
  return span.Of(SendLeave());
}

absl::Status Passes::SendLeave() {
  SHARDD_RETURN_IF_ERROR(attachment_.WaitPassBegun("leave_pass", nullptr));
  CommandRecord record = {};
  record.opcode = Opcode::kLeavePass;
  // Somebody may wait for it with a write.
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, {"leave_pass", nullptr, "space in the ring"}));
  inside_ = false;
  return absl::OkStatus();
}

absl::Status Passes::Pause() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("pause_pass"));
  if (!inside_) {
    return NotInside("pause_pass");
  }
  SHARDD_RETURN_IF_ERROR(paused_ ? absl::OkStatus() : CheckNotStored());
  paused_ = true;
  attachment_.memory().view().page().pass.store(static_cast<uint32_t>(PassWord::kPaused), std::memory_order_release);
  return absl::OkStatus();
}

bool Passes::EndPause() {
  paused_ = false;
  uint32_t paused = static_cast<uint32_t>(PassWord::kPaused);
  if (attachment_.memory().view().page().pass.compare_exchange_strong(paused,
                                                                      static_cast<uint32_t>(PassWord::kReading))) {
    return true;
  }
  inside_ = false;
  if (written_.empty()) {
    written_ = "a parameter (by another rank)";
  }
  return false;
}

bool Passes::inside() const {
  return inside_ && !(paused_ && attachment_.memory().view().page().pass.load(std::memory_order_acquire) ==
                                     static_cast<uint32_t>(PassWord::kOvertaken));
}

absl::Status Passes::Resume() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("resume_pass"));
  return CheckReading(absl::StrCat("resume_pass job \"", attachment_.plan().job(), "\""));
}

absl::Status Passes::CheckReading(absl::string_view what) {
  if (inside_ && !paused_) {
    return absl::OkStatus();
  }
  if (inside_) {
    const bool reads = EndPause();
    SHARDD_ASSIGN_OR_RETURN(std::string stored, reads ? edits_.FindAny() : edits_.FindOwn());
    if (reads && stored.empty()) {
      return absl::OkStatus();
    }
    if (!stored.empty()) {
      written_ = std::move(stored);
    }
    SHARDD_RETURN_IF_ERROR(reads ? SendLeave() : absl::OkStatus());
  }
  if (!written_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": ", written_, " was written after the forward of this pass, whose backward would see other ",
        "values (rank=", attachment_.rank(), "); write after the backward"));
  }
  return absl::FailedPreconditionError(absl::StrCat(what, ": the rank is outside of a pass (rank=", attachment_.rank(),
                                                    "); call shardd_enter_pass first"));
}

absl::Status Passes::CheckNotStored() {
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindAny());
  if (stored.empty()) {
    return absl::OkStatus();
  }
  return Fail(stored,
              "written inside a pass, while other ranks may read it; write between a backward, or a forward without "
              "gradients, and the next forward");
}

absl::Status Passes::Fail(absl::string_view stored, absl::string_view why) {
  absl::Status status =
      absl::FailedPreconditionError(absl::StrCat("write ", stored, ": ", why, " (rank=", attachment_.rank(), ")"));
  attachment_.Fail(status);
  return status;
}

absl::Status Passes::StepEnded() {
  if (!edits_.StepEnded()) {
    return absl::OkStatus();
  }
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindAny());
  // The rest of a page that was stored into is of before the update, too.
  return stored.empty() ? absl::OkStatus()
                        : Fail(absl::StrCat(stored, ", or one beside it"),
                               "written while the daemon's optimizer updates it; call shardd_wait_step first");
}

absl::Status Passes::HandInEdits(const char* call) {
  if (!edits_.on()) {
    return absl::OkStatus();
  }
  const WaitFor reason{call, nullptr, "all ranks outside of the pass, to hand in what was stored into shards"};
  if (!hand_ins_.requested() && !hand_ins_.granted()) {
    SHARDD_RETURN_IF_ERROR(inside_ && !paused_ ? CheckNotStored() : absl::OkStatus());
    SHARDD_RETURN_IF_ERROR(StepEnded());  // whoever has not waited for it
    SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindOwn());
    if (stored.empty()) {
      return absl::OkStatus();
    }
    if (inside_) {
      SHARDD_RETURN_IF_ERROR(LeaveFor(stored));
    }
    SHARDD_RETURN_IF_ERROR(hand_ins_.Request(reason));
  }
  if (hand_ins_.requested()) {
    SHARDD_RETURN_IF_ERROR(hand_ins_.Await(reason));
  }
  return edits_.HandIn();
}

absl::Status Passes::HandIn() {
  CallSpan span(attachment_, v1::TRACE_CALL_HAND_IN);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("hand_in_edits"));
  const bool copies = attachment_.plan().pass_copies();
  const bool entering = attachment_.ledger().entering_pass();
  if (copies) {
    SHARDD_RETURN_IF_ERROR(hand_ins_.AwaitOthersLeave());  // of an interrupted leave_full_params
  }
  if (copies && !entering && !handles_.in_full_params()) {
    return span.Of(absl::OkStatus());
  }
  const auto refuse = [this](const char* fact, const char* remedy) {
    return absl::FailedPreconditionError(absl::StrCat("hand_in_edits job \"", attachment_.plan().job(), "\": ", fact,
                                                      " (rank=", attachment_.rank(), "); call ", remedy, " first"));
  };
  if (entering || (inside_ && !paused_)) {
    return refuse("the rank is inside a pass", "shardd_leave_pass");
  }
  if (handles_.in_full_params()) {
    return refuse("the rank is inside of full parameters", "shardd_leave_full_params");
  }
  return span.Of(HandInEdits("hand_in_edits"));
}

absl::Status Passes::LeaveFor(std::string written) {
  written_ = std::move(written);
  return Leave();
}

}  // namespace shardd
