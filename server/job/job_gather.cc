// Jobs whose parameters are cut over nodes: what this node holds, and what it owes the others. The rest of a group
// comes from them where it is unsharded (unshard/node_gathers.h).

#include "absl/strings/str_cat.h"
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
                                  : node_gathers_->CheckUnreached(now, committed_.version() > 0 || promised(),
                                                                  absl::Milliseconds(plan_->config.grace_ms()));
}

void JobCore::SetReadable(uint64_t version) {
  if (node_gathers_ != nullptr) {
    node_gathers_->SetReadable(version);
  }
}

void JobCore::SayFinished() {
  finished_said_ = true;
  nodes_->member().Closing("its ranks have finished", /*finished=*/true);
}

}  // namespace shardd
