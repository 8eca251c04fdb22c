#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_GATHER_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_GATHER_H_

// Gathers parameters in GPU memory by NCCL: GPU k of a node gets what the GPUs k of the other nodes hold, and copies it
// to the pool slots of this node that need it. NCCL needs one order on all nodes, which node 0 says:
//
//   needs a group --Pull--> node 0 --Pull with receivers--> all nodes: pack, move, unpack
//
// A node that cannot go on tells node 0, and node 0 tells all (Pull with a code): whoever waits for it then ends.
// An order says which nodes receive, each from the nodes of its row. The other nodes only send, without a slot for the
// group, so nodes may still need groups in any order. Those that have asked for the same group by then receive in one
// order.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"
#include "server/collective/nodes/nccl/rail_parts.h"
#include "server/collective/nodes/node_gather.h"

namespace shardd {

class PeerLinks;

// Thread-safe. One order at a time is under way on a node. What it brings stays in one of two slots of the staging, so
// that it crosses the network once for all pool slots of the node, and is copied from there while the next order is
// under way. Sends messages and runs callbacks on a thread of its own.
class NcclGather final : public NodeGather {
 public:
  struct Options {
    std::shared_ptr<const ShardPlan> plan;   // cut_over_nodes and POOLED
    int node = 0;                            // of all, where the plan has its place in a row
    PeerLinks* links = nullptr;              // of as many nodes
    std::shared_ptr<NcclExchange> exchange;  // with `moves`
    std::vector<Device*> devices;            // by local rank
    const char* source = nullptr;            // start of the slab that RailParts::PackOps reads; the devices reach it
    // By local rank, memory of its device: MemoryPlan::gather_staging, aligned to kRailAlignmentBytes.
    std::vector<char*> staging;
  };
  // Where a rank's staging has what the exchange greets other nodes with.
  static char* GreetingOf(const ShardPlan& plan, char* staging) {
    const GatherStaging& of = plan.memory.gather_staging;
    return staging + of.own_bytes + kGatherSlots * of.slot_bytes;
  }
  // Links, devices, source and staging must outlive this object.
  explicit NcclGather(Options options);
  // Aborts what is under way, of the exchange's sums too.
  ~NcclGather() override;

  void Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SetReadable(uint64_t version) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnUp(int node) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnPull(int node, const v1::PeerMessage& message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDown(int node, const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Overdue(absl::Time now, absl::Duration limit) const override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Describe() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int kSlots = kGatherSlots;
  struct Key {
    int group = 0;
    uint64_t version = 0;
    auto operator<=>(const Key&) const = default;
  };
  // One call of Gather.
  struct Call {
    Key key;
    char* image = nullptr;
    std::string label;
    Done done;
    absl::Time asked;
    bool copying = false;  // devices write to the image
    std::optional<absl::Status> ended;
  };
  using CallPtr = std::shared_ptr<Call>;
  // What the other nodes hold of one group.
  struct Slot {
    std::optional<Key> key;  // none: nothing is there
    bool filling = false;
    int readers = 0;  // copies under way
  };
  struct Order {
    uint64_t generation = 0;
    uint64_t sequence = 0;
    Key key;
    std::vector<int> receivers;
    int slot = -1;  // where it is brought; -1: this node does not receive
  };

  // These run on the object's thread, and return false if there was nothing to do. Those that call out release the
  // mutex meanwhile.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool FinishOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SendOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CopyOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AskOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool DecideOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // node 0
  bool BeginOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // On threads of devices.
  void Packed(const Order& order, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Moved(const Order& order, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Copied(const CallPtr& call, int slot, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<NodeMove> MovesOf(const Order& order) const;
  bool Sends(const Order& order) const;
  bool Holds(int group) const;  // this node, some of it
  bool Receives(const Order& order) const;
  void AdvanceLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Node 0, which tells all others.
  void TellLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status FailureOf(int node, const v1::PeerMessage::Pull& pull);
  // Node 0: no node is further than one version from another.
  bool CanExistLocked(uint64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const CallPtr& call, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCallLocked(uint64_t generation, const Key& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeLocked(int node, const v1::PeerMessage::Pull& pull) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsThere(const Key& key) const { return key.group >= 0 && key.group < groups_ && key.version > 0; }
  // Of a node of any row.
  const RailParts& Part(int group, int node, int rank) const {
    return parts_[static_cast<size_t>((group * row_nodes_ + node % row_nodes_) * ranks_ + rank)];
  }
  bool IsInRow(int node) const { return node / row_nodes_ == node_ / row_nodes_; }
  // Where the part of `node`, another one of the row, begins in a slot of the rank.
  char* At(int rank, int slot, int group, int node) const;
  std::string NameOf(int group) const { return options_.plan->groups[static_cast<size_t>(group)].name; }

  // Constant after construction.
  const Options options_;
  const int node_, nodes_, row_nodes_, ranks_, groups_;
  std::vector<RailParts> parts_;  // by group, place in a row, and rank
  int64_t own_bytes_ = 0;         // of the staging, what this node sends; then slots of
  int64_t slot_bytes_ = 0;
  std::thread thread_;

  mutable absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::Status> failed_ ABSL_GUARDED_BY(mutex_);  // of the generation
  uint64_t readable_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_readable_ ABSL_GUARDED_BY(mutex_) = 0;  // the last one that was not 0
  std::vector<bool> up_ ABSL_GUARDED_BY(mutex_);        // by node
  bool touched_ ABSL_GUARDED_BY(mutex_) = false;        // the generation has had traffic
  std::deque<CallPtr> calls_ ABSL_GUARDED_BY(mutex_);
  std::set<Key> asked_ ABSL_GUARDED_BY(mutex_);  // of node 0, which has not said when
  std::deque<std::pair<int, v1::PeerMessage>> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<int, Key>> asks_ ABSL_GUARDED_BY(mutex_);  // node 0: of all nodes, its own included
  std::deque<Order> orders_ ABSL_GUARDED_BY(mutex_);              // not begun yet
  uint64_t next_order_ ABSL_GUARDED_BY(mutex_) = 0;               // sequence of the next one to come
  std::array<Slot, kSlots> slots_ ABSL_GUARDED_BY(mutex_);
  int last_slot_ ABSL_GUARDED_BY(mutex_) = 0;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;     // orders of any generation whose bytes may still move
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // one is being packed
  int copies_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t received_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_GATHER_H_
