#include "server/job/step/commits.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/full_params/summons.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/job/trace/job_trace.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/parameter_parts.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_writes.h"
#include "server/multinode/param_mask.h"
#include "server/optimizer/optimizer.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "server/storage/job_memory.h"

namespace shardd {

void Commits::TakeUp(const v1::PromisedStepRecord& promised) {
  for (int rank = 0; rank < world_size(); ++rank) {
    v1::Step step = promised.asked();
    step.set_trainer_state(promised.trainer_states(rank));
    if (in_trainers()) {
      steps_.AskInTrainer(rank, promised.trainer_states(rank));
    } else {
      steps_.Ask(rank, std::move(step), /*signal=*/0);
    }
  }
  use_.gradients->presence().SetAll(BitsOf(promised.present(), see_.plan->params.size()));
  if (promised.parts() > 0) TakeUpParts(promised);
  decision_.BeginMeasuring();
}

absl::Status Commits::CheckMayStep(int rank, const v1::Step& step) const {
  const auto error = [this, rank](absl::StatusCode code, absl::string_view fact) {
    return use_.committed->RankError(code, rank, "Step", fact);
  };
  const bool has_parameters = use_.committed->version() > 0;
  const bool in_trainers = see_.plan->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool entering = use_.writes->passes().entering(rank) || use_.writes->hand_ins().wants(rank);
  const bool in_full_params = see_.summons->full_params().asked(rank);
  if (!has_parameters || in_trainers || entering || steps_.stepped(rank) || decision_.committing() || in_full_params) {
    return error(absl::StatusCode::kFailedPrecondition,
                 !has_parameters  ? "the job has no parameters yet"
                 : in_trainers    ? "the optimizer runs in the trainers; EnterPass commits what it wrote"
                 : entering       ? "the rank is waiting for a pass, or to hand in"
                 : in_full_params ? "the rank is inside EnterFullParams"
                                  : "the rank has already sent Step for this step");
  }
  SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, "Step"));
  if (static_cast<int64_t>(step.trainer_state().size()) > kMaxTrainerStateBytes) {
    return error(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("trainer state is too large (got ", step.trainer_state().size(), ", want at most ",
                              kMaxTrainerStateBytes, " bytes)"));
  }
  absl::Status valid = CheckHyperParameters(*see_.plan, step);
  if (valid.ok() && step.part()) valid = CheckMayStepInParts();
  return valid.ok() ? valid : error(valid.code(), valid.message());
}

absl::Status Commits::Step(Session* session, RankCommand command) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(CheckMayStep(rank, *command.step));
  for (size_t group = 0; group < session->handles.size(); ++group) {
    SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kStep, see_.plan->groups[group].name, rank));
  }
  SHARDD_RETURN_IF_ERROR(use_.gradients->pairing().CheckClosed(rank, "Step"));
  steps_.Ask(rank, std::move(*command.step), command.done);
  use_.writes->Step(rank);
  // The first part has closed what was requested.
  return decision_.parts() > 0 ? use_.gradients->CloseStep(rank) : CloseStep(rank);
}

absl::Status Commits::StepInTrainer(int rank, std::string state) {
  steps_.AskInTrainer(rank, std::move(state));
  return CloseStep(rank);
}

// The rank submits nothing more in this step.
absl::Status Commits::CloseStep(int rank) {
  use_.unsharding->EndStep(rank);
  return use_.gradients->CloseStep(rank);
}

Wait Commits::WaitingToStep(int rank) const {
  return steps_.stepped(rank)
             ? FirstOther(world_size(), rank, "Step", [this](int other) { return !steps_.stepped(other); })
             : Wait();
}

absl::Status Commits::BeginDecision() {
  // Nothing that changes shards is begun before every rank's GPU has done with this step.
  Held decision;
  decision.order = Held::Order::kDecisions;
  decision.what = "Step";
  for (int rank = 0; rank < world_size(); ++rank) {
    decision.signals.push_back(use_.given_back->SignalOf(rank, steps_.signal(rank)));
  }
  if (!use_.given_back->HaveCome(decision.signals)) {
    decision_.AwaitDevices();
    decision.run = [this] {
      decision_.DevicesCame();
      return absl::OkStatus();
    };
    return use_.given_back->When(std::move(decision));
  }
  SHARDD_RETURN_IF_ERROR(steps_.CheckEqual());
  if (decision_.parts() == 0) {
    SHARDD_RETURN_IF_ERROR(use_.unsharding->CompareOrders());
  }
  decision_.BeginMeasuring();
  return Measure();
}

absl::Status Commits::Measure() {
  SHARDD_ASSIGN_OR_RETURN(DeviceOps zeros, use_.gradients->Settle());
  const v1::Step& step = steps_.step(0);
  const bool zeroed = std::any_of(zeros.begin(), zeros.end(), [](const auto& ops) { return !ops.empty(); });
  const bool wants_norm = step.max_grad_norm() > 0 || step.loss_scale() > 0;
  if (!wants_norm && !zeroed) {
    MeasuredHere(Norm(NormType(step)));
    return absl::OkStatus();
  }
  const int count = see_.devices->count();
  const auto norms = std::make_shared<std::vector<Norm>>(count, Norm(NormType(step)));
  const auto measured = [this, norms, epoch = use_.committed->epoch()](absl::Status status) {
    if (epoch != use_.committed->epoch()) {
      return;
    }
    if (!status.ok()) {
      use_.job->Fail(std::move(status));
      return;
    }
    Norm total(norms->front().order());
    for (const Norm& norm : *norms) {  // in the order of ranks, and of what was taken apart
      total.Add(norm);
    }
    MeasuredHere(total);
  };
  const auto done = zeroed ? use_.work->JoinGradientWork(count, measured) : use_.work->Join(count, measured);
  DeviceOps ops = std::move(zeros);  // decided when they are there: gradient shards do not change afterwards
  const std::vector<bool> counted = UpdatedBy(*see_.plan, step, use_.gradients->presence().by_param());
  for (int rank = 0; rank < world_size() && wants_norm; ++rank) {
    for (DeviceOp& op : NormOps(*see_.plan, see_.memory->pointers(), counted, rank, norms->data())) {
      ops[rank].push_back(std::move(op));
    }
  }
  ops = see_.devices->Divide(std::move(ops), /*in_order=*/zeroed);
  for (size_t device = 0; device < ops.size(); ++device) {
    for (DeviceOp& op : ops[device]) {
      if (auto* const norm = std::get_if<NormOp>(&op); norm != nullptr) norm->result = &(*norms)[device];
    }
  }
  see_.devices->Submit(absl::StrCat("norm step ", use_.committed->step() + 1), std::move(ops), done);
  return absl::OkStatus();
}

void Commits::MeasuredHere(const Norm& norm) {
  if (nodes_.say_reduced == nullptr) {
    Measured(norm.value());
  } else {
    nodes_.say_reduced(norm);
  }
}

void Commits::Measured(double norm) {
  decision_.Measured(norm, steps_.step(0));
  Decide();
}

void Commits::Heard(const v1::PeerMessage::Decided& decided) {
  decision_.Heard(decided);
  Decide();
}

// On several nodes, node 0 has measured, and all update with what it has found.
void Commits::Decide() {
  const int64_t step = use_.committed->step() + 1;
  // What trainers update is not counted here.
  decision_.Fix(steps_.step(0),
                in_trainers() ? std::vector<bool>(see_.plan->params.size(), false)
                              : UpdatedBy(*see_.plan, steps_.step(0), use_.gradients->presence().by_param()),
                use_.committed->step_counts());
  if (decision_.is_part()) {
    if (nodes_.say_part != nullptr) nodes_.say_part();
    decision_.BeginUpdate();
    use_.values->WhenUndoIsIdle([this, epoch = use_.committed->epoch()](const absl::Status&) {
      if (epoch == use_.committed->epoch()) SaveThenUpdate();  // else the job was closed
    });
    return;
  }
  v1::DecidedStepRecord record;
  decision_.Describe(&record);
  record.set_epoch(use_.committed->epoch());
  record.set_step(step);
  if (nodes_.generation != nullptr) record.set_generation(nodes_.generation());
  for (int rank = 0; rank < world_size(); ++rank) {
    record.add_trainer_states(steps_.step(rank).trainer_state());
  }
  if (absl::Status status = use_.committed->Decide(record); !status.ok()) {
    if (nodes_.node != 0) {
      use_.job->Close(absl::StrCat("step ", step, " is decided on all nodes: ", status.message()));
    } else {
      use_.job->Fail(std::move(status));  // nothing has changed yet
    }
    return;
  }
  if (nodes_.say_decided != nullptr) nodes_.say_decided();
  decision_.BeginUpdate();
  Update();
}

void Commits::Update() {
  const std::string label = absl::StrCat("update step ", use_.committed->step() + 1);
  auto done = use_.work->Join(see_.devices->count(), [this, label](const absl::Status& status) {
    if (!status.ok()) {
      // Device work fails only when the daemon is going down; shards may be torn.
      GiveUp(absl::StrCat("update of step ", use_.committed->step() + 1), status);
      return;
    }
    decision_.Applied();
  });
  // Trainers have written since the last version, also what has no gradient.
  const bool part = decision_.is_part();
  const bool written = !part && (use_.writes->hand_ins().any_since_version() || decision_.parts() > 0);
  DeviceOps ops(world_size());
  if (in_trainers()) {  // which have stored it: the copies that passes read are made
    for (int rank = 0; rank < world_size(); ++rank) {
      ops[rank] = CommitOps(*see_.plan, use_.snapshots->snapshot().NextPointers(), rank);
    }
    see_.devices->Submit(label, see_.devices->Divide(std::move(ops)), done);
    return;
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    // What a part changes is put back, and not completed, if the daemon dies.
    UpdateLog* const log = part ? nullptr : use_.committed->BeginUpdate(rank);
    ops[rank] = UpdateOps(*see_.plan, see_.memory->pointers(), decision_.step(), rank,
                          part ? Logged() : see_.memory->LoggedBy(log, rank));
    if (written) {
      for (DeviceOp& op : CommitOps(*see_.plan, see_.memory->pointers(), rank, decision_.step().present)) {
        ops[rank].push_back(std::move(op));
      }
    }
  }
  // In order where a replica's copy is of what is being updated.
  const bool in_order = see_.plan->shard_copies > 1 || written;
  ops = see_.devices->Divide(std::move(ops), in_order);
  const int for_each_rank = see_.devices->for_each_rank();
  for (int rank = 0; rank < world_size() && !in_order && !part; ++rank) {
    use_.committed->LogByPart(rank, &ops[static_cast<size_t>(rank * for_each_rank)], for_each_rank);
  }
  see_.devices->Submit(label, std::move(ops), done);
}

void Commits::Show() {
  if (decision_.is_part()) {
    CommitPart();
    return;
  }
  decision_.Show();
  // Its moments are not kept, so that a snapshot is of each step.
  use_.snapshots->TakeThen(/*due=*/DaemonUpdates(*see_.plan), /*stepped=*/true, [this] {
    use_.snapshots->Outdate();
    CommitStep();
  });
}

// The shards are those of the step.
void Commits::CommitStep() {
  if (in_trainers()) {
    use_.writes->CommitPass();
    CommitStepInTrainers();
    return;
  }
  const std::vector<bool>& updated = decision_.step().present;
  for (size_t param = 0; param < updated.size(); ++param) {
    if (updated[param]) {
      use_.counters->set_bytes_updated(use_.counters->bytes_updated() +
                                       ElementsOfNode(*see_.plan, static_cast<int>(param)).numel *
                                           DTypeSizeBytes(see_.plan->params[param].dtype));
    }
  }
  use_.gradients->presence().Clear();
  // Old bytes of the version before mean nothing from here on, and stay where the next step's parts keep theirs.
  if (decision_.parts() > 0) (void)use_.values->undo().BeginCommit();
  decision_.EndParts();
  use_.committed->CommitStep(updated, steps_.TakeTrainerStates());
}

void Commits::Make(Version version) {
  Begin();
  use_.snapshots->BeginVersion(version.stepped);
  auto done =
      use_.work->Join(see_.devices->count(), [this, epoch = use_.committed->epoch(), what = std::move(version.what),
                                              due = version.snapshot_is_due, stepped = version.stepped,
                                              commit = std::move(version.commit)](const absl::Status& status) mutable {
        if (epoch != use_.committed->epoch()) {
          return;  // the job was closed
        }
        if (!status.ok()) {
          GiveUp(what, status);
          return;
        }
        use_.snapshots->TakeThen(due, stepped, [this, commit = std::move(commit)] {
          decision_.End();
          commit();
        });
      });
  see_.devices->Submit(absl::StrCat(version.label, " version ", use_.committed->version() + 1),
                       see_.devices->Divide(std::move(version.ops), version.in_order), done);
}

void Commits::GiveUp(const std::string& what, const absl::Status& status) {
  decision_.End();
  use_.job->Close(absl::StrCat(what, ": ", status.message()));
}

void Commits::StepCommitted() {
  const bool shown = decision_.showing();
  decision_.End();
  use_.counters->set_commits(use_.counters->commits() + 1);
  use_.trace->Committed(use_.committed->step(), see_.sessions->by_rank());
  v1::SessionEvent event;
  event.mutable_committed()->set_step(use_.committed->step());
  decision_.Describe(event.mutable_committed());
  event.mutable_committed()->set_version(use_.committed->version());
  for (const auto& session : *see_.sessions) {
    if (session == nullptr) {
      continue;
    }
    session->words().EndStepBackwards();
    if (shown && session->stream != nullptr) {
      session->stream->Send(event);
    }
  }
}

void Commits::VersionCommitted() {
  for (const auto& session : *see_.sessions) {
    if (session != nullptr) {
      session->words().PublishVersion(use_.committed->version());
    }
  }
}

void Commits::EndEpoch() {
  steps_.EndEpoch();
  decision_.EndEpoch();
}

// Of a part nobody is to miss anything: it is taken back on all nodes or committed on all.
bool Commits::MayShow() const {
  return nodes_.held_step == nullptr || decision_.has_uncommitted() || nodes_.held_step() > use_.committed->step();
}

void Commits::CommitStepInTrainers() { use_.committed->CommitStep({}, steps_.TakeTrainerStates()); }

}  // namespace shardd
