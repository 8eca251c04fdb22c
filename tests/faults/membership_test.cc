// Who may attach, and to what.

#include <signal.h>
#include <unistd.h>

#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/faults/bad_input.h"

namespace shardd::faults {
namespace {

using e2e::Args;
using e2e::ExpectSame;
using e2e::TrainerReport;
using testing::Child;

TEST_F(BadInput, UnknownJobsAndRanksAreRefused) {
  StartDaemonWithJob();
  RawClient client(socket());
  ExpectStatus(client.Attach(4711, 0).status(), absl::StatusCode::kNotFound, "no such job");
  const uint64_t id = Job().job_id();
  for (const int rank : {-1, 1, 1 << 30, std::numeric_limits<int>::min()}) {
    ExpectStatus(client.Attach(id, rank).status(), absl::StatusCode::kInvalidArgument,
                 absl::StrCat("no such rank (got ", rank, ", want 0 to 0)"));
  }
  ExpectJobIntact();
}

TEST_F(BadInput, ARankWithALiveSessionIsNotAttachedTwice) {
  StartDaemonWithJob();
  {
    RawClient holder(socket());
    ASSERT_TRUE(holder.Enter(SpecOf(job_), 0).ok());
    const TrainerReport second = RunRanks(job_.With({{"steps", "8"}}))[0];
    EXPECT_EQ(second.code, static_cast<int>(Code::kAlreadyExists)) << second.message;
    EXPECT_TRUE(absl::StrContains(second.message, absl::StrCat("pid=", getpid()))) << second.message;
  }
  ExpectJobIntact();
}

TEST_F(BadInput, ReplaceKillsTheHolderAndTakesItsPlace) {
  StartDaemonWithJob();
  const Args holder_args = job_.With({{"steps", "1000000"}, {"pause", "unsharded@5"}});
  Child holder = StartRank(0, holder_args);
  AwaitPause(job_, "unsharded", 0);
  const TrainerReport replacement = RunRanks(job_.With({{"steps", "8"}, {"replace", "1"}, {"finish", "0"}}))[0];
  EXPECT_EQ(replacement.code, 0) << replacement.message;
  EXPECT_EQ(replacement.Note("attached"), "attached 5");
  EXPECT_EQ(holder.Wait(), 1000 + SIGKILL);
  ExpectServesOthers();
  ExpectSame({replacement}, {Report(other_, 0)});
}

}  // namespace
}  // namespace shardd::faults
