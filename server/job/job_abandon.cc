// User code gave up its forward or backward: the rank goes back to where its last backward was closed, and nobody else
// does. What is in the sums already cannot be taken out of them; it stands for what the rank submits when it does the
// backward again (job_reduce.cc).

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

constexpr int kAbandonsToldPerStep = 8;

}  // namespace

absl::Status JobCore::OnAbandonBackward(Session* session, uint64_t done) {
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(HandleEvent::kAbandon, group_name(static_cast<int>(g)), rank));
  }
  counters_.set_abandons(counters_.abandons() + 1);
  session->gave_up = true;
  unshards_.GiveUp(rank, done);
  orders_.AbandonBackward(rank);
  const int backward = state.closed_backwards;
  if (backward == kAllBackwards) {
    return absl::OkStatus();  // it has stepped: only the next forward had begun
  }
  if (nodes_ != nullptr) {
    for (auto it = pairs_.lower_bound({backward, 0}); it != pairs_.end() && it->first.first == backward; ++it) {
      if (it->second.submitted[rank] > 0) {
        return RankError(absl::StatusCode::kFailedPrecondition, rank, "AbandonBackward",
                         absl::StrCat("gradients of group \"", group_name(it->first.second),
                                      "\" were given to other nodes; the step begins anew on all of them"));
      }
    }
  }
  int taken_back = 0;
  int stays = 0;
  for (auto it = pairs_.lower_bound({backward, 0}); it != pairs_.end() && it->first.first == backward; ++it) {
    Pair& pair = it->second;
    if (!pair.waiting[rank].empty()) {
      taken_back += static_cast<int>(pair.waiting[rank].size());
      pair.waiting[rank].clear();
      const int slot = plan_->groups[it->first.second].gradient_slot;
      IssueSlot(rank, slot, /*stream_ordered=*/false);
      ReleaseSlot(rank, slot, /*stream_ordered=*/false);
    }
    pair.submitted[rank] = pair.stays[rank] = pair.added[rank];
    stays += pair.added[rank];
  }
  state.abandoned.insert(backward);
  TellAbandon(rank, backward, taken_back, stays);
  return absl::OkStatus();
}

// A rank may give up as often as it likes: what changed nothing is not told, and of the rest a few are.
void JobCore::TellAbandon(int rank, int backward, int taken_back, int stays) {
  if ((taken_back == 0 && stays == 0) || abandons_told_ == kAbandonsToldPerStep) {
    return;
  }
  ++abandons_told_;
  Event(rank, "abandon",
        absl::StrCat("gave backward ", backward, " up: ", taken_back, " submissions taken back, ", stays,
                     " added up already",
                     abandons_told_ < kAbandonsToldPerStep ? "" : "; more of this step are only counted"));
}

}  // namespace shardd
