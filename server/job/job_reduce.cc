// Gradients are added: an occurrence of a group in a backward at a time, when every rank has given its part or none.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/gradients/settle.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

// A file takes one write at a time, so beyond so many ranks' devices what was given back comes back by faults.
constexpr int kRanksOfOneFile = 4;

}  // namespace

absl::Status JobCore::TryReduce(PairKey key) {
  while (const std::optional<std::vector<int>> ranks = pairing_.Complete(key)) {
    if (nodes_ != nullptr) {
      if (!ranks->empty()) {
        SayReady(key, *ranks);
      }
      return absl::OkStatus();  // NodeGo goes on
    }
    if (!ranks->empty()) {
      SHARDD_RETURN_IF_ERROR(IssueReduce(key, *ranks));
    }
    pairing_.NextOccurrence(key);  // begun, if the group was submitted again
  }
  return absl::OkStatus();
}

DeviceOps JobCore::SettleAllPresence() {
  return SettleOps(*plan_, memory_->pointers().gradients, pairing_.SettleAll());
}

absl::Status JobCore::IssueReduce(PairKey key, const std::vector<int>& ranks, const GivenGradients* others) {
  const int group = key.second;
  const GroupPlan& plan = plan_->groups[group];
  DeviceOps zeros = SettleOps(*plan_, memory_->pointers().gradients, pairing_.Settle(key));
  SHARDD_RETURN_IF_ERROR(pairing_.TakeUneven());
  absl::StatusOr<Pairing::Sum> sum = pairing_.Take(key, ranks, others);
  SHARDD_RETURN_IF_ERROR(sum.status());
  ReduceScatterRequest request;
  request.plan = plan_.get();
  request.group = group;
  request.gradients = memory_->pointers().gradients;
  // A write through the file waits for a trainer's own write into it, which may never end, and all jobs of the device
  // wait with it: only where all of them are the same user's.
  const bool through_file = memory_->gradients()->on_host() && world_size() <= kRanksOfOneFile && owner_.IsTheDaemons();
  request.gradients_file = through_file ? memory_->gradients()->fd() : -1;
  request.staging = memory_->StagingByRank(*plan_);
  request.staging_bytes = plan_->staging_bytes;
  request.reduce_dtype = plan.mixed_precision.reduce_dtype();
  request.keep_low_precision = plan.mixed_precision.keep_low_precision_grads();
  request.scale = gradient_scale_;
  request.label = absl::StrCat("reduce ", group_name(group), " step ", committed_.step() + 1);
  request.modes = std::move(sum->modes);
  if (others != nullptr) {
    request.nodes = {nodes_->member().generation(), others->sequence, others->present};
    request.staging.clear();  // it is where the nodes' sums are made, and the collective's
    request.staging_bytes = 0;
  }
  Held reduction;
  reduction.order = Held::Order::kGradients;
  reduction.what = absl::StrCat("SubmitGradients group \"", group_name(group), "\"");
  reduction.signals = SignalsOfReduction(key, ranks, sum->given);
  std::vector<std::shared_ptr<SessionMemory>> keep;
  std::vector<bool> stream_ordered;
  for (size_t at = 0; at < ranks.size(); ++at) {
    const int rank = ranks[at];
    stream_ordered.push_back(sum->given[at].done != 0);
    GradientSource source;
    source.rank = rank;
    source.slot = sessions_[rank]->slot(group);
    source.present = std::move(sum->given[at].present);
    for (size_t i = 0; i < plan.params.size(); ++i) {
      if (source.present[i]) {
        const ParamPlan& param = plan_->params[plan.params[i]];
        counters_.set_bytes_reduced(counters_.bytes_reduced() +
                                    param.numel * DTypeSizeBytes(plan_->flat_params[param.flat_param].unsharded_dtype));
      }
    }
    request.sources.push_back(std::move(source));
    keep.push_back(sessions_[rank]->memory());
  }
  ++pending_reductions_;
  counters_.set_reductions(counters_.reductions() + 1);
  for (size_t i = 0; i < ranks.size(); ++i) {
    IssueSlot(ranks[i], plan.gradient_slot, stream_ordered[i]);
  }
  reduction.run = [this, r = Reduction{group, ranks, std::move(stream_ordered), std::move(zeros), std::move(request),
                                       std::move(keep)}]() mutable {
    SubmitReduction(std::move(r));
    return absl::OkStatus();
  };
  return given_back_.When(std::move(reduction));
}

// What was enqueued before: the slots' bytes of those who give; of the others, who may have written into the gradient
// shards, what they gave back with the backward, or last. A later signal of a rank could wait for this very reduction.
std::vector<DoneSignal> JobCore::SignalsOfReduction(PairKey key, const std::vector<int>& ranks,
                                                    const std::vector<Contribution>& given) const {
  std::vector<DoneSignal> signals;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (sessions_[rank] == nullptr) {
      continue;
    }
    uint64_t done = 0;
    if (const auto it = std::find(ranks.begin(), ranks.end(), rank); it != ranks.end()) {
      done = given[static_cast<size_t>(it - ranks.begin())].done;
    } else if (const std::optional<uint64_t> at_close = pairing_.DoneAtClose(rank, key.first)) {
      done = *at_close;
    } else {
      done = commits_.steps().stepped(rank) ? commits_.steps().signal(rank) : sessions_[rank]->ring().last_done();
    }
    if (done != 0) {
      signals.push_back(given_back_.SignalOf(rank, done));
    }
  }
  return signals;
}

void JobCore::SubmitReduction(Reduction reduction) {
  if (collective_->may_hold_requests()) {
    reduction.request.zeros = std::exchange(reduction.zeros, {});
  }
  DeviceOps& zeros = reduction.zeros;
  // The zeros are part of the reduction: it has ended when they are there too.
  const int parts =
      1 + static_cast<int>(std::count_if(zeros.begin(), zeros.end(), [](const auto& ops) { return !ops.empty(); }));
  const auto done = work_.JoinGradientWork(
      parts, [this, group = reduction.group, ranks = std::move(reduction.ranks),
              stream_ordered = std::move(reduction.stream_ordered), keep = std::move(reduction.keep),
              epoch = committed_.epoch()](absl::Status status) mutable {
        if (epoch != committed_.epoch() || closed_) {
          memory_worker_->Post([gone = std::move(keep)] {});
          return;
        }
        --pending_reductions_;
        if (!status.ok()) {
          Abort(std::move(status), {});
          return;
        }
        for (size_t i = 0; i < ranks.size(); ++i) {
          trace_.Reduced(ranks[i], group, committed_.step() + 1);
          ReleaseSlot(ranks[i], plan_->groups[group].gradient_slot, stream_ordered[i]);
        }
      });
  for (size_t device = 0; device < zeros.size(); ++device) {
    if (!zeros[device].empty()) {
      DeviceWork work;
      work.label = absl::StrCat("zero absent ", group_name(reduction.group), " step ", committed_.step() + 1);
      work.ops = std::move(zeros[device]);
      work.done = done;
      devices_[device]->Submit(StreamId::kPostBackward, std::move(work));
    }
  }
  collective_->ReduceScatter(std::move(reduction.request), done);
  if (sums_.by_trainers()) {
    poll_timer_.On();
  }
}

// Ranks that run groups in different orders can come to hold each other up: each sleeps until a slot is released whose
// group another rank submits only later. Such a state is reached whatever the timing.
bool JobCore::AllStuck() const {
  bool stuck = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (pairing_.sleeps(rank)) {
      stuck = stuck || pairing_.SleepsForTurn(rank);
    } else if (!commits_.steps().stepped(rank) &&
               !(writes_.passes().entering(rank) && writes_.passes().stepped(rank))) {
      return false;
    }
  }
  return stuck && !pairing_.AwaitsNodes();
}

absl::Status JobCore::AddBeforeTurn() {
  if (nodes_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("SubmitGradients: the ranks of this node run groups in orders in which each waits for another's "
                     "gradient slot; submit groups in the same order on all ranks (step=",
                     committed_.step() + 1, ")"));
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    const absl::StatusOr<std::optional<Pairing::Early>> early = pairing_.BeforeTurn(rank);
    SHARDD_RETURN_IF_ERROR(early.status());
    if (early->has_value()) {
      counters_.set_early_folds(counters_.early_folds() + 1);
      SHARDD_RETURN_IF_ERROR(IssueReduce((*early)->key, (*early)->ranks));
      pairing_.AddedBeforeTurn(**early);
    }
  }
  return absl::OkStatus();
}

void JobCore::PublishReduced() {
  int closed = pairing_.closed_by_all();
  if (nodes_ != nullptr) {
    closed = std::min(closed, nodes_->closed());
  }
  told_reducing_ = closed;
  told_reduced_ = pending_reductions_ == 0 ? closed : told_reduced_;
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      if (!sums_.by_trainers()) {
        session->words().PublishReducing(closed);
      }
      if (pending_reductions_ == 0) {
        session->words().PublishReduced(closed);
        session->words().PublishReducing(closed);
      }
    }
  }
}

}  // namespace shardd
