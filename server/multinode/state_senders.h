#ifndef SHARDD_SERVER_MULTINODE_STATE_SENDERS_H_
#define SHARDD_SERVER_MULTINODE_STATE_SENDERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "server/multinode/node_restore.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class CoreLoop;
class PeerLinks;

// States on their way to nodes that have lost theirs, and nodes that are sent one when no commit is under way. Owns
// both. Loop-confined.
class StateSenders {
 public:
  // Both outlive it.
  StateSenders(PeerLinks* links, CoreLoop* worker) : links_(links), worker_(worker) {}

  // The node is sent the state of the next TakeWaiting.
  void Await(int node, uint64_t transfer) { waiting_[node] = transfer; }
  bool waiting() const { return !waiting_.empty(); }
  // Numbers of transfers, by node.
  std::map<int, uint64_t> TakeWaiting() { return std::exchange(waiting_, {}); }

  // Sends `state` and each rank's, then the slabs' bytes, instead of what the node was being sent.
  void Send(int node, const v1::PeerMessage::State& state, int ranks,
            absl::FunctionRef<const std::string&(int rank)> trainer_state, const StateSlabs& slabs,
            StateSender::Failed failed, std::shared_ptr<void> keep);
  // The node is sent nothing any more.
  void Stop(int node);
  void StopAll();

 private:
  PeerLinks* const links_;
  CoreLoop* const worker_;
  std::map<int, uint64_t> waiting_;
  std::map<int, std::shared_ptr<StateSender>> senders_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_STATE_SENDERS_H_
