#ifndef SHARDD_SERVER_SESSION_COMMAND_RING_H_
#define SHARDD_SERVER_SESSION_COMMAND_RING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "server/session/rank_command.h"

namespace shardd {

class CommandDecoder;

// The daemon's end of a session's command ring and of its staging area: reads what the client writes, each word once.
// Owns how far it has read. Loop-confined.
class CommandRing {
 public:
  // All outlive it, the memory behind the views too.
  CommandRing(const ShardPlan& plan, const SessionLayout& layout, const CommandDecoder& decoder, SessionMemoryView view,
              DaemonPageView page, int rank, uint64_t epoch)
      : plan_(plan), layout_(layout), decoder_(decoder), view_(view), page_(page), rank_(rank), epoch_(epoch) {}

  bool HasCommands() const;
  // Takes the next command out of the ring. NOT_FOUND: there is none. INVALID_ARGUMENT: malformed; the session is
  // broken.
  absl::StatusOr<RankCommand> Next();
  // The command is executed: its record, masks and staging bytes may be reused by the client.
  void PublishConsumed();
  // The staging area at `offset_bytes` of the session memory; nullptr unless `size_bytes` lie within it.
  const char* Staging(int64_t offset_bytes, int64_t size_bytes) const;

  // The client's device says when it has done with memory: a record came with `done`.
  bool stream_ordered() const { return stream_ordered_; }
  uint64_t last_done() const { return last_done_; }  // of its records

 private:
  const ShardPlan& plan_;
  const SessionLayout& layout_;
  const CommandDecoder& decoder_;
  const SessionMemoryView view_;
  const DaemonPageView page_;
  const int rank_;
  const uint64_t epoch_;
  uint64_t consumed_ = 0;  // the daemon never reads its own page back
  bool stream_ordered_ = false;
  uint64_t last_done_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_COMMAND_RING_H_
