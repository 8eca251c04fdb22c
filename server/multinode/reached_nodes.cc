#include "server/multinode/reached_nodes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {

ReachedNodes::ReachedNodes(const ShardPlan* plan, int node)
    : plan_(plan), node_(node), links_(static_cast<size_t>(plan->nodes())) {}

void ReachedNodes::Start(absl::Time now) {
  for (Link& link : links_) link.since = now;
  OnUp(node_);
}

void ReachedNodes::OnUp(int node) { links_[static_cast<size_t>(node)] = {true, "", {}}; }

bool ReachedNodes::OnDown(int node, absl::string_view why, absl::Time now) {
  Link& link = links_[static_cast<size_t>(node)];
  const bool was_up = std::exchange(link.up, false);
  if (was_up) link.since = now;
  link.why = std::string(why);
  return was_up;
}

void ReachedNodes::SetWhy(int node, absl::string_view why) { links_[static_cast<size_t>(node)].why = std::string(why); }

bool ReachedNodes::all() const {
  return std::all_of(links_.begin(), links_.end(), [](const Link& link) { return link.up; });
}

std::string ReachedNodes::Text(size_t node) const {
  const std::string& why = links_[node].why;
  return absl::StrCat(NodeText(*plan_, static_cast<int>(node)), " is not reached", why.empty() ? "" : ": ", why);
}

std::string ReachedNodes::Unreached() const {
  for (size_t node = 0; node < links_.size(); ++node) {
    if (!links_[node].up) return Text(node);
  }
  return "";
}

std::string ReachedNodes::UnreachedFor(absl::Time now, absl::Time needed_since, absl::Duration grace) const {
  for (size_t node = 0; node < links_.size(); ++node) {
    if (!links_[node].up && now - std::max(links_[node].since, needed_since) >= grace) {
      return absl::StrCat(Text(node), ", for ", absl::FormatDuration(grace));
    }
  }
  return "";
}

}  // namespace shardd
