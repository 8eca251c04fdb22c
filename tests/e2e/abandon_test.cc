// User code of a rank fails between forward and the end of backward, and the rank does the backward again in the same
// session: nobody else is troubled, and training ends with the values of a run in which nothing failed.

#include "absl/strings/match.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/sanitizers.h"

namespace shardd::e2e {
namespace {

using testing::Child;

struct Case {
  std::string name;
  std::string moment;  // of step 3, in the first micro-batch
  bool everywhere;     // on all ranks, else on rank 1
  Args args;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Abandon : public Cluster, public ::testing::WithParamInterface<Case> {};

TEST_P(Abandon, SecondTryGivesTheValuesOfARunWithoutFailure) {
  const Case& c = GetParam();
  StartDaemon();
  const Args args = c.args.With({{"steps", "8"}, {"strict_order", "1"}});
  const Args failing = {{"fail", c.moment + "@3"}};
  v1::Job job;
  const std::vector<TrainerReport> reports =
      RunRanks(c.everywhere ? args.With(failing) : args, {{1, failing}}, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_EQ(job.counters().abandons(), c.everywhere ? 2u : 1u);
  EXPECT_EQ(job.counters().aborts(), 0u);
  EXPECT_EQ(job.counters().departures(), 0u);
  EXPECT_EQ(job.committed_step(), 8);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Abandon,
    ::testing::Values(Case{"InForward", "unsharded", false, {}},                                             //
                      Case{"InForwardPooled", "unsharded", false, {{"unshard_mode", "POOLED"}}},             //
                      Case{"InForwardEverywhere", "unsharded", true, {{"layout", "DIM0"}}},                  //
                      Case{"InBackward", "some_gradients", false, {{"micro", "2"}}},                         //
                      Case{"InBackwardPooled", "some_gradients", false, {{"unshard_mode", "POOLED"}}},       //
                      Case{"InBackwardEverywhere", "some_gradients", true, {{"micro", "2"}}},                //
                      Case{"AtTheEndOfBackward", "root_held", false, {{"max_norm", "0.1"}}},                 //
                      Case{"AtTheEndOfBackwardEverywhere", "root_held", true, {{"strategy", "NO_SHARD"}}}),  //
    [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

class AbandonedStep : public Cluster {};

TEST_F(AbandonedStep, WaitsForARankThatFailsLateAndIsCommitted) {
  StartDaemon();
  const Args args = {{"steps", "6"}};
  Child failing = StartRank(1, args.With({{"fail", "some_gradients@3"}, {"pause", "some_gradients@3"}}));
  Child other = StartRank(0, args.With({{"mark", "step_sent@3"}}));
  AwaitPause(args, "some_gradients", 1);
  ASSERT_TRUE(testing::PollUntil([&] {
    const std::vector<v1::Rank> ranks = Ranks();
    return !ranks.empty() && ranks[0].state() == v1::RANK_STATE_STEPPED;
  }));
  EXPECT_EQ(Job().committed_step(), 3);
  LetGo(args, "some_gradients", 1);
  EXPECT_EQ(failing.Wait(), 0);
  EXPECT_EQ(other.Wait(), 0);
  ExpectParity(args, {Report(args, 0), Report(args, 1)});
  EXPECT_TRUE(HasEvent("job", "abandon", "gave backward 0 up"));
}

TEST_F(AbandonedStep, IsEndedNamingTheRankThatDoesNothingMore) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"silence_ms", "500"}};
  Child failing = StartRank(1, args.With({{"fail", "some_gradients@3"}, {"pause", "abandoned@3"}}));
  Child other = StartRank(0, args);
  EXPECT_EQ(other.Wait(), 0);
  const TrainerReport report = Report(args, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kAborted));
  EXPECT_TRUE(absl::StrContains(report.message, "rank 1 has sent nothing")) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "AbandonBackward")) << report.message;
  EXPECT_EQ(Job().committed_step(), 3);
  failing.Kill();
}

TEST_F(AbandonedStep, IsEndedLongBeforeTheRankWouldCountAsSilent) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"silence_ms", "30000"}};
  Child failing = StartRank(1, args.With({{"fail", "some_gradients@3"}, {"pause", "abandoned@3"}}));
  Child other = StartRank(0, args);
  AwaitPause(args, "abandoned", 1);
  const int64_t gave_up_ms = absl::ToUnixMillis(absl::Now());
  EXPECT_EQ(other.Wait(), 0);
  const TrainerReport report = Report(args, 0);
  EXPECT_TRUE(absl::StrContains(report.message, "gave up a forward or backward")) << report.message;
  // A twelfth of the silence is 2.5 s, and then the epoch ends.
  EXPECT_LT(report.ended_ms - gave_up_ms, testing::kSanitized ? 12'000 : 5'000);
  failing.Kill();
}

TEST_F(AbandonedStep, IsDroppedLikeAnyWhenTheRankDiesAfterwards) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"recover", "1"}};
  Child survivor = StartRank(0, args);
  Child failing = StartRank(1, args.With({{"fail", "some_gradients@3"}, {"kill", "abandoned@3"}}));
  EXPECT_NE(failing.Wait(), 0);
  Child replacement = StartRank(1, args);
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(Report(args, 1).Note("attached"), "attached 3");
  ExpectAllOk({Report(args, 0), Report(args, 1)});
  ExpectSame({Report(args, 0), Report(args, 1)}, RunRanks(args.With({{"name", "calm"}})));
}

}  // namespace
}  // namespace shardd::e2e
