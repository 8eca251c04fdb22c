// The daemon is killed while ranks train, again and again, and its successor goes on with their jobs: no committed step
// is lost, and what comes of it has the bits of an undisturbed run.

#include "tests/e2e/daemon_death.h"

#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/long_run.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

constexpr int kKeepEvery = 3;  // of ranks that update

// For each of four kinds of job. A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills() { return testing::LongRun("SHARDD_DEATHS", 25); }

// By optimizers in the ranks, which look at the values by themselves.
Args TrainingByRanks(const char* optimizer) {
  return {{"recover", "1"},
          {"trained", optimizer},
          {"model", "pass"},
          {"trainers_write", "1"},
          {"blocks", "3"},
          {"numel", "60013"},
          {"keep_every", absl::StrCat(kKeepEvery)},
          {"timeout_ms", "60000"}};
}

class DaemonDeathWith : public DaemonDeath, public ::testing::WithParamInterface<const char*> {};

TEST_P(DaemonDeathWith, KillsAtAnyMomentLoseNothing) {
  const Args args = Training(kUntilEnough, GetParam());
  StartCustodian();
  KillWhereRanksTrain(args, Kills());
}

class DaemonDeathUnder : public DaemonDeath, public ::testing::WithParamInterface<const char*> {};

TEST_P(DaemonDeathUnder, KillsLoseNothingOfOtherOptimizers) {
  const int kills = (Kills() + 4) / 5;
  const bool has_momentum = GetParam() == std::string("rmsprop") || GetParam() == std::string("centered_rmsprop");
  const char* const momentum = has_momentum ? "0.9" : "0";
  const Args args = Training(kUntilEnough, GetParam()).With({{"momentum", momentum}, {"lr", "0.003"}});
  StartCustodian();
  KillWhereRanksTrain(args, kills);
}

class DaemonDeathOfWhole : public DaemonDeath, public ::testing::WithParamInterface<const char*> {
 protected:
  // `optimizer`: as Args say which.
  void KillWhereRanksTrainWith(const char* optimizer) {
    StartCustodian();
    KillWhereRanksTrain(Training(kUntilEnough)
                            .With({{optimizer, "1"},
                                   {"world", "3"},
                                   {"parts", GetParam()},
                                   {"momentum", "0"},
                                   {"lr", "0.003"},
                                   {"param_dtype", "bf16"}}),
                        Kills());
  }
};

// What a part has changed is taken back, and a step that is decided is completed behind its parts.
class DaemonDeathBetween : public DaemonDeath, public ::testing::WithParamInterface<const char*> {
 protected:
  // All ranks have made a part of step 5, and wait.
  std::vector<Child> StartPaused() {
    StartCustodian();
    StartKept();
    std::vector<Child> ranks = StartRanks(paused_);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(paused_, "parted", rank);
    return ranks;
  }
  const Args undisturbed_ = Training(9).With({{"parts", GetParam()}, {"momentum", "0"}, {"lr", "0.003"}});
  const Args paused_ = undisturbed_.With({{"pause", "parted@4"}});
};

TEST_P(DaemonDeathBetween, PartsOfAStepLosesNothing) {
  const Args args =
      Training(kUntilEnough).With({{"parts", GetParam()}, {"momentum", "0"}, {"lr", "0.003"}, {"param_dtype", "bf16"}});
  StartCustodian();
  KillWhereRanksTrain(args, Kills());
}

TEST_P(DaemonDeathBetween, PartsOfAStepTakesTheFirstBack) {
  std::vector<Child> ranks = StartPaused();
  KillDaemon();
  StartKept();
  EXPECT_EQ(Committed(), 4);
  for (int rank = 0; rank < 2; ++rank) LetGo(paused_, "parted", rank);
  ExpectUndisturbed(undisturbed_, ranks);
  ExpectNothingLeft();
}

// A rank dies between two parts, and another process comes in its place.
TEST_P(DaemonDeathBetween, PartsARankMayDieToo) {
  std::vector<Child> ranks = StartPaused();
  ranks[1].Kill(SIGKILL);
  ranks[1].Wait();
  ranks.pop_back();
  ranks.push_back(StartRank(1, undisturbed_));
  LetGo(paused_, "parted", 0);
  ExpectUndisturbed(undisturbed_, ranks);
  ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(All, DaemonDeathBetween, ::testing::Values("1", "2"),
                         [](const auto& info) { return info.param[0] == '1' ? "each" : "every_other"; });

// Between products of a matrix, too, which the next daemon makes again.
TEST_P(DaemonDeathOfWhole, KillsLoseNothingOfMatrices) { KillWhereRanksTrainWith("muon"); }

TEST_P(DaemonDeathOfWhole, KillsLoseNothingOfAdafactorsParametersEither) { KillWhereRanksTrainWith("adafactor"); }

INSTANTIATE_TEST_SUITE_P(All, DaemonDeathOfWhole, ::testing::Values("0", "1"),
                         [](const auto& info) { return info.param[0] == '0' ? "at_once" : "in_parts"; });

TEST_F(DaemonDeath, KillsUnderFourRanksLoseNothing) {
  const Args args = Training(kUntilEnough)
                        .With({{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}, {"max_norm", "0.1"}});
  StartCustodian();
  KillWhereRanksTrain(args, Kills());
}

// A step of theirs is committed when its snapshot is taken.
TEST_P(DaemonDeathWith, KillsWhereRanksUpdateLoseNothing) {
  const Args args = TrainingByRanks(GetParam() == std::string("sgd") ? "sgd" : "adam").With({{"keep_every", "1"}});
  StartCustodian();
  KillWhereRanksTrain(args, Kills());
}

// States are copied while ranks compute, and store into their shards: no committed step is lost.
TEST_P(DaemonDeathWith, KillsWhileSnapshotsAreTakenBehindPassesLoseNothing) {
  const Args args = TrainingByRanks(GetParam() == std::string("sgd") ? "sgd" : "adam")
                        .With({{"keep_every", "1"}, {"asks", "1"}, {"midway", "1"}});
  StartCustodian();
  KillWhereRanksTrain(args, Kills());
}

// So much is copied that kills meet it, of shards into what passes read as well.
TEST_F(DaemonDeath, KillsWhileMuchIsCopiedLoseNothing) {
  const int kills = (Kills() + 2) / 3;
  const Args args =
      TrainingByRanks("adam").With({{"keep_every", "1"}, {"asks", "1"}, {"midway", "1"}, {"numel", "2000003"}});
  StartCustodian();
  KillWhereRanksTrain(args, kills);
}

// Passes are so short that what snapshots cost decides: some have none, and shards of their own.
TEST_F(DaemonDeath, KillsWhereCostDecidesGoBackToTheSnapshot) {
  const Args args = TrainingByRanks("adam").With({{"keep_every", "0"}, {"asks", "1"}, {"midway", "1"}});
  StartCustodian();
  KillWhereRanksTrain(args, Kills(), /*most_steps_lost=*/10);
}

// Where fewer are taken, an abort goes back further.
TEST_P(DaemonDeathWith, KillsWhereRanksUpdateGoBackToTheSnapshot) {
  const int kills = (Kills() + 2) / 3;
  const Args args = TrainingByRanks(GetParam() == std::string("sgd") ? "sgd" : "adam");
  StartCustodian();
  KillWhereRanksTrain(args, kills, /*most_steps_lost=*/kKeepEvery);
}

// What is torn while they hand in is made of the snapshot, and the optimizer's states stay.
TEST_F(DaemonDeath, KillsWhereRanksHandInEditsLoseNothing) {
  StartCustodian();
  KillWhereRanksTrain(kEdits, Kills());
}

// Ranks may store at any time: every step is one when its snapshot is taken.
TEST_F(DaemonDeath, KillsWhereRanksEditBesideCopiesForPassesLoseNothing) {
  StartCustodian();
  KillWhereRanksTrain(kEdits.With({{"pass_copies", "1"}}), Kills());
}

TEST_F(DaemonDeath, WhereRanksLoadValuesTakesThemBack) {
  StartCustodian();
  KillWhereRanksLoadValues(Training(5).With({{"writeback_at_end", "1"}, {"param_dtype", "bf16"}}));
}

TEST_F(DaemonDeath, ASuccessorGoesOnAfterOneThatWasStopped) {
  StartCustodian();
  StartKept();
  const Args args = Training(400);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 20; }));
  KillDaemon(SIGTERM);
  StartKept();
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

// The next one has to know that nobody comes again: a later run of the name begins anew.
TEST_F(DaemonDeath, RanksThatFinishWithoutADaemonFinishAtTheNext) {
  StartCustodian();
  StartKept();
  const Args args = Training(5).With({{"pause", "end@5"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  KillDaemon(SIGTERM);
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  StartKept();
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk({Report(args, 0), Report(args, 1)});
  EXPECT_TRUE(PollUntil([this] { return Job().name().empty(); }));
}

// Whoever may write what a job reads again: what a process has it gets again, and nobody else does.
TEST_F(DaemonDeath, RanksThatComeAgainHaveTheMemoryThatTheyHad) {
  StartCustodian();
  StartKept();
  const Args args = Training(200'000);
  std::vector<Child> ranks = StartRanks(args);
  const auto trains_on = [this] {
    const int64_t before = Committed();
    return PollUntil([&] { return Committed() > before + 5; });
  };
  ASSERT_TRUE(trains_on());
  const auto slots = [&](int rank) { return MappedBy(ranks[rank], absl::StrCat("gradient slots ", rank)); };
  const std::string first = slots(0), second = slots(1), gradients = MappedBy(ranks[0], "gradients");
  EXPECT_NE(first, "");
  EXPECT_NE(first, second);
  EXPECT_NE(gradients, "");
  KillDaemon();
  StartKept();
  ASSERT_TRUE(trains_on());
  EXPECT_EQ(slots(0), first);
  EXPECT_EQ(slots(1), second);
  EXPECT_EQ(MappedBy(ranks[0], "gradients"), gradients);
  ranks[1].Kill(SIGKILL);
  ranks[1].Wait();
  Child other = StartRank(1, args);
  ASSERT_TRUE(trains_on());
  EXPECT_EQ(slots(0), first);
  EXPECT_EQ(MappedBy(ranks[0], "gradients"), gradients) << "the dead write no more";
  EXPECT_NE(MappedBy(other, "gradient slots 1"), "");
  EXPECT_NE(MappedBy(other, "gradient slots 1"), second);
}

TEST_F(DaemonDeath, RanksOfTheJobMayDieWithIt) {
  StartCustodian();
  StartKept();
  const Args args = Training(400);
  std::vector<Child> ranks = KillTogetherWithRanks(args, 20);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  ExpectAsUndisturbed(reports, args);
  ExpectNothingLeft();
}

TEST_F(DaemonDeath, WithItsCustodianLosesTheJobAndSaysSo) {
  StartCustodian();
  StartKept();
  const Args args = Training(4000);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  custodian_->Kill(SIGKILL);
  custodian_->Wait();
  const int64_t killed_ms = NowMs();
  KillDaemon();
  StartCustodian();
  StartKept();
  const int64_t there_ms = NowMs();
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  for (const TrainerReport& report : Reports(args)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kNotFound)) << report.message;
    EXPECT_TRUE(absl::StrContains(report.message, "lost")) << report.message;
    // No wait for what does not come.
    EXPECT_LE(report.ended_ms - there_ms, 1000) << "the daemon was replaced in " << there_ms - killed_ms << " ms";
  }
}

TEST_F(DaemonDeath, ACustodianThatDiesIsGivenTheJobsAgain) {
  StartCustodian();
  StartKept();
  const Args args = Training(600);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  custodian_->Kill(SIGKILL);
  custodian_->Wait();
  StartCustodian();
  ASSERT_TRUE(
      PollUntil([this] { return absl::StrContains(testing::ReadWholeFile(DaemonLog()), "has all jobs again"); }));
  KillDaemon();
  StartKept();
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

TEST_F(DaemonDeath, StoppingDaemonOrCustodianForAWhileEndsNothing) {
  StartCustodian();
  StartKept();
  const Args args = Training(1500);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  for (const pid_t pid : {custodian_->pid(), daemon_pid()}) {
    ASSERT_EQ(kill(pid, SIGSTOP), 0);
    absl::SleepFor(absl::Milliseconds(700));
    ASSERT_EQ(kill(pid, SIGCONT), 0);
    const int64_t before = Committed();
    ASSERT_TRUE(PollUntil([&] { return Committed() > before || ranks[0].Ended(); }));
  }
  ExpectUndisturbed(args, ranks);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("aborted"), "") << "rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DaemonDeathWith, ::testing::Values("adamw", "sgd"),
                         [](const auto& info) { return std::string(info.param); });
INSTANTIATE_TEST_SUITE_P(Optimizers, DaemonDeathUnder,
                         ::testing::Values("adagrad", "rmsprop", "centered_rmsprop", "lion", "adamw_amsgrad"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shardd::e2e
