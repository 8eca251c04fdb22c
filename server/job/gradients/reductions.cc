#include "server/job/gradients/reductions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/device.h"
#include "server/job/gradients/settle.h"
#include "server/job/job_part.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/trace/job_trace.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/passes.h"
#include "server/job/writes/trainer_writes.h"
#include "server/loop/core_loop.h"
#include "server/multinode/backwards.h"
#include "server/multinode/given_gradients.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

// A file takes one write at a time, so beyond so many ranks' devices what was given back comes back by faults.
constexpr int kRanksOfOneFile = 4;

float ScaleOf(const ShardPlan& plan) {
  const double factor = plan.config.gradient_divide_factor();
  return static_cast<float>(1.0 / (factor > 0 ? factor : plan.world_size));
}

}  // namespace

Reductions::Reductions(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services, Pairing* pairing)
    : plan_(std::move(plan)), see_(facts), use_(std::move(services)), pairing_(pairing), scale_(ScaleOf(*plan_)) {}

absl::Status Reductions::AddComplete(PairKey key) {
  while (const std::optional<std::vector<int>> ranks = pairing_->Complete(key)) {
    if (over_nodes()) {
      if (const auto said = ranks->empty() ? std::nullopt : pairing_->Say(key, *ranks); said.has_value()) {
        nodes_.say_ready(key, *said);
      }
      return absl::OkStatus();
    }
    if (!ranks->empty()) {
      SHARDD_RETURN_IF_ERROR(Issue(key, *ranks, nullptr));
    }
    pairing_->NextOccurrence(key);  // begun, if the group was submitted again
  }
  return absl::OkStatus();
}

absl::Status Reductions::AddClosed(int rank, const std::vector<PairKey>& keys) {
  for (const PairKey& key : keys) {
    SHARDD_RETURN_IF_ERROR(pairing_->CheckMissing(rank, key));
    SHARDD_RETURN_IF_ERROR(AddComplete(key));
    pairing_->ForgetIfClosed(key);
  }
  return absl::OkStatus();
}

absl::Status Reductions::AddGiven(PairKey key, int occurrence, const GivenGradients& given) {
  const std::vector<int> ranks = pairing_->ToldToAdd(key, occurrence);
  pairing_->SetAnySeen();
  SHARDD_RETURN_IF_ERROR(Issue(key, ranks, &given));
  pairing_->AddedOverNodes(key, occurrence);
  SHARDD_RETURN_IF_ERROR(AddComplete(key));
  pairing_->ForgetIfClosed(key);
  return absl::OkStatus();
}

DeviceOps Reductions::SettleAll() {
  return SettleOps(*plan_, see_.memory->pointers().gradients, pairing_->SettleAll());
}

ReduceScatterRequest Reductions::RequestOf(PairKey key, const GivenGradients* by_nodes) const {
  const GroupPlan& plan = plan_->groups[static_cast<size_t>(key.second)];
  ReduceScatterRequest request;
  request.plan = plan_.get();
  request.group = key.second;
  request.gradients = see_.memory->pointers().gradients;
  // A write through the file waits for a trainer's own write into it, which may never end, and all jobs of the device
  // wait with it: only where all of them are the same user's.
  const bool through_file =
      see_.memory->gradients()->on_host() && world_size() <= kRanksOfOneFile && see_.of_the_daemons_user;
  request.gradients_file = through_file ? see_.memory->gradients()->fd() : -1;
  request.reduce_dtype = plan.mixed_precision.reduce_dtype();
  request.keep_low_precision = plan.mixed_precision.keep_low_precision_grads();
  request.scale = scale_;
  request.label = absl::StrCat("reduce ", plan.name, " step ", see_.committed->step() + 1);
  if (by_nodes != nullptr) {  // staging is where the nodes' sums are made, and the collective's
    request.nodes = {nodes_.generation(), by_nodes->sequence, by_nodes->present};
  } else {
    request.staging = see_.memory->StagingByRank(*plan_);
    request.staging_bytes = plan_->staging_bytes;
  }
  return request;
}

absl::Status Reductions::Issue(PairKey key, const std::vector<int>& ranks, const GivenGradients* by_nodes) {
  const int group = key.second;
  const GroupPlan& plan = plan_->groups[static_cast<size_t>(group)];
  Reduction reduction;
  reduction.group = group;
  reduction.ranks = ranks;
  reduction.zeros = SettleOps(*plan_, see_.memory->pointers().gradients, pairing_->Settle(key));
  SHARDD_RETURN_IF_ERROR(pairing_->TakeUneven());
  absl::StatusOr<Pairing::Sum> sum = pairing_->Take(key, ranks, by_nodes);
  SHARDD_RETURN_IF_ERROR(sum.status());
  reduction.request = RequestOf(key, by_nodes);
  reduction.request.modes = std::move(sum->modes);
  Held held;
  held.order = Held::Order::kGradients;
  held.what = absl::StrCat("SubmitGradients group \"", plan.name, "\"");
  held.signals = SignalsOf(key, ranks, sum->given);
  for (size_t at = 0; at < ranks.size(); ++at) {
    const Session& session = *(*see_.sessions)[ranks[at]];
    reduction.stream_ordered.push_back(sum->given[at].done != 0);
    GradientSource source;
    source.rank = ranks[at];
    source.slot = session.slot(group);
    source.present = std::move(sum->given[at].present);
    for (size_t i = 0; i < plan.params.size(); ++i) {
      if (source.present[i]) {
        const ParamPlan& param = plan_->params[plan.params[i]];
        use_.counters->set_bytes_reduced(use_.counters->bytes_reduced() +
                                         param.numel *
                                             DTypeSizeBytes(plan_->flat_params[param.flat_param].unsharded_dtype));
      }
    }
    reduction.request.sources.push_back(std::move(source));
    reduction.keep.push_back(session.memory());
  }
  for (int rank : sum->lacking) {  // before any of them is told that the backward is reduced
    Session* const session = (*see_.sessions)[rank].get();
    if (session != nullptr && pairing_->closed(rank) != kAllBackwards) {  // who has asked for the step looks at none
      session->words().PublishOthersGave(key.first);
    }
  }
  ++under_way_;
  use_.counters->set_reductions(use_.counters->reductions() + 1);
  for (size_t at = 0; at < ranks.size(); ++at) {
    IssueSlot(ranks[at], plan.gradient_slot, reduction.stream_ordered[at]);
  }
  held.run = [this, reduction = std::move(reduction)]() mutable {
    Submit(std::move(reduction));
    return absl::OkStatus();
  };
  return use_.given_back->When(std::move(held));
}

// What was enqueued before: the slots' bytes of those who give; of the others, who may have written into the gradient
// shards, what they gave back with the backward, or last. A later signal of a rank could wait for this very reduction.
std::vector<DoneSignal> Reductions::SignalsOf(PairKey key, const std::vector<int>& ranks,
                                              const std::vector<Contribution>& given) const {
  std::vector<DoneSignal> signals;
  for (int rank = 0; rank < world_size(); ++rank) {
    const Session* session = (*see_.sessions)[rank].get();
    if (session == nullptr) {
      continue;
    }
    uint64_t done = 0;
    if (const auto it = std::find(ranks.begin(), ranks.end(), rank); it != ranks.end()) {
      done = given[static_cast<size_t>(it - ranks.begin())].done;
    } else if (const std::optional<uint64_t> at_close = pairing_->DoneAtClose(rank, key.first)) {
      done = *at_close;
    } else {
      done = see_.steps->stepped(rank) ? see_.steps->signal(rank) : session->ring().last_done();
    }
    if (done != 0) {
      signals.push_back(use_.given_back->SignalOf(rank, done));
    }
  }
  return signals;
}

void Reductions::Submit(Reduction reduction) {
  if (use_.collective->may_hold_requests()) {
    reduction.request.zeros = std::exchange(reduction.zeros, {});
  }
  DeviceOps& zeros = reduction.zeros;
  // The zeros are part of the reduction: it has ended when they are there too.
  const int parts =
      1 + static_cast<int>(std::count_if(zeros.begin(), zeros.end(), [](const auto& ops) { return !ops.empty(); }));
  const auto done = use_.work->JoinGradientWork(
      parts, [this, group = reduction.group, ranks = std::move(reduction.ranks),
              stream_ordered = std::move(reduction.stream_ordered), keep = std::move(reduction.keep),
              epoch = see_.committed->epoch(), begin = MonotonicNow()](absl::Status status) mutable {
        if (epoch != see_.committed->epoch()) {  // as also where the job was closed
          use_.reaper->Post([gone = std::move(keep)] {});
          return;
        }
        --under_way_;
        if (!status.ok()) {
          use_.job->Fail(std::move(status));
          return;
        }
        durations_.Add(MonotonicNow() - begin);
        for (size_t i = 0; i < ranks.size(); ++i) {
          use_.trace->Reduced(ranks[i], group, see_.committed->step() + 1);
          ReleaseSlot(ranks[i], plan_->groups[static_cast<size_t>(group)].gradient_slot, stream_ordered[i]);
        }
      });
  for (size_t device = 0; device < zeros.size(); ++device) {
    if (!zeros[device].empty()) {
      DeviceWork work;
      work.label = absl::StrCat("zero absent ", group_name(reduction.group), " step ", see_.committed->step() + 1);
      work.ops = std::move(zeros[device]);
      work.done = done;
      (*see_.devices)[device]->Submit(StreamId::kPostBackward, std::move(work));
    }
  }
  use_.collective->ReduceScatter(std::move(reduction.request), done);
  if (by_trainers()) {
    use_.poll_timer->On();
  }
}

bool Reductions::AllStuck() const {
  const Passes& passes = see_.writes->passes();
  bool stuck = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (pairing_->sleeps(rank)) {
      stuck = stuck || pairing_->SleepsForTurn(rank);
    } else if (!see_.steps->stepped(rank) && !(passes.entering(rank) && passes.stepped(rank))) {
      return false;
    }
  }
  return stuck && !pairing_->AwaitsNodes();
}

absl::Status Reductions::AddBeforeTurn() {
  if (over_nodes()) {
    return absl::FailedPreconditionError(
        absl::StrCat("SubmitGradients: the ranks of this node run groups in orders in which each waits for another's "
                     "gradient slot; submit groups in the same order on all ranks (step=",
                     see_.committed->step() + 1, ")"));
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    const absl::StatusOr<std::optional<Pairing::Early>> early = pairing_->BeforeTurn(rank);
    SHARDD_RETURN_IF_ERROR(early.status());
    if (early->has_value()) {
      use_.counters->set_early_folds(use_.counters->early_folds() + 1);
      SHARDD_RETURN_IF_ERROR(Issue((*early)->key, (*early)->ranks, nullptr));
      pairing_->AddedBeforeTurn(**early);
    }
  }
  return absl::OkStatus();
}

int Reductions::closed() const {
  const int here = pairing_->closed_by_all();
  return over_nodes() ? std::min(here, nodes_.closed()) : here;
}

bool Reductions::OwesWord() const {
  return (!by_trainers() && closed() > told_under_way_) || (!under_way() && closed() > told_added_);
}

void Reductions::Publish() {
  told_under_way_ = closed();
  told_added_ = under_way() ? told_added_ : told_under_way_;
  for (const auto& session : *see_.sessions) {
    if (session == nullptr) {
      continue;
    }
    if (!by_trainers() || !under_way()) {
      session->words().PublishReducing(told_under_way_);
    }
    if (!under_way()) {
      session->words().PublishReduced(told_added_);  // last: it wakes who then looks at the other
    }
  }
}

void Reductions::EndEpoch() {
  EndStep();
  under_way_ = 0;
}

void Reductions::IssueSlot(int rank, int slot, bool stream_ordered) {
  if (stream_ordered) {  // its next submission waits for this one where it writes, and so does what reads it
    pairing_->FreeSlot(rank, slot);
  }
  if (!by_trainers()) {
    (*see_.sessions)[rank]->words().PublishSlotIssued(slot);
  }
}

void Reductions::ReleaseSlot(int rank, int slot, bool stream_ordered) {
  use_.trace->Released(rank, slot);
  if (!stream_ordered) {
    pairing_->FreeSlot(rank, slot);
  }
  (*see_.sessions)[rank]->words().PublishSlotReleased(slot);
  if (by_trainers()) {
    (*see_.sessions)[rank]->words().PublishSlotIssued(slot);  // collective/trainers/README.md says why not before
  }
}

void Reductions::DropSlot(int rank, int slot) {
  IssueSlot(rank, slot, /*stream_ordered=*/false);
  ReleaseSlot(rank, slot, /*stream_ordered=*/false);
}

}  // namespace shardd
