// Ranks that have no session: refused ones, for whom others wait in vain, and those whose process ends after their
// epoch did.

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"

namespace shardd {

void JobCore::RankAnswered(int rank, const absl::Status& status, uint64_t ticks) {
  if (closed_ || !IsFinalRefusal(status) || rank < 0 || rank >= world_size()) {
    return;
  }
  if (sessions_[rank] != nullptr || leavers_.finished(rank)) {  // nobody waits for whom this is
    return;
  }
  if (absent_.Refused(rank, std::string(status.message()), ticks, MonotonicNow())) {
    events_.Add(rank, "refused", std::string(status.message()));
  }
  Advance();
}

bool JobCore::SomeWaitInVain() const {
  return absent_.some_refused() && std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& session) {
           return session != nullptr && session->stream != nullptr &&
                  absent_.WaitsInVain(session->start_ticks, MonotonicNow());
         });
}

absl::Status JobCore::RefusedError() const {
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", name(), "\" waits for a rank that does not come: ", absent_.WhyRefused()));
}

absl::Status JobCore::CheckStillHas(const Session& session) const {
  if (session.expected_version == 0 || committed_.version() > 0) {
    return absl::OkStatus();
  }
  const std::string what = absl::StrCat("reattach rank ", session.rank(), " of job \"", name(), "\": ");
  if (nodes_ != nullptr && nodes_->member().MayBeSentState()) {
    return absl::AbortedError(absl::StrCat(
        what, "this daemon, a new one, has not heard yet whether another node has its state; attach again"));
  }
  return absl::NotFoundError(absl::StrCat(
      what, "its parameters are lost (got version 0, want ", session.expected_version,
      " or later): the daemon was restarted, or has freed the job after its grace time; start the program anew, which "
      "begins from the values that it gives (a checkpoint's)"));
}

void JobCore::CheckAbsent() {
  for (const AbsentRanks::Ended& ended : absent_.TakeEnded()) {
    events_.Add(ended.rank, "lost",
                absl::StrCat("its process (pid ", ended.pid,
                             ") ended without attaching again; its session had ended with "
                             "its epoch"));
  }
}

bool JobCore::IsMidStep() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (writes_.hand_ins().open(rank) || !writes_.passes().outside(rank) || gradients_.pairing().closed(rank) > 0) {
      return true;
    }
  }
  if (gradients_.pairing().any_seen() || writes_.hand_ins().any_since_version() || values_.any_initial() ||
      summons_.full_params().AnyAsked()) {
    return true;
  }
  return commits_.steps().any_stepped() || values_.commit().any_asked() ||
         std::any_of(sessions_.begin(), sessions_.end(), [](const auto& session) {
           return session != nullptr &&
                  std::any_of(session->handles.begin(), session->handles.end(),
                              [](const Handle& handle) { return handle.training() != TrainingState::kIdle; });
         });
}

}  // namespace shardd
