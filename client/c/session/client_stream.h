#ifndef SHARDD_CLIENT_C_SESSION_CLIENT_STREAM_H_
#define SHARDD_CLIENT_C_SESSION_CLIENT_STREAM_H_

// The gRPC stream of one session: the lease. Sends hello and detach; a thread reads events. Nothing of the hot path
// goes through it, unless the session shares no words with the daemon: then commands do, and what the words say.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "client/c/host/interrupt.h"
#include "client/c/session/stream_writer.h"
#include "client/c/session/told_words.h"
#include "common/clock/deadline.h"
#include "common/clock/timed_condition.h"
#include "grpcpp/channel.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {

// Thread-compatible (one caller); the reader thread is its own. Waits end with CANCELLED when they are interrupted.
// Destroying it cancels the stream: to the daemon the rank is lost unless Detach has succeeded.
class ClientStream {
 public:
  // Opens the stream, sends hello, starts the reader. Does not wait for the daemon. `outlives_daemon`: the end of the
  // daemon is no more than an abort, because the next one goes on with the job.
  static absl::StatusOr<std::unique_ptr<ClientStream>> Open(const std::shared_ptr<grpc::Channel>& channel,
                                                            uint64_t session_id, const std::string& token,
                                                            bool outlives_daemon = false);
  ~ClientStream();
  ClientStream(const ClientStream&) = delete;
  ClientStream& operator=(const ClientStream&) = delete;

  // Until the session is live. DEADLINE_EXCEEDED, or as EndStatus.
  absl::Status WaitAttached(Deadline deadline, const Interrupt& interrupt);

  // From here on the daemon tells what its words say, which the reader stores into `words`, whose memory outlives this,
  // and commands may be pushed. To be called once, before the session's first command.
  absl::Status TellWords(const ToldWords& words) ABSL_LOCKS_EXCLUDED(mutex_);
  // For the session's other calls, by its connection.
  v1::TrainerService::Stub* stub() { return stub_.get(); }
  // Null before TellWords.
  StreamWriter* writer() { return writer_.get(); }

  // One load: the session is over, or the stream has broken. Thread-safe.
  bool over() const { return over_.load(std::memory_order_acquire); }

  // Why it is over; OK while it is not. ABORTED with the event's text; NOT_FOUND when the job was closed; UNAVAILABLE
  // when the daemon is gone, and the job with it; what the daemon said when it refused the session. Waits until
  // `deadline` for the end to arrive.
  absl::Status EndStatus(Deadline deadline, const Interrupt& interrupt);
  absl::optional<v1::SessionEvent::Aborted> aborted();

  // For whom the daemon says that this rank waits; empty: for nobody.
  std::string waiting_for();

  // The event of step `step` or a later one, if it has come by `deadline`; nullopt also when the stream ends.
  absl::StatusOr<absl::optional<v1::SessionEvent::Committed>> WaitCommitted(int64_t step, int64_t parts,
                                                                            Deadline deadline,
                                                                            const Interrupt& interrupt);

  // The same for the event of the `number`th EnterFullParams, with gradients or writeback.
  absl::StatusOr<absl::optional<v1::SessionEvent::FullParams>> WaitFullParams(uint64_t number, Deadline deadline,
                                                                              const Interrupt& interrupt);

  // Says detach and waits for the answer. As EndStatus on failure.
  absl::Status Detach(bool finished, Deadline deadline, const Interrupt& interrupt);
  // Cancels and joins the reader. Idempotent. Does not wait for the daemon.
  void Close();

  // For the exit handler: cancels every live stream and waits a moment for their readers, so that no thread of ours
  // runs while static objects are destroyed.
  static void CancelAllAtExit();

 private:
  ClientStream() = default;
  static void* ReaderMain(void* self);
  void Read() ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(v1::SessionEvent* event) ABSL_LOCKS_EXCLUDED(mutex_);
  // Until `done`, which holds from some moment on, at most until `deadline`. CANCELLED: "<call>: interrupted".
  absl::Status Await(const std::function<bool()>& done, Deadline deadline, const Interrupt& interrupt, const char* call)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status EndStatusLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after Open.
  bool outlives_daemon_ = false;
  grpc::ClientContext context_;
  std::unique_ptr<v1::TrainerService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> stream_;
  pthread_t reader_ = 0;
  std::unique_ptr<StreamWriter> writer_;  // constant after TellWords
  // Self-synchronised.
  std::atomic<bool> over_{false};
  // Guarded.
  absl::Mutex mutex_;
  TimedCondition changed_;  // what is guarded, but for the words
  bool attached_ ABSL_GUARDED_BY(mutex_) = false;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_here_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<ToldWords> words_ ABSL_GUARDED_BY(mutex_);
  std::string waiting_for_ ABSL_GUARDED_BY(mutex_);
  absl::optional<v1::SessionEvent::Committed> committed_ ABSL_GUARDED_BY(mutex_);
  absl::optional<v1::SessionEvent::FullParams> full_params_ ABSL_GUARDED_BY(mutex_);
  absl::optional<v1::SessionEvent::Aborted> aborted_ ABSL_GUARDED_BY(mutex_);
  grpc::Status end_ ABSL_GUARDED_BY(mutex_);
  // Guarded by the mutex of the list of live streams: the exit handler joins too.
  bool joined_ = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_CLIENT_STREAM_H_
