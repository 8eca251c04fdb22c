#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_EXCHANGE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_EXCHANGE_H_

// Adds over nodes in host memory, by the daemons' own connections. The concatenation of a sum's parts is cut into one
// piece per node, equal except for the last ones, of whole cache lines. Each node sends every other node its bytes of
// that node's piece, adds its own piece of all nodes in their order (a chunk as soon as all have sent it), and sends
// the result to all others. Each byte is sent and received about 2 (n-1)/n times and added once, so all nodes have the
// same bits. A sum begins when the sum `slots` before it is done here; that bounds the memory for receiving.
//
// In ReduceScatter, pieces are cut along the parts of places, and instead of the result nodes with other places get a
// message that it was added. So a sum is done when nobody reads this node's contribution any more. The nodes with one
// place, one in each row, each add an equal piece of its parts and send each other the result.

#include <cstdint>
#include <cstdlib>
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
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/links/piece_cut.h"
#include "server/collective/nodes/node_exchange.h"

namespace shardd {

class PeerLinks;

// Thread-safe. Adds and sends on a thread of its own.
class PeerExchange final : public NodeExchange {
 public:
  // `max_numel`: most elements of one sum's parts together. Allocates slots * (nodes - 1) * CutOf(max_numel) for
  // receiving; RESOURCE_EXHAUSTED: the system has not so much.
  // REQUIRES: `links` outlives it.
  // `max_piece_numel`: most elements that one node adds, if more than an equal part. `places`: nodes of a row
  // (common/plan/node_part.h); 0: all nodes are one.
  static absl::StatusOr<std::unique_ptr<PeerExchange>> Make(PeerLinks* links, int64_t max_numel, int slots,
                                                            int64_t max_piece_numel = 0, int places = 0);
  // REQUIRES: OnData and OnDown are not called any more. Waits for bytes that links still use: for a node that has
  // stopped, until its link is lost.
  ~PeerExchange() override;

  const char* name() const override { return "peers"; }
  std::string Describe() const override;
  void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                 Done done) override ABSL_LOCKS_EXCLUDED(mutex_);
  void ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                     Done done) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnMessage(int, const v1::PeerMessage::Exchange&) override {}

  // As PeerLinks::Events. Data of a newer generation than Begin's ends older ones like Begin: it arrives on another
  // link than node 0's message, which was sent before. Data that no sum can be waiting for ends the generation with
  // INVALID_ARGUMENT, the loss of a node with UNAVAILABLE.
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDown(int node, const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Sum;
  using SumPtr = std::shared_ptr<Sum>;
  // Receives the other nodes' bytes of this node's piece, of one sum at a time.
  struct Slot {
    bool used = false;
    uint64_t sequence = 0;
    int64_t numel = 0;  // of the sum; scattered: of this node's piece
    bool scattered = false;
    std::vector<int64_t> received;  // by node: number of elements received of this node's piece, from its beginning
    bool added = true;              // the whole piece is added: another sum may take the slot
  };
  // Data on its way to a node.
  struct Outgoing {
    SumPtr sum;
    int64_t offset = 0;
    int64_t numel = 0;
    bool is_sum = false;  // scattered, to another place: only reports that this node has added its piece
  };
  struct Peer {
    std::deque<Outgoing> queue;
    int64_t unsent_bytes = 0;  // given to the links
    bool touched = false;      // this generation has had traffic with it
  };

  using Memory = std::unique_ptr<float, decltype(&std::free)>;
  PeerExchange(PeerLinks* links, int64_t max_numel, int slots, int64_t slot_numel, int places, Memory memory);
  void Enter(uint64_t generation, SumPtr sum) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Each does one thing, dropping the mutex for it. Returns false if there was nothing to do.
  bool FinishOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool StartOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SendOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AddOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A sum whose owner must be called back, or null.
  SumPtr TakeFinishedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdvanceLocked(uint64_t generation, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndSumsLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The slot of a sum; begins the sum in it if the slot is free.
  absl::StatusOr<Slot*> SlotLocked(uint64_t sequence, int64_t numel, bool scattered)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Queues the added part of this node's piece for sending, or the report that all of it was added.
  void QueueAddedLocked(const SumPtr& sum, int64_t offset, int64_t numel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReceivePart(int node, const v1::PeerData& header, absl::string_view elements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReceiveSum(int node, const v1::PeerData& header, absl::string_view elements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  float* Received(uint64_t sequence, int node) const;
  bool HasOwnPlace(int node) const { return node % places_ == node_ % places_; }

  // Constant after construction.
  PeerLinks* const links_;
  const int node_;
  const int nodes_;
  const int places_;
  const int64_t max_numel_;
  const int slot_count_;
  const int64_t slot_numel_;  // the most that one other node sends of a piece
  const Memory memory_;       // slots by nodes - 1; Slot::received says who writes where
  std::thread thread_;

  mutable absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;                // sequence of the next AllReduce
  std::map<uint64_t, SumPtr> sums_ ABSL_GUARDED_BY(mutex_);  // unfinished sums of the generation
  std::vector<SumPtr> ended_ ABSL_GUARDED_BY(mutex_);        // done or abandoned; reported when nothing touches them
                                                             // any more
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);
  size_t next_peer_ ABSL_GUARDED_BY(mutex_) = 0;                // nodes take turns
  std::optional<absl::Status> failed_ ABSL_GUARDED_BY(mutex_);  // of the generation
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_EXCHANGE_H_
