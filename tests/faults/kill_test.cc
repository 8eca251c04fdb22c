// SIGKILL of trainers: nothing is lost, nobody hangs, nothing leaks, and the result is that of a run without crashes.

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/sanitizers.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

constexpr int kKilled = 1000 + SIGKILL;
// Of the wait for ABORTED, not of its usual length, which is a few ms.
constexpr int64_t kAbortLimitMs = testing::kSanitized ? 10'000 : 1000;

class Kill : public Cluster {
 protected:
  void StartDaemon(const std::string& devices = "cpu:2") {
    Cluster::StartDaemon({}, devices);
    before_ = DaemonFootprint();
  }

  // Bits of the same training without any crash.
  std::vector<TrainerReport> WithoutCrash(const Args& args) {
    std::vector<TrainerReport> reports = RunRanks(args.With({{"name", "undisturbed"}, {"kill", ""}}));
    ExpectAllOk(reports);
    return reports;
  }

  void ExpectNothingLeaks() {
    EXPECT_TRUE(Job().name().empty());
    EXPECT_TRUE(PollUntil([&] {
      const Footprint now = DaemonFootprint();
      return now.shared_maps == before_.shared_maps;
    })) << DaemonFootprint()
        << ", want " << before_;
    EndRanks();
    EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() <= before_; })) << DaemonFootprint() << ", want " << before_;
  }

  // What a rank wrote into `file` of its folder; 0: not yet.
  int64_t TimeIn(const Args& args, const std::string& file, int rank) const {
    int64_t ms = 0;
    std::ifstream(absl::StrCat(Folder(args), "/", file, ".", rank)) >> ms;
    return ms;
  }

  // Of ranks that have ended.
  void ExpectToldInTime(const Args& args, int victim, int survivor) {
    const TrainerReport report = Report(args, survivor);
    const std::string note = report.Note("aborted");
    ASSERT_FALSE(note.empty()) << "rank " << survivor << " never saw the abort";
    EXPECT_TRUE(absl::StrContains(note, absl::StrCat("rank ", victim, " is lost"))) << note;
    int64_t step = 0, told_ms = 0;
    ASSERT_EQ(sscanf(note.c_str(), "aborted %ld %ld", &step, &told_ms), 2);
    const int64_t killed_ms = TimeIn(args, "killed", victim);
    ASSERT_GT(killed_ms, 0);
    EXPECT_LT(told_ms - killed_ms, kAbortLimitMs);
  }
  // Of a victim that has just died, and of a survivor that lives on (with mark=aborted).
  void ExpectToldNow(const Args& args, int victim, int survivor) {
    const int64_t killed_ms = TimeIn(args, "killed", victim);
    ASSERT_GT(killed_ms, 0);
    int64_t told_ms = 0;
    ASSERT_TRUE(PollUntil([&] { return (told_ms = TimeIn(args, "at.aborted", survivor)) >= killed_ms; }))
        << "rank " << survivor << " was not told that rank " << victim << " is gone";
    EXPECT_LT(told_ms - killed_ms, kAbortLimitMs);
  }
  // A victim that died at no known moment has left nothing: no session, and a survivor that has one again.
  void ExpectGoneInTime(int victim, int survivor) {
    EXPECT_TRUE(PollUntil(
        [&] {
          const std::vector<v1::Rank> ranks = Ranks();
          return ranks.size() == 2 && ranks[victim].state() == v1::RANK_STATE_ABSENT &&
                 ranks[survivor].state() != v1::RANK_STATE_ABSENT;
        },
        absl::Milliseconds(kAbortLimitMs)));
  }

  // Rank `dies` does so at `moment`, is replaced, and all ends as if nothing had been.
  void KillAndReplace(const std::string& moment, const Args& extra = {}, int dies = 1) {
    StartDaemon();
    const Args args = Args({{"steps", "10"}, {"recover", "1"}}).With(extra);
    Child survivor = StartRank(1 - dies, args);
    // One that attaches after the death has nothing to be told.
    ASSERT_TRUE(PollUntil([&] {
      const std::vector<v1::Rank> ranks = Ranks();
      return ranks.size() == 2 && ranks[1 - dies].state() != v1::RANK_STATE_ABSENT;
    }));
    Child victim = StartRank(dies, args.With({{"kill", moment}}));
    EXPECT_EQ(victim.Wait(), kKilled);
    Child replacement = StartRank(dies, args);
    EXPECT_EQ(replacement.Wait(), 0);
    EXPECT_EQ(survivor.Wait(), 0);
    const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
    ExpectAllOk(reports);
    ExpectToldInTime(args, dies, 1 - dies);
    ExpectSame(reports, WithoutCrash(args));
    ExpectNothingLeaks();
  }

 private:
  Footprint before_;
};

// One rank of a replica: the other replica has the same shards, and neither loses anything.
TEST_F(Kill, InAHybridJobLosesNothing) {
  StartDaemon("cpu:4");
  const Args args = {{"steps", "10"},     {"recover", "1"}, {"world", "4"}, {"strategy", "HYBRID_SHARD"},
                     {"group_size", "2"}, {"micro", "2"}};
  std::vector<Child> survivors;
  for (int rank = 0; rank < 3; ++rank) survivors.push_back(StartRank(rank, args));
  Child victim = StartRank(3, args.With({{"kill", "submitted_mid@4"}}));
  EXPECT_EQ(victim.Wait(), kKilled);
  Child replacement = StartRank(3, args);
  EXPECT_EQ(replacement.Wait(), 0);
  std::vector<TrainerReport> reports;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(survivors[rank].Wait(), 0);
    ExpectToldInTime(args, 3, rank);
  }
  for (int rank = 0; rank < 4; ++rank) reports.push_back(Report(args, rank));
  ExpectAllOk(reports);
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

TEST_F(Kill, BetweenUnshardAndReshard) { KillAndReplace("unsharded@4"); }

TEST_F(Kill, BetweenUnshardAndReshardOfAPooledGroup) {
  KillAndReplace("unsharded@4", {{"unshard_mode", "POOLED"}, {"forward_prefetch", "1"}});
}

TEST_F(Kill, AfterSomeGradients) { KillAndReplace("some_gradients@4"); }

TEST_F(Kill, InTheSecondMicroBatchOfAccumulation) { KillAndReplace("some_gradients@4", {{"micro", "3"}}); }

TEST_F(Kill, AfterAllGradientsBeforeStep) { KillAndReplace("before_step@4", {{"max_norm", "0.1"}}); }

TEST_F(Kill, DuringTheInitialWrites) { KillAndReplace("initial@0"); }

TEST_F(Kill, DuringWritebackOfFullParametersLeavesTheOldValues) {
  KillAndReplace("writeback@10", {{"writeback_at_end", "1"}});
}

TEST_F(Kill, OfTheOnlyRankWritingBackLeavesTheOldValues) {
  KillAndReplace("writeback@10", {{"writeback_at_end", "1"}, {"rank0_only", "1"}}, /*dies=*/0);
}

TEST_F(Kill, OfARankAwaitingTheWriterLeavesTheOldValues) {
  KillAndReplace("full_params@10", {{"writeback_at_end", "1"}, {"rank0_only", "1"}});
}

// The child keeps its parent's connection open, but no session, no slab and no memory of the job.
TEST_F(Kill, OfAProcessWhoseForkedChildHoldsItsSockets) { KillAndReplace("unsharded@4", {{"orphan", "1"}}); }

// Whether the step of the dead rank is still committed depends on whether the others have stepped too: either is right.
TEST_F(Kill, AfterStepWasSent) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"recover", "1"}};
  Child survivor = StartRank(0, args);
  Child victim = StartRank(1, args.With({{"kill", "step_sent@4"}}));
  EXPECT_EQ(victim.Wait(), kKilled);
  Child replacement = StartRank(1, args);
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  const std::string attached = reports[1].Note("attached");
  EXPECT_TRUE(attached == "attached 4" || attached == "attached 5") << attached;
  EXPECT_EQ(reports[1].Note("state"), absl::StrCat("state step ", attached.substr(9), " rank 1;"));
  ExpectToldInTime(args, 1, 0);
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

// Nobody is left to be told. What was begun is dropped, what was committed waits for whoever comes.
TEST_F(Kill, OfEveryRankLeavesTheJobAtItsCommittedStep) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"recover", "1"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args.With({{"kill", "some_gradients@6"}})));
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), kKilled);
  ASSERT_TRUE(PollUntil([&] { return Job().attached_ranks() == 0; }));
  EXPECT_EQ(Job().committed_step(), 6);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_WAITING);
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 6");
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

// The trainer has its session but never said hello: its end is seen by its pidfd, not by a timeout.
TEST_F(Kill, BetweenAttachRankAndHello) {
  StartDaemon();
  const Args args = {{"steps", "5"}, {"recover", "1"}};
  Child half = StartRank(1, args.With({{"half_attach", "1"}}));
  AwaitPause(args, "half", 1);
  EXPECT_EQ(Ranks()[1].state(), v1::RANK_STATE_ATTACHING);
  const absl::Time start = absl::Now();
  half.Kill();
  EXPECT_EQ(half.Wait(), kKilled);
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectAllOk(reports);
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));  // the attach timeout is 30 s
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

// Killed after 0.5 to 20 ms, wherever it is then: exec, connect, OpenJob, AttachRank, hello, mapping, first commands.
TEST_F(Kill, AnywhereWithinAttach) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"recover", "1"}};
  Child survivor = StartRank(0, args.With({{"pause", "root_held@5"}}));
  Child first = StartRank(1, args);
  AwaitPause(args, "root_held", 0);  // and stands still, so that nobody gets to the end
  first.Kill();
  EXPECT_EQ(first.Wait(), kKilled);
  for (int i = 1; i <= 40; ++i) {
    EXPECT_EQ(StartRank(1, args.With({{"kill_after_us", std::to_string(i * 500)}})).Wait(), kKilled);
  }
  LetGo(args, "root_held", 0);
  Child last = StartRank(1, args);
  EXPECT_EQ(last.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

// While it is told that the other is dead, before it has attached again.
TEST_F(Kill, OfTheSurvivorWhenItIsTold) {
  StartDaemon();
  const Args args = {{"steps", "10"}, {"recover", "1"}};
  Child survivor = StartRank(0, args.With({{"kill", "aborted"}}));
  Child victim = StartRank(1, args.With({{"kill", "some_gradients@4"}}));
  EXPECT_EQ(victim.Wait(), kKilled);
  EXPECT_EQ(survivor.Wait(), kKilled);
  EXPECT_LT(TimeIn(args, "killed", 0) - TimeIn(args, "killed", 1), kAbortLimitMs);
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 4");
  EXPECT_EQ(reports[1].Note("attached"), "attached 4");
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

// Seventy-five kills at named moments, each rank in turn, and twenty-five of replacements that are still attaching.
TEST_F(Kill, AHundredTimesChangesNoBit) {
  StartDaemon();
  constexpr int kNamed = 75;
  constexpr int kAttaching = 25;
  const char* moments[] = {"unsharded", "some_gradients", "before_step", "step_sent", "root_held"};
  const Args args = {{"steps", std::to_string(2 * kNamed + 4)}, {"recover", "1"}, {"micro", "2"}, {"mark", "aborted"}};
  // Two steps apart: a survivor never comes to its own end before it is told, also where the dead rank's last step is
  // still committed. Every moment meets both ranks, with a forked child that lives on and without.
  auto start = [&](int kill) {
    return kill >= kNamed ? StartRank(kill % 2, args)
                          : StartRank(kill % 2, args.With({{"kill", absl::StrCat(moments[kill % 5], "@", 2 * kill + 1)},
                                                           {"orphan", kill / 5 % 3 == 1 ? "1" : "0"}}));
  };
  std::optional<Child> ranks[2];
  ranks[0].emplace(start(0));
  ranks[1].emplace(start(1));
  int attaching = 0;
  for (int kill = 0; kill < kNamed; ++kill) {
    const int victim = kill % 2;
    const int survivor = 1 - victim;
    SCOPED_TRACE(absl::StrCat("kill ", kill, " of rank ", victim, ": ", moments[kill % 5]));
    ASSERT_EQ(ranks[victim]->Wait(), kKilled) << Report(args, victim).message;
    ASSERT_NO_FATAL_FAILURE(ExpectToldNow(args, victim, survivor));
    if (kill % 3 == 1) {
      // After 0.8 to 20 ms, wherever it is then; not beyond its first unshard, so that no step is made meanwhile.
      ++attaching;
      const Args dies_early = {{"kill_after_us", std::to_string(attaching * 800)}, {"pause", "unsharded"}};
      ASSERT_EQ(StartRank(victim, args.With(dies_early)).Wait(), kKilled);
      ExpectGoneInTime(victim, survivor);
    }
    ranks[victim].emplace(start(kill + 2));
  }
  EXPECT_EQ(attaching, kAttaching);
  for (std::optional<Child>& rank : ranks) EXPECT_EQ(rank->Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  ExpectSame(reports, WithoutCrash(args));
  ExpectNothingLeaks();
}

TEST_F(Kill, OfTheDaemonIsAnErrorAndNoHang) {
  StartDaemon();
  const Args args = {{"steps", "1000000"}, {"timeout_ms", "3000"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 5; }));
  kill(daemon_pid(), SIGKILL);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].Wait(), 0);
    EXPECT_EQ(Report(args, rank).code, static_cast<int>(Code::kUnavailable)) << Report(args, rank).message;
  }
}

}  // namespace
}  // namespace shardd::e2e
