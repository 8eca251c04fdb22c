// The daemon is killed where it and its ranks do something else than a step: at the beginning of a job, while more is
// to be trained, and while the next daemon takes up what the one before has left.

#include <signal.h>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/daemon_death.h"
#include "tests/testing/long_run.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills() { return testing::LongRun("SHARDD_DEATHS", 6); }

class DeathMoments : public DaemonDeath {
 protected:
  void SetUp() override {
    StartCustodian();
    StartKept();
  }
  // At most; at random.
  void SleepForUs(unsigned us) { absl::SleepFor(absl::Microseconds(random_() % us)); }
  // A successor that is killed so long after its start, whatever it does then.
  void StartAndKill(unsigned most_us) {
    Child next = testing::Spawn({testing::ProgramPath("shardd"), "--listen=unix:" + socket(), "--devices=" + devices_,
                                 "--custodian=unix:" + Custody()},
                                {.log = DaemonLog(), .own_group = true});
    SleepForUs(most_us);
    next.Kill(SIGKILL);
    next.Wait();
  }
  std::mt19937 random_{static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 41))};
};

// Half of a parameter is handed in, and no version has it.
TEST_F(DeathMoments, HalfWrittenInitialValuesAreWrittenAgain) {
  const Args undisturbed = Training(3);
  const Args args = undisturbed.With({{"pause", "initial@0"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "initial", rank);
  KillDaemon();
  StartKept();
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "initial", rank);
  ExpectUndisturbed(undisturbed, ranks);
  ExpectNothingLeft();
}

class DeathMomentsBy : public DeathMoments, public ::testing::WithParamInterface<int> {};

// While it is opened, ranks attach, initial values are handed in, and the first steps made.
TEST_P(DeathMomentsBy, AtTheBeginningOfAJobLoseNothing) {
  for (int kill = 0; kill < Kills(); ++kill) {
    const Args args =
        Training(300).With({{"name", absl::StrCat("job", kill)}, {"filler", "100000"}, {"await_daemon", "1"}});
    std::vector<Child> ranks = StartRanks(args);
    if (kill % 2 == 0) {
      ASSERT_TRUE(PollUntil([&] { return !Job(args.Text("name")).name().empty(); }));
      SleepForUs(10'000);
    } else {
      SleepForUs(60'000);
    }
    KillDaemon(GetParam());
    StartKept();
    if (HasFatalFailure()) return;
    ExpectUndisturbed(args, ranks);
    if (HasFailure()) return;
  }
  ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(Signals, DeathMomentsBy, ::testing::Values(SIGKILL, SIGTERM),
                         [](const auto& info) { return info.param == SIGKILL ? "SIGKILL" : "SIGTERM"; });

// The job that trains more takes the place of the one that is.
TEST_F(DeathMoments, WhileMoreIsToBeTrainedLoseNothing) {
  const Args undisturbed = {{"model", "blocks"}, {"blocks", "2"}, {"numel", "20011"},     {"recover", "1"},
                            {"steps", "6"},      {"extend", "3"}, {"timeout_ms", "60000"}};
  for (int kill = 0; kill < Kills(); ++kill) {
    const Args args = undisturbed.With({{"name", absl::StrCat("job", kill)}, {"pause", "extending@0"}});
    std::vector<Child> ranks = StartRanks(args);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "extending", rank);
    for (int rank = 0; rank < 2; ++rank) LetGo(args, "extending", rank);
    SleepForUs(12'000);
    KillDaemon();
    StartKept();
    if (HasFatalFailure()) return;
    ExpectUndisturbed(undisturbed.With({{"name", args.Text("name")}}), ranks);
    if (HasFailure()) return;
  }
  ExpectNothingLeft();
}

TEST_F(DeathMoments, OfTheNextDaemonsWhileTheyTakeUpLoseNothing) {
  const Args args = UntilEnough(Training(kUntilEnough));  // and no kill while ranks finish
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
  for (int kills = 0; kills < 4 * Kills(); kills += 4) {
    const int64_t before = Committed();
    KillDaemon();
    for (int again = 0; again < 3; ++again) StartAndKill(100'000);
    StartKept();
    if (HasFatalFailure()) return;
    ASSERT_TRUE(PollUntil([&] { return Committed() > before; }));
  }
  SayEnough();
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

// A rank that says that it has finished says so to the next daemon: the program could not, it has no job any more.
TEST_F(DeathMoments, WhileRanksFinishTheyHaveFinishedAtTheNext) {
  for (int kill = 0; kill < Kills(); ++kill) {
    const Args undisturbed = Training(3).With({{"name", absl::StrCat("job", kill)}});
    const Args args = undisturbed.With({{"pause", "end@3"}});
    std::vector<Child> ranks = StartRanks(args);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
    for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
    SleepForUs(8'000);
    KillDaemon();
    StartKept();
    if (HasFatalFailure()) return;
    ExpectUndisturbed(undisturbed, ranks);
    EXPECT_TRUE(PollUntil([&] { return Job(args.Text("name")).name().empty(); })) << "a later run begins anew";
    if (HasFailure()) return;
  }
  ExpectNothingLeft();
}

// Of waits: the daemon does not come again.
TEST_F(DeathMoments, RanksWaitForTheNextDaemonAsLongAsTold) {
  const Args args = Training(100'000).With({{"timeout_ms", "3000"}});
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  const int64_t killed_ms = NowMs();
  KillDaemon();
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  for (const TrainerReport& report : Reports(args)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kUnavailable)) << report.message;
    EXPECT_GE(report.ended_ms - killed_ms, 2500) << report.message;
    EXPECT_LE(report.ended_ms - killed_ms, 4000) << report.message;
    EXPECT_LE(report.waited_ms, MostMs(args));
  }
}

}  // namespace
}  // namespace shardd::e2e
