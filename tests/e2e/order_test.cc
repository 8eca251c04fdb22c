// Requests are paired by name: another order is right and shown, a missing one is an error that says whose.

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/sanitizers.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// Between a request that makes an error and the error, of ranks that do not stop at anything else.
constexpr int64_t kErrorLimitMs = testing::kSanitized ? 10'000 : 1000;
// Of ranks that wait for one that will not come. Above the half second after which the daemon says whom they wait for.
constexpr int64_t kPatienceMs = testing::kSanitized ? 10'000 : 2000;

class Order : public Cluster {
 protected:
  void ExpectMessage(const TrainerReport& report, const std::vector<std::string>& parts, Code code = Code::kAborted) {
    EXPECT_EQ(report.code, static_cast<int>(code)) << report.message;
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

// head and embed share a gradient slot, as there are two where groups are large: in opposite orders each rank waits for
// what the other has not sent yet.
TEST_F(Order, RanksThatWaitForEachOthersSlotTrainRight) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"order", "head,mid,embed,root"}, {"steps", "30"}, {"filler", "100000"}};
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

// When an order is recorded, the one that departs learns at its request, long before the step.
TEST_F(Order, StrictModeRefusesALaterDepartureFromTheCapturedOrder) {
  StartDaemon();
  const Args args = {{"strict_order", "1"}, {"order", "root,embed,mid,head"}, {"steps", "10"}};
  const std::vector<TrainerReport> reports = RunRanks(args, {{1, {{"odd_order", "root,mid,embed,head@4"}}}});
  for (const TrainerReport& report : reports) {
    ExpectMessage(report,
                  {"recorded order", "rank=1", "step=5", "got Unshard (forward) mid", "want Unshard (forward) embed"});
  }
  EXPECT_TRUE(HasEvent("job", "departure", "recorded order"));
  EXPECT_EQ(Job().committed_step(), 4);
  EXPECT_EQ(Job().counters().departures(), 1u);
}

TEST_F(Order, StrictModeServesRanksThatKeepTheOrder) {
  StartDaemon();
  const Args args = {{"strict_order", "1"}, {"micro", "2"}};
  ExpectParity(args, RunRanks(args));
}

TEST_F(Order, ASkippedGroupFailsAtOnceNamingGroupAndCall) {
  StartDaemon();
  const Args args = {{"steps", "10"}};
  const std::vector<TrainerReport> reports =
      RunRanks(args, {{0, {{"mark", "submitted_mid@4"}}}, {1, {{"skip", "mid@4"}, {"mark", "backward_done@4"}}}});
  const int64_t submitted_ms = TimeOf(args, "submitted_mid", 0);
  const int64_t closed_ms = TimeOf(args, "backward_done", 1);
  ASSERT_GT(submitted_ms, 0);
  ASSERT_GT(closed_ms, 0);
  for (const TrainerReport& report : reports) {
    ExpectMessage(report, {"rank 1", "rank 0", "\"mid\"", "SubmitGradients", "step=5"});
    EXPECT_LT(report.ended_ms - std::max(submitted_ms, closed_ms), kErrorLimitMs) << report.message;
  }
  EXPECT_EQ(Job().committed_step(), 4);
}

// Its deadline passes, and says for whom it has waited.
TEST_F(Order, ARankThatNeverAttachesIsNamedToThoseWaiting) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"timeout_ms", absl::StrCat(kPatienceMs)}, {"pause", "ended"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "ended", rank);  // neither leaves before the other has waited
  for (int rank = 0; rank < 2; ++rank) {
    LetGo(args, "ended", rank);
    EXPECT_EQ(ranks[rank].Wait(), 0);
    ExpectMessage(Report(args, rank), {"commit_parameters", "waits for rank 2: CommitParameters (it is not attached)"},
                  Code::kDeadlineExceeded);
  }
}

TEST_F(Order, ARankThatStaysAwayIsNamedToThoseWaiting) {
  StartDaemon();
  const Args args = {{"steps", "3"}, {"read_values", "0"}, {"finish", "0"}, {"wait_step", "1"}};
  ExpectAllOk(RunRanks(args, {}, [] {}));
  const Args alone = {{"steps", "6"}, {"timeout_ms", absl::StrCat(kPatienceMs)}};
  Child first = StartRank(0, alone);
  EXPECT_EQ(first.Wait(), 0);
  ExpectMessage(Report(alone, 0), {"waits for rank 1: SubmitGradients", "(it is not attached)"},
                Code::kDeadlineExceeded);
  EXPECT_EQ(Job().committed_step(), 3);
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

TEST_F(Order, ASilentRankEndsTheStepAndIsNamed) {
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
