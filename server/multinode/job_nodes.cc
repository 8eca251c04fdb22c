#include "server/multinode/job_nodes.h"

#include <limits>
#include <utility>

#include "server/multinode/backwards.h"
#include "server/multinode/param_mask.h"

namespace shardd {

JobNodes::JobNodes(std::shared_ptr<const ShardPlan> plan, CoreLoop* loop, NodeParts* parts, NodeJob* job)
    : worker_(parts->worker),
      sums_(parts->collective),
      events_(std::move(parts->events)),
      links_(std::move(parts->links)),
      member_(std::move(plan), parts->node, loop, links_.get(), events_, job),
      senders_(links_.get(), worker_) {}

void JobNodes::SayClosed(int64_t step, int backwards, const v1::Step& ranks_step) {
  said_closed_ = backwards;
  v1::PeerMessage::Closed closed;
  closed.set_step(step);
  closed.set_backwards(backwards);
  if (backwards == kAllBackwards) {
    *closed.mutable_ranks_step() = ranks_step;
    closed.mutable_ranks_step()->clear_trainer_state();
  }
  member_.Closed(std::move(closed));
}

void JobNodes::SayReady(int64_t step, int backward, int group, int occurrence, const std::vector<bool>& present,
                        const std::vector<bool>& fresh) {
  v1::PeerMessage::Ready ready;
  ready.mutable_key()->set_step(step);
  ready.mutable_key()->set_backward(backward);
  ready.mutable_key()->set_group(group);
  ready.mutable_key()->set_occurrence(occurrence);
  *ready.mutable_gives()->mutable_present() = MaskOf(present);
  *ready.mutable_gives()->mutable_fresh() = MaskOf(fresh);
  member_.Ready(std::move(ready));
}

void JobNodes::SayReduced(int64_t step, uint64_t version, const std::vector<bool>& present, const Norm& own_norm) {
  own_norm_ = own_norm;
  v1::PeerMessage::Reduced reduced;
  reduced.set_step(step);
  *reduced.mutable_present() = MaskOf(present);
  reduced.set_norm_scale(own_norm.state().scale);
  reduced.set_norm_sum(own_norm.state().sum);
  const std::vector<uint64_t>& digests = digests_.At(version);
  reduced.mutable_digests()->Add(digests.begin(), digests.end());
  member_.Reduced(std::move(reduced));
}

void JobNodes::Stop() {
  member_.Stop();
  senders_.StopAll();
  sums_->Begin(std::numeric_limits<uint64_t>::max());  // nothing of it needs the links any more
}

const std::shared_ptr<NodeFetch>& JobNodes::BeginFetch(int from, uint64_t transfer, int ranks) {
  return fetch_ = std::make_shared<NodeFetch>(from, transfer, ranks);
}

void JobNodes::TakeBytes(std::shared_ptr<NodeRestore> slabs) {
  events_->SetState([slabs = std::move(slabs), from = fetch_->from()](int node, const v1::PeerData& header,
                                                                      absl::string_view elements) {
    if (node == from) slabs->Take(header, elements);
  });
}

void JobNodes::AskForState(int from, uint64_t transfer) {
  v1::PeerMessage message;
  message.mutable_fetch()->set_transfer(transfer);
  links_->Send(from, std::move(message));
}

void JobNodes::EndFetch() {
  events_->SetState(nullptr);
  fetch_ = nullptr;
}

}  // namespace shardd
