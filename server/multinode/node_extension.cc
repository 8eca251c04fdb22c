// How all nodes come to train more between the same two steps: twice every node says the same and node 0 answers when
// all have, first when the ranks ask, and then when each node has made the job that takes this one's place.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/multinode/node_coordinator.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {
namespace {

// Memory is allocated, and the job's values are copied into it. Links notice a node that is lost.
constexpr absl::Duration kMakes = absl::Minutes(10);

constexpr absl::string_view kTogether = "; the ranks of all nodes unfreeze the same before the same forward";

}  // namespace

absl::Status NodeCoordinator::OnExtends(int node, const v1::PeerMessage::Extends& extends) {
  Node& from = nodes_[static_cast<size_t>(node)];
  const bool in_turn = extends.made() ? extending_ && from.extends.has_value() && !from.extends->made() &&
                                            from.extends->plan_digest() == extends.plan_digest()
                                      : !extending_ && !from.extends.has_value();
  if (!in_turn || !initialized_ || (Version() > 0 && extends.version() != Version())) {
    return absl::FailedPreconditionError(
        absl::StrCat(NodeText(node), extends.made() ? " has made what trains " : " asks to train ", extends.what(),
                     " from here on: not its turn (got version ", extends.version(), ", want ", Version(), ")"));
  }
  from.extends = extends;
  for (size_t other = 0; other < nodes_.size(); ++other) {
    const Node& of = nodes_[other];
    const bool gave = std::any_of(pending_.begin(), pending_.end(),
                                  [other](const auto& sum) { return sum.second[other].has_value(); });
    if (gave || of.closed > 0 || of.values.has_value() || of.asks_to_write.times() > 0 || !gone_.empty()) {
      return CheckNobodyExtends(static_cast<int>(other));
    }
  }
  SHARDD_RETURN_IF_ERROR(CompareExtends());
  const auto said = [made = extends.made()](const Node& n) {
    return n.extends.has_value() && n.extends->made() == made;
  };
  if (Missing(said) >= 0) return absl::OkStatus();
  extending_ = true;
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_may_extend()->set_made(extends.made());
  SendAll(message);
  return absl::OkStatus();
}

absl::Status NodeCoordinator::CompareExtends() const {
  const Node* first = nullptr;
  for (const Node& node : nodes_) {
    if (!node.extends.has_value()) continue;
    if (first == nullptr) {
      first = &node;
    } else if (node.extends->plan_digest() != first->extends->plan_digest()) {
      return absl::FailedPreconditionError(
          absl::StrCat("ExtendJob: nodes differ in what their ranks train from here on (got ", node.extends->what(),
                       ", on ", NodeText(static_cast<int>(&node - nodes_.data())), ", and ", first->extends->what(),
                       ", on ", NodeText(static_cast<int>(first - nodes_.data())), ")", kTogether));
    }
  }
  return absl::OkStatus();
}

absl::Status NodeCoordinator::CheckNobodyExtends(int node) const {
  for (size_t other = 0; other < nodes_.size(); ++other) {
    if (!nodes_[other].extends.has_value()) continue;
    const bool is_own = static_cast<int>(other) == node;
    return absl::FailedPreconditionError(absl::StrCat(
        "ExtendJob: rank 0 of ", NodeText(static_cast<int>(other)), " trains ", nodes_[other].extends->what(),
        " from here on and ",
        is_own ? "went on before it was answered" : absl::StrCat("rank 0 of ", NodeText(node), " does not"),
        kTogether));
  }
  return absl::OkStatus();
}

absl::Duration NodeCoordinator::PatienceOf(absl::Duration limit) const {
  return extending_ ? std::max(limit, kMakes) : limit;
}

std::string NodeCoordinator::UnextendedText() const {
  const auto asks = std::find_if(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.extends.has_value(); });
  if (asks == nodes_.end()) return "";
  const int missing =
      Missing([this](const Node& n) { return n.extends.has_value() && (!extending_ || n.extends->made()); });
  if (missing < 0) return "";
  return absl::StrCat(NodeText(missing), nodes_[static_cast<size_t>(missing)].up ? "" : ", which has no link,",
                      extending_ ? " has not made what trains " : " has not asked to train ", asks->extends->what(),
                      " from here on");
}

}  // namespace shardd
