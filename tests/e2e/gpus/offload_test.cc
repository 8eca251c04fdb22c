// Jobs on GPUs whose shards, gradients and optimizer state are in host memory (JobConfig.offload): daemon and trainers
// as processes, each with the fake driver of its own, every operation of the daemon's streams late by a seed; or on
// real GPUs.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class Offloaded : public GpuCluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  void StartOnGpus(int gpus, int threads = 1, std::vector<std::string> daemon_only = {}) {
    RanksFind(testing::FakeCudaEnvironment(gpus));
    daemon_only.push_back("FAKE_CUDA_DELAY_SEED=7");
    StartDaemon({absl::StrCat("--offload_threads=", threads)}, "cuda:all",
                testing::FakeCudaEnvironment(gpus, daemon_only));
  }
  TrainerReport Refusal(const Args& args) { return GpuCluster::Refusal(args.With({{"device_memory", "1"}})); }
  // What the daemon's threads of this name have run.
  int64_t ThreadNs(const std::string& name) {
    int64_t total_ns = 0;
    for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_pid(), "/task"))) {
      if (testing::ReadWholeFile(task.path() / "comm") != name + "\n") continue;
      total_ns += std::atoll(testing::ReadWholeFile(task.path() / "schedstat").c_str());
    }
    return total_ns;
  }
};

struct OffloadCase {
  friend void PrintTo(const OffloadCase& value, std::ostream* out) { *out << value.name; }
  std::string name;
  int gpus;
  Args args;
  double tolerance = 1e-5;
};

class OffloadedJobs : public Offloaded, public ::testing::WithParamInterface<OffloadCase> {};

// The same values, to the bit, as where all is on the GPUs: sums are made there in the same order, and the host's
// kernels are the fake GPU's.
TEST_P(OffloadedJobs, TrainToTheBitAsTheSameJobOnGpus) {
  const int gpus = testing::GpusAtMost(GetParam().gpus);
  StartOnGpus(gpus);
  const Args args = GetParam().args.With({{"device_memory", "1"}, {"steps", "20"}});
  const std::vector<TrainerReport> resident = RunRanks(args.With({{"name", "resident"}}));
  ExpectAllOk(resident);
  const Args offloaded = args.With({{"offload", "HOST"}});
  std::map<std::string, v1::Purpose> purposes;
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(offloaded, {}, [&] {
    purposes = Purposes();
    job = Job();
  });
  ExpectParity(offloaded, reports, GetParam().tolerance);
  ExpectSame(reports, resident);
  for (size_t rank = 0; rank < reports.size(); ++rank) EXPECT_EQ(reports[rank].losses, resident[rank].losses);
  EXPECT_GT(job.counters().unshard_copies(), 0);
  for (const char* purpose : {"shards", "gradients", "optimizer", "parameters"}) {
    const v1::Purpose& of = purposes[purpose];
    if (of.planned_bytes() == 0) continue;
    EXPECT_TRUE(absl::EndsWith(of.backing(), ", pinned")) << purpose << ": " << of.backing();
    EXPECT_EQ(of.devices_size(), 0) << purpose;
    EXPECT_GE(of.allocated_bytes(), of.planned_bytes()) << purpose;
  }
  for (const char* purpose : {"unsharded pool", "gradient staging", "gradient slots"}) {
    EXPECT_EQ(purposes[purpose].devices_size(), gpus) << purpose;
    EXPECT_TRUE(absl::StartsWith(purposes[purpose].backing(), "cuda"))
        << purpose << ": " << purposes[purpose].backing();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, OffloadedJobs,
    ::testing::Values(
        OffloadCase{"TwoRanksOnOneGpu", 1, {}}, OffloadCase{"TwoRanksOnTwoGpus", 2, {{"forward_prefetch", "1"}}},
        OffloadCase{"AccumulatedAndClipped", 2, {{"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
        OffloadCase{"FreshReplaces", 1, {{"micro", "2"}, {"fresh", "b1"}, {"world", "3"}}},
        OffloadCase{"AbsentOnSomeAndOnAll",
                    2,
                    {{"absent", "mixed"}, {"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}, {"micro", "2"}}},
        OffloadCase{"InBf16", 2, {{"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"micro", "2"}}},
        OffloadCase{"EveryGroupItsOwnPrecision",
                    1,
                    {{"mixed", "embed:bf16/fp32,mid:fp16/,(root):/bf16"},
                     {"max_norm", "0.1"},
                     {"optimizer", "sgd"},
                     {"world", "3"}}},
        OffloadCase{"Dim0", 2, {{"layout", "DIM0"}, {"world", "3"}}},
        OffloadCase{"ShardGradOp", 2, {{"strategy", "SHARD_GRAD_OP"}}},
        OffloadCase{"NoShard", 2, {{"strategy", "NO_SHARD"}, {"max_norm", "0.05"}}},
        OffloadCase{"Hybrid", 2, {{"strategy", "HYBRID_SHARD"}, {"group_size", "2"}, {"world", "4"}}},
        OffloadCase{"HybridZero2", 2, {{"strategy", "HYBRID_SHARD_ZERO2"}, {"group_size", "2"}, {"world", "4"}}}),
    [](const auto& info) { return info.param.name; });

// Norms and updates of each rank are taken apart for two threads, in a parameter of 12 MiB.
TEST_F(Offloaded, ThreadsShareARanksWorkAndAppearInStatus) {
  StartOnGpus(2, /*threads=*/4);
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"}, {"offload", "HOST"}, {"filler", "3000000"},
                     {"max_norm", "0.1"},    {"lr", "0.003"},     {"steps", "10"}};
  v1::ListStreamsResponse streams;
  ExpectParity(args, RunRanks(args, {}, [&] {
                 grpc::ClientContext context;
                 EXPECT_TRUE(jobs().ListStreams(&context, v1::ListStreamsRequest(), &streams).ok());
               }));
  std::map<std::string, uint64_t> done;  // of norms and updates, by device
  for (const v1::Stream& stream : streams.streams()) {
    if (stream.name() == "optimizer") done[stream.device()] = stream.done();
  }
  for (int i = 0; i < 4; ++i) EXPECT_GE(done[absl::StrCat("host:", i)], 20u) << i;
  EXPECT_EQ(done["cuda:0"], 0u);
  // Threads stay; memory, descriptors and files do not.
  ExpectNothingLeaks(before);
}

TEST_F(Offloaded, NcclAddsWhereItIsAskedFor) {
  SHARDD_NEEDS_GPUS(2);
  RanksFind(testing::FakeCudaEnvironment(2));
  StartDaemon({"--collective=nccl"}, "cuda:all", testing::FakeCudaEnvironment(2, {"FAKE_CUDA_DELAY_SEED=11"}));
  const Args args = {{"device_memory", "1"}, {"offload", "HOST"}, {"micro", "2"}, {"max_norm", "0.1"}};
  v1::Job job;
  ExpectParity(args, RunRanks(args, {}, [&] { job = Job(); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), "nccl 2.28.9 over cuda:0, cuda:1: ")) << job.collective();
  EXPECT_FALSE(absl::StrContains(job.collective(), ": 0 gradient elements")) << job.collective();
}

// On CPUs everything is in host memory: the same spec is the same job there, and neither pooled nor pinned.
TEST_F(Offloaded, OnCpusOffloadChangesNothingAndGivesTheSameBits) {
  const Args args = {{"device_memory", "1"}, {"offload", "HOST"}, {"steps", "20"}, {"micro", "2"}, {"max_norm", "0.1"}};
  StartOnGpus(2);
  const std::vector<TrainerReport> want = RunRanks(args);
  ExpectAllOk(want);
  EXPECT_EQ(StopDaemon(), 0);
  StartDaemon({}, "cpu:2");
  std::map<std::string, v1::Purpose> purposes;
  v1::Job job;
  const std::vector<TrainerReport> got = RunRanks(args.With({{"name", "cpu"}}), {}, [&] {
    purposes = Purposes("cpu");
    job = Job("cpu");
  });
  ExpectAllOk(got);
  ExpectSame(got, want);
  EXPECT_EQ(got[0].norms, want[0].norms);
  EXPECT_EQ(got[0].losses, want[0].losses);
  EXPECT_EQ(job.counters().unshard_copies(), 0);
  EXPECT_EQ(purposes["unsharded pool"].planned_bytes(), 0);
  EXPECT_FALSE(absl::StrContains(purposes["shards"].backing(), "pinned")) << purposes["shards"].backing();
}

// In the middle of a step, between its steps, and in the middle of a writeback, whose old bytes come back.
TEST_F(Offloaded, ReplacingAKilledRankChangesNoResult) {
  StartOnGpus(2);
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"},    {"offload", "HOST"},   {"steps", "10"},         {"recover", "1"},
                     {"writeback_at_end", "1"}, {"filler", "3000000"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}};
  ExpectReplacedRanksChangeNothing(args, {"some_gradients@4", "step_sent@6", "writeback@10"}, /*aborts=*/true);
  ExpectNothingLeaks(before);
}

TEST_F(Offloaded, WhatIsNotServedIsHarmlesslyRefusedByName) {
  SHARDD_NEEDS_FAKE_GPUS("memory that cannot be locked");
  // The first memory that is registered is a GPU's of its own, for norms.
  StartOnGpus(1, 1, {"FAKE_CUDA_FAIL=cuMemHostRegister:2:2"});
  const Footprint before = DaemonFootprint();
  TrainerReport report = Refusal({{"name", "locked"}, {"offload", "HOST"}});
  EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "slab \"gradients\"")) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "RLIMIT_MEMLOCK")) << report.message;
  report = Refusal({{"name", "zero"}, {"offload", "HOST"}, {"unshard_mode", "ZERO_COPY"}});
  EXPECT_EQ(report.code, static_cast<int>(Code::kInvalidArgument)) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "plan config offload: ")) << report.message;
  report = Refusal({{"name", "copies"},
                    {"offload", "HOST"},
                    {"strategy", "HYBRID_SHARD"},
                    {"group_size", "1"},
                    {"replica_copies", "1"}});
  EXPECT_EQ(report.code, static_cast<int>(Code::kUnimplemented)) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "copies of gradients for replicas are not served")) << report.message;
  ExpectNothingLeaks(before);
  ExpectAllOk(RunRanks({{"device_memory", "1"}, {"offload", "HOST"}, {"steps", "2"}}));
}

// The daemon's loop, which serves all jobs, has its own work alone: a model is written back, and put back as it was, by
// a thread of its own.
TEST_F(Offloaded, ValuesOfALargeModelAreCopiedBesideTheLoop) {
  SHARDD_NEEDS_FAKE_GPUS("copies of the host alone are measured");
  StartOnGpus(1);
  const Args args = {{"device_memory", "1"},    {"offload", "HOST"},    {"steps", "2"},        {"recover", "1"},
                     {"writeback_at_end", "1"}, {"filler", "30000000"}, {"write_filler", "1"}, {"optimizer", "sgd"}};
  Child survivor = StartRank(0, args);
  Child victim = StartRank(1, args.With({{"pause", "filler_written@2"}}));
  AwaitPause(args, "filler_written", 1);
  const int64_t written_ns = ThreadNs("copier");
  EXPECT_GT(written_ns, 10'000'000) << "it has written and kept 120 MB";
  victim.Kill(SIGKILL);
  EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
  EXPECT_EQ(StartRank(1, args).Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  ExpectAllOk({Report(args, 0), Report(args, 1)});
  EXPECT_GT(ThreadNs("copier") - written_ns, 10'000'000) << "it has taken them back";
}

// Pages are pinned while a job is there: what is left of the daemon's limit is not enough for a second one.
TEST_F(Offloaded, OnlyTheJobThatCannotBePinnedIsRefused) {
  SHARDD_NEEDS_FAKE_GPUS("their limit of pinned memory");
  StartOnGpus(1, 1, {absl::StrCat("FAKE_CUDA_PINNED_BYTES=", int64_t{36} << 20)});
  const Args args = {{"device_memory", "1"},
                     {"offload", "HOST"},
                     {"steps", "4"},
                     {"filler", "3000000"},
                     {"optimizer", "sgd"}};  // 12 MB of shards, as much of gradients
  ExpectAllOk(RunRanks(args, {}, [&] {
    const Footprint before = DaemonFootprint();
    const TrainerReport report = Refusal(args.With({{"name", "second"}}));
    EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
    for (const char* part :
         {"open job \"second\"", "cuMemHostRegister", "slab \"", "RLIMIT_MEMLOCK", "JobConfig.offload"}) {
      EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
    }
    ExpectNothingLeaks(before);
  }));
  ExpectAllOk(RunRanks(args.With({{"name", "third"}})));
}

// The second GPU does not come back from a copy; what is pinned for both is left to the system, within the limits.
TEST_F(Offloaded, AHangingGpuDoesNotKeepTheDaemonFromEnding) {
  SHARDD_NEEDS_FAKE_GPUS("a copy does not end");
  const std::string lose = File("lose");
  std::ofstream(lose).flush();
  StartOnGpus(2, 2, {"FAKE_CUDA_LOSE_FILE=" + lose});
  const Args args = {{"device_memory", "1"}, {"offload", "HOST"}, {"steps", "1000000"}, {"timeout_ms", "60000"}};
  Child first = StartRank(0, args);
  Child second = StartRank(1, args);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 3; }));
  std::ofstream(lose) << "1 copy\n" << std::flush;
  ASSERT_TRUE(PollUntil([&] { return access((lose + ".seen").c_str(), F_OK) == 0; }));
  const int64_t begin = NowMs();
  EXPECT_EQ(StopDaemon(), 0);
  EXPECT_LT(NowMs() - begin, 45'000) << "10 s for the GPU, 20 s where its driver does not return";
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  for (int rank = 0; rank < 2; ++rank) EXPECT_NE(Report(args, rank).code, 0);
}

// Ranks that run groups in different orders: what the stuck ones have is added before its turn, on top of copies.
TEST_F(Offloaded, SumsThatAreAddedOutOfTurnAreTheSame) {
  StartOnGpus(2);
  const Args args = {{"device_memory", "1"}, {"offload", "HOST"}, {"steps", "12"}, {"micro", "2"}};
  ExpectParity(args,
               RunRanks(args, {{0, {{"order", "head,mid,embed,root"}}}, {1, {{"order", "root,embed,mid,head"}}}}));
}

TEST_F(Offloaded, ALostGpuEndsItsJobsButNotTheDaemon) {
  SHARDD_NEEDS_FAKE_GPUS("it is lost");
  const std::string file = File("lose");
  std::ofstream(file).flush();
  StartOnGpus(1, 2, {"FAKE_CUDA_LOSE_FILE=" + file});
  const Args args = {
      {"device_memory", "1"}, {"offload", "HOST"}, {"steps", "1000000"}, {"recover", "1"}, {"timeout_ms", "20000"}};
  for (const TrainerReport& report : RunUntilTheGpuIsLost(args, file)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kNotFound)) << report.message;
    EXPECT_TRUE(absl::StrContains(report.message, "CUDA_ERROR_ECC_UNCORRECTABLE")) << report.message;
  }
  EXPECT_TRUE(DaemonAlive());
}

TEST_F(Offloaded, ADaemonToldToEndDuringStepsEnds) {
  StartOnGpus(2, 4);
  const Args args = {{"device_memory", "1"},
                     {"offload", "HOST"},
                     {"steps", "1000000"},
                     {"filler", "3000000"},
                     {"timeout_ms", "20000"}};
  Child first = StartRank(0, args);
  Child second = StartRank(1, args);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 3; }));
  EXPECT_EQ(StopDaemon(), 0);
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_NE(Report(args, 0).code, 0);
}

// Trainers that never wait for their GPU: their streams wait for copies from the host, and for sums that are there.
class OffloadedByStream : public Offloaded {
 protected:
  void Start(int gpus) {
    StartOnGpus(gpus);
    RanksFind(testing::FakeCudaEnvironment(gpus, {"FAKE_CUDA_DELAY_SEED=11"}));
  }
  const Args args_ = {{"model", "stream"}, {"device_memory", "1"}, {"offload", "HOST"}};
};

TEST_F(OffloadedByStream, TrainersOnTwoStreamsTrainAsTheUnshardedRun) {
  Start(2);
  const Args args = args_.With(
      {{"forward_prefetch", "1"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"streams", "2"}, {"micro", "2"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  EXPECT_EQ(reports[0].Note("ordered"), "ordered 1");
}

// What looks is a function of the host's in the stream, so it may follow the pointers.
TEST_F(OffloadedByStream, BehindWaitGradientsTheHostHasTheStepsSum) {
  Start(1);
  const Args args = args_.With({{"max_norm", "0.1"}, {"look", "1"}, {"steps", "20"}, {"micro", "2"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  for (const TrainerReport& report : reports) {
    const std::string note = report.Note("looked ");
    ASSERT_FALSE(note.empty());
    EXPECT_LT(std::atof(note.c_str() + 7), 1e-5);
  }
}

TEST_F(OffloadedByStream, ReplacingARankKilledAtAnyMomentChangesNoResult) {
  Start(2);
  const Args args = args_.With({{"steps", "8"}, {"recover", "1"}});
  ExpectReplacedRanksChangeNothing(args, {"read_mid@3", "submitted_head@4", "step_sent@5"}, /*aborts=*/false);
}

}  // namespace
}  // namespace shardd::e2e
