#include "server/job/membership/extensions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/full_params/full_params.h"
#include "server/job/gradients/pairing.h"
#include "server/job/membership/leavers.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/writes/hand_ins.h"
#include "server/job/writes/passes.h"
#include "server/session/session.h"

namespace shardd {

absl::Status Extensions::CheckMayAsk(int rank) const {
  const char* fact = see_.committed->version() == 0  ? "the job has no parameters yet"
                     : see_.full_params->asked(rank) ? "the rank is inside EnterFullParams"
                     : see_.steps->stepped(rank) || see_.decision->committing() || see_.decision->parts() > 0
                         ? "a step is not committed yet"
                     : see_.passes->entering(rank) ? "the rank is entering a pass"
                     : see_.hand_ins->any_since_version() || see_.hand_ins->open(rank) || see_.hand_ins->wants(rank)
                         ? "what was written is not committed yet; enter a pass first"
                         : nullptr;
  if (fact != nullptr) {
    return see_.committed->RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob", fact);
  }
  for (int other = 0; other < ranks_; ++other) {
    if (other != rank && (see_.leavers->finished(other) || see_.leavers->leaving_finished(other))) {
      return see_.committed->RankError(
          absl::StatusCode::kFailedPrecondition, rank, "ExtendJob",
          absl::StrCat("rank ", other, " has finished and takes part in nothing any more"));
    }
  }
  return absl::OkStatus();
}

absl::Status Extensions::CheckNobodyWentOn(int rank, const std::string& what) const {
  const int closed = see_.pairing->closed(rank);
  for (int other = 0; other < ranks_; ++other) {
    const bool began =
        see_.pairing->closed(other) > closed || see_.steps->stepped(other) || see_.pairing->GaveFrom(other, closed);
    if (other != rank && began) {
      return AloneError(other, "ExtendJob", rank, what);
    }
  }
  return absl::OkStatus();
}

absl::Status Extensions::CheckEqual() const {
  const auto& [first, agreed] = *by_rank_.begin();
  const auto other = std::find_if(by_rank_.begin(), by_rank_.end(), [&of = agreed](const auto& entry) {
    return entry.second.extension->plan.digest != of.extension->plan.digest;
  });
  if (other == by_rank_.end()) {
    return absl::OkStatus();
  }
  return see_.committed->RankError(
      absl::StatusCode::kFailedPrecondition, other->first, "ExtendJob",
      absl::StrCat("ranks differ in what they train from here on (got ", other->second.extension->what, ", rank ",
                   first, ": ", agreed.extension->what, ")"));
}

absl::Status Extensions::CheckAllTakePart(int rank, absl::string_view what, int backward) const {
  SHARDD_RETURN_IF_ERROR(see_.leavers->CheckNobodyFinished(rank, what, backward));
  return CheckNobodyAsks(rank, what, backward);
}

absl::Status Extensions::CheckNobodyAsks(int rank, absl::string_view what, int backward) const {
  for (const auto& [other, asked] : by_rank_) {
    if (other != rank && see_.pairing->closed(other) <= backward) {
      return AloneError(rank, what, other, asked.extension->what);
    }
  }
  return absl::OkStatus();
}

absl::Status Extensions::AloneError(int rank, absl::string_view what, int asking, const std::string& extension) const {
  return see_.committed->RankError(
      absl::StatusCode::kFailedPrecondition, rank, what,
      absl::StrCat("rank ", asking, " trains ", extension,
                   " from here on and this rank does not; every rank must unfreeze the same before the same forward"));
}

Wait Extensions::WaitingFor(int rank) const {
  for (int other = 0; Has(rank) && other < ranks_; ++other) {
    if (other != rank && !Has(other)) {
      return {other, "ExtendJob"};
    }
  }
  return {};
}

void Extensions::StartBuild() {
  building_ = true;
  std::vector<Done> waiting;
  for (auto& [rank, asked] : by_rank_) {
    waiting.push_back(std::exchange(asked.done, nullptr));
  }
  Asked& agreed = by_rank_.begin()->second;
  const Build build = std::exchange(agreed.build, nullptr);
  build(agreed.extension, std::move(waiting));
}

const Extension& Extensions::BeginAsking() {
  building_ = true;
  return *by_rank_.begin()->second.extension;
}

void Extensions::Built(TakeItsPlace take) { built_ = std::move(take); }

Extensions::TakeItsPlace Extensions::TakeBuilt() {
  decided_ = decided_ || built_ != nullptr;
  return std::exchange(built_, nullptr);
}

void Extensions::Widen(std::shared_ptr<const Extension> extension, Build build) {
  if (!decided_ && !widens()) widening_ = {std::move(extension), nullptr, std::move(build)};
}

void Extensions::StartWidening() {
  building_ = true;
  const Build build = widening_.build;  // it is called again where the epoch ends before it has built
  build(widening_.extension, {});
}

absl::Duration Extensions::PutOffWidening(absl::Time now, absl::Duration pause, bool counts) {
  building_ = false;
  widen_at_ = now + pause;
  if (!counts) return absl::ZeroDuration();
  put_off_since_ = std::min(put_off_since_, now);
  return now - put_off_since_;
}

absl::Status Extensions::CheckMayBegin(const std::string& what) {
  if (!decided_ && !widens()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(what, "the job goes on with more to train, as on the other nodes",
                                         widens() ? absl::StrCat(": ", widening_.extension->what) : "",
                                         "; open it again"));
}

absl::Status Extensions::GoOn(int rank) {
  if (!Has(rank)) {
    return absl::OkStatus();
  }
  if (building_) {
    return see_.committed->RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob",
                                     "the rank goes on before it is answered");
  }
  const Done done = std::move(by_rank_.extract(rank).mapped().done);
  done(see_.committed->RankError(absl::StatusCode::kCancelled, rank, "ExtendJob", "the rank has gone on instead"));
  return absl::OkStatus();
}

Extensions::ByRank Extensions::TakeAll() {
  building_ = false;
  built_ = nullptr;
  return std::exchange(by_rank_, {});
}

void Extensions::Answer(const ByRank& asked, const absl::Status& status) {
  for (const auto& [rank, of_rank] : asked) {
    if (of_rank.done != nullptr) {
      of_rank.done(status);
    }
  }
}

void Extensions::SessionEnds(Session* session) {
  const int rank = session->rank();
  if (building_) {  // over several nodes ranks may wait for those to ask, too
    Answer(TakeAll(), see_.committed->RankError(absl::StatusCode::kAborted, rank, "ExtendJob",
                                                "the rank has left, so nothing comes of what all had asked for"));
  }
  (void)GoOn(rank);
}

}  // namespace shardd
