// Jobs whose passes read copies (JobConfig.pass_copies), as processes that update their shards themselves
// (pass_trainer.h): on CPUs, and on GPUs, by the trainers' streams and by the host; on the fake driver every operation
// of every stream late by a seed. Ranks die at all moments, and the values are right in the end.

#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

const Args kPass = {{"model", "pass"},  {"trainers_write", "1"}, {"trained", "sgd"}, {"blocks", "3"},
                    {"numel", "20011"}, {"steps", "6"},          {"midway", "1"},    {"timeout_ms", "60000"}};

struct Case {
  const char* name;
  Args args;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Passes : public Cluster {
 protected:
  // SIGKILL of the last rank at every moment of a step; it is replaced, the others come back by themselves.
  void KillEverywhere(const Args& args_in, int64_t most_steps_lost) {
    const char* const between = args_in.Int("midway") != 0 ? "midway" : "updating";
    const int world = args_in.Int("world", 2);
    const Args args = args_in.With({{"recover", "1"}});
    for (const char* moment : {"before_pass", "entered", between, "before_update", "updated"}) {
      SCOPED_TRACE(moment);
      const std::string at = absl::StrCat(moment, "@4");
      std::vector<Child> survivors;
      for (int rank = 0; rank + 1 < world; ++rank) survivors.push_back(StartRank(rank, args));
      Child victim = StartRank(world - 1, args.With({{"kill", at}}));
      EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
      Child replacement = StartRank(world - 1, args);
      EXPECT_EQ(replacement.Wait(), 0);
      for (Child& survivor : survivors) EXPECT_EQ(survivor.Wait(), 0);
      std::vector<TrainerReport> reports;
      for (int rank = 0; rank < world; ++rank) reports.push_back(Report(args, rank));
      ExpectAllOk(reports);
      const std::string note = reports[0].Note("aborted ");
      ASSERT_FALSE(note.empty());
      EXPECT_GE(std::atoll(note.c_str() + 8), 4 - most_steps_lost) << note;
      EXPECT_LE(std::atoll(note.c_str() + 8), 4) << note;
      ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
    }
  }
};

class PassesOnCpus : public Passes, public ::testing::WithParamInterface<Case> {};

TEST_P(PassesOnCpus, UpdatesOfTrainersAreThoseOfTheUnshardedModel) {
  const Args args = kPass.With(GetParam().args);
  StartDaemon({}, absl::StrCat("cpu:", args.Int("world", 2)));
  ExpectAllOk(RunRanks(args));
}

const Case kCases[] = {
    {"Sgd", {}},
    {"AdamOnThreeRanks", {{"trained", "adam"}, {"world", "3"}}},
    {"OneRank", {{"world", "1"}}},
    {"FourRanksDim0", {{"world", "4"}, {"layout", "DIM0"}}},
    {"EmptyShards", {{"world", "4"}, {"layout", "DIM0"}, {"numel", "3"}}},
    {"LowerPrecision", {{"param_dtype", "bf16"}, {"trained", "adam"}}},
    {"Pooled", {{"unshard_mode", "POOLED"}, {"forward_prefetch", "1"}, {"micro", "2"}}},
    {"PooledLowerPrecision", {{"unshard_mode", "POOLED"}, {"param_dtype", "bf16"}, {"keep_every", "3"}}},
    {"KeptWithEachPassAndWrittenBack", {{"keep_every", "1"}, {"writeback", "1"}, {"micro", "2"}}},
    {"WrittenBackBehindSnapshotsBehindPasses",
     {{"keep_every", "1"}, {"asks", "1"}, {"writeback", "1"}, {"micro", "2"}, {"trained", "adam"}}},
    {"HybridWithCopiesForReplicas",
     {{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}, {"replica_copies", "1"}}},
};

INSTANTIATE_TEST_SUITE_P(Cases, PassesOnCpus, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST_F(Passes, AKillAnywhereTakesTheJobBackToTheSnapshot) {
  StartDaemon({}, "cpu:3");
  KillEverywhere(kPass.With({{"keep_every", "1"}, {"trained", "adam"}}), 1);
  KillEverywhere(kPass.With({{"keep_every", "1"}, {"trained", "adam"}, {"asks", "1"}, {"layout", "DIM0"}}), 1);
  KillEverywhere(kPass.With({{"keep_every", "3"}, {"world", "3"}, {"midway", "0"}}), 4);
}

class PassesOnGpus : public Passes {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  void StartOnGpus(int gpus, const std::vector<std::string>& of_ranks = {}) {
    std::vector<std::string> environment = {"FAKE_CUDA_DELAY_SEED=11"};
    environment.insert(environment.end(), of_ranks.begin(), of_ranks.end());
    RanksFind(testing::FakeCudaEnvironment(gpus, environment));
    StartDaemon({}, "cuda:all", testing::FakeCudaEnvironment(gpus, {"FAKE_CUDA_DELAY_SEED=7"}));
  }
};

class PassesOnGpusOnly : public PassesOnGpus,
                         public ::testing::WithParamInterface<std::tuple<int, const char*, Case>> {};

TEST_P(PassesOnGpusOnly, UpdatesOfTrainersAreThoseOfTheUnshardedModel) {
  const auto& [gpus, ordered, c] = GetParam();
  StartOnGpus(gpus);
  const std::vector<TrainerReport> reports =
      RunRanks(kPass.With({{"device_memory", "1"}, {"ordered", ordered}}).With(c.args));
  ExpectAllOk(reports);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.Note("ordered"), absl::StrCat("ordered ", ordered));
}

INSTANTIATE_TEST_SUITE_P(Cases, PassesOnGpusOnly,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Values("0", "1"),
                                            ::testing::ValuesIn(kCases)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<2>(info.param).name, "On", std::get<0>(info.param),
                                               std::get<1>(info.param)[0] == '1' ? "ByStream" : "ByHost");
                         });

TEST_F(PassesOnGpus, AKillAnywhereTakesTheJobBackToTheSnapshot) {
  SHARDD_NEEDS_FAKE_GPUS("late writes");
  StartOnGpus(2, {"FAKE_CUDA_LATE_WRITES_US=3000"});
  const Args args = kPass.With({{"device_memory", "1"}});
  KillEverywhere(args.With({{"keep_every", "1"}, {"trained", "adam"}}), 3);
  KillEverywhere(args.With({{"keep_every", "3"}, {"world", "3"}}), 4);
  KillEverywhere(args.With({{"keep_every", "3"}, {"ordered", "0"}}), 4);
}

// Their streams come to the copies when the hosts have enqueued what reads them.
TEST_F(PassesOnGpus, NoHostWaitsForAGpuToEnterAPass) {
  StartOnGpus(1);
  const std::vector<TrainerReport> reports = RunRanks(kPass.With({{"device_memory", "1"}, {"ahead", "3"}}));
  ExpectAllOk(reports);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.Note("ahead "), "ahead 1");
}

TEST_F(PassesOnGpus, ARankWhoseStreamMissesAPassIsNamed) {
  StartOnGpus(1);
  const std::vector<TrainerReport> reports =
      RunRanks(kPass.With({{"device_memory", "1"}, {"silence_ms", "1000"}}), {{1, {{"stuck", "2"}}}});
  EXPECT_TRUE(absl::StrContains(reports[0].message, "EnterPass: the stream of rank 1 on cuda:0")) << reports[0].message;
}

// The wider job begins with what lies in the shards, keeps it before anybody attaches, and goes on with passes.
TEST_F(Passes, AJobIsExtendedBetweenPasses) {
  StartDaemon();
  const std::vector<TrainerReport> reports = RunRanks({{"model", "blocks"},
                                                       {"blocks", "2"},
                                                       {"numel", "5000"},
                                                       {"steps", "6"},
                                                       {"trainers_write", "1"},
                                                       {"pass_copies", "1"},
                                                       {"extend", "3"},
                                                       {"timeout_ms", "60000"}});
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("extended"), "extended at 3");
}

TEST_F(PassesOnGpus, WhatIsOffloadedIsStoredIntoByTheHost) {
  StartOnGpus(2);
  ExpectAllOk(RunRanks(kPass.With({{"device_memory", "1"}, {"offload", "HOST"}, {"trained", "adam"}})));
}

}  // namespace
}  // namespace shardd::e2e
