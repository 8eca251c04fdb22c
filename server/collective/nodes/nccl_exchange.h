#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "server/collective/nodes/node_exchange.h"
#include "server/device/device.h"

namespace shardd {

// By NCCL: for each local rank one communicator, whose members are that rank's GPUs of all nodes, in the nodes' order.
// They are made when the first sum needs them and kept over generations as long as nothing breaks. Before a
// generation's first sum every node tells node 0 which it has, and node 0 tells all what is used: those, or new ones by
// the ids that it sends along, under a number above all that were told (PeerMessage.Exchange). So who comes back, or
// has given up what the others still have, has everybody make them anew, and no sum begins on what a node has not.
//
// A generation that ends (Begin) with sums under way, or while communicators are made, has them aborted on this node;
// the others are told by their own Begin. So is what NCCL says to be broken, of which it is asked while sums are under
// way; sums of that generation are refused from then on.
class NcclExchange final : public NodeExchange {
 public:
  struct Options {
    int node = 0;  // this one
    int nodes = 2;
    std::vector<Device*> devices;  // by local rank, which may share them; outlive this
    std::vector<int> ordinals;     // of the same, as the driver counts
    // PeerLinks::Send: in order, never blocks, may lose what it cannot send when the generation ends for that.
    std::function<void(int node, v1::PeerMessage message)> send;
    NcclCommunicator::Options communicators;
    std::shared_ptr<void> claim;  // kept as long as this is there
  };
  NcclExchange(const NcclLibrary& library, const CudaDriver& driver, Options options);
  // Aborts what is under way.
  ~NcclExchange() override;
  const char* name() const override { return "nccl"; }
  std::string Describe() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                 Done done) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(uint64_t generation) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnMessage(int node, const v1::PeerMessage::Exchange& message) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Communicators = std::vector<std::shared_ptr<NcclCommunicator>>;  // by local rank
  struct Sum {
    uint64_t generation = 0;
    std::vector<NodePart> parts;
    std::string label;
    Done done;
  };
  // What a node has said last.
  struct Said {
    uint64_t generation = 0;
    uint64_t attempt = 0;
    std::vector<nccl::UniqueId> ids;
    absl::Status malformed;
  };
  // Of this generation.
  enum class Phase {
    kUnasked,  // no sum has come yet
    kAsked,    // node 0 knows, or is being told, what this node has
    kAgreed,   // communicators_ are those of all nodes
    kFailed,   // failed_ says why; sums are refused
  };

  // On the exchange's thread, which alone sends, makes communicators and issues sums. Those that block, or call others,
  // let go of the mutex meanwhile.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasWorkLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HaveAllAskedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskLibrary() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayWhatIsHere() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UseOrMake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void IssueNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status Check(uint64_t sequence, const std::vector<NodePart>& parts) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SumIsDone(const std::shared_ptr<Sum>& sum, const Communicators& on, absl::Status status)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // 0: none that can be used.
  uint64_t UsableAttemptLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The rest of the generation.
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Communicators that are there, and that are being made, are aborted.
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
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;                                 // sequence to be issued
  std::map<uint64_t, std::shared_ptr<Sum>> waiting_ ABSL_GUARDED_BY(mutex_);  // by sequence
  std::vector<std::pair<Done, absl::Status>> refused_ ABSL_GUARDED_BY(mutex_);
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;  // issued, of any generation, of which streams have not come to the end
  int to_tell_ ABSL_GUARDED_BY(mutex_) = 0;    // those, and others whose `done` has not returned

  std::vector<Said> said_ ABSL_GUARDED_BY(mutex_);  // by node; of node 0 on the others: what is to be used
  uint64_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;    // of communicators_
  uint64_t highest_ ABSL_GUARDED_BY(mutex_) = 0;    // attempt that this node has heard of
  Communicators communicators_ ABSL_GUARDED_BY(mutex_);
  Communicators being_made_ ABSL_GUARDED_BY(mutex_);
  absl::Time asked_library_ ABSL_GUARDED_BY(mutex_);

  // For status.
  uint64_t sums_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t made_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration took_ ABSL_GUARDED_BY(mutex_);
  std::string dropped_ ABSL_GUARDED_BY(mutex_);  // why the last were

  std::thread thread_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_EXCHANGE_H_
