#ifndef SHARDD_SERVER_MULTINODE_NODE_FETCH_H_
#define SHARDD_SERVER_MULTINODE_NODE_FETCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/multinode/node_restore.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// What comes of another node's committed state, until all of it is there. Loop-confined.
class NodeFetch {
 public:
  NodeFetch(int from, uint64_t transfer, int ranks);
  // To be called once, before bytes come. `ended` runs once, on any thread, when the last byte of the slabs is there or
  // they cannot be written. Returns what takes the bytes, on the network's threads.
  std::shared_ptr<NodeRestore> Begin(const StateSlabs& slabs, std::function<void(absl::Status)> ended);

  int from() const { return from_; }
  absl::Time began() const { return began_; }
  void SlabsAreThere() { all_slabs_ = true; }

  // Both ignore what belongs to another transfer. The second returns FAILED_PRECONDITION where the state does not fit
  // the plan.
  void TakeRankState(const v1::PeerMessage::RankState& state);
  absl::Status TakeState(const ShardPlan& plan, const v1::PeerMessage::State& state);

  int64_t received_bytes() const { return slabs_ == nullptr ? 0 : slabs_->received_bytes(); }

  bool has_come() const { return all_slabs_ && state_.has_value(); }
  // All of it is there, and has not been taken.
  bool complete() const { return has_come() && !taken_; }
  // REQUIRES of these: complete(). What they return lives as long as this.
  const v1::PeerMessage::State& state() const { return *state_; }
  const v1::PeerMessage::State& Take() {
    taken_ = true;
    return *state_;
  }
  std::vector<std::string> TakeTrainerStates() { return std::move(trainer_states_); }

 private:
  const int from_;
  const absl::Time began_;
  const uint64_t transfer_;
  std::shared_ptr<NodeRestore> slabs_;
  bool all_slabs_ = false;
  bool taken_ = false;
  std::optional<v1::PeerMessage::State> state_;
  std::vector<std::string> trainer_states_;  // by rank
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_FETCH_H_
