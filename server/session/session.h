#ifndef SHARDD_SERVER_SESSION_SESSION_H_
#define SHARDD_SERVER_SESSION_SESSION_H_

// The lease of one rank in one epoch: its memory, its page, its stream. A new epoch makes new ones, so nothing that a
// dying process or its forked children still write can reach a later epoch.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/handle/handle.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/fd_channel.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "server/collective/trainers/sum_channel.h"
#include "server/device/device_memory.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// The daemon's end of a session stream. Thread-safe; after Finish or when the client is gone Send is a no-op.
class SessionStream {
 public:
  virtual ~SessionStream() = default;
  virtual void Send(v1::SessionEvent event) = 0;
  virtual void Finish(absl::Status status) = 0;
};

// A command after decoding, whether it came by ring or by stream. Plain; nothing in it points into client memory.
struct RankCommand {
  Opcode opcode = Opcode::kInvalid;
  uint32_t flags = 0;
  int32_t group = 0;
  int64_t arg0 = 0;
  int64_t arg1 = 0;
  int64_t arg2 = 0;
  std::vector<bool> present;  // SubmitGradients; by index_in_group
  std::vector<bool> fresh;
  v1::Step step;              // Step
  std::string trainer_state;  // EnterPass
  uint64_t done = 0;          // CommandRecord::done
};

// What outlives the session for as long as device work reads it.
struct SessionMemory {
  // A client that keeps its mapping or a descriptor keeps no memory.
  ~SessionMemory() {
    if (memory != nullptr) {
      memory->Discard();
    }
  }
  std::unique_ptr<Slab> memory;  // the client writes: page, ring, masks, payload, gradient slots on the host
  // Gradient slots on a device; null: in `memory`, or there are none. Shared with the collective, which may have to
  // keep them longer.
  std::shared_ptr<DeviceSlab> slots;
  std::unique_ptr<Slab> daemon_page;  // the daemon writes
};

// Loop-confined, but for Create.
class Session {
 public:
  // Allocates and populates; blocks (about 1 s per GiB). Any thread.
  // `place`: where the rank's gradient slots lie, the devices that add them among its users.
  static absl::StatusOr<std::unique_ptr<Session>> Create(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank,
                                                         uint64_t epoch, const SlabPlace& place = {});

  uint64_t id() const { return id_; }
  int rank() const { return rank_; }
  uint64_t epoch() const { return epoch_; }
  const std::string& token() const { return token_; }
  const std::shared_ptr<SessionMemory>& memory() const { return memory_; }
  const SessionLayout& layout() const { return layout_; }
  int doorbell() const { return doorbell_.get(); }
  char* slot(int group) const;  // start of the group's gradient slot
  // What its client is told to add; null: nothing, the daemon's devices add.
  const std::shared_ptr<SumChannel>& sums() const { return sums_; }

  // Takes the next command out of the ring. NOT_FOUND: none, or held. INVALID_ARGUMENT: malformed; the session is
  // broken.
  absl::StatusOr<RankCommand> NextFromRing();
  // The command is executed: its record, masks and staging bytes may be reused by the client.
  void PublishConsumed();
  bool HasCommands() const;
  // The client's device has come to signal `done` (CommandRecord::done). 0: always.
  bool HasDone(uint64_t done) const;
  // The same checks for a command that came by the stream.
  absl::StatusOr<RankCommand> Decode(const v1::Command& command) const;
  // The staging area at `offset_bytes` of the session memory; nullptr unless `size_bytes` lie within it.
  const char* Staging(int64_t offset_bytes, int64_t size_bytes) const;

  // The client measures its calls, or not.
  void SetTracing(bool tracing);
  // Appends the next records that it has measured, at most `most`, as the client wrote them. False: it broke the ring's
  // rules, and nothing is taken from it any more.
  bool TakeTrace(size_t most, std::vector<TraceRecord>* out);
  // Passes over all that lies there; returns how many records that is.
  uint64_t DropTrace();

  // Words of the daemon's page.
  void PublishVersion(uint64_t version);
  void PublishSlotIssued(int slot);
  void PublishSlotReleased(int slot);
  // POOLED: the client waits for as many as it has asked for, so requests are counted (`asked`), not publications.
  // Where the group will lie, and that it is under way. Then, when it is there, as often as was asked for by then.
  void PublishUnshardIssued(int group, uint64_t asked, int64_t pool_offset_bytes);
  void PublishUnsharded(int group, uint64_t asked);
  void PublishFullParams();
  uint64_t next_full_params() const { return full_params_ + 1; }
  void PublishPass();
  void PublishPassIssued();  // before it, with pass_copies
  void PublishWindow();
  // Inside its pass, and reads nothing for now.
  bool pass_paused() const;
  // Ends the pass of a client that has paused in it. False: it reads again.
  bool Overtake();
  // This rank has closed one more backward; a step that is committed ends the counting of `closed` from 0.
  void CountBackward() { ++backwards_; }
  void EndStepBackwards();
  // `closed` backwards of the running step are closed by all ranks and reduced; those that this rank has closed count.
  void PublishReduced(int closed);
  // The same when all that they add up is with devices.
  void PublishReducing(int closed);
  void SetAwake(bool awake);
  // Lets every waiter go: all words move to `epoch`.
  void Poison(uint64_t epoch);

  // State kept here because it dies with the session.
  std::vector<Handle> handles;            // by group
  std::shared_ptr<SessionStream> stream;  // null until hello
  PeerCredentials peer;
  UniqueFd pidfd;
  uint64_t start_ticks = 0;  // of its process (ProcessStat); 0: not known
  absl::Time last_command_time = absl::InfinitePast();
  absl::Time last_progress_time = absl::InfinitePast();  // it was let go from a wait: its own time starts again
  bool broken = false;  // it did what it must not while a commit was under way: nothing is read from it any more
  uint64_t expected_version = 0;  // AttachRankRequest
  bool lost = false;              // its process or stream has ended
  bool gave_up = false;           // its last command that began anything was given up (AbandonBackward)
  // Its last command waits for a copy off the loop: nothing is read from it until JobCore::Release.
  bool held = false;
  bool consumes_when_released = false;               // that command lies in the ring
  std::vector<std::function<void()>> when_released;  // posted to the loop then, or when the session ends
  std::string last_command;
  std::string told_waiting_for;  // what the client knows of it
  bool stream_ordered = false;   // its device says when it has done with memory: a record came with `done`
  uint64_t last_done = 0;        // of its records
  uint64_t commands = 0;
  uint64_t departures = 0;

 private:
  Session() = default;
  // Records that were written; breaks the trace where that cannot be.
  std::optional<uint64_t> TraceWritten();
  // INVALID_ARGUMENT: `bytes` are no Step, or one with more fields than this job's can have.
  absl::Status ParseStep(absl::string_view bytes, v1::Step* step) const;
  int64_t MostOptimizerGroups() const;
  int64_t MostFieldsOfAStep() const;
  uint64_t CountClosed(int closed) const;
  const std::atomic<uint32_t>* waiting() const { return &view_.page().waiting; }

  std::shared_ptr<const ShardPlan> plan_;
  uint64_t id_ = 0;
  int rank_ = 0;
  uint64_t epoch_ = 0;
  std::string token_;
  SessionLayout layout_;
  std::shared_ptr<SessionMemory> memory_;
  std::shared_ptr<SumChannel> sums_;
  UniqueFd doorbell_;
  SessionMemoryView view_;
  DaemonPageView page_;
  // The daemon never reads its own page back.
  uint64_t consumed_ = 0;
  uint64_t trace_taken_ = 0;
  bool trace_broken_ = false;
  uint64_t full_params_ = 0;
  uint64_t passes_ = 0;
  uint64_t passes_issued_ = 0;
  uint64_t windows_ = 0;
  uint64_t backwards_ = 0;              // closed
  uint64_t backwards_before_step_ = 0;  // of them, in earlier steps
  uint64_t reduced_ = 0;
  uint64_t reducing_ = 0;
  std::vector<uint64_t> released_;  // by slot
  std::vector<uint64_t> issued_;    // by slot
};

absl::string_view OpcodeName(Opcode opcode);

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_SESSION_H_
