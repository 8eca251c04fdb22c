#ifndef SHARDD_CLIENT_C_SESSION_SESSION_LIFE_H_
#define SHARDD_CLIENT_C_SESSION_SESSION_LIFE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/host/interrupt.h"
#include "client/c/session/client_stream.h"
#include "client/c/session/session_memory.h"

namespace shardd {

// Knows whether a session lives, and why it ended. Owns the stream that is the lease. Thread-compatible; Ended is
// thread-safe.
class SessionLife {
 public:
  // `interrupt` and `memory` outlive this.
  SessionLife(uint64_t epoch, int rank, const Interrupt& interrupt, const SessionMemory& memory)
      : epoch_(epoch), rank_(rank), interrupt_(interrupt), memory_(memory) {}

  // Opens the stream and waits until the session is live, at most until `deadline`.
  // `outlives_daemon`: as ClientStream::Open.
  absl::Status Open(const std::shared_ptr<grpc::Channel>& channel, uint64_t session_id, const std::string& token,
                    Deadline deadline, bool outlives_daemon);
  // Returns why the stream has ended if that arrives soon, else `status`, with which a call beside it has failed.
  absl::Status Explain(const absl::Status& status);

  uint64_t epoch() const { return epoch_; }
  int rank() const { return rank_; }
  ClientStream& stream() const { return *stream_; }

  // True if the stream has ended or the epoch has advanced. Costs two loads.
  bool Ended() const {
    return stream_->over() || TimelineEpoch(memory_.page().epoch.load(std::memory_order_acquire)) > epoch_;
  }
  // True if Ended, or if a wait of the GPU took too long.
  bool Over() const { return (order_ != nullptr && order_->has_expired()) || Ended(); }
  // Returns OK while the session lives, else Failure().
  absl::Status Live() { return Over() ? Failure() : absl::OkStatus(); }
  // Returns why the session is over; waits up to 1 s for the explanation to arrive. REQUIRES: Over().
  absl::Status Failure();

  // Tells whether the host wants a wait to end.
  const Interrupt& interrupt() const { return interrupt_; }
  // Sets the order whose expired waits end the session; null for none.
  void set_order(const StreamOrder* order) { order_ = order; }

 private:
  const uint64_t epoch_;
  const int rank_;
  const Interrupt& interrupt_;
  const SessionMemory& memory_;
  const StreamOrder* order_ = nullptr;
  std::unique_ptr<ClientStream> stream_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_SESSION_LIFE_H_
