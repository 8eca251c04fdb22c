// A node whose daemon was lost with its slabs gets what is committed from node 0, a replica: shards, the optimizer's
// state, counts. Node 0's own cannot change meanwhile, because no step is decided without the node.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int64_t kElementBytes = 4;  // slabs are cut at kSlabAlignmentBytes
constexpr int64_t kPieceBytes = PeerLinks::kMaxDataBytes;
constexpr int kPiecesUnderWay = 8;

// Pieces that the link has, so many at a time. Thread-safe.
class Window {
 public:
  // Blocks until there is room; the error of an earlier piece.
  absl::Status Take() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](Window* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->under_way_ < kPiecesUnderWay; }, this));
    ++under_way_;
    return first_;
  }
  void GiveBack(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    --under_way_;
    first_.Update(status);
  }

 private:
  absl::Mutex mutex_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status first_ ABSL_GUARDED_BY(mutex_);
};

absl::Status SendSlab(const JobSlab& slab, v1::Slab which, int64_t bytes, PeerLinks& links, int node) {
  const auto window = std::make_shared<Window>();
  for (int64_t at = 0; at < bytes; at += kPieceBytes) {
    const auto piece = std::make_shared<std::string>();
    piece->resize(static_cast<size_t>(std::min(kPieceBytes, bytes - at)));
    SHARDD_RETURN_IF_ERROR(window->Take());
    SHARDD_RETURN_IF_ERROR(slab.Read(at, piece->data(), static_cast<int64_t>(piece->size())));
    v1::PeerData header;
    header.set_slab(which);
    header.set_offset(at / kElementBytes);
    header.set_numel(bytes / kElementBytes);
    links.SendData(node, header, *piece, [piece, window](const absl::Status& status) { window->GiveBack(status); });
  }
  return absl::OkStatus();
}

}  // namespace

const JobSlab* JobCore::SlabOf(v1::Slab slab) const {
  return slab == v1::SLAB_SHARDS ? memory_->shards() : slab == v1::SLAB_OPTIMIZER ? memory_->optimizer() : nullptr;
}

int64_t JobCore::StateBytes(v1::Slab slab) const {
  return slab == v1::SLAB_SHARDS ? plan_->memory.shards_bytes : plan_->memory.optimizer_bytes;
}

void JobCore::NodeSendState(int node) {
  if (committing_) {
    wait_for_state_.push_back(node);
    return;
  }
  v1::PeerMessage message;
  v1::PeerMessage::State* state = message.mutable_state();
  state->set_step(committed_step_);
  state->set_version(version_);
  state->mutable_step_counts()->Add(step_counts_.begin(), step_counts_.end());
  for (const std::string& of_rank : trainer_states_) {
    state->add_trainer_states(of_rank);
  }
  state->set_bytes(StateBytes(v1::SLAB_SHARDS) + StateBytes(v1::SLAB_OPTIMIZER));
  Event(-1, "state", absl::StrCat("step ", committed_step_, " is sent to node ", node, ", ", state->bytes(), " bytes"));
  node_links_->Send(node, std::move(message));
  node_worker_->Post([self = shared_from_this(), node] {
    for (const v1::Slab slab : {v1::SLAB_SHARDS, v1::SLAB_OPTIMIZER}) {
      const int64_t bytes = self->StateBytes(slab);
      const absl::Status sent =
          bytes == 0 ? absl::OkStatus() : SendSlab(*self->SlabOf(slab), slab, bytes, *self->node_links_, node);
      if (!sent.ok()) {  // a link that is lost is everybody's news already
        LogWarning(absl::StrCat("job ", self->name(), ": send state to node ", node, ": ", sent.message()));
        return;
      }
    }
  });
}

void JobCore::NodeTakeState(const v1::PeerMessage::State& state) {
  const int64_t want = StateBytes(v1::SLAB_SHARDS) + StateBytes(v1::SLAB_OPTIMIZER);
  if (restore_->state.has_value() || state.step() < 0 || state.version() == 0 || state.bytes() != want ||
      state.step_counts_size() != static_cast<int>(plan_->params.size()) ||
      state.trainer_states_size() != world_size()) {
    Close(absl::StrCat("state from node 0: it does not fit the plan (got ", state.bytes(), " bytes, ",
                       state.step_counts_size(), " counts, ", state.trainer_states_size(), " trainers' states, want ",
                       want, ", ", plan_->params.size(), ", ", world_size(), ")"));
    return;
  }
  restore_->state = state;
  MaybeRestored();
}

void JobCore::NodeTakeBytes(const v1::PeerData& header, const std::string& bytes) {
  const JobSlab* const slab = SlabOf(header.slab());
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t all = slab == nullptr ? 0 : StateBytes(header.slab());
  if (header.numel() != all / kElementBytes || header.offset() < 0 || header.offset() > (all - size) / kElementBytes) {
    Close(absl::StrCat("state from node 0: bytes out of range (got ", size, " at ", header.offset() * kElementBytes,
                       " of ", header.numel() * kElementBytes, ", want within ", all, ")"));
    return;
  }
  restore_->received_bytes += size;
  node_worker_->Post(
      [self = shared_from_this(), restore = restore_, slab, at = header.offset() * kElementBytes, bytes] {
        const absl::Status written = slab->Write(at, bytes.data(), static_cast<int64_t>(bytes.size()));
        if (!written.ok()) {
          self->loop_->Post([self, written] { self->Close(absl::StrCat("state from node 0: ", written.message())); });
        }
      });
  MaybeRestored();
}

// Behind all that was posted before it.
void JobCore::MaybeRestored() {
  if (!restore_->state.has_value() || restore_->received_bytes < restore_->state->bytes()) {
    return;
  }
  node_worker_->Post([self = shared_from_this(), restore = restore_] {
    self->loop_->Post([self, restore] {
      if (!self->closed_ && self->restore_ == restore && self->nodes_->fetching()) {
        self->FinishRestore();
      }
    });
  });
}

void JobCore::FinishRestore() {
  auto cast = Join(optimizer_devices_.count(), [this, restore = restore_](const absl::Status& status) {
    if (closed_ || restore_ != restore || !nodes_->fetching()) {
      return;
    }
    if (!status.ok()) {
      Close(absl::StrCat("state from node 0: ", status.message()));
      return;
    }
    const v1::PeerMessage::State& state = *restore->state;
    committed_step_ = state.step();
    version_ = state.version();
    step_counts_.assign(state.step_counts().begin(), state.step_counts().end());
    trainer_states_.assign(state.trainer_states().begin(), state.trainer_states().end());
    initial_writes_.clear();
    if (absl::Status written = journal_->WriteHeader({epoch_, committed_step_, version_}); !written.ok()) {
      LogError(absl::StrCat("job ", name(), ": ", written.message()));
    }
    Event(-1, "state",
          absl::StrCat("step ", committed_step_, " came from node 0, ", state.bytes(), " bytes in ",
                       absl::FormatDuration(absl::Trunc(MonotonicNow() - restore->began, absl::Milliseconds(1)))));
    restore_ = nullptr;
    nodes_->Restored();
  });
  DeviceOps ops(world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    ops[rank] = CommitOps(*plan_, memory_->pointers(), rank);
  }
  optimizer_devices_.Submit(absl::StrCat("cast step ", restore_->state->step()),
                            optimizer_devices_.Divide(std::move(ops)), cast);
}

}  // namespace shardd
