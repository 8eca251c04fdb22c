#include "server/job/work/device_waits.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/device/device.h"
#include "server/device/device_memory.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"

namespace shardd {

DeviceWaits::DeviceWaits(Facts facts, Services services)
    : see_(facts),
      use_(services),
      timer_(use_.loop),
      given_back_(see_.sessions, &timer_, use_.reaper),
      sums_(use_.collective) {}

bool DeviceWaits::Poll() {
  bool found = false;
  if (sums_.waiting()) {
    found = sums_.Poll();
    PollNoMore();
  }
  return (!given_back_.empty() && RunGivenBack()) || found;
}

void DeviceWaits::PollNoMore() {
  if (given_back_.empty() && !sums_.waiting()) {
    timer_.Off();
  }
}

bool DeviceWaits::RunGivenBack() {
  bool found = false;
  const uint64_t epoch = see_.committed->epoch();
  for (absl::Status status; given_back_.RunNext(&status);) {
    found = true;
    if (!status.ok() && epoch == see_.committed->epoch()) {
      use_.job->Fail(std::move(status));
    }
    use_.job->Advance();
    if (epoch != see_.committed->epoch()) {
      return true;
    }
  }
  PollNoMore();
  return found;
}

void DeviceWaits::EndEpoch() {
  given_back_.Drop();
  timer_.Stop();
}

absl::Status DeviceWaits::CheckSignals(absl::Time now, int* rank) const {
  const GivenBack::Late late = given_back_.FindLate(now, absl::Milliseconds(see_.plan->config.silence_timeout_ms()));
  if (late.what.empty()) {
    return absl::OkStatus();
  }
  *rank = late.signal.rank;
  return see_.committed->RankError(
      absl::StatusCode::kDeadlineExceeded, *rank, late.what,
      absl::StrCat("the stream of rank ", *rank, " on ", (*see_.devices)[*rank]->name(), " has not come to signal ",
                   late.signal.done, ", behind which it has given the memory back, after ",
                   absl::FormatDuration(late.since), " (last command: ", (*see_.sessions)[*rank]->last_command(), ")"));
}

absl::Status DeviceWaits::CheckSums(absl::Time now, int* rank) const {
  const auto late = sums_.FindLate(now, absl::Milliseconds(see_.plan->config.silence_timeout_ms()));
  if (late.rank < 0) {
    return absl::OkStatus();
  }
  *rank = late.rank;
  const Session* session = (*see_.sessions)[late.rank].get();
  return see_.committed->RankError(
      absl::StatusCode::kDeadlineExceeded, late.rank, late.what,
      absl::StrCat("rank ", late.rank, " has not added its part on ", (*see_.devices)[late.rank]->name(), " after ",
                   absl::FormatDuration(late.since), " (got ", late.summed, " operations, want ", late.told,
                   "; last command: ", session == nullptr ? std::string("none") : session->last_command(), ")"));
}

void DeviceWaits::ForgetStragglers() {
  if (auto gone = sums_.TakeDone(); !gone.empty()) {
    use_.reaper->Post([gone = std::move(gone)] {});
  }
}

void DeviceWaits::ForgetAllStragglers() {
  use_.reaper->Post([gone = sums_.TakeAll()] {});
}

AttachAnswer DeviceWaits::MayAttach(const std::string& what, int rank, int32_t pid, bool replace) {
  ForgetStragglers();
  return sums_.MayAttach(what, rank, pid, replace);
}

absl::StatusOr<int> DeviceWaits::SlotsOfPeer(FdRange range) const {
  const uint32_t rank = range.first - kFdFirstPeerSlots;
  if (!sums_.by_trainers() || range.count != 1 || rank >= static_cast<uint32_t>(see_.plan->world_size)) {
    return absl::InvalidArgumentError(absl::StrCat("fd channel: no such descriptors (got ", range.count, " from ",
                                                   range.first, ", want 1 of the gradient slots of a rank of 0 to ",
                                                   see_.plan->world_size - 1, " of a job with trainer_sums)"));
  }
  const Session* session = (*see_.sessions)[static_cast<int>(rank)].get();
  if (session == nullptr || session->memory()->slots == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("fd channel: rank ", rank, " has no session, and so no gradient slots"));
  }
  return session->memory()->slots->pieces().front().fd;
}

}  // namespace shardd
