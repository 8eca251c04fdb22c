#include "server/job/unshard/node_gathers.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

constexpr absl::Duration kOverdueShown = absl::Seconds(1);

absl::Status EpochEnded(const std::string& label) {
  return absl::AbortedError(absl::StrCat(label, ": the epoch went on"));
}

}  // namespace

NodeGathers::NodeGathers(std::unique_ptr<NodeGather> gather, std::function<std::string()> unreached,
                         std::function<void(absl::AnyInvocable<void()>)> post)
    : gather_(std::move(gather)), unreached_(std::move(unreached)), post_(std::move(post)) {}

void NodeGathers::Gather(Request request) { GatherInEpoch(epoch_, std::move(request)); }

void NodeGathers::GatherInEpoch(uint64_t epoch, Request request) {
  if (epoch != epoch_) {
    request.done(EpochEnded(request.label));
    return;
  }
  if (!unreached_().empty()) {  // that a link was lost is known, and was the end of an epoch
    waiting_.push_back(std::move(request));
    return;
  }
  auto done = [this, generation = generation_, epoch, request](absl::Status status) {
    if (!absl::IsAborted(status)) {
      request.done(std::move(status));
      return;
    }
    // A generation that ends takes this epoch with it, unless it began behind the news: then the next one is its own.
    post_([this, generation, epoch, request] {
      if (epoch == epoch_ && generation_ == generation) {
        waiting_.push_back(request);
      } else {
        GatherInEpoch(epoch, request);
      }
    });
  };
  gather_->Gather(generation_, request.group, request.version, request.destination, request.label, std::move(done));
}

void NodeGathers::Retry() {
  for (Request& request : std::exchange(waiting_, {})) {
    Gather(std::move(request));
  }
}

void NodeGathers::BeginGeneration(uint64_t generation) {
  generation_ = generation;
  gather_->Begin(generation);
  Retry();
}

void NodeGathers::EndEpoch() {
  ++epoch_;
  for (Request& request : std::exchange(waiting_, {})) {
    request.done(EpochEnded(request.label));
  }
}

void NodeGathers::EndJob() { gather_->Begin(std::numeric_limits<uint64_t>::max()); }

absl::Status NodeGathers::CheckDeadlines(absl::Time now, absl::Duration limit) const {
  std::string late = gather_->Overdue(now, limit);
  if (late.empty() && std::any_of(waiting_.begin(), waiting_.end(),
                                  [&](const Request& request) { return now - request.since > limit; })) {
    late = unreached_();
    late = late.empty() ? std::string("node 0 has begun no other attempt") : late;
  }
  return late.empty() ? absl::OkStatus()
                      : absl::DeadlineExceededError(
                            absl::StrCat("Unshard: ", late, " (limit ", absl::FormatDuration(limit), ")"));
}

std::string NodeGathers::WaitText(absl::Time now) const {
  const std::string unreached = unreached_();
  return unreached.empty() ? gather_->Overdue(now, kOverdueShown) : unreached;
}

}  // namespace shardd
