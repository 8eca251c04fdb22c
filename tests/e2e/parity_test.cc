// Training through the daemon is training: losses and parameters of 50 steps equal those of one process without any
// service, whatever the strategy, layout, mode, optimizer and number of ranks.

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"

namespace shardd::e2e {
namespace {

struct Case {
  std::string name;
  Args args;
  double tolerance = 1e-5;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Of losses, relative.
double LargestDifference(const Trained& got, const Trained& want) {
  double largest = 0;
  for (size_t rank = 0; rank < want.losses.size(); ++rank) {
    for (size_t step = 0; step < want.losses[rank].size(); ++step) {
      const double loss = want.losses[rank][step];
      largest = std::max(largest, std::abs(got.losses[rank][step] - loss) / loss);
    }
  }
  return largest;
}

class Parity : public Cluster, public ::testing::WithParamInterface<Case> {};

TEST_P(Parity, FiftyStepsEqualTheUnshardedRun) {
  const Case& c = GetParam();
  const int world = c.args.Int("world", 2);
  StartDaemon({}, "cpu:" + std::to_string(world));
  const Args& args = c.args;
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { job = Job(); });
  ExpectParity(args, reports, c.tolerance);
  if (args.Double("max_norm") > 0) {
    EXPECT_LT(*std::min_element(reports[0].clips.begin(), reports[0].clips.end()), 1) << "it never clipped";
  }

  if (!args.Text("mixed").empty()) {
    const Trained uniform = Reference(args.With({{"mixed", ""}})).Run();
    EXPECT_GT(LargestDifference(uniform, Reference(args).Run()), c.tolerance) << "the job's would pass as well";
  }
  if (!args.Text("param_dtype").empty() || !args.Text("reduce_dtype").empty()) {
    const Trained in_fp32 =
        Reference(args.With({{"param_dtype", "fp32"}, {"reduce_dtype", "fp32"}, {"mixed", ""}})).Run();
    EXPECT_GT(LargestDifference(in_fp32, Reference(args).Run()), c.tolerance) << "full precision would pass as well";
    if (args.Int("keep_low") != 0) {
      const Trained not_kept = Reference(args.With({{"keep_low", "0"}})).Run();
      EXPECT_GT(LargestDifference(not_kept, Reference(args).Run()), 0) << "sums in fp32 would pass as well";
    }
  }

  const int micro = args.Int("micro", 1);
  EXPECT_EQ(job.committed_step(), 50);
  EXPECT_EQ(job.counters().commits(), 50);
  EXPECT_EQ(job.counters().reductions(), 50u * micro * kGroupCount);
  EXPECT_EQ(job.counters().gradient_submissions(), 50u * micro * kGroupCount * world);
  EXPECT_EQ(job.counters().departures(), 0);
  EXPECT_EQ(job.counters().early_folds(), 0);
  if (args.Text("unshard_mode") == "POOLED") {
    EXPECT_GT(job.counters().unshard_copies(), 50u);
    if (args.Int("forward_prefetch") != 0 || args.Text("backward_prefetch", "PRE") != "NONE") {
      EXPECT_GT(job.counters().prefetch_hits(), 40u);
      EXPECT_LE(job.counters().prefetch_hits(), job.counters().prefetches());
    } else {
      EXPECT_EQ(job.counters().prefetches(), 0);
    }
  } else {
    EXPECT_EQ(job.counters().unshard_copies(), 0);  // zero-copy moves no byte
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parity,
                         ::testing::Values(Case{"OneRank", {{"world", "1"}}}, Case{"TwoRanks", {{"world", "2"}}},
                                           Case{"ThreeRanks", {{"world", "3"}}}, Case{"FourRanks", {{"world", "4"}}}),
                         [](const auto& info) { return info.param.name; });

// Every number of ranks with every strategy and layout, each time with accumulation and clipping. With a rate at which
// losses stay away from zero: relative to a loss of nearly nothing fp32 itself is no better than 1e-5.
std::vector<Case> Matrix() {
  std::vector<Case> cases;
  for (const char* world : {"1", "2", "3", "4"}) {
    for (const auto& [strategy, name] :
         {std::pair{"FULL_SHARD", "FullShard"}, {"SHARD_GRAD_OP", "ShardGradOp"}, {"NO_SHARD", "NoShard"}}) {
      for (const auto& [layout, suffix] : {std::pair{"FLAT", "Flat"}, {"DIM0", "Dim0"}}) {
        cases.push_back({absl::StrCat(name, suffix, "On", world),
                         {{"world", world},
                          {"strategy", strategy},
                          {"layout", layout},
                          {"micro", "2"},
                          {"max_norm", "0.1"},
                          {"lr", "0.003"}}});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Matrix, Parity, ::testing::ValuesIn(Matrix()),
                         [](const auto& info) { return info.param.name; });

// Four ranks in every split into shard groups, neighbours and not: gradients of all ranks meet in one set of shards,
// also over two micro-batches, and clipping counts each once.
std::vector<Case> Splits() {
  const std::vector<std::pair<std::string, Args>> splits = {{"2x2", {{"group_size", "2"}}},
                                                            {"2x2Crossed", {{"groups", "3,0;1,2"}}},
                                                            {"1x4", {{"group_size", "4"}}},
                                                            {"4x1", {{"group_size", "1"}}}};
  std::vector<Case> cases;
  for (const auto& [split, groups] : splits) {
    for (const auto& [strategy, name] : {std::pair{"HYBRID_SHARD", "Hybrid"}, {"HYBRID_SHARD_ZERO2", "HybridZero2"}}) {
      for (const auto& [layout, suffix] : {std::pair{"FLAT", "Flat"}, {"DIM0", "Dim0"}}) {
        cases.push_back({absl::StrCat(name, suffix, "As", split), groups.With({{"world", "4"},
                                                                               {"strategy", strategy},
                                                                               {"layout", layout},
                                                                               {"micro", "2"},
                                                                               {"max_norm", "0.1"},
                                                                               {"lr", "0.003"}})});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Splits, Parity, ::testing::ValuesIn(Splits()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Placements, Parity,
    ::testing::Values(
        Case{"ZeroStage1", {{"world", "3"}, {"strategy", "NO_SHARD"}, {"place_optimizer", "WORLD"}}},
        Case{"ZeroStage2",
             {{"world", "3"}, {"strategy", "NO_SHARD"}, {"place_gradients", "WORLD"}, {"layout", "DIM0"}}},
        Case{"HybridWithOptimizerOverTheWorld",
             {{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}, {"place_optimizer", "WORLD"}}},
        Case{"ZeroStage2WithinFullShard",
             {{"world", "4"}, {"strategy", "FULL_SHARD"}, {"place_parameters", "REPLICATED"}, {"max_norm", "0.1"}}},
        Case{"HybridPooledInBf16",
             {{"world", "4"},
              {"strategy", "HYBRID_SHARD"},
              {"group_size", "2"},
              {"unshard_mode", "POOLED"},
              {"param_dtype", "bf16"},
              {"optimizer", "sgd"}}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Sharding, Parity,
                         ::testing::Values(Case{"Dim0", {{"world", "3"}, {"layout", "DIM0"}}},
                                           Case{"ShardGradOp", {{"strategy", "SHARD_GRAD_OP"}}},
                                           Case{"NoShard", {{"strategy", "NO_SHARD"}, {"world", "3"}}}),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Pooled, Parity,
    ::testing::Values(
        Case{"WithoutPrefetch", {{"unshard_mode", "POOLED"}, {"backward_prefetch", "NONE"}}},
        Case{"ForwardPrefetch",
             {{"unshard_mode", "POOLED"}, {"backward_prefetch", "NONE"}, {"forward_prefetch", "1"}, {"world", "3"}}},
        Case{"BackwardPrefetchPre", {{"unshard_mode", "POOLED"}, {"backward_prefetch", "PRE"}}},
        Case{"BackwardPrefetchPost",
             {{"unshard_mode", "POOLED"}, {"backward_prefetch", "POST"}, {"layout", "DIM0"}, {"world", "3"}}},
        Case{"ShardGradOp",
             {{"unshard_mode", "POOLED"}, {"strategy", "SHARD_GRAD_OP"}, {"forward_prefetch", "1"}, {"micro", "2"}}},
        Case{"BothPrefetchesInBf16",
             {{"unshard_mode", "POOLED"}, {"forward_prefetch", "1"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Optimizer, Parity,
    ::testing::Values(
        Case{"Sgd", {{"optimizer", "sgd"}, {"weight_decay", "0"}}},
        Case{"SgdMomentum", {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}, {"world", "3"}}},
        Case{"SgdDampening",
             {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"dampening", "0.3"}, {"weight_decay", "0.01"}}},
        Case{"SgdNesterov",
             {{"optimizer", "sgd"}, {"momentum", "0.8"}, {"nesterov", "1"}, {"lr", "0.02"}, {"layout", "DIM0"}}},
        Case{"TwoGroupsCutAFlatParameter", {{"two_groups", "1"}, {"world", "3"}}},
        Case{"TwoGroupsSgdMomentumDim0",
             {{"two_groups", "1"}, {"optimizer", "sgd"}, {"momentum", "0.5"}, {"layout", "DIM0"}}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Gradients, Parity,
    ::testing::Values(
        Case{"AccumulatedOverTwoBackwards", {{"micro", "2"}}},
        Case{"AccumulatedOverThreeOnThreeRanks", {{"micro", "3"}, {"world", "3"}, {"layout", "DIM0"}}},
        Case{"Clipped", {{"max_norm", "0.05"}, {"world", "3"}}},
        Case{"ClippedAndAccumulated", {{"max_norm", "0.1"}, {"micro", "2"}, {"optimizer", "sgd"}}},
        Case{"ClippedNoShardCountsEachGradientOnce", {{"max_norm", "0.05"}, {"strategy", "NO_SHARD"}}},
        Case{"ClippedByTheSumOfMagnitudes", {{"max_norm", "0.2"}, {"norm_type", "1"}, {"micro", "2"}}},
        Case{"ClippedByTheCubes", {{"max_norm", "0.03"}, {"norm_type", "3"}, {"world", "3"}}},
        Case{"ClippedByAnOrderInBetween",
             {{"max_norm", "0.05"}, {"norm_type", "1.5"}, {"strategy", "NO_SHARD"}, {"world", "3"}}},
        Case{"ClippedByTheLargest",
             {{"max_norm", "0.01"}, {"norm_type", "inf"}, {"optimizer", "sgd"}, {"world", "3"}, {"layout", "DIM0"}}},
        Case{"DividedByAGivenFactor", {{"divide", "3.5"}, {"optimizer", "sgd"}}},
        Case{"FreshReplacesWhatWasAccumulated", {{"micro", "2"}, {"fresh", "b1"}, {"world", "3"}}}),
    [](const auto& info) { return info.param.name; });

// A sum between two values of the lower dtype is rounded to one or the other by the last bit of fp32, which the double
// precision of the reference's optimizer has otherwise: of an element's gradient that is 2^-9, after 50 steps this
// much.
constexpr double kRoundedSums = 2e-4;

// With AdamW one gradient near zero that rounds to the other side moves a parameter by twice the learning rate.
INSTANTIATE_TEST_SUITE_P(
    Precision, Parity,
    ::testing::Values(
        Case{"ParametersInBf16", {{"param_dtype", "bf16"}, {"optimizer", "sgd"}}},
        Case{"ParametersInBf16WithAdamW", {{"param_dtype", "bf16"}, {"world", "3"}}, 2e-3},
        Case{"ParametersInFp16", {{"param_dtype", "fp16"}, {"optimizer", "sgd"}, {"world", "3"}}},
        Case{"GradientsReducedInBf16", {{"reduce_dtype", "bf16"}, {"optimizer", "sgd"}, {"world", "3"}}},
        Case{"GradientsReducedInFp16", {{"reduce_dtype", "fp16"}, {"optimizer", "sgd"}, {"world", "3"}}},
        Case{"GradientsReducedInBf16WithAdamW", {{"reduce_dtype", "bf16"}}, 5e-4},
        Case{"AllInBf16WithAdamW",
             {{"param_dtype", "bf16"}, {"reduce_dtype", "bf16"}, {"micro", "2"}, {"max_norm", "0.1"}},
             1e-2},
        Case{"SummedNotAveragedInBf16",
             {{"divide", "1"}, {"reduce_dtype", "bf16"}, {"optimizer", "sgd"}, {"lr", "0.05"}, {"micro", "2"}},
             kRoundedSums},
        Case{
            "DividedByAFactorInFp16OfBf16Parameters",
            {{"divide", "5"}, {"param_dtype", "bf16"}, {"reduce_dtype", "fp16"}, {"optimizer", "sgd"}, {"world", "3"}}},
        Case{"KeptInBf16",
             {{"keep_low", "1"}, {"reduce_dtype", "bf16"}, {"optimizer", "sgd"}, {"micro", "3"}, {"world", "3"}},
             kRoundedSums},
        Case{"KeptInTheDtypeOfParameters",
             {{"keep_low", "1"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"micro", "2"}, {"layout", "DIM0"}},
             kRoundedSums},
        Case{"KeptInFp16Clipped",
             {{"keep_low", "1"}, {"reduce_dtype", "fp16"}, {"max_norm", "0.5"}, {"optimizer", "sgd"}, {"micro", "2"}},
             2e-5},
        Case{"EveryGroupItsOwn",
             {{"param_dtype", "bf16"},
              {"mixed", "(root):/,mid:fp16/bf16,head:fp32/fp16"},
              {"optimizer", "sgd"},
              {"micro", "2"},
              {"layout", "DIM0"}},
             kRoundedSums},  // a parameter between two values of bf16 is rounded to one or the other, too
        Case{"SumsOfOneGroupKept", {{"mixed", "head:fp32/fp16/kept"}, {"optimizer", "sgd"}, {"micro", "3"}}, 2e-5},
        Case{"EveryGroupItsOwnPooledAndClipped",
             {{"mixed", "embed:bf16/fp32,mid:fp16/,(root):/bf16"},
              {"unshard_mode", "POOLED"},
              {"forward_prefetch", "1"},
              {"max_norm", "0.1"},
              {"optimizer", "sgd"},
              {"world", "3"}}},
        Case{"Bf16Dim0ShardGradOp",
             {{"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"layout", "DIM0"}, {"strategy", "SHARD_GRAD_OP"}}}),
    [](const auto& info) { return info.param.name; });

class Training : public Cluster {};

// A parameter without a gradient on one rank counts as zero there; on no rank: value, decay and step count untouched.
TEST_F(Training, AbsentGradientsAreNoneAndNotZero) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"absent", "mixed"}};
  ExpectParity(args, RunRanks(args));
}

TEST_F(Training, AbsentGradientsWithMomentumAndAccumulation) {
  StartDaemon();
  const Args args = {{"absent", "mixed"}, {"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}, {"micro", "2"}};
  ExpectParity(args, RunRanks(args));
}

TEST_F(Training, GivesTheSameBitsOnEveryRun) {
  StartDaemon({}, "cpu:3");
  const Args args = {{"world", "3"}, {"steps", "20"}, {"max_norm", "0.1"}, {"micro", "2"}};
  const std::vector<TrainerReport> first = RunRanks(args.With({{"name", "first"}}));
  ExpectAllOk(first);
  for (const char* name : {"second", "third"}) {
    const std::vector<TrainerReport> again = RunRanks(args.With({{"name", name}}));
    ExpectAllOk(again);
    ExpectSame(again, first);
    EXPECT_EQ(again[0].norms, first[0].norms);
  }
}

TEST_F(Training, SeveralJobsAtATimeDoNotMeet) {
  StartDaemon();
  const Args args = {{"steps", "50"}};
  const Args other = {{"steps", "50"}, {"name", "other"}, {"optimizer", "sgd"}, {"world", "3"}};
  std::vector<testing::Child> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(StartRank(rank, other));
  for (testing::Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectParity(args, {Report(args, 0), Report(args, 1)});
  ExpectParity(other, {Report(other, 0), Report(other, 1), Report(other, 2)});
}

}  // namespace
}  // namespace shardd::e2e
