// Trainers that give the memory of their gradients back after each step: what status says of it, and who dies between a
// commit and the next reduction.

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/gpus/purposes.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class GiveBack : public Cluster {
 protected:
  v1::Purpose Gradients() { return PurposesOf(jobs())["gradients"]; }
  const Args args_ = {{"model", "blocks"}, {"blocks", "2"},    {"numel", "1000000"},   {"steps", "6"},
                      {"recover", "1"},    {"give_back", "1"}, {"timeout_ms", "60000"}};
};

TEST_F(GiveBack, StatusSaysWhatIsInMemoryAndWhatIsNot) {
  StartDaemon();
  Child first = StartRank(0, args_.With({{"pause", "given_back@2"}}));
  Child second = StartRank(1, args_.With({{"pause", "given_back@2"}}));
  AwaitPause(args_, "given_back", 0);
  AwaitPause(args_, "given_back", 1);
  const v1::Purpose given_back = Gradients();
  EXPECT_GT(given_back.planned_bytes(), 2 * 4'000'000);
  EXPECT_LT(given_back.allocated_bytes(), given_back.planned_bytes() / 20) << "what is no whole page stays";
  LetGo(args_, "given_back", 0);
  LetGo(args_, "given_back", 1);
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  const std::vector<TrainerReport> got = {Report(args_, 0), Report(args_, 1)};
  ExpectAllOk(got);
  v1::Purpose kept;
  const std::vector<TrainerReport> want = RunRanks(args_.With({{"give_back", "0"}}), {}, [&] { kept = Gradients(); });
  ExpectAllOk(want);
  EXPECT_GE(kept.allocated_bytes(), kept.planned_bytes());
  EXPECT_EQ(got[0].losses, want[0].losses);
}

// Its pages are gone and nothing has come into them; the replacement's sums do.
TEST_F(GiveBack, ReplacingARankKilledAfterACommitChangesNoResult) {
  StartDaemon();
  const std::vector<TrainerReport> want = RunRanks(args_.With({{"give_back", "0"}, {"name", "undisturbed"}}));
  ExpectAllOk(want);
  for (int victim_rank = 0; victim_rank < 2; ++victim_rank) {
    SCOPED_TRACE(victim_rank);
    Child survivor = StartRank(1 - victim_rank, args_);
    Child victim = StartRank(victim_rank, args_.With({{"kill", "given_back@3"}}));
    EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
    Child replacement = StartRank(victim_rank, args_);
    EXPECT_EQ(replacement.Wait(), 0);
    EXPECT_EQ(survivor.Wait(), 0);
    const TrainerReport survived = Report(args_, 1 - victim_rank);
    ExpectAllOk({survived, Report(args_, victim_rank)});
    EXPECT_FALSE(survived.Note("aborted 4").empty()) << "in the step behind the commit";
    EXPECT_EQ(survived.losses, want[0].losses);
    // The replacement has begun behind the commit.
    const std::vector<double> rest = Report(args_, victim_rank).losses;
    ASSERT_EQ(rest.size(), 6u);
    EXPECT_EQ(rest[4], want[0].losses[4]);
    EXPECT_EQ(rest[5], want[0].losses[5]);
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  }
}

}  // namespace
}  // namespace shardd::e2e
