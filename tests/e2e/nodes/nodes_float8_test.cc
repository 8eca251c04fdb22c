// Jobs whose parts of groups cross nodes in float8: all ranks train as one process that rounds each node's part of each
// parameter, and deaths change no bit.

#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "google/protobuf/util/json_util.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/float8_reference.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

Args InFloat8(const Args& args = {}) { return Args({{"strategy", "FULL_SHARD"}, {"float8", "1"}}).With(args); }

class NodesFloat8 : public Nodes {
 protected:
  ShardPlan Plan(const Args& args) {
    v1::JobSpec spec;
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(SpecJson(Of(0, args)), &spec).ok());
    return *PlanShards(spec, 0);
  }
  // Rounds what each node holds of a parameter, where its group is gathered in float8.
  static Reference::AsRead Rounded(const ShardPlan& plan, const Args& args) {
    return [&plan, args](int param, Tensor* values) {
      if (!PrecisionOf(args, kGroupNames[kGroupOfParam[param]]).float8) return;
      const int p = plan.FindParam(kParamNames[param]);
      for (int node = 0; node < NodesOfRow(plan); ++node) {
        const ParamRange range = NodeRangeOf(plan, p, node);
        testing::RoundToFloat8(values->data() + range.first, range.numel);
      }
    };
  }
};

class NodesFloat8Parity : public NodesFloat8, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(NodesFloat8Parity, TrainingIsThatOfOneProcessThatRoundsAlike) {
  const Args args = InFloat8(GetParam().second);
  Start(args.Int("node_count", 2), args.Int("world", 2));
  const std::vector<TrainerReport> reports = RunAll(args);
  const ShardPlan plan = Plan(args);
  ExpectParity(World(args), reports, args.Text("param_dtype").empty() ? 1e-5 : 4e-3, Rounded(plan, args));
  for (const TrainerReport& report : reports) {
    EXPECT_EQ(report.values, reports[0].values) << "the owner's ranks read what the others do";
  }
  // The parameters themselves are not rounded: the same training without float8 ends elsewhere, and not far away.
  const std::vector<TrainerReport> full = RunAll(args.With({{"float8", "0"}, {"name", "full"}}));
  ExpectAllOk(full);
  EXPECT_NE(full[0].values, reports[0].values);
  EXPECT_NEAR(full[0].losses.back(), reports[0].losses.back(), 0.1 * full[0].losses.back());
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, NodesFloat8Parity,
    ::testing::Values(
        std::pair{"Flat", Args{{"steps", "10"}, {"optimizer", "sgd"}}},
        std::pair{"Dim0", Args{{"steps", "10"}, {"optimizer", "sgd"}, {"layout", "DIM0"}, {"world", "3"}}},
        std::pair{"ThreeNodes", Args{{"steps", "10"}, {"optimizer", "adamw"}, {"node_count", "3"}, {"world", "1"}}},
        std::pair{"GradOpAccumulated", Args{{"steps", "10"},
                                            {"strategy", "SHARD_GRAD_OP"},
                                            {"optimizer", "sgd"},
                                            {"micro", "3"},
                                            {"max_norm", "0.1"}}},
        std::pair{"AllGroupsButOne",
                  Args{{"steps", "10"}, {"optimizer", "sgd"}, {"mixed", "mid:/"}, {"forward_prefetch", "1"}}},
        std::pair{"Bf16", Args{{"steps", "10"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}}},
        std::pair{"Fp16Dim0",
                  Args{{"steps", "10"}, {"param_dtype", "fp16"}, {"optimizer", "sgd"}, {"layout", "DIM0"}}}),
    [](const auto& info) { return std::string(info.param.first); });

TEST_F(NodesFloat8, BytesBetweenNodesAreHalvedAgainstBf16) {
  constexpr int64_t kFiller = int64_t{1} << 20;  // elements, half of them on each node
  Start(2, 1);
  int64_t received[2] = {0, 0};
  for (const bool float8 : {false, true}) {
    const Args args = InFloat8({{"steps", "4"},
                                {"param_dtype", "bf16"},
                                {"filler", absl::StrCat(kFiller)},
                                {"float8", float8 ? "1" : "0"},
                                {"name", float8 ? "float8" : "bf16"}});
    int64_t sums = 0;  // parts of sums travel in fp32 whatever is gathered
    ExpectAllOk(RunAll(args, {}, [&] {
      const v1::Job job = node(0).Job(args.Text("name"));
      received[float8] = job.nodes(1).bytes_received();
      sums = job.counters().reductions();
    }));
    EXPECT_GT(sums, 0);
  }
  // Each step gathers "mid" for forward and for backward.
  const int64_t half = kFiller / 2;
  const int64_t gathers = (received[0] - received[1]) / (half - half / 128);
  EXPECT_GE(gathers, 4);
  EXPECT_NEAR(static_cast<double>(received[0] - received[1]), static_cast<double>(gathers * (half - half / 128)),
              0.01 * static_cast<double>(half));
}

TEST_F(NodesFloat8, RanksThatDieChangeNoBit) {
  Start(2);
  int turn = 0;
  for (const char* moment : {"unsharded@3", "backward_done@4", "step_sent@6"}) {
    const Args args = InFloat8({{"steps", "10"},
                                {"recover", "1"},
                                {"param_dtype", "bf16"},
                                {"optimizer", "adamw"},
                                {"name", absl::StrCat("died", turn)}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, turn % 2, 1 - turn % 2);
    ExpectSame(reports, RunAll(args.With({{"name", absl::StrCat("undisturbed", turn++)}})));
  }
}

TEST_F(NodesFloat8, DaemonsThatDieChangeNoBit) {
  WithCustodians();
  Start(2, 1);
  const Args args = InFloat8(kOutlivesDaemons.With({{"steps", "300"}, {"param_dtype", "bf16"}}));
  std::vector<Child> ranks = StartRanks(args);
  for (int turn = 0; turn < 4; ++turn) {
    const int64_t before = node(0).Job().committed_step();
    ASSERT_TRUE(PollUntil([&] { return node(0).Job().committed_step() > before + 5 || ranks[0].Ended(); }));
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(turn % 2));
  }
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(10 * testing::kLimit), 0);
  ExpectNothingChanged(args);
  ExpectNothingLeft();
}

TEST_F(NodesFloat8, OnGpusItIsRefusedByName) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  Start(2, 1);
  const std::vector<TrainerReport> reports = RunAll(InFloat8({{"steps", "2"}, {"gpus", "1"}}));
  EXPECT_TRUE(absl::StrContains(reports[0].message, "float8_gathers is not served where ranks train on GPUs"))
      << reports[0].message;
  EXPECT_TRUE(absl::StrContains(reports[0].message, "use param_dtype bfloat16")) << reports[0].message;
}

}  // namespace
}  // namespace shardd::e2e
