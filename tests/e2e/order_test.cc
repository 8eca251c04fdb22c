// Requests are paired by name: another order is right and shown, a missing one is an error that says whose.

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class Order : public Cluster {
 protected:
  void ExpectMessage(const TrainerReport& report, const std::vector<std::string>& parts) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kAborted)) << report.message;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(report.message, part)) << part << " in: " << report.message;
    }
  }
};

TEST_F(Order, RanksThatRunGroupsInAnotherOrderTrainRight) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"order", "root,embed,mid,head"}, {"steps", "50"}};
  v1::Job job;
  const std::vector<TrainerReport> reports =
      RunRanks(args, {{1, {{"order", "root,mid,embed,head"}}}}, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_GE(job.counters().departures(), 50u);
  EXPECT_EQ(job.counters().aborts(), 0);
  EXPECT_TRUE(HasEvent("job", "departure", "embed")) << "a departure names the groups";
}

// head and embed share a gradient slot, so in opposite orders each rank waits for what the other has not sent yet.
TEST_F(Order, RanksThatHoldEachOtherUpOnASlotTrainRight) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"order", "head,mid,embed,root"}, {"steps", "30"}};
  const std::map<int, Args> reversed = {{1, {{"order", "root,embed,mid,head"}}}};
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(args, reversed, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_GE(job.counters().early_folds(), 30u);
  // The same on every run: folding is decided by state, not by timing.
  const std::vector<TrainerReport> again = RunRanks(args.With({{"name", "again"}}), reversed);
  ExpectAllOk(again);
  ExpectSame(again, reports);
}

TEST_F(Order, StrictModeRefusesADepartureAndNamesRankAndGroups) {
  StartDaemon();
  const Args args = {{"strict_order", "1"}, {"order", "root,embed,mid,head"}};
  const std::vector<TrainerReport> reports = RunRanks(args, {{1, {{"order", "root,mid,embed,head"}}}});
  for (const TrainerReport& report : reports) {
    ExpectMessage(report, {"rank=1", "got group \"mid\"", "want \"embed\""});
  }
  EXPECT_TRUE(HasEvent("job", "departure", "mid"));
}

TEST_F(Order, StrictModeServesRanksThatKeepTheOrder) {
  StartDaemon();
  const Args args = {{"strict_order", "1"}, {"micro", "2"}};
  ExpectParity(args, RunRanks(args));
}

TEST_F(Order, ASkippedGroupIsAnErrorAtOnceThatNamesRanksGroupAndCall) {
  StartDaemon();
  const Args args = {{"steps", "10"}};
  const std::vector<TrainerReport> reports = RunRanks(args, {{1, {{"skip", "mid@4"}}}});
  for (const TrainerReport& report : reports) {
    ExpectMessage(report, {"rank 1", "rank 0", "\"mid\"", "SubmitGradients", "step=5"});
  }
  EXPECT_EQ(Job().committed_step(), 4);
}

TEST_F(Order, AllowMissingContributionMakesASkippedGroupAnEmptyOne) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"allow_missing", "1"}};
  v1::Job job;
  ExpectAllOk(RunRanks(args, {{1, {{"skip", "mid@4"}}}}, [&] { job = Job(); }));
  EXPECT_EQ(job.committed_step(), 10);
  EXPECT_EQ(job.counters().aborts(), 0);
  EXPECT_EQ(job.counters().gradient_submissions(), 10u * 2 * kGroupCount - 1);
}

TEST_F(Order, AGroupThatNoRankSubmitsIsNobodysError) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"skip", "mid@4"}};
  v1::Job job;
  ExpectAllOk(RunRanks(args, {}, [&] { job = Job(); }));
  EXPECT_EQ(job.counters().aborts(), 0);
  EXPECT_EQ(job.counters().reductions(), 10u * kGroupCount - 1);
}

TEST_F(Order, ARankThatFallsSilentEndsTheStepWithItsName) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"silence_ms", "500"}};
  Child silent = StartRank(1, args.With({{"pause", "unsharded@3"}}));
  Child waiting = StartRank(0, args);
  EXPECT_EQ(waiting.Wait(), 0);
  ExpectMessage(Report(args, 0), {"rank 1", "has sent nothing", "rank 0 waits for", "step=4"});
  LetGo(args, "unsharded", 1);
  EXPECT_EQ(silent.Wait(), 0);
  ExpectMessage(Report(args, 1), {"rank 1", "has sent nothing"});
  EXPECT_EQ(Job().committed_step(), 3);
}

// Silence alone is no fault: somebody has to wait for that rank.
TEST_F(Order, ASlowJobWhoseRanksAllComputeIsLeftAlone) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"silence_ms", "300"}, {"pause", "unsharded@3"}};
  Child first = StartRank(0, args);
  Child second = StartRank(1, args);
  AwaitPause(args, "unsharded", 0);
  AwaitPause(args, "unsharded", 1);
  const absl::Time start = absl::Now();
  EXPECT_TRUE(PollUntil([&] {
    const std::vector<v1::Rank> ranks = Ranks();
    return ranks.size() == 2 && ranks[0].last_command_age_ms() > 900 && ranks[1].last_command_age_ms() > 900;
  })) << absl::Now() - start;
  EXPECT_EQ(Job().counters().aborts(), 0);
  LetGo(args, "unsharded", 0);
  LetGo(args, "unsharded", 1);
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
}

}  // namespace
}  // namespace shardd::e2e
