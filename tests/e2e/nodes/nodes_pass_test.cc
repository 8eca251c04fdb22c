// Jobs over several nodes whose ranks update their shards themselves (pass_trainer.h): values are those of the
// unsharded model, and a rank that dies at whatever moment takes all nodes back to the version before, or none.

#include <signal.h>

#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

const Args kPass = {{"model", "pass"}, {"trainers_write", "1"}, {"trained", "sgd"},
                    {"blocks", "3"},   {"numel", "20011"},      {"steps", "6"},
                    {"midway", "1"},   {"timeout_ms", "60000"}, {"by_groups", "1"}};

struct PassCase {
  const char* name;
  Args args;
};
std::ostream& operator<<(std::ostream& out, const PassCase& c) { return out << c.name; }

class NodesPass : public Nodes, public ::testing::WithParamInterface<PassCase> {};

TEST_P(NodesPass, UpdatesOfTrainersAreThoseOfTheUnshardedModel) {
  const Args args = kPass.With(GetParam().args);
  if (args.Int("gpus") > 0) {
    SHARDD_NEEDS_GPUS(args.Int("gpus"));
    OnGpus(args.Int("gpus"));
  }
  Start(args.Int("node_count", 2), args.Int("world", 2));
  ExpectAllOk(RunAll(args));
  for (int k = 0; k < count(); ++k) {
    EXPECT_TRUE(testing::PollUntil([&] { return node(k).Job().name().empty(); })) << "all have finished";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, NodesPass,
    ::testing::Values(PassCase{"Replicas", {}},
                      PassCase{"ReplicasReadInPlace", {{"by_groups", "0"}, {"writeback", "1"}}},
                      PassCase{"ReplicasAdamDim0Micro", {{"trained", "adam"}, {"layout", "DIM0"}, {"micro", "2"}}},
                      PassCase{"Cut", {{"strategy", "FULL_SHARD"}}},
                      PassCase{"CutAdamOnThreeNodes",
                               {{"strategy", "FULL_SHARD"}, {"trained", "adam"}, {"node_count", "3"}, {"world", "1"}}},
                      PassCase{"CutDim0Micro", {{"strategy", "FULL_SHARD"}, {"layout", "DIM0"}, {"micro", "2"}}},
                      PassCase{"CutEmptyShards", {{"strategy", "FULL_SHARD"}, {"layout", "DIM0"}, {"numel", "3"}}}),
    [](const auto& info) { return info.param.name; });

// A host is ahead of its GPU there, so the stores of a step may be on their way when its pass is entered.
INSTANTIATE_TEST_SUITE_P(
    OnGpus, NodesPass,
    ::testing::Values(
        PassCase{"Replicas", {{"gpus", "2"}}},
        PassCase{"ReplicasAdamDim0Micro", {{"gpus", "2"}, {"trained", "adam"}, {"layout", "DIM0"}, {"micro", "2"}}},
        PassCase{"ReplicasReadInPlaceOnOneGpu",
                 {{"gpus", "1"}, {"by_groups", "0"}, {"writeback", "1"}, {"param_dtype", "bf16"}}},
        PassCase{"Cut", {{"gpus", "2"}, {"strategy", "FULL_SHARD"}}},
        PassCase{"CutBehindItsHosts", {{"gpus", "2"}, {"strategy", "FULL_SHARD"}, {"ordered", "0"}}},
        PassCase{"CutAdamOnThreeNodes",
                 {{"gpus", "1"}, {"strategy", "FULL_SHARD"}, {"trained", "adam"}, {"node_count", "3"}, {"world", "1"}}},
        PassCase{"CutDim0Micro", {{"gpus", "2"}, {"strategy", "FULL_SHARD"}, {"layout", "DIM0"}, {"micro", "2"}}}),
    [](const auto& info) { return info.param.name; });

struct PassDeath {
  const char* name;
  const char* strategy;
  int gpus;  // of each node; 0: CPUs
};

class NodesPassDeath : public Nodes, public ::testing::WithParamInterface<PassDeath> {};

TEST_P(NodesPassDeath, AKillAnywhereCostsOneStepAtMost) {
  if (GetParam().gpus > 0) {
    SHARDD_NEEDS_GPUS(GetParam().gpus);
    OnGpus(GetParam().gpus);
  }
  Start(2, 2);
  const Args args =
      kPass.With({{"strategy", GetParam().strategy}, {"recover", "1"}, {"trained", "adam"}, {"steps", "8"}});
  int on = 0;
  for (const char* moment : {"before_pass", "entered", "midway", "before_update", "updating", "updated"}) {
    SCOPED_TRACE(moment);
    const std::vector<TrainerReport> reports =
        RunWithADeath(args.With({{"name", absl::StrCat("killed-", moment)}, {"midway", moment[0] == 'm' ? "1" : "0"}}),
                      absl::StrCat(moment, "@4"), on, 1);
    on = 1 - on;
    for (size_t r = 0; r < reports.size(); ++r) {
      const std::string note = reports[r].Note("aborted ");
      if (note.empty()) continue;  // it came in the dead one's place
      EXPECT_GE(std::atoll(note.c_str() + 8), 3) << note;
      EXPECT_LE(std::atoll(note.c_str() + 8), 4) << note;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, NodesPassDeath,
                         ::testing::Values(PassDeath{"Replicas", "HYBRID_SHARD", 0}, PassDeath{"Cut", "FULL_SHARD", 0},
                                           PassDeath{"ReplicasOnGpus", "HYBRID_SHARD", 2},
                                           PassDeath{"CutOnGpus", "FULL_SHARD", 2}),
                         [](const auto& info) { return info.param.name; });

class NodesPassLost : public Nodes {
 protected:
  // The daemon is another one, which has nothing, and its rank another process, as whoever restarts it makes it.
  void LoseWithRank(int lost, const Args& args, std::map<int, testing::Child>* ranks) {
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(lost));
    EXPECT_EQ(ranks->at(lost).Wait(), 0);
    ranks->erase(lost);
    ranks->emplace(lost, StartRank(lost, 0, args));
  }
  void LoseBothInTurn() {
    Start(2, 1);
    const Args args = kPass.With({{"recover", "1"}, {"trained", "adam"}, {"steps", "60"}});
    std::map<int, testing::Child> ranks;
    for (int k = 0; k < 2; ++k) ranks.emplace(k, StartRank(k, 0, args));
    for (int k = 1; k >= 0; --k) {
      ASSERT_TRUE(testing::PollUntil([&] { return node(1 - k).Job().committed_step() > 20 - 10 * k; }));
      ASSERT_NO_FATAL_FAILURE(LoseWithRank(k, args, &ranks));
    }
    for (auto& [node, rank] : ranks) EXPECT_EQ(rank.Wait(), 0) << node;
    ExpectAllOk(Reports(args));
  }
};

// Without a custodian its replica is sent what is committed; where parts exist once the job ends by name.
TEST_F(NodesPassLost, ALostDaemonsReplicaGoesOnFromTheCommittedVersion) { LoseBothInTurn(); }
TEST_F(NodesPassLost, ALostGpuDaemonsReplicaGoesOnFromTheCommittedVersion) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  LoseBothInTurn();
}

TEST_F(NodesPassLost, APartNowhereElseEndsTheJobByName) {
  Start(2, 1);
  const Args args = kPass.With({{"strategy", "FULL_SHARD"}, {"recover", "1"}, {"steps", "100000"}});
  std::map<int, testing::Child> ranks;
  for (int k = 0; k < 2; ++k) ranks.emplace(k, StartRank(k, 0, args));
  ASSERT_TRUE(testing::PollUntil([&] { return node(0).Job().committed_step() > 10; }));
  ASSERT_NO_FATAL_FAILURE(LoseWithRank(1, args, &ranks));
  EXPECT_EQ(ranks.at(0).Wait(), 0);  // the other may have come behind the end, to a job that begins anew
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "has nothing of what other nodes have committed"))
      << Report(0, 0, args).message;
}

}  // namespace
}  // namespace shardd::e2e
