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

// Waits and signals of the program's CUDA stream in place of the host's. Owns the order by that stream (stream_order.h)
// and the sums of gradients that this trainer makes (trainer_sums.h), which both name the session's memory.
// Thread-compatible.
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
  // Adds this rank's part of gradients from now on. `id` and `token` are the session's.
  absl::Status StartSums(const Target& target, uint64_t id, const std::string& token, const ShardPlan& plan);

  // Waits of that stream take the place of waits of the host.
  bool ordered() const { return by_stream_ && !waits_on_host_ && order_->by_stream(); }
  // The host waits all the same: in a graph's launch, in which its stream cannot be given anything.
  void set_waits_on_host(bool waits_on_host) { waits_on_host_ = waits_on_host; }
  // REQUIRES: Use was called.
  StreamOrder* order() { return order_.get(); }
  // Why not ordered(), where Use was called.
  absl::Status fallback() const { return order_ == nullptr ? absl::OkStatus() : order_->fallback(); }

  // As WordWaits::Wait, for what nothing but kernels looks at: where ordered(), the stream waits, and the host only
  // while too many waits are outstanding. REQUIRES: nothing that a rank does can hold it up any more.
  absl::Status Wait(const TimelineWord& word, uint64_t sequence, const WaitFor& reason);
  // Where trainers add, no stream waits for what comes behind the sums of so many backwards before those are there: in
  // a queue of the GPU that both share, the sum would stand behind the wait. The host waits for them.
  void NeedSums(uint64_t backwards) { needs_sums_ = sums_ == nullptr ? 0 : backwards; }
  // What to put into CommandRecord::done of a record that gives back what the stream's work so far uses. 0: no stream,
  // or the host has waited for it. Before the record changes anything: it can fail.
  absl::StatusOr<uint64_t> SignalDone(const WaitFor& reason);
  // All that the stream was given has run. `release`: the session is over, waits are ended.
  bool Drain(bool release, absl::Duration limit) {
    return order_ == nullptr || order_->Drain(release, limit, [this] { return life_.interrupt().Raised(); });
  }

  // Nothing of it is named by any stream.
  bool idle() const { return order_ == nullptr && sums_ == nullptr; }
  // Ends what there is, in at most twice `limit`; idle() then, or streams still name the rest.
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
