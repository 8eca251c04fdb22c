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
  int node = 0;  // of the spec's nodes
  absl::Duration timeout;
  v1::Launcher launcher;  // start_ticks 0: none is told
};

// A rank's tie to its job at the daemon: owns the session, the failure that ended it, the plan and the ledger of
// versions, and sends and waits for whoever works with them. The first status that ends the session (ABORTED,
// UNAVAILABLE, whatever else) is sticky: Live and everything that waits return it until Reattach has succeeded.
// Thread-compatible. REQUIRES of all but Attach: Attach has succeeded.
class Attachment {
 public:
  explicit Attachment(AttachOptions options) : options_(std::move(options)), plan_(options_.rank, options_.node) {}
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  // Both retry what may go away by itself, at most for the timeout, and then have a new session.
  absl::Status Attach();
  // FAILED_PRECONDITION while the session is alive. The old memory stays mapped until the new one is there: pointers
  // into it must not fault while this fails and is tried again.
  absl::Status Reattach();
  // What was sent before has come to the daemon: the ring and a call are two ways to it.
  absl::Status Flush(const char* call);
  // Ends the session in order where `status` is OK, at most until `deadline`, and closes it. The first failure.
  absl::Status Detach(absl::Status status, bool finished, absl::Time deadline);

  const RankPlan& plan() const { return plan_; }
  int rank() const { return plan_.rank(); }
  const StepLedger& ledger() const { return ledger_; }
  StepLedger& ledger() { return ledger_; }
  // The ledger takes over what has been committed.
  void Retire() { ledger_.Retire(session_->waits(), page()); }
  // Those of the ledger, after a look at what has been committed.
  int64_t committed_step();
  const std::string& trainer_state();
  const Target& target() const { return target_; }
  bool created() const { return created_; }
  uint64_t epoch() const { return epoch_; }
  const std::string& device() const { return device_; }
  absl::Duration timeout() const { return options_.timeout; }
  Interrupt& interrupt() { return interrupt_; }
  const Interrupt& interrupt() const { return interrupt_; }
  ClientSession& session() const { return *session_; }
  SessionMemory& memory() const { return session_->memory(); }
  const DaemonPage& page() const { return session_->memory().page(); }

  // OK while the session lives; otherwise the failure that is noted for good.
  absl::Status Live();
  // Notes a failure that ends the session, passes the status on.
  absl::Status Note(absl::Status status);
  // What a signal handler has found, which the next call says. Async-signal-safe.
  void Fail(absl::Status status) {
    if (failure_.ok()) failure_ = std::move(status);
  }
  bool has_failed() const { return !failure_.ok(); }

  // As the session's parts, with failures noted.
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
  // The signal of a record that gives memory back (CommandRecord::done).
  absl::StatusOr<uint64_t> GiveBack(const WaitFor& reason);
  // Until the pass that was entered has begun, for the host too: what follows is of it, for the daemon as well.
  absl::Status WaitPassBegun(const char* call, const std::string* group);
  // Until the step sent last is committed: what follows belongs to the next one.
  absl::Status WaitCommitted(const char* call, const std::string* group);

  // The program's CUDA stream, of this session and of those to come.
  absl::Status NameStream(void* stream);
  void ForgetStream();
  bool IsNamed(void* stream) const { return stream == stream_.value_or(nullptr); }

 private:
  absl::Status Establish(absl::Time deadline);
  absl::Status TryEstablish(absl::Time deadline);
  bool MayRetry(const absl::Status& status, bool again, absl::Duration waited) const;
  v1::OpenJobRequest OpenRequest() const;
  void Adopt(const v1::AttachRankResponse& attach, std::unique_ptr<ClientSession> session);

  AttachOptions options_;  // its spec is the plan's, once there is one
  Interrupt interrupt_;
  RankPlan plan_;
  absl::optional<void*> stream_;
  bool attached_before_ = false;
  // Of the current session.
  Target target_;
  bool created_ = false;
  std::string device_;
  uint64_t epoch_ = 0;
  StepLedger ledger_;
  absl::Status failure_;
  std::unique_ptr<ClientSession> session_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_ATTACHMENT_H_
