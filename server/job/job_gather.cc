// Jobs whose parameters are cut over nodes: this node holds a part of each group and asks the others for the rest where
// a group is unsharded (collective/nodes/node_gather.h). Nobody waits for another's order there: a version does not
// change before all nodes have reduced a step, and a node has not while it gathers.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/shm/session_view.h"
#include "server/job/job_core.h"

namespace shardd {

void JobCore::GatherFromNodes(Gathered gathered) {
  const uint64_t generation = gather_generation_;
  if (closed_ || gathered.epoch != epoch_) {
    gathered.done(absl::AbortedError(absl::StrCat(gathered.label, ": the epoch went on")));
    return;
  }
  if (!nodes_->Unreached().empty()) {  // that a link was lost is known, and was the end of an epoch
    KeepGather(std::move(gathered));
    return;
  }
  auto done = [self = shared_from_this(), generation, gathered](absl::Status status) {
    if (!absl::IsAborted(status)) {
      gathered.done(std::move(status));
      return;
    }
    // A generation that ends takes this epoch with it, unless it began behind the news: then the next one is its own.
    self->loop_->Post([self, generation, gathered, status = std::move(status)] {
      if (self->closed_ || gathered.epoch != self->epoch_) {
        gathered.done(status);
      } else if (self->gather_generation_ > generation) {
        self->GatherFromNodes(gathered);
      } else {
        self->KeepGather(gathered);
      }
    });
  };
  node_gather_->Gather(generation, gathered.group, gathered.version, gathered.destination, gathered.label,
                       std::move(done));
}

void JobCore::KeepGather(Gathered gathered) { next_gathers_.push_back(std::move(gathered)); }

void JobCore::GatherAgain() {
  for (Gathered& gathered : std::exchange(next_gathers_, {})) {
    GatherFromNodes(std::move(gathered));
  }
}

void JobCore::NodeIsUp() {
  MaybeSayFinished();  // a link forgets what was said over the one before
  if (node_gather_ != nullptr) {
    GatherAgain();
  }
}

absl::Status JobCore::CheckGathers(absl::Time now) const {
  if (node_gather_ == nullptr) {
    return absl::OkStatus();
  }
  const absl::Duration limit = absl::Milliseconds(plan_->config.silence_timeout_ms());
  std::string late = node_gather_->Overdue(now, limit);
  if (late.empty() && std::any_of(next_gathers_.begin(), next_gathers_.end(),
                                  [&](const Gathered& gathered) { return now - gathered.since > limit; })) {
    late = nodes_->Unreached();
    late = late.empty() ? std::string("node 0 has begun no other attempt") : late;
  }
  return late.empty() ? absl::OkStatus()
                      : absl::DeadlineExceededError(
                            absl::StrCat("Unshard: ", late, " (limit ", absl::FormatDuration(limit), ")"));
}

// The part of a node that does not come back is nowhere else.
absl::Status JobCore::CheckUnreached(absl::Time now) {
  const bool needs_others = node_gather_ != nullptr && (version_ > 0 || promised());
  std::string unreached = needs_others ? nodes_->Unreached() : "";
  if (unreached.empty()) {
    unreached_since_ = absl::InfiniteFuture();
    return absl::OkStatus();
  }
  unreached_since_ = std::min(unreached_since_, now);
  const absl::Duration grace = absl::Milliseconds(plan_->config.grace_ms());
  if (now - unreached_since_ < grace) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(unreached, ", for ", absl::FormatDuration(grace),
                                             ", and what its ranks held is nowhere else; open the job anew on all "
                                             "nodes, from a checkpoint"));
}

void JobCore::DropGathers() {
  for (Gathered& gathered : std::exchange(next_gathers_, {})) {
    gathered.done(absl::AbortedError(absl::StrCat(gathered.label, ": the epoch went on")));
  }
}

void JobCore::SetReadable(uint64_t version) {
  if (node_gather_ != nullptr) {
    node_gather_->SetReadable(version);
  }
}

// Others go on for as long as they like, and need what this node holds.
void JobCore::MaybeSayFinished() {
  if (node_gather_ != nullptr && RanksFinished()) {
    nodes_->Closing("its ranks have finished", /*finished=*/true);
  }
}

ParamRange JobCore::HeldOf(int param) const {
  if (!plan_->cut_over_nodes) {
    return {0, plan_->params[param].numel};
  }
  return NodeRangeOf(*plan_, param, plan_->node);
}

std::string JobCore::PresentOnHolders(const std::vector<v1::PeerMessage::Reduced>& reduced) const {
  std::string present = reduced[0].present();  // sizes are those of the plan: node 0 has checked them
  for (size_t param = 0; param < plan_->params.size(); ++param) {
    const auto says = [&](size_t node) { return (reduced[node].present()[param / 8] >> (param % 8) & 1) != 0; };
    size_t differs = 1;
    while (differs < reduced.size() && says(differs) == says(0)) ++differs;
    if (differs == reduced.size()) continue;
    size_t holder = 0;
    while (holder < reduced.size() &&
           NodeRangeOf(*plan_, static_cast<int>(param), static_cast<int>(holder)).numel == 0) {
      ++holder;
    }
    if (holder < reduced.size()) {
      SetMaskBit(reinterpret_cast<uint8_t*>(present.data()), static_cast<int64_t>(param), says(holder));
    }
  }
  return present;
}

}  // namespace shardd
