#include "server/job/nodes/steps_over_nodes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/gradients/gradient_presence.h"
#include "server/job/nodes/model_digests.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/multinode/given_gradients.h"
#include "server/multinode/node_member.h"
#include "server/multinode/param_mask.h"
#include "server/multinode/reduced_steps.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

// Node 0 decides: where it has not, nobody has.
void StepsOverNodes::WritePromise() {
  if (use_.member->node() == 0) return;
  v1::PromisedStepRecord promise;
  promise.set_generation(use_.member->generation());
  *promise.mutable_asked() = see_.steps->step(0);
  promise.mutable_asked()->clear_trainer_state();
  promise.set_present(MaskOf(use_.presence->by_param()));
  for (std::string& state : see_.steps->TrainerStates()) promise.add_trainer_states(std::move(state));
  if (see_.decision->parts() > 0) {
    promise.set_parts(see_.decision->parts());
    promise.mutable_step_counts()->Assign(use_.committed->step_counts().begin(), use_.committed->step_counts().end());
  }
  use_.committed->Promise(std::move(promise));
}

void StepsOverNodes::SayReduced(const Norm& own_norm) {
  own_norm_ = own_norm;
  const bool part = see_.steps->step(0).part();
  if (!part) WritePromise();
  v1::PeerMessage::Reduced reduced;
  reduced.set_step(use_.committed->step() + 1);
  *reduced.mutable_present() = MaskOf(use_.presence->by_param());
  reduced.set_norm_scale(own_norm.state().scale);
  reduced.set_norm_sum(own_norm.state().sum);
  const std::vector<uint64_t>& digests = see_.digests->OfCommitted();
  reduced.mutable_digests()->Add(digests.begin(), digests.end());
  reduced.set_part(part);
  if (!part) reduced.set_ends_attempt(ends_);
  use_.member->Reduced(std::move(reduced));
}

void StepsOverNodes::SayDecided() {
  const int64_t step = use_.committed->step() + 1;
  if (use_.member->node() == 0) {
    v1::PeerMessage::Decided decided;
    see_.decision->Describe(&decided);
    decided.set_step(step);
    if (see_.plan->cut_over_nodes) {
      decided.set_present(MaskOf(use_.presence->by_param()));
    }
    decided.set_ends_attempt(all_end_);
    use_.member->Decide(decided);
    if (!all_end_.empty()) tell_.ends(absl::AbortedError(std::exchange(all_end_, "")));
  }
  use_.member->Holding(step);  // before the update, which takes longer than all nodes' answers
}

void StepsOverNodes::SayPart() {
  if (use_.member->node() != 0) return;
  v1::PeerMessage::Decided decided;
  see_.decision->Describe(&decided);
  decided.set_step(use_.committed->step() + 1);
  decided.set_part(true);
  if (see_.plan->cut_over_nodes) decided.set_present(MaskOf(use_.presence->by_param()));
  use_.member->DecidePart(decided);
}

void StepsOverNodes::SayExtends(const Extension& extension, bool made) {
  v1::PeerMessage::Extends extends;
  extends.set_plan_digest(extension.plan.digest);
  extends.set_what(extension.what);
  extends.set_made(made);
  use_.member->Extends(std::move(extends));
}

void StepsOverNodes::NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) {
  all_end_.clear();
  for (size_t node = 0; node < reduced.size() && all_end_.empty(); ++node) {
    const std::string& why = reduced[node].ends_attempt();
    if (!why.empty()) all_end_ = absl::StrCat(NodeText(*see_.plan, static_cast<int>(node)), ": ", why);
  }
  if (!see_.plan->cut_over_nodes) {
    tell_.measured(own_norm_.value());  // all nodes have the same gradients
    return;
  }
  use_.presence->SetAll(PresentOnHolders(*see_.plan, reduced));
  tell_.measured(NormOverNodes(*see_.plan, own_norm_.order(), reduced).value());
}

void StepsOverNodes::NodeDecided(const v1::PeerMessage::Decided& decided) {
  if (see_.plan->cut_over_nodes) use_.presence->SetAll(BitsOf(decided.present(), see_.plan->params.size()));
  if (!decided.ends_attempt().empty()) tell_.ends(absl::AbortedError(decided.ends_attempt()));
  tell_.decided(decided);
}

void StepsOverNodes::NodeValuesAgreed() {
  use_.committed->AgreesOnValues(use_.member->generation());
  tell_.agreed();
}

}  // namespace shardd
