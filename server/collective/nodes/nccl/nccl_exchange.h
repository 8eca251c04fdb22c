#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/collective/local/fan_out.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "server/collective/nodes/nccl/job_turns.h"
#include "server/collective/nodes/nccl/node_turns.h"
#include "server/collective/nodes/node_exchange.h"

namespace shardd {

// Bytes that one local rank's device sends to the same rank's device of another node, or gets from it.
struct NodeMove {
  int rank = 0;
  MoveOp::Move move;  // `peer` is the other node
};

struct NcclExchangeOptions {
  int node = 0;  // of this daemon
  int nodes = 2;
  // Parts are cut over the nodes of a row of so many, and rows are copies of each other (common/plan/node_part.h).
  int row_nodes = 0;             // 0: one row
  std::vector<Device*> devices;  // by local rank; ranks may share devices; must outlive the exchange
  std::vector<int> ordinals;     // of the devices, in the driver's numbering
  // PeerLinks::Send: sends in order, never blocks, may drop a message if the loss ends the generation.
  std::function<void(int node, v1::PeerMessage message)> send;
  // There are moves, too, on communicators of their own: a sum and a move may wait for other nodes at the same time.
  // The same on all nodes.
  bool moves = false;
  // With `moves`: by local rank, GreetingBytes of its device's memory, which outlive the exchange. Ranks may share
  // none.
  std::vector<char*> greetings;
  NcclCommunicator::Options communicators;
  std::vector<std::string> addresses;     // of all nodes, by node: jobs on the same GPUs must have the same
  std::shared_ptr<NodeTurns::Seat> seat;  // the exchange leaves it; null: it is alone
};

// Exchange by NCCL: for each local rank one communicator, whose members are that rank's GPUs on all nodes, in the
// nodes' order. They are made when the first sum needs them and kept over generations while nothing breaks. Before a
// generation's first sum every node tells node 0 which communicators it has, and node 0 tells all nodes which to use:
// those, or new ones with the ids that it sends along, under a number above all reported ones (PeerMessage.Exchange).
// So if a node has restarted, or dropped communicators that the others still have, all nodes make them anew, and no sum
// begins on communicators that some node lacks.
//
// NCCL connects two members when they first send each other something, and holds the call meanwhile, and with it the
// GPU's issuing thread. A sum and a move could so wait for each other: node 0's thread is held by its first move to
// node 1, whose thread is held by a sum that node 0 has yet to issue. Therefore new communicators for moves greet all
// other nodes of the row before anything else is issued. Sums' connections are made with their communicators
// (NcclLibrary::SetEnvironment), but for those of pieces that rows send each other, which greet likewise.
//
// Where there are rows, the nodes with one place in them cut its parts among them: each gets the sums of its pieces,
// and sends them to the others in a move that follows the sum in the same stream. So all rows have the same bits.
//
// If a generation ends (Begin) while sums are under way or communicators are made, this node aborts them; the other
// nodes do the same in their own Begin. While sums are under way the exchange also asks NCCL whether communicators are
// broken, aborts those, and refuses further sums of the generation.
//
// Beside another job on the same nodes' GPUs, communicators are made, and sums and moves issued, as its turns allow
// (job_turns.h): the exchange of node 0 asks for turns (node_turns.h), and says limits, which all nodes obey. A job
// that is alone has the turn as long as it needs it, and no limit.
class NcclExchange final : public NodeExchange {
 public:
  using Options = NcclExchangeOptions;
  static int64_t GreetingBytes(int nodes) { return int64_t{2} * nodes * kGreetingBytes; }
  NcclExchange(const NcclLibrary& library, const CudaDriver& driver, Options options);
  // Aborts what is under way.
  ~NcclExchange() override;
  const char* name() const override { return "nccl"; }
  std::string Describe() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                 Done done) override ABSL_LOCKS_EXCLUDED(mutex_);
  void ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                     Done done) override ABSL_LOCKS_EXCLUDED(mutex_);
  // Moves bytes between nodes, on kUnshard of each local rank's device. All nodes must call it with the same generation
  // and sequence and with the other halves of each other's moves, in the order of sequences, which begin at 0 in each
  // generation, have no gaps and are apart from those of sums. A node that takes no part calls it with none. `done` and
  // errors: as AllReduce's. REQUIRES: options.moves.
  void Move(uint64_t generation, uint64_t sequence, std::vector<NodeMove> moves, std::string label, Done done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnMessage(int node, const v1::PeerMessage::Exchange& message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDown(int node, const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int64_t kGreetingBytes = 64;  // of each direction (GatherStaging::greeting_bytes)
  static constexpr absl::Duration kAskInterval = absl::Milliseconds(100);
  // By local rank, for sums; then likewise for moves, if there are any.
  using Communicators = std::vector<std::shared_ptr<NcclCommunicator>>;
  struct Sum {
    uint64_t generation = 0;
    std::vector<NodePart> parts;
    bool is_move = false;
    std::vector<NodeMove> moves;  // of a move, which has no parts
    std::string label;
    Done done;
  };
  // In the order of all nodes.
  struct Queue {
    uint64_t next = 0;  // sequence to issue next
    std::map<uint64_t, std::shared_ptr<Sum>> waiting;
    bool ready() const { return !waiting.empty() && waiting.begin()->first == next; }
    uint64_t ready_below() const {
      uint64_t end = next;
      for (auto it = waiting.begin(); it != waiting.end() && it->first == end; ++it) ++end;
      return end;
    }
  };
  // The last message of a node.
  struct Report {
    uint64_t generation = 0;
    uint64_t number = 0;
    std::vector<ncclUniqueId> ids;
    absl::Status malformed;
    bool takes_turns = false;  // the node knows of limits
  };
  struct Turns {
    // Node 0.
    NodeTurns::View view;
    bool wanted = false;             // as the seat was told last
    std::optional<JobTurns> of_job;  // of the current generation, from its decision on
    std::set<int> gone;              // nodes whose links were lost, and which have said nothing since
    bool ended = false;              // a link was lost since the current generation's decision, which so ends
    // All nodes, of the current generation.
    TurnLimit limit;
    TurnReport reported;  // node 0 has it
    TurnCounts done;
  };
  // State of the current generation.
  enum class Phase {
    kUnasked,  // no sum has arrived yet
    kAsked,    // node 0 knows what this node has, or is about to
    kAgreed,   // communicators_ are those of all nodes
    kFailed,   // failed_ says why; sums are refused
  };

  // These run on the exchange's thread, which alone sends, makes communicators and issues sums. Those that block or
  // call out release the mutex meanwhile.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasWorkLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasStepLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HaveAllAskedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskLibrary() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendReport() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UseOrMake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // All others that this node moves bytes to or from, on new communicators. OK without moves.
  absl::Status Greet(const Communicators& made) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void IssueNext(Queue& queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Turns (nccl_exchange_turns.cc).
  bool HasTurnWorkLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DoTurnWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next of the queue.
  bool MayIssueLocked(const Queue& queue) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As the generation's communicators are said, which is what `message` does.
  void BeginTurnsLocked(bool obeyed, v1::PeerMessage::Exchange* message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayDecideLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  JobTurns::Step NextTurnLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TurnReport OwnReportLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HearTurns(int node, uint64_t generation, const v1::PeerMessage::Exchange::Turns& turns)
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::string DescribeTurns() const ABSL_LOCKS_EXCLUDED(mutex_);

  size_t CommunicatorCount() const { return options_.devices.size() * (options_.moves ? 2 : 1); }
  // The operations of each rank's device.
  std::vector<DevicePart> SumParts(const Sum& sum, const Communicators& on) const;
  // `first`: the communicator of rank 0, in `on`.
  std::vector<DevicePart> MoveParts(const std::vector<NodeMove>& moves, const Communicators& on, size_t first) const;
  // Adds the part to a sum, or its pieces and what this node sends and gets of them.
  void AddPart(const NodePart& part, SumOp* sum, MoveOp* pieces) const;
  int row_nodes() const { return options_.row_nodes > 0 ? options_.row_nodes : options_.nodes; }
  absl::Status Check(const Queue& queue, uint64_t sequence, const Sum& sum) const;
  void Enter(Queue* queue, uint64_t sequence, Sum sum) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SumIsDone(const std::shared_ptr<Sum>& sum, const Communicators& on, absl::Status status)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // 0: this node has no usable communicators.
  uint64_t UsableNumberLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fails the rest of the generation.
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Aborts all communicators, those being made included.
  void DropLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const NcclLibrary library_;
  const CudaDriver driver_;
  const Options options_;

  mutable absl::Mutex mutex_;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kUnasked;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  Queue sums_waiting_ ABSL_GUARDED_BY(mutex_);
  Queue moves_waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<Done, absl::Status>> refused_ ABSL_GUARDED_BY(mutex_);
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;   // issued in any generation and not finished on their streams
  int unreported_ ABSL_GUARDED_BY(mutex_) = 0;  // those, and others whose `done` has not returned

  Turns turns_ ABSL_GUARDED_BY(mutex_);

  std::vector<Report> reports_ ABSL_GUARDED_BY(mutex_);  // by node; on other nodes than 0, entry 0 is what to use
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;          // number of communicators_
  uint64_t highest_ ABSL_GUARDED_BY(mutex_) = 0;         // highest such number that this node has heard of
  Communicators communicators_ ABSL_GUARDED_BY(mutex_);
  Communicators being_made_ ABSL_GUARDED_BY(mutex_);
  absl::Time asked_library_ ABSL_GUARDED_BY(mutex_);

  // For status.
  uint64_t sums_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t made_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration took_ ABSL_GUARDED_BY(mutex_);
  std::string dropped_ ABSL_GUARDED_BY(mutex_);  // why the last ones were dropped

  std::thread thread_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NCCL_EXCHANGE_H_
