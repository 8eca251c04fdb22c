#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_GATHER_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_GATHER_H_

// Gathers parameters in host memory by the daemons' own connections. One-sided: a node that needs a group pulls the
// part of each other node of its row (common/plan/node_part.h), which arrives as it must lie in the pool. There is no
// common order and nothing is done together: a node answers when it has the requested version.

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
#include "common/clock/monotonic_now.h"
#include "common/plan/plan.h"
#include "server/collective/nodes/links/gather_parts.h"
#include "server/collective/nodes/node_gather.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class PeerLinks;

// Thread-safe. Casts, sends and runs callbacks on a thread of its own.
class PeerGather final : public NodeGather {
 public:
  // `source`: start of slab "shards" in host memory, or as GatherParts::CopyOut. Reads only this node's own ranges
  // there, only for pulls, and only between SetReadable of a version and of the next. Allocates at most 4 MiB per other
  // node for data in flight. REQUIRES: plan->cut_over_nodes and POOLED; as many nodes in `links`; links and source must
  // outlive this object.
  PeerGather(std::shared_ptr<const ShardPlan> plan, PeerLinks* links, const char* source);
  // Waits for bytes that links still use: for a node that has stopped, until its link is lost.
  ~PeerGather() override;

  // `done` runs on the sending thread.
  void Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SetReadable(uint64_t version) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) override ABSL_LOCKS_EXCLUDED(mutex_);

  // A message of a newer generation than Begin's ends older ones like Begin; one of an older generation is dropped.
  // Data that was not pulled ends the generation here.
  void OnUp(int node) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnPull(int node, const v1::PeerMessage& message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDown(int node, const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Overdue(absl::Time now, absl::Duration limit) const override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Describe() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // One call of Gather; guarded by the mutex, except for what is constant and the image.
  struct Call {
    const int group;
    const uint64_t version;
    char* const image;
    const std::string label;
    Done done;
    int waiting = 0;  // number of nodes
    int users = 0;    // number of threads that write to the image
    std::optional<absl::Status> ended = std::nullopt;
  };
  using CallPtr = std::shared_ptr<Call>;
  // What this node pulls from one node. Stays until all of it has arrived, even if its call has ended before: a refusal
  // may overtake data sent earlier.
  struct Transfer {
    CallPtr call;
    int node = 0;
    absl::Time asked;
    int64_t received = 0;
  };
  using TransferPtr = std::shared_ptr<Transfer>;
  // A pull of another node.
  struct Offer {
    v1::PeerMessage::Pull pull;
    int64_t sent = 0;  // bytes given to the links
  };
  struct Peer {
    bool up = false;
    bool touched = false;                     // this generation has had traffic with it
    absl::Time heard = absl::InfinitePast();  // last data from it
    std::deque<Offer> offers;
    std::deque<v1::PeerMessage::Pull> refusals;  // to be sent
    int unsent = 0;                              // number of pieces given to links
  };

  // peer_gather.cc
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool FinishOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // drops the mutex for it; false: there was none
  void AdvanceLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndCallsLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const CallPtr& call, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCallLocked(uint64_t generation, int group, uint64_t version) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // REQUIRES: a node of this node's row.
  const GatherParts& Parts(int group, int node) const {
    return parts_[static_cast<size_t>(group * row_nodes_ + node - row_first_)];
  }
  bool IsOfRow(int node) const { return node >= row_first_ && node < row_first_ + row_nodes_; }
  int groups() const { return static_cast<int>(plan_->groups.size()); }

  // peer_gather_receive.cc: answers to this node's pulls.
  absl::Status ReceiveLocked(int node, const v1::PeerData& header, absl::string_view elements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RefusedLocked(int node, const v1::PeerMessage::Pull& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // peer_gather_send.cc: pulls of other nodes.
  absl::Status OfferLocked(int node, const v1::PeerMessage::Pull& pull) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLocked(Peer& peer, const v1::PeerMessage::Pull& pull, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RefuseOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // as FinishOne
  bool SendOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);    // likewise

  // Constant after construction.
  const std::shared_ptr<const ShardPlan> plan_;
  PeerLinks* const links_;
  const char* const source_;
  const int node_;
  const int nodes_;      // of all rows
  const int row_nodes_;  // of this node's, which begins with row_first_
  const int row_first_;
  std::vector<GatherParts> parts_;  // by group and node of the row
  size_t max_offers_ = 0;           // per node
  std::thread thread_;

  mutable absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_transfer_ ABSL_GUARDED_BY(mutex_) = 1;  // over all generations
  std::map<uint64_t, TransferPtr> transfers_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallPtr> ended_ ABSL_GUARDED_BY(mutex_);  // reported when nobody writes to the image any more
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);
  size_t next_peer_ ABSL_GUARDED_BY(mutex_) = 0;  // nodes take turns
  uint64_t readable_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;                          // a piece of readable_
  std::vector<std::unique_ptr<char[]>> buffers_ ABSL_GUARDED_BY(mutex_);  // free ones, each for a piece
  int64_t received_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::Status> failed_ ABSL_GUARDED_BY(mutex_);  // of the generation
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_GATHER_H_
