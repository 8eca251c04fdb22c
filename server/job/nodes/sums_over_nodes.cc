#include "server/job/nodes/sums_over_nodes.h"

#include <utility>

#include "absl/status/statusor.h"
#include "server/job/job_part.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/multinode/backwards.h"
#include "server/multinode/given_gradients.h"
#include "server/multinode/node_member.h"
#include "server/multinode/param_mask.h"

namespace shardd {

void SumsOverNodes::SayReady(PairKey key, const Pairing::Said& said) {
  v1::PeerMessage::Ready ready;
  ready.mutable_key()->set_step(see_.committed->step() + 1);
  ready.mutable_key()->set_backward(key.first);
  ready.mutable_key()->set_group(key.second);
  ready.mutable_key()->set_occurrence(said.occurrence);
  *ready.mutable_gives()->mutable_present() = MaskOf(said.present);
  *ready.mutable_gives()->mutable_fresh() = MaskOf(said.fresh);
  use_.member->Ready(std::move(ready));
}

void SumsOverNodes::SayClosed() {
  said_closed_ = see_.pairing->ClosedToSay();
  v1::PeerMessage::Closed closed;
  closed.set_step(see_.committed->step() + 1);
  closed.set_backwards(said_closed_);
  if (said_closed_ == kAllBackwards) {
    *closed.mutable_ranks_step() = see_.steps->step(0);
    closed.mutable_ranks_step()->clear_trainer_state();
  }
  use_.member->Closed(std::move(closed));
}

void SumsOverNodes::NodeGo(const v1::PeerMessage::Go& go) {
  const int group = go.key().group();
  if (see_.decision->committing() || go.key().step() != see_.committed->step() + 1 || group < 0 ||
      group >= static_cast<int>(see_.plan->groups.size()) || go.gives_size() != see_.plan->nodes()) {
    return;
  }
  absl::StatusOr<GivenGradients> given = GivenByAll(*see_.plan, go);
  absl::Status status = given.status();
  const uint64_t epoch = see_.committed->epoch();
  if (status.ok()) {
    status = add_({go.key().backward(), group}, go.key().occurrence(), *given);
  }
  if (!status.ok() && epoch == see_.committed->epoch()) {
    use_.job->Fail(std::move(status));
  }
}

}  // namespace shardd
