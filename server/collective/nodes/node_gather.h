#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_

// Parameters that are cut over nodes (common/plan/node_part.h), brought to where they are needed. One-sided: who needs
// a group asks each other node for what that holds of it, and is sent it as it is to lie in the pool. There is no
// common order and nothing is done together: a node answers whenever its version is the one that is asked for.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/collective/nodes/gather_parts.h"
#include "server/peer/peer_links.h"

namespace shardd {

// Thread-safe. Casts, sends and tells on a thread of its own.
class NodeGather {
 public:
  using Done = std::function<void(absl::Status)>;
  // `shards`: start of slab "shards", memory of the host, of which this node's own ranges are read, and of those only
  // what is asked for, between SetReadable of a version and of the next. Takes at most 4 MiB for each other node, for
  // what is on its way to it.
  // REQUIRES: plan->cut_over_nodes and POOLED; links of as many nodes; links and shards outlive it.
  NodeGather(std::shared_ptr<const ShardPlan> plan, PeerLinks* links, const char* shards);
  // REQUIRES: no event comes any more. Waits for bytes that links have been given: for a node that has stopped, until
  // its link is lost. Every `done` has run when it returns.
  ~NodeGather();

  // What the other nodes hold of the group, at `version` (from 1), into `image`: the group's in a pool slot, of this
  // node's ranges nothing. `done` runs once, not within the call, on the thread that sends to others, so it is to
  // return soon. When it runs nothing touches the image any more. ABORTED: the generation was ended. UNAVAILABLE: a
  // node is gone. FAILED_PRECONDITION: a node has a later version. INVALID_ARGUMENT: the call cannot be, or a node has
  // sent what was not asked for. Where a node has failed, with what that has failed with.
  // REQUIRES: at most twice as many at a time as there are groups; more are refused by the others.
  void Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // What the slab holds from now on; 0: nothing that anybody may read, as it is about to be written. Returns when no
  // piece of what it held is being read, within a millisecond. What is asked for of a later version waits for it; of
  // an earlier one it is refused.
  void SetReadable(uint64_t version) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends what is of earlier generations, asked for and to be sent, and refuses it from now on.
  void Begin(uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);

  // PeerLinks::Events. What is of a newer generation than Begin has named ends older ones as Begin does; what is of an
  // older one is dropped. Data that was not asked for, and a lost link of which something of this generation has come
  // or was asked, end the generation here: what others ask for is refused, until the next one begins.
  void OnUp(int node) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnPull(int node, const v1::PeerMessage& message) ABSL_LOCKS_EXCLUDED(mutex_);  // message.pull() is there
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDown(int node, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // A node that was asked longer ago than `limit` (of CLOCK_MONOTONIC, as MonotonicNow) and has sent nothing since:
  // "node 1 has not sent ...", with group and version; empty: there is none.
  std::string Overdue(absl::Time now, absl::Duration limit) const ABSL_LOCKS_EXCLUDED(mutex_);
  // What status says: how much was gathered and is under way.
  std::string Describe() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // One call of Gather, under the mutex but for what is constant and the image.
  struct Call {
    const int group;
    const uint64_t version;
    char* const image;
    const std::string label;
    Done done;
    int waiting = 0;  // for so many nodes
    int users = 0;    // who write to the image now
    std::optional<absl::Status> ended = std::nullopt;
  };
  using CallPtr = std::shared_ptr<Call>;
  // What one node was asked for. Stays until all of it has come: also where its call has ended without it, as by a
  // refusal, which may overtake what was sent before.
  struct Transfer {
    CallPtr call;
    int node = 0;
    absl::Time asked;
    int64_t received = 0;
  };
  using TransferPtr = std::shared_ptr<Transfer>;
  // What another node has asked for.
  struct Offer {
    v1::PeerMessage::Pull pull;
    int64_t sent = 0;  // given to the links
  };
  struct Peer {
    bool up = false;
    bool touched = false;                     // something of this generation has come from it or was asked of it
    absl::Time heard = absl::InfinitePast();  // data of it
    std::deque<Offer> offers;
    std::deque<v1::PeerMessage::Pull> refusals;  // to be sent
    int unsent = 0;                              // pieces that links have been given
  };

  // node_gather.cc
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool FinishOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // drops the mutex for it; false: there was none
  void AdvanceLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndCallsLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const CallPtr& call, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCallLocked(uint64_t generation, int group, uint64_t version) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  const GatherParts& Parts(int group, int node) const { return parts_[static_cast<size_t>(group * nodes_ + node)]; }
  static absl::Time Now();  // of CLOCK_MONOTONIC
  int groups() const { return static_cast<int>(plan_->groups.size()); }

  // gather_receive.cc: what was asked for.
  absl::Status ReceiveLocked(int node, const v1::PeerData& header, absl::string_view elements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RefusedLocked(int node, const v1::PeerMessage::Pull& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // gather_send.cc: what others ask for.
  absl::Status OfferLocked(int node, const v1::PeerMessage::Pull& pull) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLocked(Peer& peer, const v1::PeerMessage::Pull& pull, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RefuseOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // as FinishOne
  bool SendOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);    // likewise

  // Constant after construction.
  const std::shared_ptr<const ShardPlan> plan_;
  PeerLinks* const links_;
  const char* const shards_;
  const int node_;
  const int nodes_;
  std::vector<GatherParts> parts_;  // by group and node
  size_t max_offers_ = 0;           // of one node
  std::thread thread_;

  mutable absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_transfer_ ABSL_GUARDED_BY(mutex_) = 1;  // of any generation
  std::map<uint64_t, TransferPtr> transfers_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallPtr> ended_ ABSL_GUARDED_BY(mutex_);  // to be told when nobody writes to the image any more
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);
  size_t next_peer_ ABSL_GUARDED_BY(mutex_) = 0;  // nodes are sent to in turn
  uint64_t readable_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;                          // a piece, of readable_
  std::vector<std::unique_ptr<char[]>> buffers_ ABSL_GUARDED_BY(mutex_);  // free ones, each for a piece
  int64_t received_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::Status> failed_ ABSL_GUARDED_BY(mutex_);  // of the generation
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_
