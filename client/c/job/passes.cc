#include "client/c/job/passes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/status/status_macros.h"

namespace shardd {

void Passes::Reset() {
  inside_ = reads_ = false;
  written_.clear();
}

void Passes::BeginSession() {
  Reset();
  said_stored_.clear();
  told_to_write_back_ = 0;
  to_write_back_ = false;
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
  if (inside_) {
    return absl::FailedPreconditionError(
        absl::StrCat(object(), "the rank is inside one (rank=", attachment_.rank(), "); call shardd_leave_pass first"));
  }
  if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(object(), "trainer state is too large (got ", state.size(),
                                                   " bytes, want at most ", kMaxTrainerStateBytes,
                                                   "; rank=", attachment_.rank(), ")"));
  }
  if (attachment_.plan().writes_edits_back() && (stepped || !state.empty())) {
    return absl::UnimplementedError(absl::StrCat(
        object(), "over several nodes, beside an optimizer of the daemon's, no pass commits a trainer state or a step ",
        "(rank=", attachment_.rank(), "); give the state to shardd_step"));
  }
  if (stepped && gradients_.backward_open()) {
    return absl::FailedPreconditionError(absl::StrCat(object(), "a backward is not closed (rank=", attachment_.rank(),
                                                      "); call shardd_backward_done first"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitPassBegun("enter_pass", nullptr));
  if (attachment_.plan().writes_edits_back()) {
    SHARDD_RETURN_IF_ERROR(StepEnded());  // whoever has not waited for it
    SHARDD_ASSIGN_OR_RETURN(said_stored_, edits_.FindOwn());
  } else {
    SHARDD_RETURN_IF_ERROR(HandInEdits("enter_pass"));
  }
  SHARDD_RETURN_IF_ERROR(staging_.WaitTaken(reason));
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kEnterPass, 1, reason));
  hand_ins_.End();
  staging_.PutMessage(state);
  record.flags = (stepped ? kStepped : 0) | (asks_to_store_ ? kAsksToStore : 0) | (said_stored_.empty() ? 0 : kEdits);
  record.arg0 = static_cast<int64_t>(state.size());
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
  if (writeback_.under_way() || to_write_back_) {
    SHARDD_RETURN_IF_ERROR(WriteBack());
  }
  if (!attachment_.ledger().entering_pass()) {
    SHARDD_RETURN_IF_ERROR(SendEnter(stepped, state, reason));
  }
  SHARDD_RETURN_IF_ERROR(AwaitEntered(reason));
  for (;;) {
    SHARDD_ASSIGN_OR_RETURN(const bool writes, IsToWriteBack());
    if (!writes) break;
    SHARDD_RETURN_IF_ERROR(WriteBack());
    SHARDD_RETURN_IF_ERROR(SendEnter(stepped, state, reason));
    SHARDD_RETURN_IF_ERROR(AwaitEntered(reason));
  }
  return span.Of(absl::OkStatus());
}

absl::Status Passes::WriteBack() {
  to_write_back_ = true;  // also where a call below is interrupted, and Enter is called again
  SHARDD_RETURN_IF_ERROR(inside_ ? SendLeave() : absl::OkStatus());
  SHARDD_RETURN_IF_ERROR(writeback_.Run());
  to_write_back_ = false;
  return absl::OkStatus();
}

absl::StatusOr<bool> Passes::IsToWriteBack() {
  if (!attachment_.plan().writes_edits_back()) {
    return false;
  }
  const uint64_t told = TimelineSequence(attachment_.page().hand_ins.load(std::memory_order_acquire));
  SHARDD_RETURN_IF_ERROR(attachment_.Live());  // else the word is another epoch's
  const std::string stored = std::exchange(said_stored_, {});
  if (std::exchange(told_to_write_back_, told) != told) {
    return true;
  }
  // The others are inside of a pass whose forward this rank has left, and this is it.
  return stored.empty() ? absl::StatusOr<bool>(false)
                        : Fail(stored,
                               "written while other ranks are inside of the pass, which this rank enters again; write "
                               "between a backward, or a forward without gradients, and the next forward");
}

absl::Status Passes::AwaitEntered(const WaitFor& reason) {
  StepLedger& ledger = attachment_.ledger();
  const bool copies = attachment_.plan().pass_copies();
  const DaemonPage& page = attachment_.page();
  if (copies && attachment_.session().stream_waits().ordered()) {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.passes_issued, ledger.passes(), reason));
    SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(page.passes, ledger.passes(), reason));
    ledger.StreamAwaits(ledger.expected_version());
  } else {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.passes, ledger.passes(), reason));
  }
  Reset();
  inside_ = reads_ = true;
  ledger.PassEntered();
  if (ledger.entering_stepped()) {
    gradients_.BeginStep();
  }
  attachment_.Retire();  // what has come with it, if it has begun
  return absl::OkStatus();
}

absl::Status Passes::Leave() {
  CallSpan span(attachment_, v1::TRACE_CALL_LEAVE_PASS);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("leave_pass"));
  if (!inside_) {
    return NotInside("leave_pass");
  }
  SHARDD_RETURN_IF_ERROR(reads_ ? CheckNotStored() : absl::OkStatus());
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

absl::Status Passes::StopReading() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("stop_reading"));
  if (!inside_) {
    return NotInside("stop_reading");
  }
  SHARDD_RETURN_IF_ERROR(reads_ ? CheckNotStored() : absl::OkStatus());
  reads_ = false;
  return absl::OkStatus();
}

absl::Status Passes::ResumeReading() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("resume_reading"));
  return CheckReading(absl::StrCat("resume_reading job \"", attachment_.plan().job(), "\""));
}

absl::Status Passes::CheckReading(absl::string_view what) {
  if (inside_ && !reads_) {
    SHARDD_ASSIGN_OR_RETURN(written_, edits_.FindAny());
    SHARDD_RETURN_IF_ERROR(written_.empty() ? absl::OkStatus() : SendLeave());
    reads_ = inside_;
  }
  if (inside_) {
    return absl::OkStatus();
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
  if (attachment_.plan().writes_edits_back()) {
    return CheckNothingToWriteBack(call);
  }
  const WaitFor reason{call, nullptr, "all ranks outside of the pass, to hand in what was stored into shards"};
  if (!hand_ins_.requested() && !hand_ins_.granted()) {
    SHARDD_RETURN_IF_ERROR(inside_ && reads_ ? CheckNotStored() : absl::OkStatus());
    SHARDD_RETURN_IF_ERROR(StepEnded());  // whoever has not waited for it
    SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindOwn());
    if (stored.empty()) {
      return absl::OkStatus();
    }
    if (inside_) {  // a backward, should one come, is told why
      SHARDD_RETURN_IF_ERROR(SendLeave());
      written_ = stored;
    }
    SHARDD_RETURN_IF_ERROR(hand_ins_.Request(reason));
  }
  if (hand_ins_.requested()) {
    SHARDD_RETURN_IF_ERROR(hand_ins_.Await(reason));
  }
  return edits_.HandIn();
}

absl::Status Passes::CheckNothingToWriteBack(const char* call) {
  SHARDD_RETURN_IF_ERROR(inside_ && reads_ ? CheckNotStored() : absl::OkStatus());
  SHARDD_RETURN_IF_ERROR(StepEnded());
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindOwn());
  return stored.empty() ? absl::OkStatus()
                        : absl::FailedPreconditionError(absl::StrCat(
                              call, " job \"", attachment_.plan().job(), "\": ", stored,
                              " was written since the last pass, and over several nodes the ranks of all write such "
                              "edits back together (rank=",
                              attachment_.rank(), "); call shardd_hand_in_edits first, on all ranks"));
}

absl::Status Passes::AwaitStore() {
  asks_to_store_ = true;
  const uint64_t begun = TimelineSequence(attachment_.page().snapshots_begun.load(std::memory_order_acquire));
  if (begun == 0) {
    return absl::OkStatus();
  }
  // Also where it was whole before: of a session that is over nobody knows whether the last one is.
  CallSpan span(attachment_, v1::TRACE_CALL_HAND_IN);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  return span.Of(attachment_.Wait(attachment_.page().snapshots_whole, begun,
                                  {"await_store", nullptr, "the snapshot of what the last step has written"}));
}

absl::Status Passes::CheckMayHandIn(const char* call) const {
  const bool inside = attachment_.ledger().entering_pass() || (inside_ && reads_);
  if (!inside && !handles_.in_full_params()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      call, " job \"", attachment_.plan().job(), "\": the rank is inside ", inside ? "a pass" : "of full parameters",
      " (rank=", attachment_.rank(), "); call ", inside ? "shardd_leave_pass" : "shardd_leave_full_params", " first"));
}

absl::StatusOr<bool> Passes::HasEdits() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("has_edits"));
  if (!edits_.on()) {
    return false;
  }
  SHARDD_RETURN_IF_ERROR(CheckMayHandIn("has_edits"));
  SHARDD_RETURN_IF_ERROR(StepEnded());  // whoever has not waited for it
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindOwn());
  return !stored.empty();
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
  if (attachment_.plan().writes_edits_back()) {
    if (!writeback_.under_way()) {
      SHARDD_RETURN_IF_ERROR(CheckMayHandIn("hand_in_edits"));
      SHARDD_RETURN_IF_ERROR(StepEnded());
    }
    return span.Of(WriteBack());
  }
  SHARDD_RETURN_IF_ERROR(CheckMayHandIn("hand_in_edits"));
  return span.Of(HandInEdits("hand_in_edits"));
}

}  // namespace shardd
