// Jobs over several nodes whose ranks update their shards themselves (pass_trainer.h): values are those of the
// unsharded model, and a rank that dies at whatever moment takes all nodes back to the version before, or none.

#include <signal.h>

#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"

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

class NodesPassDeath : public Nodes, public ::testing::WithParamInterface<const char*> {};

TEST_P(NodesPassDeath, AKillAnywhereCostsOneStepAtMost) {
  Start(2, 2);
  const Args args = kPass.With({{"strategy", GetParam()}, {"recover", "1"}, {"trained", "adam"}, {"steps", "8"}});
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

INSTANTIATE_TEST_SUITE_P(Placements, NodesPassDeath, ::testing::Values("HYBRID_SHARD", "FULL_SHARD"),
                         [](const auto& info) { return std::string(info.param[0] == 'F' ? "Cut" : "Replicas"); });

class NodesPassLost : public Nodes {
 protected:
  // The daemon is another one, which has nothing, and its rank another process, as whoever restarts it makes it.
  void LoseWithRank(int lost, const Args& args, std::map<int, testing::Child>* ranks) {
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(lost));
    EXPECT_EQ(ranks->at(lost).Wait(), 0);
    ranks->erase(lost);
    ranks->emplace(lost, StartRank(lost, 0, args));
  }
};

// Without a custodian its replica is sent what is committed; where parts exist once the job ends by name.
TEST_F(NodesPassLost, ALostDaemonsReplicaGoesOnFromTheCommittedVersion) {
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
