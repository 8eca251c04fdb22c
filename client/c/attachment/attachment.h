#ifndef SHARDD_CLIENT_C_ATTACHMENT_ATTACHMENT_H_
#define SHARDD_CLIENT_C_ATTACHMENT_ATTACHMENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/c/attachment/rank_plan.h"
#include "client/c/attachment/step_ledger.h"
#include "client/c/daemon/connect.h"
#include "client/c/host/interrupt.h"
#include "client/c/session/client_session.h"
#include "common/clock/deadline.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

struct AttachOptions {
  v1::JobSpec spec;
  int rank = 0;
  int local_world = 1;
  std::string address;  // empty: found or started
  bool replace = false;
  bool adopt = false;
  bool device_memory = false;
  int node = 0;            // of the spec's nodes
  std::string job_secret;  // empty: none
  Control control = Control::kAny;
  absl::Duration timeout;
  absl::Duration daemon_wait = absl::Seconds(60);  // of Reattach, where there is no daemon
  v1::Launcher launcher;                           // start_ticks 0: none is told
};

// Ties a rank to its job at the daemon. Owns the session, the failure that ended it, the plan and the ledger of
// versions; the parts of a job send and wait through it. The first status that ends the session (ABORTED, UNAVAILABLE
// or another) is sticky: Live and everything that waits return it until Reattach succeeds. Thread-compatible. REQUIRES:
// Attach has succeeded before any other call.
class Attachment {
 public:
  explicit Attachment(AttachOptions options) : options_(std::move(options)), plan_(options_.rank, options_.node) {}
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  // Attach and Reattach begin a new session. Both retry errors that may pass, for at most the timeout.
  absl::Status Attach();
  // Returns FAILED_PRECONDITION while the session is alive. The old memory stays mapped until the new one is: pointers
  // into it must not fault while this fails and is called again.
  absl::Status Reattach();
  // The same, but makes no job: NOT_FOUND if the daemon has that one no more, OUT_OF_RANGE if it has not committed the
  // step `committed`.
  absl::Status ReattachIfThere(int64_t committed);
  // Waits until the daemon has taken all records sent so far. An rpc could overtake them: it does not go through the
  // ring.
  absl::Status Flush(const char* call);
  // Says detach if `status` is OK, waiting at most until `deadline`, then closes the session. Returns the first
  // failure.
  absl::Status Detach(absl::Status status, bool finished, Deadline deadline);

  const RankPlan& plan() const { return plan_; }
  int rank() const { return plan_.rank(); }
  const StepLedger& ledger() const { return ledger_; }
  StepLedger& ledger() { return ledger_; }
  // Lets the ledger read which steps are committed.
  void Retire() { ledger_.Retire(session_->waits(), page()); }
  // Both call Retire first.
  int64_t committed_step();
  const std::string& trainer_state();
  // The job may train more by now than this rank's description says; Reattach then fails, and refuses nobody.
  void MayBeExtended() { options_.adopt = true; }
  bool trains_more() const { return trains_more_; }  // Reattach has failed because it does
  const Target& target() const { return target_; }
  bool created() const { return created_; }
  uint64_t job_id() const { return job_id_; }
  const std::string& job_secret() const { return options_.job_secret; }
  uint64_t epoch() const { return epoch_; }
  const std::string& device() const { return device_; }
  absl::Duration timeout() const { return options_.timeout; }
  Interrupt& interrupt() { return interrupt_; }
  const Interrupt& interrupt() const { return interrupt_; }
  ClientSession& session() const { return *session_; }
  SessionMemory& memory() const { return session_->memory(); }
  const DaemonPage& page() const { return session_->memory().page(); }

  // Returns OK while the session lives, else its sticky failure.
  absl::Status Live();
  // Returns `status`, and keeps it as the sticky failure if the session is over.
  absl::Status Note(absl::Status status);
  // Makes `status` the sticky failure, for a signal handler: the next call returns it. Async-signal-safe.
  void Fail(absl::Status status) {
    if (failure_.ok()) failure_ = std::move(status);
  }
  // Whether a call has returned the sticky failure. A call that has what it wanted all the same takes that back.
  bool told() const { return told_; }
  void SetTold(bool told) { told_ = told; }
  // True if the session is over and nothing of this rank is lost, because its daemon has stopped right behind the
  // commit of the step that this rank sent last.
  bool lost_nothing() const { return lost_nothing_; }
  bool outlives_daemon() const { return outlives_daemon_; }
  bool takes_writes_where_cut() const { return takes_writes_where_cut_; }

  // These forward to the session and Note what they return.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
    return Note(session_->waits().Wait(word, sequence, reason));
  }
  absl::Status WaitInStream(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
    return Note(session_->stream_waits().Wait(word, sequence, reason));
  }
  absl::Status WaitSpace(uint64_t records, const WaitFor& reason) {
    return Note(session_->ring().WaitSpace(records, reason));
  }
  absl::Status WaitConsumed(uint64_t number, const WaitFor& reason) {
    return Note(session_->ring().WaitConsumed(number, reason));
  }
  absl::Status Send(const CommandRecord& record, bool act, const WaitFor& reason) {
    return Note(session_->ring().Send(record, act, reason));
  }
  // Returns CommandRecord::done for a record that gives memory back.
  absl::StatusOr<uint64_t> GiveBack(const WaitFor& reason);
  // Such a record, when the ring has space for it and for what follows at once, `records` in all.
  absl::StatusOr<CommandRecord> GivingBack(Opcode opcode, uint64_t records, const WaitFor& reason);
  // Blocks the host until the pass that was entered has begun: what is sent next belongs to that pass.
  absl::Status WaitPassBegun(const char* call, const std::string* group);
  // Waits until the step sent last is committed: what is sent next belongs to the next step.
  absl::Status WaitCommitted(const char* call, const std::string* group);

  // Sets the program's CUDA stream for this session and for later ones.
  absl::Status NameStream(void* stream);
  void ForgetStream();
  bool IsNamed(void* stream) const { return stream == stream_.value_or(nullptr); }

 private:
  absl::Status Establish(Deadline deadline);
  absl::Status TryEstablish(Deadline deadline);
  bool MayRetry(const absl::Status& status, bool again, absl::Duration waited);
  v1::OpenJobRequest OpenRequest() const;
  void Adopt(const v1::AttachRankResponse& attach, std::unique_ptr<ClientSession> session);

  AttachOptions options_;  // Attach moves its spec into plan_
  Interrupt interrupt_;
  RankPlan plan_;
  absl::optional<void*> stream_;
  bool attached_before_ = false;
  bool reached_ = false;                 // a daemon listened there: where it dies, another one will
  int64_t if_there_ = -1;                // ReattachIfThere: its step; -1: this is not one
  int tries_there_ = 0;                  // of a first attach that a daemon which listens there had not answered
  bool outlives_daemon_ = false;         // the job, of the last session
  bool takes_writes_where_cut_ = false;  // its daemon
  // These belong to the current session.
  Target target_;
  bool created_ = false;
  uint64_t job_id_ = 0;
  std::string device_;
  uint64_t epoch_ = 0;
  StepLedger ledger_;
  absl::Status failure_;
  bool told_ = false;
  bool lost_nothing_ = false;
  bool trains_more_ = false;
  std::unique_ptr<ClientSession> session_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_ATTACHMENT_H_
