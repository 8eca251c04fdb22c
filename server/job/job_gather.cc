// Jobs whose parameters are cut over nodes: what this node holds, and what it owes the others. The rest of a group
// comes from them where it is unsharded (unshard/node_gathers.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/shm/session_view.h"
#include "server/job/job_core.h"

namespace shardd {

void JobCore::NodeIsUp() {
  finished_said_ = false;  // a link forgets what was said over the one before
  if (node_gathers_ != nullptr) {
    node_gathers_->Retry();
  }
}

absl::Status JobCore::CheckUnreached(absl::Time now) {
  return node_gathers_ == nullptr ? absl::OkStatus()
                                  : node_gathers_->CheckUnreached(now, version_ > 0 || promised(),
                                                                  absl::Milliseconds(plan_->config.grace_ms()));
}

void JobCore::SetReadable(uint64_t version) {
  if (node_gathers_ != nullptr) {
    node_gathers_->SetReadable(version);
  }
}

void JobCore::SayFinished() {
  finished_said_ = true;
  nodes_->Closing("its ranks have finished", /*finished=*/true);
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
