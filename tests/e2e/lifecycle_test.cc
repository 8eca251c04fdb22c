// Jobs come and go: versions, full parameters, state handed on, grace times, closing, finishing.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class Lifecycle : public Cluster {
 protected:
  v1::RankState StateOf(int rank) {
    const std::vector<v1::Rank> ranks = Ranks();
    return static_cast<int>(ranks.size()) > rank ? ranks[rank].state() : v1::RANK_STATE_UNSPECIFIED;
  }
  // Rank 0 stands still while it holds a group that it will read again; rank 1 has stepped meanwhile.
  void DelayRankZeroWhileRankOneSteps(const Args& extra) {
    StartDaemon();
    const Args args = extra.With({{"steps", "12"}});
    Child delayed = StartRank(0, args.With({{"pause", "root_held@5"}}));
    Child other = StartRank(1, args);
    AwaitPause(args, "root_held", 0);
    ASSERT_TRUE(PollUntil([&] { return StateOf(1) == v1::RANK_STATE_STEPPED; }));
    EXPECT_EQ(Job().committed_step(), 5);  // what rank 0 reads is not written
    EXPECT_TRUE(absl::StrContains(Ranks()[1].waiting_for(), "rank 0")) << Ranks()[1].waiting_for();
    LetGo(args, "root_held", 0);
    EXPECT_EQ(delayed.Wait(), 0);
    EXPECT_EQ(other.Wait(), 0);
    // Parity of losses: the delayed rank has read the version of its pass throughout.
    ExpectParity(args, {Report(args, 0), Report(args, 1)});
  }
};

TEST_F(Lifecycle, ADelayedRankReadsItsVersionWhileAnotherHasStepped) { DelayRankZeroWhileRankOneSteps({}); }

TEST_F(Lifecycle, FromThePoolADelayedRankReadsItsOwnVersion) {
  DelayRankZeroWhileRankOneSteps({{"unshard_mode", "POOLED"}, {"forward_prefetch", "1"}});
}

TEST_F(Lifecycle, WrittenBackParametersAreTheNextVersionOnEveryRank) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"writeback_at_end", "1"}};
  v1::Job job;
  const std::vector<TrainerReport> written = RunRanks(args, {}, [&] { job = Job(); });
  ExpectAllOk(written);
  EXPECT_EQ(job.version(), 6u + 2);  // initial values, six steps, the writeback
  EXPECT_EQ(job.committed_step(), 6);
  const Args plain = {{"steps", "6"}, {"name", "plain"}};
  const std::vector<TrainerReport> untouched = RunRanks(plain);
  for (int i = 0; i < kNumel[kB1]; ++i) {
    EXPECT_EQ(written[0].values[kB1][i], untouched[0].values[kB1][i] + 1) << i;
  }
  EXPECT_EQ(written[0].values[kW1], untouched[0].values[kW1]);
  ExpectSame({written[1]}, {written[0]});
}

TEST_F(Lifecycle, WritebackByRankZeroAloneIsTheSameEverywhere) {
  StartDaemon();
  const Args args = {{"steps", "6"}, {"writeback_at_end", "1"}, {"rank0_only", "1"}, {"layout", "DIM0"}};
  const std::vector<TrainerReport> written = RunRanks(args);
  ExpectAllOk(written);
  const std::vector<TrainerReport> by_all = RunRanks(args.With({{"rank0_only", "0"}, {"name", "all"}}));
  ExpectSame(written, by_all);
}

TEST_F(Lifecycle, FullParametersOfABf16JobAreFullPrecision) {
  StartDaemon();
  const Args args = {{"steps", "3"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}};
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectAllOk(reports);
  int finer = 0;
  for (const float x : reports[0].values[kW1]) finer += x != RoundTo("bf16", x) ? 1 : 0;
  EXPECT_GT(finer, 40);
}

TEST_F(Lifecycle, ARankMayFinishWhileAnotherStillReadsFullParameters) {
  StartDaemon();
  const Args args = {{"steps", "3"}};
  Child slow = StartRank(0, args.With({{"pause", "reading@3"}}));
  Child fast = StartRank(1, args);
  AwaitPause(args, "reading", 0);
  EXPECT_EQ(fast.Wait(), 0);
  EXPECT_EQ(Report(args, 1).code, 0) << Report(args, 1).message;
  LetGo(args, "reading", 0);
  EXPECT_EQ(slow.Wait(), 0);
  EXPECT_EQ(Report(args, 0).code, 0) << Report(args, 0).message;
}

TEST_F(Lifecycle, ARankThatGoesOnAloneIsToldWhoFinished) {
  StartDaemon();
  const Args args = {{"steps", "8"}, {"read_values", "0"}};
  const std::vector<TrainerReport> reports = RunRanks(args, {{1, {{"steps", "3"}}}});
  EXPECT_EQ(reports[1].code, 0) << reports[1].message;
  EXPECT_EQ(reports[0].code, static_cast<int>(Code::kAborted));
  EXPECT_TRUE(absl::StrContains(reports[0].message, "rank 1") || absl::StrContains(reports[0].message, "rank=1"))
      << reports[0].message;
  EXPECT_TRUE(absl::StrContains(reports[0].message, "finished")) << reports[0].message;
}

TEST_F(Lifecycle, AMebibyteOfTrainerStateIsHandedToTheReplacement) {
  StartDaemon();
  const Args args = {{"steps", "4"}, {"state_bytes", std::to_string(1 << 20)}, {"read_values", "0"}};
  ExpectAllOk(RunRanks(args.With({{"finish", "0"}, {"wait_step", "1"}}), {}, [] {}));
  // All ranks are gone; the job and its state are not.
  ASSERT_EQ(Job().committed_step(), 4);
  const Args more = {{"steps", "6"}, {"wait_step", "1"}};
  const std::vector<TrainerReport> reports = RunRanks(more);
  ExpectAllOk(reports);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(reports[rank].Note("attached"), "attached 4");
    EXPECT_TRUE(absl::StartsWith(reports[rank].Note("state"), absl::StrCat("state step 4 rank ", rank, ";xxx")))
        << reports[rank].Note("state");
  }
}

TEST_F(Lifecycle, AJobIsFreedOnlyAfterItsGraceTime) {
  StartDaemon();
  const Footprint before = DaemonFootprint();
  const Args args = {{"steps", "3"}, {"grace_ms", "3000"}, {"finish", "0"}};
  ExpectAllOk(RunRanks(args, {}, [] {}));
  EXPECT_EQ(Job().committed_step(), 3);
  EXPECT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  EXPECT_TRUE(HasEvent("job", "close", "no session for"));
  EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() <= before; })) << DaemonFootprint() << ", want " << before;
}

TEST_F(Lifecycle, WhoComesTooLateHearsWhatWasLostAndWhy) {
  StartDaemon();
  const Args args = {{"steps", "3"}, {"grace_ms", "300"}, {"finish", "0"}};
  ExpectAllOk(RunRanks(args, {}, [] {}));
  ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  v1::Job late;
  ExpectAllOk(RunRanks(args, {}, [&] { late = Job(); }));
  EXPECT_EQ(late.lost().committed_step(), 3);
  for (const char* part : {"3 committed steps", "300ms", "SHARDD_GRACE_MS"}) {
    EXPECT_TRUE(absl::StrContains(late.lost().text(), part)) << part << " in: " << late.lost().text();
  }
  EXPECT_TRUE(HasEvent("job", "lost", "3 committed steps"));
}

TEST_F(Lifecycle, AJobIsKeptAsLongAsItsLauncherLives) {
  StartDaemon();
  const Args args = {{"steps", "3"}, {"grace_ms", "100"}, {"finish", "0"}};
  ExpectAllOk(RunRanks(args.With({{"name", "without"}}), {}, [] {}));
  RanksFind({"TORCHELASTIC_RUN_ID=run"});  // of this process it is not: it is the launcher
  ExpectAllOk(RunRanks(args, {}, [] {}));
  EXPECT_TRUE(PollUntil([&] { return Job("without").name().empty(); }));
  EXPECT_FALSE(PollUntil([&] { return Job().name().empty(); }, absl::Seconds(1)));
  EXPECT_EQ(Job().committed_step(), 3);
}

TEST_F(Lifecycle, AJobIsKeptAsLongAsItsContainersLauncher) {
  if (geteuid() != 0) GTEST_SKIP() << "a PID namespace is made by root";
  StartDaemon();
  std::string program(4096, 0);
  program.resize(static_cast<size_t>(std::max<ssize_t>(readlink("/proc/self/exe", program.data(), program.size()), 0)));
  RanksAreRunBy({"/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc", program, "--launcher"});
  const Args args = {{"steps", "3"}, {"world", "1"}, {"grace_ms", "100"}, {"finish", "0"}};
  Child container = StartRank(0, args);
  ASSERT_TRUE(PollUntil([&] { return Report(args, 0).ended_ms > 0; }));
  EXPECT_EQ(Report(args, 0).code, 0) << Report(args, 0).message;
  EXPECT_FALSE(PollUntil([&] { return Job().name().empty(); }, absl::Seconds(1)));
  EXPECT_EQ(Job().committed_step(), 3);
  container.Kill();
  EXPECT_TRUE(PollUntil([&] { return Job().name().empty(); }));
}

TEST_F(Lifecycle, EveryRankThatIsLostIsAnEvent) {
  StartDaemon();
  const Args args = {{"steps", "1000000"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 3; }));
  for (Child& rank : ranks) rank.Kill(SIGTERM);
  const auto is_lost = [&](int rank) {
    const std::vector<v1::Event> events = Events();
    return std::count_if(events.begin(), events.end(),
                         [&](const v1::Event& event) { return event.kind() == "lost" && event.rank() == rank; }) == 1;
  };
  EXPECT_TRUE(PollUntil([&] { return is_lost(0) && is_lost(1); }));
}

// Who watches the log for what is amiss sees it without the other lines.
TEST_F(Lifecycle, ALostRankAndItsAbortAreLoggedAsWarnings) {
  StartDaemon();
  const Args args = {{"steps", "6"}};
  Child survivor = StartRank(0, args);
  Child victim = StartRank(1, args.With({{"kill", "backward_done@3"}}));
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_NE(victim.Wait(), 0);
  const auto is_said = [this](const std::string& level, const std::string& kind) {
    for (const auto line : absl::StrSplit(testing::ReadWholeFile(DaemonLog()), '\n')) {
      if (absl::StrContains(line, absl::StrCat("Z ", level, " ")) && absl::StrContains(line, " job job epoch ") &&
          absl::StrContains(line, absl::StrCat(" ", kind, ": "))) {
        return true;
      }
    }
    return false;
  };
  for (const char* kind : {"lost", "abort"}) {
    EXPECT_TRUE(PollUntil([&] { return is_said("W", kind); })) << kind;
    EXPECT_FALSE(is_said("I", kind)) << kind;
  }
  EXPECT_TRUE(is_said("I", "open"));
}

TEST_F(Lifecycle, ARankThatLeavesOutsideOfAStepAbortsNone) {
  StartDaemon();
  const Args args = {{"steps", "3"}, {"read_values", "0"}, {"wait_step", "1"}, {"finish", "0"}};
  ExpectAllOk(RunRanks(args, {}, [] {}));
  EXPECT_TRUE(HasEvent("job", "epoch", "the rank detached"));
  EXPECT_FALSE(HasEvent("job", "abort", ""));
}

TEST_F(Lifecycle, AFinishedJobIsFreedAtOnce) {
  StartDaemon();
  const Footprint before = DaemonFootprint();
  ExpectAllOk(RunRanks({{"steps", "3"}}));
  EXPECT_TRUE(PollUntil([&] { return Job().name().empty() && DaemonFootprint() <= before; }))
      << DaemonFootprint() << ", want " << before;
  EXPECT_TRUE(HasEvent("job", "close", "finished"));
}

TEST_F(Lifecycle, ClosingAJobEndsItsRanksAndFreesItsMemory) {
  StartDaemon();
  const Footprint before = DaemonFootprint();
  const Args args = {{"steps", "1000000"}, {"recover", "1"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 5; }));
  const std::string command =
      absl::StrCat(testing::ProgramPath("shardctl"), " --address=unix:", socket(), " close job > /dev/null");
  EXPECT_EQ(system(command.c_str()), 0);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].Wait(), 0);
    EXPECT_EQ(Report(args, rank).code, static_cast<int>(Code::kNotFound)) << Report(args, rank).message;
    EXPECT_TRUE(absl::StrContains(Report(args, rank).message, "closed")) << Report(args, rank).message;
  }
  EXPECT_TRUE(Job().name().empty());
  EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() <= before; })) << DaemonFootprint() << ", want " << before;
}

TEST_F(Lifecycle, AnEmbeddedDaemonEndsAfterItsLastJob) {
  StartDaemon({"--embedded"});
  const Args args = {{"steps", "3"}};
  const Args other = {{"steps", "3"}, {"name", "other"}};
  ExpectAllOk(RunRanks(args, {}, [&] { ExpectAllOk(RunRanks(other)); }));  // one is left: it goes on
  EXPECT_TRUE(PollUntil([&] { return access(socket().c_str(), F_OK) != 0; }));
  EXPECT_EQ(WaitForDaemon(), 0);
}

// Nobody rotates the file that each of a user's embedded daemons appends to; a shared one's is its operator's.
TEST_F(Lifecycle, TheLogOfAnEmbeddedDaemonIsBounded) {
  constexpr uintmax_t kMostBytes = 4 << 20;  // server/main.cc
  const std::string log = File("daemon.log");
  for (const bool embedded : {false, true}) {
    {
      std::ofstream before(log);
      for (uintmax_t bytes = 0; bytes <= kMostBytes; bytes += 100) before << std::string(99, 'x') << '\n';
    }
    StartDaemon(embedded ? std::vector<std::string>{"--embedded"} : std::vector<std::string>());
    ASSERT_EQ(DaemonLog(), log);
    ASSERT_TRUE(PollUntil([&] { return absl::StrContains(testing::ReadWholeFile(log), "listens on"); }));
    EXPECT_EQ(std::filesystem::file_size(log) <= kMostBytes, embedded) << embedded;
    EXPECT_EQ(StopDaemon(), 0);
  }
}

TEST_F(Lifecycle, SigtermEndsTheDaemonInOrderAlsoWithRanksAttached) {
  StartDaemon();
  const Args args = {{"steps", "1000000"}, {"timeout_ms", "2000"}};
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 5; }));
  EXPECT_EQ(StopDaemon(), 0);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].Wait(), 0);
    EXPECT_NE(Report(args, rank).code, 0);
  }
  EXPECT_EQ(access(socket().c_str(), F_OK), -1);
}

}  // namespace
}  // namespace shardd::e2e
