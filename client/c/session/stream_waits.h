#ifndef SHARDD_CLIENT_C_SESSION_STREAM_WAITS_H_
#define SHARDD_CLIENT_C_SESSION_STREAM_WAITS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/c/daemon/connect.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/gpu/trainer_sums.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"
#include "client/c/session/word_waits.h"

namespace shardd {

// Lets the program's CUDA stream wait and signal in place of the host. Owns the order by that stream (stream_order.h)
// and the trainer sums (trainer_sums.h); both use the session's memory. Thread-compatible.
class StreamWaits {
 public:
  // All outlive this.
  StreamWaits(SessionLife& life, SessionMemory& memory, WordWaits& waits)
      : life_(life), memory_(memory), waits_(waits) {}

  // REQUIRES: the memory lies on a GPU.
  absl::Status Use(void* stream);
  void Forget() {
    by_stream_ = false;
    if (order_ != nullptr) order_->Forget();
  }
  // Starts this rank's trainer sums. `id` and `token` are the session's.
  absl::Status StartSums(const Target& target, uint64_t id, const std::string& token, int protocol_version,
                         const ShardPlan& plan);

  // True if the stream waits in place of the host.
  bool ordered() const { return by_stream_ && !waits_on_host_ && order_->by_stream(); }
  // While set, the host waits all the same: during a graph's launch nothing else can be enqueued into the stream.
  void set_waits_on_host(bool waits_on_host) { waits_on_host_ = waits_on_host; }
  // REQUIRES: Use was called.
  StreamOrder* order() { return order_.get(); }
  // Returns why ordered() is false after Use.
  absl::Status fallback() const { return order_ == nullptr ? absl::OkStatus() : order_->fallback(); }

  // Waits like WordWaits::Wait, for memory that only kernels read: if ordered(), the stream waits, and the host only
  // while too many waits are outstanding. REQUIRES: nothing that a rank does can delay the word any more.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  // With trainer sums, the host waits for the sums of so many backwards before the stream waits for anything later: in
  // a GPU queue that both share, the sum would stand behind the stream's wait.
  void NeedSums(uint64_t backwards) { needs_sums_ = sums_ == nullptr ? 0 : backwards; }
  // Returns CommandRecord::done for a record that gives back what the stream's work so far uses; 0 without a stream, or
  // if the host has waited for it. It can fail: call it before the record changes anything.
  absl::StatusOr<uint64_t> SignalDone(const WaitFor& reason);
  // Waits until the stream has run all that it was given; returns false after `limit`. `release` ends its waits,
  // because the session is over.
  bool Drain(bool release, absl::Duration limit) {
    return order_ == nullptr || order_->Drain(release, limit, [this] { return life_.interrupt().Raised(); });
  }

  // True if no stream of a GPU can still use the session's memory.
  bool idle() const { return order_ == nullptr && sums_ == nullptr; }
  // Ends the order and the sums within twice `limit`. Afterwards idle() tells whether streams still use the memory.
  void End(absl::Duration limit);
  struct Named {
    std::unique_ptr<StreamOrder> order;
    std::unique_ptr<TrainerSums> sums;
  };
  Named Release() { return {std::move(order_), std::move(sums_)}; }

 private:
  SessionLife& life_;
  SessionMemory& memory_;
  WordWaits& waits_;
  std::unique_ptr<StreamOrder> order_;  // null: no stream was named yet
  bool by_stream_ = false;
  bool waits_on_host_ = false;
  std::unique_ptr<TrainerSums> sums_;  // null: the daemon's devices add
  uint64_t needs_sums_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_STREAM_WAITS_H_
