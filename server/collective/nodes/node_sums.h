#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUMS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUMS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/collective.h"
#include "server/collective/local/fan_out.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/nodes/node_sum_ops.h"

namespace shardd {

class Device;

// A node's unfinished sums (NodeCollective). Thread-safe. Whoever changes a sum's state calls Advance, which takes
// every step that is possible.
class NodeSums final : public std::enable_shared_from_this<NodeSums> {
 public:
  using Done = Collective::Done;

  NodeSums(std::vector<Device*> devices, NodeExchange* exchange, std::vector<char*> staging, int64_t slot_bytes)
      : devices_(std::move(devices)),
        staging_(std::move(staging)),
        slot_bytes_(slot_bytes),
        local_(devices_),
        exchange_(exchange) {}

  LocalCollective& local() { return local_; }
  void Enter(ReduceScatterRequest request, Done done) ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);
  // After this the exchange is not called any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class State {
    kWaiting,  // waits for a slot
    kAdding,   // devices add this node's sources into its slot
    kAdded,    // waits to be exchanged after the sums before it
    kExchanging,
    kExchanged,  // waits to be written after the sums before it
    kWriting,    // devices write gradient shards; nothing ends it any more
  };
  // mutex_ guards state and status; the other fields belong to the thread that advances this sum.
  struct Sum {
    ReduceScatterRequest request;
    Done done;
    State state = State::kWaiting;
    int slot = -1;
    NodeSumOps ops;       // from kAdding on; each part until it is submitted
    absl::Status status;  // its first error
    uint64_t generation() const { return request.nodes->generation; }
  };
  using SumPtr = std::shared_ptr<Sum>;
  using Step = std::function<void()>;

  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  // The next step, to be run without the lock; null: none.
  Step NextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `before`: the earliest state among the sums before it in its generation.
  Step StepOfLocked(const SumPtr& sum, State before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RefusalLocked(const ReduceScatterRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The reason why the sum cannot continue, or OK.
  absl::Status EndOfLocked(const Sum& sum) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveLocked(const SumPtr& sum) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Steps and their completions.
  void Add(const SumPtr& sum) ABSL_LOCKS_EXCLUDED(mutex_);
  void Exchange(const SumPtr& sum, NodeExchange* exchange, uint64_t sequence) ABSL_LOCKS_EXCLUDED(mutex_);
  void Write(const SumPtr& sum) ABSL_LOCKS_EXCLUDED(mutex_);
  void Reached(const SumPtr& sum, State state, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Written(const SumPtr& sum, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteErrorLocked(Sum& sum, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<DevicePart> PartsOf(std::vector<std::vector<DeviceOp>> by_rank) const;
  // Runs on a thread of a device, like every other `done`.
  void End(Done done, std::string label, absl::Status status);

  // Constant after construction.
  const std::vector<Device*> devices_;
  const std::vector<char*> staging_;
  const int64_t slot_bytes_;

  // Synchronises itself.
  LocalCollective local_;

  absl::Mutex mutex_;
  NodeExchange* exchange_ ABSL_GUARDED_BY(mutex_);  // called without the lock, by the advancing thread
  bool is_advancing_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool tells_generation_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<uint64_t> generation_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_exchanged_ ABSL_GUARDED_BY(mutex_) = 0;  // the same, without sums that are not exchanged
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);          // the generation's first error
  std::array<bool, kNodeSlots> is_taken_ ABSL_GUARDED_BY(mutex_) = {};
  std::deque<SumPtr> sums_ ABSL_GUARDED_BY(mutex_);  // in the order of requests
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUMS_H_
