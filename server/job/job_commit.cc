// The step is decided, journaled, applied and committed; then what had to wait for it is done.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"
#include "server/multinode/param_mask.h"
#include "server/observe/log.h"

namespace shardd {

void JobCore::Decide() {
  DeviceOps zeros = SettleAllPresence();
  if (absl::Status uneven = pairing_.TakeUneven(); !uneven.ok()) {
    Abort(std::move(uneven), {});
    return;
  }
  const bool zeroed = std::any_of(zeros.begin(), zeros.end(), [](const auto& ops) { return !ops.empty(); });
  const bool wants_norm = steps_.step(0).max_grad_norm() > 0 || steps_.step(0).loss_scale() > 0;
  if (!wants_norm && !zeroed) {
    Measured(Norm(NormType(steps_.step(0))));
    return;
  }
  const auto norms = std::make_shared<std::vector<Norm>>(optimizer_devices_.count(), Norm(NormType(steps_.step(0))));
  const auto measured = [this, norms, epoch = committed_.epoch()](absl::Status status) {
    if (epoch != committed_.epoch() || closed_) {
      return;
    }
    if (!status.ok()) {
      Abort(std::move(status), {});
      return;
    }
    Norm total(norms->front().order());
    for (const Norm& norm : *norms) {  // in the order of ranks, and of what was taken apart
      total.Add(norm);
    }
    Measured(total);
  };
  const int count = optimizer_devices_.count();
  const auto done = zeroed ? work_.JoinGradientWork(count, measured) : work_.Join(count, measured);
  DeviceOps ops = std::move(zeros);  // decided when they are there: gradient shards do not change afterwards
  for (int rank = 0; rank < world_size() && wants_norm; ++rank) {
    for (DeviceOp& op : NormOps(*plan_, memory_->pointers(), pairing_.presence().by_param(), rank, norms->data())) {
      ops[rank].push_back(std::move(op));
    }
  }
  ops = optimizer_devices_.Divide(std::move(ops), /*in_order=*/zeroed);
  for (size_t device = 0; device < ops.size(); ++device) {
    for (DeviceOp& op : ops[device]) {
      if (auto* const norm = std::get_if<NormOp>(&op); norm != nullptr) norm->result = &(*norms)[device];
    }
  }
  optimizer_devices_.Submit(absl::StrCat("norm step ", committed_.step() + 1), std::move(ops), done);
}

void JobCore::Measured(const Norm& norm) {
  if (nodes_ == nullptr) {
    Apply(norm.value());
    return;
  }
  nodes_->SayReduced(committed_.step() + 1, committed_.version(), pairing_.presence().by_param(), norm);
}

void JobCore::Apply(double norm) {
  decision_.Measured(norm, steps_.step(0));
  ApplyDecided();
}

// On several nodes, node 0 has measured, and all update with what it has found.
void JobCore::ApplyDecided() {
  decision_.Fix(steps_.step(0), pairing_.presence().by_param(), committed_.step_counts());
  v1::DecidedStepRecord record;
  decision_.Describe(&record);
  record.set_epoch(committed_.epoch());
  record.set_step(committed_.step() + 1);
  for (int rank = 0; rank < world_size(); ++rank) {
    record.add_trainer_states(steps_.step(rank).trainer_state());
  }
  if (absl::Status status = committed_.Decide(record); !status.ok()) {
    if (nodes_ != nullptr && nodes_->member().node() != 0) {
      Close(absl::StrCat("step ", committed_.step() + 1, " is decided on all nodes: ", status.message()));
      return;
    }
    Abort(std::move(status), {});  // nothing has changed yet
    return;
  }
  if (nodes_ != nullptr && nodes_->member().node() == 0) {
    v1::PeerMessage::Decided decided;
    decision_.Describe(&decided);
    decided.set_step(committed_.step() + 1);
    if (plan_->cut_over_nodes) {
      decided.set_present(MaskOf(pairing_.presence().by_param()));
    }
    nodes_->member().Decide(decided);
  }
  decision_.BeginUpdate();
  if (nodes_ != nullptr) {
    nodes_->member().Holding(committed_.step() + 1);  // before the update, which takes longer than all nodes' answers
  }
  SetReadable(0);
  auto done = work_.Join(optimizer_devices_.count(), [this](const absl::Status& status) {
    if (!status.ok()) {
      // Device work fails only when the daemon is going down; shards may be torn.
      LogError(absl::StrCat("job ", name(), ": update of step ", committed_.step() + 1, ": ", status.message()));
      decision_.End();
      Close(absl::StrCat("update of step ", committed_.step() + 1, ": ", status.message()));
      return;
    }
    decision_.Applied();
  });
  DeviceOps ops(world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    ops[rank] = UpdateOps(*plan_, memory_->pointers(), decision_.step(), rank);
    if (writes_.hand_ins()
            .any_since_version()) {  // trainers have written since the last version, also what has no gradient
      for (DeviceOp& op : CommitOps(*plan_, memory_->pointers(), rank)) {
        ops[rank].push_back(std::move(op));
      }
    }
  }
  // In order where a replica's copy is of what is being updated.
  ops = optimizer_devices_.Divide(std::move(ops),
                                  /*in_order=*/plan_->shard_copies > 1 || writes_.hand_ins().any_since_version());
  optimizer_devices_.Submit(absl::StrCat("update step ", committed_.step() + 1), std::move(ops), done);
}

bool JobCore::MayShow() const { return nodes_ == nullptr || nodes_->member().held_step() > committed_.step(); }

// A step that is being shown completes forward. One that is not may be behind for as long as another node is silent.
bool JobCore::MayEndEpoch() const {
  return !promised() && (!decision_.committing() || (decision_.applied() && !MayShow()));
}

void JobCore::Show() {
  decision_.Show();
  const v1::OptimizerKind kind = plan_->config.optimizer().kind();
  snapshots_.TakeThen(/*due=*/kind != v1::OPTIMIZER_KIND_NONE, [this] { Commit(); });  // its moments are not kept
}

// Ranks have gone without having been told of the step (Abort).
void JobCore::CommitUnshown() {
  CountUpdates();
  EndStep(decision_.step().present);
  SetReadable(committed_.version());
}

void JobCore::CountUpdates() {
  for (size_t i = 0; i < pairing_.presence().by_param().size(); ++i) {
    if (decision_.step().present[i]) {
      counters_.set_bytes_updated(counters_.bytes_updated() + ElementsOfNode(*plan_, static_cast<int>(i)).numel *
                                                                  DTypeSizeBytes(plan_->params[i].dtype));
    }
  }
  pairing_.presence().Clear();
}

void JobCore::Commit() {
  if (closed_) {
    return;
  }
  CountUpdates();
  EndStep(decision_.step().present);
  snapshots_.Outdate();
  v1::SessionEvent event;
  event.mutable_committed()->set_step(committed_.step());
  decision_.Describe(event.mutable_committed());
  event.mutable_committed()->set_version(committed_.version());
  for (const auto& session : sessions_) {
    if (session != nullptr && session->stream != nullptr) {
      session->stream->Send(event);
    }
  }
  AfterCommit();
}

// One more step is committed, one more version there; the next step begins.
void JobCore::EndStep(const std::vector<bool>& updated) {
  committed_.CommitStep(updated, steps_.TakeTrainerStates());
  unsharding_.StepCommitted();
  counters_.set_commits(counters_.commits() + 1);
  trace_.Committed(committed_.step(), sessions_.by_rank());
  decision_.End();
  NoteHandInsCommitted();
  pairing_.EndStep();
  told_reducing_ = told_reduced_ = 0;
  if (nodes_ != nullptr) nodes_->EndStep();
  abandons_told_ = 0;
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->words().EndStepBackwards();
    }
  }
  writes_.StepCommitted();
  unsharding_.NewVersion();
  CompareReplicasIfDue();
}

// The new version is there: whoever waits for it is let go. Advance does what had to wait for the commit.
void JobCore::AfterCommit() {
  snapshots_.VersionCommitted();
  SetReadable(committed_.version());
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->words().PublishVersion(committed_.version());
    }
  }
  unsharding_.RetryAll();
}

}  // namespace shardd
