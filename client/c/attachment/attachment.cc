#include "client/c/attachment/attachment.h"

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status Attachment::Reattach() {
  const auto object = [this] { return absl::StrCat("reattach job \"", plan_.job(), "\": "); };
  if (failure_.ok() && Live().ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(object(), "the session is alive (epoch ", epoch_, "; rank=", rank(), ")"));
  }
  if (absl::IsNotFound(failure_)) {
    return failure_;  // attaching would make a new job of the same name
  }
  session_->Close();
  // What its stream still writes is none of the next epoch.
  if (!session_->stream_waits().Drain(/*release=*/true, options_.timeout)) {
    SHARDD_RETURN_IF_ERROR(interrupt_.Check("reattach"));
    return absl::DeadlineExceededError(absl::StrCat(object(), "the program's stream has not ended what it had within ",
                                                    absl::FormatDuration(options_.timeout), " (rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(memory().GiveUpStores());
  return Establish(Deadline::In(options_.timeout));
}

absl::Status Attachment::ReattachIfThere(int64_t committed) {
  if_there_ = committed;
  const absl::Status status = Reattach();
  if_there_ = -1;
  return status;
}

absl::Status Attachment::Flush(const char* call) {
  session_->ring().Wake();
  return WaitConsumed(session_->ring().submitted(), {call, nullptr, "the commands before it"});
}

absl::Status Attachment::Detach(absl::Status status, bool finished, Deadline deadline) {
  if (status.ok() && !session_->stream_waits().Drain(/*release=*/false, deadline.Left())) {
    status = absl::DeadlineExceededError(
        absl::StrCat("detach: the program's stream has not done with the job's memory in time (rank=", rank(), ")"));
  }
  if (status.ok()) {
    // The ring and the stream are two ways to the daemon: what was sent on the first must not be overtaken.
    const TimelineWord& consumed = page().consumed;
    session_->ring().Wake();
    while (status.ok() && !session_->waits().Reached(consumed, session_->ring().submitted()) && !deadline.HasPassed()) {
      status = session_->waits().WaitBriefly(consumed, session_->ring().submitted(), "detach");
    }
    status = status.ok() ? memory().GiveUpStores() : status;  // nobody waits for the stores of who has detached
    if (status.ok()) {
      status = session_->life().stream().Detach(finished, deadline, interrupt_);
    }
  }
  session_->Close();
  return status;
}

int64_t Attachment::committed_step() {
  Retire();
  return ledger_.committed_step();
}

const std::string& Attachment::trainer_state() {
  Retire();
  return ledger_.trainer_state();
}

absl::Status Attachment::Live() {
  if (!failure_.ok()) {
    told_ = true;
    return failure_;
  }
  return Note(session_->life().Live());
}

absl::Status Attachment::Note(absl::Status status) {
  // An interrupted wait says nothing of the session, even if that has ended meanwhile: the next call finds out why.
  if (status.ok() || !failure_.ok() || absl::IsCancelled(status) || !session_->life().Over()) {
    return status;
  }
  Retire();
  failure_ = status;
  told_ = true;
  if (outlives_daemon_) {
    // The next daemon may complete what this one was doing with the shards, while the program goes on.
    (void)memory().GiveUpStores();
  }
  if (const auto aborted = session_->life().stream().aborted(); aborted.has_value()) {
    lost_nothing_ = aborted->behind_commit() && aborted->committed_step() == ledger_.sent_step();
    ledger_.Abort(*aborted);
  }
  return status;
}

absl::StatusOr<uint64_t> Attachment::GiveBack(const WaitFor& reason) {
  absl::StatusOr<uint64_t> done = session_->stream_waits().SignalDone(reason);
  SHARDD_RETURN_IF_ERROR(Note(done.status()));
  return done;
}

absl::StatusOr<CommandRecord> Attachment::GivingBack(Opcode opcode, uint64_t records, const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(WaitSpace(records, reason));
  CommandRecord record = {};
  record.opcode = opcode;
  SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
  return record;
}

absl::Status Attachment::WaitPassBegun(const char* call, const std::string* group) {
  if (ledger_.pass_begins()) {
    SHARDD_RETURN_IF_ERROR(Wait(page().passes, ledger_.passes(), {call, group, "the copies that the pass reads"}));
    Retire();
  }
  return absl::OkStatus();
}

absl::Status Attachment::WaitCommitted(const char* call, const std::string* group) {
  SHARDD_RETURN_IF_ERROR(WaitPassBegun(call, group));
  return Wait(page().version, ledger_.expected_version(), {call, group, "the commit of the last step"});
}

absl::Status Attachment::NameStream(void* stream) {
  SHARDD_RETURN_IF_ERROR(session_->stream_waits().Use(stream));
  stream_ = stream;
  return absl::OkStatus();
}

void Attachment::ForgetStream() {
  stream_.reset();
  session_->stream_waits().Forget();
  ledger_.StreamAwaits(0);  // the host has not waited for it
}

}  // namespace shardd
