// Jobs on GPUs whose gradients are added in the trainers' own contexts (JobConfig.trainer_sums): the daemon and each
// trainer are processes with the fake driver of their own, so a rank that reads a peer's gradients does so through
// descriptors; or on real GPUs.

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

const Args kSums = {{"device_memory", "1"}, {"trainer_sums", "1"}};

class TrainerSums : public GpuCluster {
 protected:
  // With the sums in the trainers and in the daemon: the same bits.
  void ExpectAsByTheDaemon(const Args& args) {
    std::string collective;
    const std::vector<TrainerReport> got = RunRanks(args.With(kSums), {}, [&] { collective = Job().collective(); });
    ExpectParity(args.With(kSums), got);
    EXPECT_TRUE(absl::StrContains(collective, "trainers: each rank's library adds")) << collective;
    EXPECT_FALSE(absl::StrContains(collective, "(0 operations by them")) << collective;
    EXPECT_TRUE(absl::StrContains(collective, ", 0 by devices")) << collective;
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
    const std::vector<TrainerReport> want = RunRanks(args.With({{"device_memory", "1"}, {"name", "by-the-daemon"}}), {},
                                                     [&] { collective = Job("by-the-daemon").collective(); });
    EXPECT_EQ(collective.find("trainers"), std::string::npos) << collective;
    ExpectSame(got, want);
  }
};

struct SumsCase {
  friend void PrintTo(const SumsCase& value, std::ostream* out) { *out << value.name; }
  std::string name;
  int gpus;
  Args args;
};

class TrainerSumsOf : public TrainerSums, public ::testing::WithParamInterface<SumsCase> {};

TEST_P(TrainerSumsOf, AreThoseOfTheDaemonBitByBit) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  StartOnGpus(GetParam().gpus);
  ExpectAsByTheDaemon(GetParam().args.With({{"steps", "12"}}));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, TrainerSumsOf,
    ::testing::Values(
        SumsCase{"OneRank", 1, {{"world", "1"}}}, SumsCase{"TwoOnOneGpu", 1, {{"micro", "2"}, {"max_norm", "0.1"}}},
        SumsCase{"TwoOnTwoGpus", 2, {{"micro", "2"}}},
        SumsCase{"FourOnTwoInDim0", 2, {{"world", "4"}, {"layout", "DIM0"}, {"max_norm", "0.1"}}},
        SumsCase{"FourHybrid", 2, {{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}}},
        SumsCase{"ThreeNoShard", 1, {{"world", "3"}, {"strategy", "NO_SHARD"}, {"micro", "2"}}},
        SumsCase{
            "TwoPooledInBf16",
            2,
            {{"unshard_mode", "POOLED"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"forward_prefetch", "1"}}},
        SumsCase{"ThreeInTheirOwnPrecisions",
                 1,
                 {{"world", "3"},
                  {"mixed", "embed:bf16/fp32,mid:fp16/,(root):/bf16"},
                  {"optimizer", "sgd"},
                  {"momentum", "0.9"},
                  {"lr", "0.02"}}},
        SumsCase{"TwoAbsentAndFresh", 1, {{"absent", "mixed"}, {"micro", "2"}, {"fresh", "b1"}}},
        SumsCase{"TwoOrderedByStreams", 2, {{"model", "stream"}, {"micro", "2"}, {"lr", "0.003"}}},
        SumsCase{"TwoOrderedByStreamsPooled", 1, {{"model", "stream"}, {"unshard_mode", "POOLED"}, {"micro", "2"}}}),
    [](const auto& info) { return info.param.name; });

// Who adds where the spec does not say.
TEST_F(TrainerSums, AreMadeByTrainersWithoutMpsUnlessToldOtherwise) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(1);
  const Args args = kSums.With({{"trainer_sums", "2"}, {"steps", "5"}});
  const auto collective_of = [&](const Args& of) {
    std::string collective;
    ExpectParity(of, RunRanks(of, {}, [&] { collective = Job(of.Text("name", "job")).collective(); }));
    return collective;
  };
  const char* const mps = getenv("SHARDD_GPU_MPS");
  const bool under_mps = testing::OnRealGpus() && mps != nullptr && std::string(mps) == "on";
  EXPECT_EQ(absl::StrContains(collective_of(args), "trainers: each rank's library adds"), !under_mps);
  const std::string offloaded = collective_of(args.With({{"offload", "HOST"}, {"name", "offloaded"}}));
  EXPECT_FALSE(absl::StrContains(offloaded, "trainers")) << offloaded;
}

TEST_F(TrainerSums, AreMadeByTheDaemonUnderMpsUnlessToldOtherwise) {
  SHARDD_NEEDS_FAKE_GPUS("MPS");
  StartOnGpus(1, {}, {"FAKE_CUDA_MPS=1"});
  std::string collective;
  const Args args = kSums.With({{"trainer_sums", "2"}, {"steps", "5"}});
  ExpectParity(args, RunRanks(args, {}, [&] { collective = Job().collective(); }));
  EXPECT_FALSE(absl::StrContains(collective, "trainers")) << collective;
}

TEST_F(TrainerSums, AreRefusedByNameWhereTheDaemonHasNoGpus) {
  StartDaemon();
  EXPECT_EQ(StartRank(0, kSums.With({{"device_memory", "0"}})).Wait(), 0);
  const TrainerReport report = Report(kSums, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kFailedPrecondition)) << report.message;
  for (const char* part : {"trainer_sums", "no GPUs", "cpu:0"}) {
    EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
  }
}

TEST_F(TrainerSums, AreRefusedByNameWithGradientsOfTheHost) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(1);
  EXPECT_EQ(StartRank(0, kSums.With({{"offload", "HOST"}})).Wait(), 0);
  const TrainerReport report = Report(kSums, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kUnimplemented)) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "trainer_sums")) << report.message;
}

TEST_F(TrainerSums, WithoutMemoryOperationsTheThreadWaitsForTheGpu) {
  SHARDD_NEEDS_FAKE_GPUS("a GPU without them");
  StartOnGpus(1, {"FAKE_CUDA_MEMOPS=0"});
  const Args args = kSums.With({{"steps", "10"}});
  ExpectParity(args, RunRanks(args));
}

// No stream waits for a sum that is not there: with a queue of the GPU in common it would wait for ever.
TEST_F(TrainerSums, StreamsSeeTheSumsThatTheStepTakes) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(1);
  const Args args = kSums.With(
      {{"model", "stream"}, {"max_norm", "0.1"}, {"look", "1"}, {"peek", "1"}, {"steps", "20"}, {"micro", "2"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  for (const TrainerReport& report : reports) {
    EXPECT_LT(std::atof(report.Note("looked ").c_str() + 7), 1e-5) << report.Note("looked ");
    EXPECT_EQ(report.Note("peeked"), "peeked 19 0");
  }
}

// A sum that is enqueued behind a wait of the program's stream runs behind it there, so no stream may wait for it yet.
TEST_F(TrainerSums, StreamsSharingAQueueWithTheSumsDoNotDeadlock) {
  SHARDD_NEEDS_FAKE_GPUS("one queue for all streams");
  StartOnGpus(2, {"FAKE_CUDA_ONE_QUEUE=1"});
  const Args args = kSums.With({{"model", "stream"}, {"steps", "12"}, {"micro", "2"}, {"timeout_ms", "15000"}});
  for (const char* mode : {"ZERO_COPY", "POOLED"}) {
    SCOPED_TRACE(mode);
    const Args in_mode = args.With({{"unshard_mode", mode}, {"name", absl::StrCat("job-", mode)}});
    ExpectParity(in_mode, RunRanks(in_mode));
  }
  const Args looks = args.With({{"name", "looks"}, {"look", "1"}, {"peek", "1"}, {"max_norm", "0.1"}});
  ExpectParity(looks, RunRanks(looks));
}

TEST_F(TrainerSums, PassesThatReadCopiesDoNotDeadlockEither) {
  SHARDD_NEEDS_FAKE_GPUS("one queue for all streams");
  StartOnGpus(2, {"FAKE_CUDA_ONE_QUEUE=1"});
  ExpectAllOk(RunRanks(kSums.With({{"model", "pass"},
                                   {"trainers_write", "1"},
                                   {"trained", "sgd"},
                                   {"blocks", "3"},
                                   {"numel", "20011"},
                                   {"steps", "8"},
                                   {"micro", "2"},
                                   {"timeout_ms", "15000"}})));
}

TEST_F(TrainerSums, GraphsAreRefused) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(1);
  EXPECT_TRUE(OneIsRefused(RunRanks(kSums.With({{"model", "stream"}, {"graph", "1"}, {"steps", "2"}})),
                           "got trainerSums true, want false"));
}

TEST_F(TrainerSums, RanksWithDifferentGroupOrdersDoNotDeadlock) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(2);
  const Args args = kSums.With({{"model", "stream"}, {"steps", "12"}, {"micro", "2"}});
  ExpectParity(args,
               RunRanks(args, {{0, {{"order", "head,mid,embed,root"}}}, {1, {{"order", "root,embed,mid,head"}}}}));
}

TEST_F(TrainerSums, ReplacingARankKilledAtAnyMomentChangesNoResult) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(2);
  const Args args = kSums.With({{"steps", "8"}, {"recover", "1"}});
  ExpectReplacedRanksChangeNothing(args, {"some_gradients@3", "before_step@4", "step_sent@5"}, /*aborts=*/false);
}

// Its GPU has made the sum and not said so, which is all that the daemon can know. It is killed, and its word lands in
// the next epoch.
TEST_F(TrainerSums, LateWordsOfRanksKilledInASumTouchNobody) {
  SHARDD_NEEDS_FAKE_GPUS("it holds what it writes");
  StartOnGpus(2);
  const Args args = kSums.With({{"steps", "10"}, {"recover", "1"}});
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  const std::string hold = File("hold");
  Child survivor = StartRank(0, args);
  Child victim = StartRankWithHeldSignals(args, hold);
  victim.Kill(SIGKILL);
  EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
  Child replacement = StartRank(1, args);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 6; }));
  unlink(hold.c_str());
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  EXPECT_FALSE(reports[0].Note("aborted").empty());
  ExpectSame(reports, want);
}

// Stopped where its sums are under way, it is named when its time is over; and its place is not given while it may
// still wake up and add.
TEST_F(TrainerSums, RanksStoppedInASumAreReplacedOnlyOnceGone) {
  SHARDD_NEEDS_FAKE_GPUS("it holds what it writes");
  StartOnGpus(1);
  const Args args = kSums.With({{"steps", "10"}, {"recover", "1"}, {"silence_ms", "1500"}, {"timeout_ms", "60000"}});
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  const std::string hold = File("hold");
  Child survivor = StartRank(0, args);
  Child stopped = StartRankWithHeldSignals(args, hold);
  stopped.Kill(SIGSTOP);
  ASSERT_TRUE(PollUntil([&] { return HasEvent("job", "abort", "rank 1 has not added its part on cuda:0"); }));
  EXPECT_TRUE(HasEvent("job", "abort", "reduce ")) << "what it was to add";
  // Without `replace` another process waits; it is let in when the one that is stopped is gone.
  Child replacement = StartRank(1, args);
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_EQ(Job().attached_ranks(), 1);
  stopped.Kill(SIGKILL);
  EXPECT_EQ(stopped.Wait(), 1000 + SIGKILL);
  unlink(hold.c_str());
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  ExpectSame(reports, want);
}

}  // namespace
}  // namespace shardd::e2e
