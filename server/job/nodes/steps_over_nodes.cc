#include "server/job/nodes/steps_over_nodes.h"

#include "server/multinode/given_gradients.h"
#include "server/multinode/param_mask.h"

namespace shardd {

void StepsOverNodes::SayReduced(const Norm& own_norm) {
  own_norm_ = own_norm;
  v1::PeerMessage::Reduced reduced;
  reduced.set_step(see_.committed->step() + 1);
  *reduced.mutable_present() = MaskOf(use_.presence->by_param());
  reduced.set_norm_scale(own_norm.state().scale);
  reduced.set_norm_sum(own_norm.state().sum);
  const std::vector<uint64_t>& digests = see_.digests->At(see_.committed->version());
  reduced.mutable_digests()->Add(digests.begin(), digests.end());
  use_.member->Reduced(std::move(reduced));
}

void StepsOverNodes::SayDecided() {
  const int64_t step = see_.committed->step() + 1;
  if (use_.member->node() == 0) {
    v1::PeerMessage::Decided decided;
    see_.decision->Describe(&decided);
    decided.set_step(step);
    if (see_.plan->cut_over_nodes) {
      decided.set_present(MaskOf(use_.presence->by_param()));
    }
    use_.member->Decide(decided);
  }
  use_.member->Holding(step);  // before the update, which takes longer than all nodes' answers
}

void StepsOverNodes::NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) {
  if (!see_.plan->cut_over_nodes) {
    tell_.measured(own_norm_.value());  // all nodes have the same gradients
    return;
  }
  use_.presence->SetAll(PresentOnHolders(*see_.plan, reduced));
  tell_.measured(NormOverNodes(own_norm_.order(), reduced).value());
}

void StepsOverNodes::NodeDecided(const v1::PeerMessage::Decided& decided) {
  if (see_.plan->cut_over_nodes) use_.presence->SetAll(BitsOf(decided.present(), see_.plan->params.size()));
  tell_.decided(decided);
}

}  // namespace shardd
