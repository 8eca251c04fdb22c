#ifndef SHARDD_CLIENT_C_SESSION_COMMAND_RING_H_
#define SHARDD_CLIENT_C_SESSION_COMMAND_RING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/c/session/session_memory.h"
#include "client/c/session/stream_writer.h"
#include "client/c/session/word_waits.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"

namespace shardd {

// The producer's end of a session's ring of commands. Owns how many records were written, and when the daemon was last
// known to be awake. In a session whose words are told each record goes by the stream, as a message; all else is as
// with the ring: as many records may be on their way, and `consumed` counts them. Thread-compatible.
class CommandRing {
 public:
  // `waits` and `memory` outlive this.
  CommandRing(uint64_t epoch, WordWaits& waits, const SessionMemory& memory)
      : epoch_(epoch), waits_(waits), memory_(memory) {}

  // Sends all records by this writer from here on, as commands of the plan. Both outlive this; none was sent before.
  void SendBy(StreamWriter* writer, const ShardPlan* plan);

  // Returns how many records were written, which is the number of the last one.
  uint64_t submitted() const { return submitted_; }
  uint64_t doorbells() const { return doorbells_; }  // rung so far

  // Waits until so many records fit. Commands call it before they change anything, because a wait can fail.
  absl::Status WaitSpace(uint64_t records, const WaitFor& reason);
  // Writes a record, and wakes the daemon if it must `act` on it. Waits only while the ring is full.
  absl::Status Send(const CommandRecord& command, bool act, const WaitFor& reason);
  // Wakes the daemon if it sleeps, for earlier records that needed no action.
  void Wake();
  // Waits until the daemon has copied record `number` (1 is the first) with its masks and payload.
  absl::Status WaitConsumed(uint64_t number, const WaitFor& reason);

 private:
  void RingDoorbell();
  void Publish(const CommandRecord& command, bool wake);

  const uint64_t epoch_;
  WordWaits& waits_;
  const SessionMemory& memory_;
  StreamWriter* writer_ = nullptr;  // null: records go by the ring
  const ShardPlan* plan_ = nullptr;
  SessionLayout layout_;
  uint64_t submitted_ = 0;
  uint64_t consumed_seen_ = 0;  // a lower bound of what the daemon has consumed
  uint64_t rung_at_ = 0;        // `submitted_` when the daemon was last known to be awake
  uint64_t doorbells_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_COMMAND_RING_H_
