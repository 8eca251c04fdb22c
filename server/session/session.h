#ifndef SHARDD_SERVER_SESSION_SESSION_H_
#define SHARDD_SERVER_SESSION_SESSION_H_

// The lease of one rank in one epoch: its memory, its page, its stream. A new epoch makes new ones, so nothing that a
// dying process or its forked children still write can reach a later epoch.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/handle/handle.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/fd_channel.h"
#include "common/shm/slab.h"
#include "common/versions/versions.h"
#include "server/device/slab_place.h"
#include "server/session/command_decoder.h"
#include "server/session/command_ring.h"
#include "server/session/rank_command.h"
#include "server/session/session_words.h"
#include "server/session/trace_records.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

class CoreLoop;
class DeviceSlab;
class SessionStream;
class SumChannel;

// What outlives the session for as long as device work reads it.
struct SessionMemory {
  // A client that keeps its mapping or a descriptor keeps no memory.
  ~SessionMemory() {
    if (memory != nullptr) {
      memory->Discard();
    }
  }
  std::unique_ptr<Slab> memory;  // the client writes: page, ring, masks, payload, gradient slots on the host
  // Gradient slots on a device; null: there are none. Shared with the collective, which may have to keep them longer.
  std::shared_ptr<DeviceSlab> slots;
  // Gradient slots on the host that the client maps apart; neither: they are in `memory`.
  std::shared_ptr<Slab> host_slots;
  std::unique_ptr<Slab> daemon_page;  // the daemon writes
};

// Loop-confined, but for Create.
class Session {
 public:
  // Allocates and populates; blocks (about 1 s per GiB). Any thread.
  // `place`: where the rank's gradient slots lie, the devices that add them among its users. `host_slots`: where they
  // lie apart on the host (RankSlots); null: they are on devices, or in the session's memory. REQUIRES: this build
  // speaks `protocol_version`.
  static absl::StatusOr<std::unique_ptr<Session>> Create(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank,
                                                         uint64_t epoch, const SlabPlace& place = {},
                                                         std::shared_ptr<Slab> host_slots = nullptr,
                                                         int protocol_version = kProtocolVersions.newest);

  uint64_t id() const { return id_; }
  int rank() const { return rank_; }
  uint64_t epoch() const { return epoch_; }
  const std::string& token() const { return token_; }
  // Of all that it and its client exchange.
  int protocol_version() const { return words_.protocol_version(); }
  const std::shared_ptr<SessionMemory>& memory() const { return memory_; }
  const SessionLayout& layout() const { return layout_; }
  int doorbell() const { return doorbell_.get(); }
  char* slot(int group) const;  // start of the group's gradient slot
  // What its client is told to add; null: nothing, the daemon's devices add.
  const std::shared_ptr<SumChannel>& sums() const { return sums_; }

  // The words of its pages.
  SessionWords& words() { return words_; }
  const SessionWords& words() const { return words_; }
  const CommandRing& ring() const { return ring_; }
  TraceRecords& trace() { return trace_; }

  // As CommandRing; NOT_FOUND, and no commands, also while it is held or broken, or if its words are told.
  absl::StatusOr<RankCommand> NextFromRing();
  bool HasCommands() const { return MayReadRing() && ring_.HasCommands(); }
  // Of a command from the ring, or from the stream of a client whose words are told.
  void PublishConsumed();
  // From here on the client is told by its stream what its words say, first that the parameters have `version`, and its
  // commands come by the stream alone. No-op if it is so already. FAILED_PRECONDITION: it has sent commands, or is to
  // add gradients, which it would hear of in its page. REQUIRES: the stream has said hello; `loop` outlives this.
  absl::Status TellWords(CoreLoop* loop, uint64_t version);
  const char* Staging(int64_t offset_bytes, int64_t size_bytes) const {
    return ring_.Staging(offset_bytes, size_bytes);
  }
  // The same checks for a command that came by the stream.
  absl::StatusOr<RankCommand> Decode(const v1::Command& command) const { return decoder_.Decode(command); }
  // Lets every waiter go: all words move to `epoch`.
  void Poison(uint64_t epoch);
  // What the client asked for last, with the group's name; empty: nothing yet. Kept as it came, because few ask and
  // every command is one.
  std::string last_command() const;
  // `what`: a literal. `group`: -1 where it names none.
  void SetLastCommand(absl::string_view what, int group = -1) { last_command_ = {what, group}; }

  // State kept here because it dies with the session.
  std::vector<Handle> handles;            // by group
  std::shared_ptr<SessionStream> stream;  // null until hello
  PeerCredentials peer;
  UniqueFd pidfd;
  uint64_t start_ticks = 0;  // of its process (ProcessStat); 0: not known
  absl::Time last_command_time = absl::InfinitePast();
  bool broken = false;  // it did what it must not while a commit was under way: nothing is read from it any more
  uint64_t expected_version = 0;  // AttachRankRequest
  bool lost = false;              // its process or stream has ended
  bool gave_up = false;           // its last command that began anything was given up (AbandonBackward)
  // Its last command waits for a copy off the loop: nothing is read from it until JobCore::Release.
  bool held = false;
  bool consumes_when_released = false;               // that command lies in the ring
  std::vector<std::function<void()>> when_released;  // posted to the loop then, or when the session ends
  std::string told_waiting_for;                      // what the client knows of it
  uint64_t commands = 0;
  uint64_t departures = 0;

 private:
  bool MayReadRing() const { return !broken && !held && words_.told() == nullptr; }
  Session(std::shared_ptr<const ShardPlan> plan, uint64_t id, int rank, uint64_t epoch, std::string token,
          int protocol_version, SessionLayout layout, std::shared_ptr<SessionMemory> memory, UniqueFd doorbell);

  const std::shared_ptr<const ShardPlan> plan_;
  const uint64_t id_;
  const int rank_;
  const uint64_t epoch_;
  const std::string token_;
  const SessionLayout layout_;
  const std::shared_ptr<SessionMemory> memory_;
  const UniqueFd doorbell_;
  const std::shared_ptr<SumChannel> sums_;
  const CommandDecoder decoder_;
  SessionWords words_;
  CommandRing ring_;
  TraceRecords trace_;
  struct LastCommand {
    absl::string_view what;
    int group = -1;
  };
  LastCommand last_command_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_SESSION_H_
