// Jobs on GPUs whose trainers leave everything to their GPU (copy_trainer.h): what ordering by streams is worth where
// copies take long enough to be overtaken. Small on the fake driver; on real GPUs groups are of 64 MiB.

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class ByCopies : public GpuCluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  static std::string Pick(int64_t on_fake, int64_t on_real) {
    return absl::StrCat(testing::OnRealGpus() ? on_real : on_fake);
  }
  const Args args_ = {{"model", "copy"},
                      {"device_memory", "1"},
                      {"optimizer", "sgd"},
                      {"blocks", "5"},
                      {"numel", Pick(300'007, 16'000'007)},
                      {"steps", Pick(8, 30)},
                      {"unshard_mode", "POOLED"},
                      {"timeout_ms", "60000"}};
};

class ByCopiesOnly : public ByCopies, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(ByCopiesOnly, EveryElementOfEveryRankIsRightInTheEnd) {
  StartOnGpus(2);
  const std::vector<TrainerReport> reports = RunRanks(args_.With(GetParam().second));
  ExpectAllOk(reports);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.Note("ordered"), "ordered 1");
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ByCopiesOnly,
    ::testing::Values(std::pair("PooledOnTwoStreams", Args{{"streams", "2"}}),
                      std::pair("PooledPrefetched", Args{{"forward_prefetch", "1"}, {"micro", "2"}}),
                      std::pair("ZeroCopy", Args{{"unshard_mode", "ZERO_COPY"}, {"micro", "2"}}),
                      std::pair("ShardGradOp", Args{{"strategy", "SHARD_GRAD_OP"}, {"streams", "2"}}),
                      std::pair("OneRankWithFewerSlotsThanGroups", Args{{"world", "1"}, {"streams", "2"}}),
                      std::pair("FourRanksDim0", Args{{"world", "4"}, {"layout", "DIM0"}}),
                      std::pair("Offloaded", Args{{"offload", "HOST"}, {"forward_prefetch", "1"}})),
    [](const auto& info) { return info.param.first; });

// The host of a rank is far ahead of its GPU when it dies; what its GPU still had to do goes with it.
TEST_F(ByCopies, ReplacingARankKilledAnywhereKeepsAllElementsRight) {
  StartOnGpus(2);
  const Args args = args_.With({{"recover", "1"}, {"streams", "2"}});
  const int rounds = testing::OnRealGpus() ? 12 : 5;
  const char* const moments[] = {"unsharded@2", "submitted@2", "before_step@2", "step_sent@2", "initial@0"};
  for (int round = 0; round < rounds; ++round) {
    const std::string moment = moments[round % 5];
    const std::string late_us = absl::StrCat(1 + 1700 * round % 9001);
    SCOPED_TRACE(absl::StrCat(moment, " and ", late_us, " us"));
    Child survivor = StartRank(0, args);
    Child victim = StartRank(1, args.With({{"kill", moment}, {"kill_late_us", late_us}}));
    ReplaceKilledRank(args, victim, survivor);
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  }
}

// Three such jobs at once would not fit.
TEST_F(ByCopies, JobsWhoseRanksWereKilledLeaveNoGpuMemoryBehind) {
  std::vector<std::string> of_daemon = {"FAKE_CUDA_DELAY_SEED=7"};
  if (!testing::OnRealGpus()) of_daemon.push_back(absl::StrCat("FAKE_CUDA_MEMORY_BYTES=", int64_t{60} << 20));
  StartOnGpus(1, {}, of_daemon);
  const Args args =
      args_.With({{"recover", "1"}, {"zeros", "1"}, {"look_at_all", "0"}, {"blocks", "2"}, {"steps", "5"}})
          .With({{"numel", Pick(1'000'000, 900'000'000)}});
  for (int round = 0; round < 4; ++round) {
    SCOPED_TRACE(round);
    Child survivor = StartRank(0, args);
    Child victim = StartRank(1, args.With({{"kill", "submitted@2"}}));
    ReplaceKilledRank(args, victim, survivor);
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  }
}

}  // namespace
}  // namespace shardd::e2e
