#include "server/job/unlike_calls.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/job/full_params/full_params.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/writes/passes.h"

namespace shardd {
namespace {

bool EntersFullParams(const AskedCalls& asked, int rank) {
  return asked.full_params->asked(rank) && !asked.full_params->inside(rank);
}

// What a rank has come to, in the order of its calls.
std::string CallsOf(const AskedCalls& asked, int rank) {
  const char* const step = asked.steps->stepped(rank) ? "Step" : "";
  const char* const then = EntersFullParams(asked, rank)  ? "EnterFullParams"
                           : asked.passes->entering(rank) ? "EnterPass"
                                                          : "";
  return absl::StrCat(step, *step != '\0' && *then != '\0' ? " and " : "", then);
}

}  // namespace

bool Waits(const AskedCalls& asked, int rank) {
  return EntersFullParams(asked, rank) || asked.passes->entering(rank) || asked.steps->stepped(rank);
}

absl::Status CheckLikeCalls(const AskedCalls& asked) {
  int enters = -1;
  int stepped = 0;
  for (int rank = 0; rank < asked.world_size; ++rank) {
    if (!Waits(asked, rank)) return absl::OkStatus();
    if (enters < 0 && EntersFullParams(asked, rank)) enters = rank;
    stepped += asked.steps->stepped(rank) ? 1 : 0;
  }
  if (enters < 0 || stepped == asked.world_size) return absl::OkStatus();  // a step that all have sent comes first
  const std::string got = CallsOf(asked, enters);
  for (int other = 0; other < asked.world_size; ++other) {
    const std::string want = CallsOf(asked, other);
    if (want == got) continue;
    return asked.committed->RankError(
        absl::StatusCode::kFailedPrecondition, enters, "EnterFullParams",
        absl::StrCat("ranks wait for each other in different calls (got ", got, " on rank ", enters, ", ", want,
                     " on rank ", other,
                     "); all ranks enter full parameters, hand in edits over several nodes, enter passes and step in "
                     "the same order"));
  }
  return absl::OkStatus();
}

}  // namespace shardd
