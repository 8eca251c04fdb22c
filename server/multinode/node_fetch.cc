#include "server/multinode/node_fetch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/session_layout.h"
#include "common/shm/ring.h"

namespace shardd {

NodeFetch::NodeFetch(int from, uint64_t transfer, int ranks)
    : from_(from), began_(MonotonicNow()), transfer_(transfer), trainer_states_(ranks) {}

std::shared_ptr<NodeRestore> NodeFetch::Begin(const StateSlabs& slabs, std::function<void(absl::Status)> ended) {
  all_slabs_ = slabs[0].bytes + slabs[1].bytes == 0;  // this node holds nothing
  slabs_ = std::make_shared<NodeRestore>(transfer_, slabs, std::move(ended));
  return slabs_;
}

void NodeFetch::TakeRankState(const v1::PeerMessage::RankState& state) {
  if (state.transfer() == transfer_ && state.rank() >= 0 && state.rank() < static_cast<int>(trainer_states_.size()) &&
      static_cast<int64_t>(state.trainer_state().size()) <= kMaxTrainerStateBytes) {
    trainer_states_[state.rank()] = state.trainer_state();
  }
}

absl::Status NodeFetch::TakeState(const ShardPlan& plan, const v1::PeerMessage::State& state) {
  if (state.transfer() != transfer_) {
    return absl::OkStatus();
  }
  const bool counted = std::all_of(state.step_counts().begin(), state.step_counts().end(),
                                   [](int64_t count) { return count >= 0 && count <= kMaxUpdates; });
  if (state.step() < 0 || state.step() > kMaxUpdates || state.version() == 0 || state.version() > kMaxUpdates ||
      state.step_counts_size() != static_cast<int>(plan.params.size()) || !counted) {
    return absl::FailedPreconditionError(absl::StrCat(
        "state from node ", from_, ": it does not fit the plan (got step ", state.step(), ", version ", state.version(),
        ", ", state.step_counts_size(), " counts, want ", plan.params.size(), " counts of 0 to ", kMaxUpdates, ")"));
  }
  state_ = state;
  return absl::OkStatus();
}

}  // namespace shardd
