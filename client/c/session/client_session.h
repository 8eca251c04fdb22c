#ifndef SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_
#define SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/c/daemon/connect.h"
#include "client/c/host/interrupt.h"
#include "client/c/session/command_ring.h"
#include "client/c/session/control.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"
#include "client/c/session/stream_waits.h"
#include "client/c/session/trace_writer.h"
#include "client/c/session/word_waits.h"
#include "common/plan/plan.h"

namespace shardd {

// One rank's session in one epoch. It composes mapped memory, the stream that is the lease, waits of the host and of
// the program's stream, and the producer's ends of the rings; it knows nothing of groups and steps. Thread-compatible.
// Destroying it cancels the stream and unmaps everything that no stream of a GPU can still use.
//
// A call on the hot path: life().Live() (two loads), ring().Send() (a record, a store; sometimes an eventfd write),
// waits().Reached() (a load). Where client and daemon share no words, Send makes a message, which another thread
// writes, and what a wait loads is memory of this process, which the stream's reader stores into.
class ClientSession {
 public:
  ~ClientSession();
  struct Options {
    const ShardPlan* plan = nullptr;
    int rank = 0;
    int protocol_version = 0;  // from OpenJob
    uint64_t job_id = 0;       // from OpenJob
    Control control = Control::kAny;
    absl::Duration timeout;                 // of every wait
    Deadline deadline = Deadline::Never();  // of Open
    const Interrupt* interrupt = nullptr;   // of all waits; outlives the session
  };
  // Opens the stream, waits for `attached`, fetches and maps the descriptors. ABORTED when the epoch advances
  // meanwhile.
  static absl::StatusOr<std::unique_ptr<ClientSession>> Open(const Target& target,
                                                             const std::shared_ptr<grpc::Channel>& channel,
                                                             const v1::AttachRankResponse& attach,
                                                             const Options& options);

  // Names the daemon and its job, for SessionMemory::GiveUpStoresBefore.
  static std::string JobName(const Target& target, uint64_t job_id);

  uint64_t id() const { return id_; }
  const std::string& token() const { return token_; }
  SessionMemory& memory() { return memory_; }
  SessionLife& life() { return life_; }
  WordWaits& waits() { return waits_; }
  CommandRing& ring() { return ring_; }
  TraceWriter& trace() { return trace_; }
  StreamWaits& stream_waits() { return stream_waits_; }
  // Cancels the stream; memory stays mapped.
  void Close() { life_.stream().Close(); }

 private:
  ClientSession(const v1::AttachRankResponse& attach, const Options& options);
  absl::Status ShareWords(std::vector<UniqueFd>& fds, const Target& target, const v1::AttachRankResponse& attach,
                          const Options& options);

  const uint64_t id_;
  const std::string token_;
  SessionMemory memory_;
  SessionLife life_;  // destroyed before memory_: its reader thread ends first
  WordWaits waits_;
  CommandRing ring_;
  TraceWriter trace_;
  StreamWaits stream_waits_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_CLIENT_SESSION_H_
