// Jobs whose memory lies on GPUs: the daemon and its trainers as processes, each with the fake driver of its own
// (tests/fakes/cuda), or on real GPUs, which they share (tests/testing/fake_cuda.h). The trainers of this folder
// compute on the host and copy what they read and write; pointers, descriptors and access are as on any machine.

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class OnGpus : public GpuCluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  // Daemon and ranks find so many GPUs; every operation of a stream starts late, by a seed.
  void StartOnGpus(int gpus, std::vector<std::string> daemon_only = {}) {
    RanksFind(testing::FakeCudaEnvironment(gpus));
    daemon_only.push_back("FAKE_CUDA_DELAY_SEED=7");
    StartDaemon({"--max_bytes_per_uid=0"}, "cuda:all", testing::FakeCudaEnvironment(gpus, daemon_only));
  }
};

TEST_F(OnGpus, RanksOnOneGpuTrainRightAndStatusSaysWhere) {
  StartOnGpus(1);
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"}, {"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}};
  std::map<std::string, v1::Purpose> purposes;
  std::vector<v1::Rank> ranks;
  v1::Daemon daemon;
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] {
    purposes = Purposes();
    ranks = Ranks();
    daemon = DaemonStatus();
    job = Job();
  });
  ExpectParity(args, reports);
  EXPECT_EQ(job.counters().commits(), 50);
  EXPECT_EQ(job.counters().unshard_copies(), 0);  // the trainers read the shards where they lie
  ASSERT_EQ(daemon.devices_size(), 1);
  EXPECT_EQ(daemon.devices(0), "cuda:0");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].device(), "cuda:0");
  for (const char* purpose : {"shards", "gradients", "optimizer", "gradient slots"}) {
    EXPECT_TRUE(absl::StartsWith(purposes[purpose].backing(), "cuda"))
        << purpose << ": " << purposes[purpose].backing();
    EXPECT_GT(purposes[purpose].allocated_bytes(), 0) << purpose;
  }
  EXPECT_EQ(purposes["session"].backing(), "sealed memfd");  // rings and pages are the host's anywhere
  ExpectNothingLeaks(before);
}

// More ranks than GPUs.
class SharingOneGpu : public OnGpus, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(SharingOneGpu, RanksTrainAsTheUnshardedRun) {
  StartOnGpus(1);
  const Args args = GetParam().second.With({{"device_memory", "1"}, {"steps", "12"}});
  ExpectParity(args, RunRanks(args));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, SharingOneGpu,
    ::testing::Values(std::pair("FourDim0", Args{{"world", "4"}, {"layout", "DIM0"}, {"max_norm", "0.1"}}),
                      std::pair("FourHybrid", Args{{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}}),
                      std::pair("ThreeNoShard", Args{{"world", "3"}, {"strategy", "NO_SHARD"}, {"micro", "2"}}),
                      std::pair("TwoPooledInBf16", Args{{"unshard_mode", "POOLED"},
                                                        {"param_dtype", "bf16"},
                                                        {"optimizer", "sgd"},
                                                        {"forward_prefetch", "1"}}),
                      std::pair("ThreeInTheirOwnPrecisions", Args{{"world", "3"},
                                                                  {"mixed", "embed:bf16/fp32,mid:fp16/,(root):/bf16"},
                                                                  {"optimizer", "sgd"},
                                                                  {"momentum", "0.9"},
                                                                  {"lr", "0.02"}}),
                      std::pair("TwoAbsentAndFresh", Args{{"absent", "mixed"}, {"micro", "2"}, {"fresh", "b1"}})),
    [](const auto& info) { return info.param.first; });

constexpr int64_t kPageBytes = int64_t{2} << 20;

std::map<std::string, int64_t> BytesByGpu(const v1::Purpose& purpose) {
  std::map<std::string, int64_t> bytes;
  for (const v1::DeviceBytes& entry : purpose.devices()) bytes[entry.device()] = entry.allocated_bytes();
  return bytes;
}

struct SpreadCase {
  friend void PrintTo(const SpreadCase& value, std::ostream* out) { *out << value.name; }
  std::string name;
  int gpus;
  Args args;
};

class OverGpus : public OnGpus, public ::testing::WithParamInterface<SpreadCase> {
 protected:
  // Of all that the daemon has made on each GPU, as the fake driver has it: memory of a GPU is a memfd of its name.
  std::map<std::string, int64_t> FakeBytesByGpu() {
    std::map<std::string, int64_t> bytes;
    std::set<ino_t> seen;
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_pid(), "/fd"))) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry.path(), gone);
      struct stat about {};
      int gpu = -1;
      if (std::sscanf(target.c_str(), "/memfd:fake-cuda-%d", &gpu) != 1 || stat(entry.path().c_str(), &about) != 0 ||
          !seen.insert(about.st_ino).second) {
        continue;
      }
      bytes[absl::StrCat("cuda:", gpu)] += about.st_size;
    }
    return bytes;
  }
};

// One parameter is of 12 MiB in fp32, so that slabs have pages to divide; the others are cut unevenly or have fewer
// rows than there are ranks.
TEST_P(OverGpus, RanksTrainRightWithEverySlabSpreadOverAllGpus) {
  const int gpus = GetParam().gpus;
  SHARDD_NEEDS_GPUS(gpus);
  StartOnGpus(gpus);
  const Footprint before = DaemonFootprint();
  const Args args =
      GetParam().args.With({{"device_memory", "1"}, {"filler", "3000000"}, {"world", absl::StrCat(gpus)}});
  std::map<std::string, v1::Purpose> purposes;
  std::map<std::string, int64_t> fake_bytes;
  const std::map<std::string, int64_t> scratch_bytes = FakeBytesByGpu();
  std::vector<v1::Rank> ranks;
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] {
    purposes = Purposes();
    fake_bytes = FakeBytesByGpu();
    ranks = Ranks();
    job = Job();
  });
  ExpectParity(args, reports);
  ASSERT_EQ(ranks.size(), static_cast<size_t>(gpus));
  for (int rank = 0; rank < gpus; ++rank) EXPECT_EQ(ranks[rank].device(), absl::StrCat("cuda:", rank));
  std::map<std::string, int64_t> status_bytes;
  for (const auto& [name, purpose] : purposes) {
    int64_t total_bytes = 0;
    for (const auto& [gpu, bytes] : BytesByGpu(purpose)) {
      status_bytes[gpu] += bytes;
      total_bytes += bytes;
      if (name == "shards" || name == "optimizer" || name == "gradients" || name == "parameters") {
        EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(purpose.allocated_bytes()) / gpus, kPageBytes)
            << name << " on " << gpu;
      }
    }
    if (total_bytes > 0) {
      EXPECT_EQ(total_bytes, purpose.allocated_bytes()) << name;
    }
  }
  EXPECT_EQ(purposes["shards"].backing(), "cuda");
  EXPECT_EQ(BytesByGpu(purposes["gradients"]).size(), static_cast<size_t>(gpus));
  EXPECT_EQ(BytesByGpu(purposes["gradient slots"]).size(), static_cast<size_t>(gpus));
  const bool is_pooled = args.Text("unshard_mode") != "ZERO_COPY";
  if (is_pooled) {
    EXPECT_GT(job.counters().unshard_copies(), 50u * static_cast<unsigned>(gpus));
    EXPECT_EQ(BytesByGpu(purposes["unsharded pool"]).size(), static_cast<size_t>(gpus));
  } else {
    EXPECT_EQ(job.counters().unshard_copies(), 0);
    EXPECT_EQ(purposes["unsharded pool"].allocated_bytes(), 0);
  }
  for (const auto& [gpu, bytes] : status_bytes) {
    EXPECT_EQ(bytes, fake_bytes[gpu] - (scratch_bytes.count(gpu) > 0 ? scratch_bytes.at(gpu) : 0)) << gpu;
  }
  ExpectNothingLeaks(before);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, OverGpus,
    ::testing::Values(
        SpreadCase{"TwoAccumulating", 2, {{"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
        SpreadCase{
            "TwoInBf16Prefetched", 2, {{"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"forward_prefetch", "1"}}},
        SpreadCase{
            "TwoZeroCopyInBf16", 2, {{"unshard_mode", "ZERO_COPY"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}}},
        SpreadCase{"FourDim0", 4, {{"layout", "DIM0"}, {"steps", "20"}}},
        SpreadCase{"FourNoShard", 4, {{"strategy", "NO_SHARD"}, {"steps", "20"}}},
        SpreadCase{"FourHybrid", 4, {{"strategy", "HYBRID_SHARD"}, {"group_size", "2"}, {"steps", "20"}}}),
    [](const auto& info) { return info.param.name; });

// More descriptors than one message of the socket holds.
TEST_F(OnGpus, SlabsOfHundredsOfPiecesAreMapped) {
  SHARDD_NEEDS_GPUS(2);
  StartOnGpus(2);
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"}, {"model", "blocks"},  {"blocks", "68"}, {"numel", "1048576"},
                     {"steps", "3"},         {"optimizer", "sgd"}, {"world", "2"},   {"timeout_ms", "60000"}};
  int descriptors = 0;
  Child first = StartRank(0, args.With({{"pause", "end"}}));
  Child second = StartRank(1, args);
  AwaitPause(args, "end", 0);
  descriptors = DaemonFootprint().descriptors;
  LetGo(args, "end", 0);
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_GT(descriptors - before.descriptors, 2 * 253) << "each piece is a memory and a descriptor of the daemon";
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].losses, reports[1].losses);
  EXPECT_LT(reports[0].losses.back(), reports[0].losses.front());
  ExpectNothingLeaks(before);
}

TEST_F(OnGpus, AFullGpuIsNamedAndServesTheNextJob) {
  // 88 GB of shards and as much of gradients.
  std::vector<std::string> limit = {absl::StrCat("FAKE_CUDA_MEMORY_BYTES=", int64_t{48} << 20)};
  Args args = {{"device_memory", "1"}, {"steps", "1"}, {"name", "large"}, {"filler", "30000000"}};
  if (testing::OnRealGpus()) {
    limit.clear();
    args = args.With({{"model", "blocks"}, {"blocks", "11"}, {"numel", "2000000000"}, {"optimizer", "sgd"}});
  }
  StartOnGpus(2, limit);
  const Footprint before = DaemonFootprint();
  EXPECT_EQ(StartRank(0, args).Wait(), 0);
  const TrainerReport report = Report(args, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
  EXPECT_TRUE(absl::StrContains(report.message, "cuda:0 has no room for its slabs and gradient slots"))
      << report.message;
  ExpectNothingLeaks(before);
  ExpectAllOk(RunRanks({{"device_memory", "1"}, {"steps", "2"}}));
}

// What a job has let go is not free while a GPU's driver keeps it; whoever opens another job does not wait for that.
TEST_F(OnGpus, AJobOpensWhileTheDriverStillKeepsFreedMemory) {
  SHARDD_NEEDS_FAKE_GPUS("its driver keeps memory");
  const std::string hold = File("hold");
  StartOnGpus(1, {"FAKE_CUDA_HOLD_UNMAP_FILE=" + hold});
  std::ofstream(hold).flush();
  ExpectAllOk(RunRanks({{"device_memory", "1"}, {"steps", "2"}}));
  ASSERT_TRUE(testing::PollUntil([&] { return access((hold + ".seen").c_str(), F_OK) == 0; }));
  ExpectAllOk(RunRanks({{"device_memory", "1"}, {"steps", "2"}, {"name", "second"}}));
  EXPECT_FALSE(absl::StrContains(testing::ReadWholeFile(DaemonLog()), "memory that was let go is not free after"));
  unlink(hold.c_str());
}

TEST_F(OnGpus, AJobThatFindsMemoryShortWaitsForFreedMemory) {
  SHARDD_NEEDS_FAKE_GPUS("its driver keeps memory");
  const std::string hold = File("hold");
  StartOnGpus(1, {"FAKE_CUDA_HOLD_UNMAP_FILE=" + hold, absl::StrCat("FAKE_CUDA_MEMORY_BYTES=", int64_t{48} << 20)});
  const Args args = {{"device_memory", "1"}, {"steps", "2"}, {"filler", "2000000"}, {"optimizer", "sgd"}};
  std::ofstream(hold).flush();
  ExpectAllOk(RunRanks(args));  // more than half of the GPU
  ASSERT_TRUE(testing::PollUntil([&] { return access((hold + ".seen").c_str(), F_OK) == 0; }));
  const Args second = args.With({{"name", "second"}});
  EXPECT_EQ(StartRank(0, second.With({{"timeout_ms", "2000"}})).Wait(), 0);
  EXPECT_EQ(Report(second, 0).code, static_cast<int>(Code::kDeadlineExceeded))
      << "it waits: " << Report(second, 0).message;
  unlink(hold.c_str());
  ExpectAllOk(RunRanks(second));
}

TEST_F(OnGpus, AnotherNumberOfPoolsThanGpusIsRefused) {
  SHARDD_NEEDS_GPUS(2);
  StartOnGpus(2);
  const Args args = {{"device_memory", "1"}, {"steps", "1"}, {"unshard_mode", "POOLED"}, {"pools", "1"}};
  EXPECT_EQ(StartRank(0, args).Wait(), 0);
  EXPECT_EQ(Report(args, 0).code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_TRUE(absl::StrContains(Report(args, 0).message, "(got 1, want 0 or 2)")) << Report(args, 0).message;
}

TEST_F(OnGpus, ThreeStatesMuonAndPartsOfAStepAreRefusedByName) {
  SHARDD_NEEDS_GPUS(1);
  StartOnGpus(1);
  const Args on_gpu = {{"device_memory", "1"}, {"unshard_mode", "POOLED"}};
  TrainerReport refused = Refusal(on_gpu.With({{"optimizer", "adamw_amsgrad"}}));
  EXPECT_EQ(refused.code, static_cast<int>(Code::kUnimplemented));
  EXPECT_TRUE(absl::StrContains(refused.message, "three states for each element")) << refused.message;
  refused = Refusal(on_gpu.With({{"muon", "1"}, {"name", "muon"}}));
  EXPECT_EQ(refused.code, static_cast<int>(Code::kUnimplemented));
  EXPECT_TRUE(absl::StrContains(refused.message, "Muon is not served where ranks train on GPUs")) << refused.message;
  const Args parts = on_gpu.With({{"parts", "1"}, {"optimizer", "sgd"}, {"two_states", "1"}, {"name", "parts"}});
  EXPECT_TRUE(OneIsRefused(RunRanks(parts), "step in parts, which are not served on GPUs"));
}

TEST_F(OnGpus, NcclReducesGradientsWhereAskedAndStatusShowsItsCost) {
  SHARDD_NEEDS_GPUS(2);
  const std::vector<std::string> environment = testing::FakeCudaEnvironment(2);
  RanksFind(environment);
  StartDaemon({"--collective=nccl"}, "cuda:all", testing::FakeCudaEnvironment(2, {"FAKE_CUDA_DELAY_SEED=11"}));
  const Args args = {{"device_memory", "1"}, {"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}};
  v1::Job job;
  ExpectParity(args, RunRanks(args, {}, [&] { job = Job(); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), "nccl 2.28.9 over cuda:0, cuda:1: ")) << job.collective();
  EXPECT_FALSE(absl::StrContains(job.collective(), ": 0 gradient elements")) << job.collective();
  EXPECT_TRUE(absl::StrContains(job.collective(), "at most 8 CTAs on each GPU, CTA policy zero")) << job.collective();
  const Args bf16 = {{"device_memory", "1"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}, {"name", "bf16"}};
  ExpectParity(bf16, RunRanks(bf16, {}, [&] { job = Job("bf16"); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), ": 0 gradient elements summed by it")) << job.collective();
  const Args four = {{"device_memory", "1"}, {"world", "4"}, {"steps", "3"}, {"name", "four"}};
  ExpectAllOk(RunRanks(four, {}, [&] { job = Job("four"); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), "local: NCCL wants a GPU for each rank")) << job.collective();
}

// NCCL takes a GPU for each rank; a rank alone has nothing to add.
TEST_F(OnGpus, RanksOnOneGpuOrAloneDoWithoutNccl) {
  std::vector<std::string> flags = {"--collective=nccl"};
  if (testing::OnRealGpus()) {
    const char* const library = getenv("SHARDD_NCCL_LIBRARY");
    if (library == nullptr) GTEST_SKIP() << "SHARDD_NCCL_LIBRARY does not say where NCCL is";
    flags.push_back(absl::StrCat("--nccl_library=", library));
  }
  RanksFind(testing::FakeCudaEnvironment(1));
  StartDaemon(flags, "cuda:0", testing::FakeCudaEnvironment(1));
  const Args args = {{"device_memory", "1"}, {"steps", "10"}, {"micro", "2"}, {"max_norm", "0.1"}};
  v1::Job job;
  ExpectParity(args, RunRanks(args, {}, [&] { job = Job(); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), "local: NCCL wants a GPU for each rank (got 2 ranks on 1 GPUs)"))
      << job.collective();
  const Args alone = args.With({{"world", "1"}, {"name", "alone"}});
  ExpectParity(alone, RunRanks(alone, {}, [&] { job = Job("alone"); }));
  EXPECT_TRUE(absl::StrContains(job.collective(), "local: one rank has nobody to sum with")) << job.collective();
}

// Both in the middle of a step and in the middle of a writeback, whose old bytes come back from the GPU.
TEST_F(OnGpus, ReplacingAKilledRankChangesNoResult) {
  StartOnGpus(2);
  const Footprint before = DaemonFootprint();
  const Args args = {
      {"device_memory", "1"}, {"steps", "10"}, {"recover", "1"}, {"writeback_at_end", "1"}, {"filler", "3000000"}};
  ExpectReplacedRanksChangeNothing(args, {"some_gradients@4", "writeback@10"}, /*aborts=*/true);
  ExpectNothingLeaks(before);
}

TEST_F(OnGpus, UnsupportedJobsAreRefusedByNameWhenOpened) {
  StartOnGpus(2);
  const TrainerReport report = Refusal({{"name", "host"}});
  EXPECT_EQ(report.code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_TRUE(absl::StrContains(report.message, "this trainer takes host memory alone")) << report.message;
}

TEST_F(OnGpus, AGpuThatDoesNotReachAnotherIsHarmlesslyNamed) {
  SHARDD_NEEDS_FAKE_GPUS("no peer access");
  // The daemon gives each GPU its scratch, then the slab its own GPU's access and the peer's.
  StartOnGpus(2, {"FAKE_CUDA_FAIL=cuMemSetAccess:4:101"});
  const TrainerReport report = Refusal({{"name", "apart"}, {"device_memory", "1"}});
  EXPECT_EQ(report.code, static_cast<int>(Code::kFailedPrecondition));
  EXPECT_TRUE(absl::StrContains(report.message, "cuda:1 does not reach the memory of cuda:0")) << report.message;
  ExpectAllOk(RunRanks({{"device_memory", "1"}, {"steps", "2"}}));  // the next one is served
}

// Values of one job go to the GPU; its engine that copies them hangs, those that the other's kernels use do not.
TEST_F(OnGpus, AHangingCopyDisturbsNeitherStatusNorAnotherJob) {
  SHARDD_NEEDS_FAKE_GPUS("an engine hangs");
  const std::string file = File("hang");
  std::ofstream(file).flush();
  StartOnGpus(1, {"FAKE_CUDA_LOSE_FILE=" + file});
  const Args other = {{"name", "other"}, {"device_memory", "1"}, {"steps", "1000000"}, {"timeout_ms", "60000"}};
  const Child first = StartRank(0, other);
  const Child second = StartRank(1, other);
  ASSERT_TRUE(PollUntil([&] { return Job("other").committed_step() > 3; }));
  const Args args = {{"device_memory", "1"}, {"timeout_ms", "60000"}, {"pause", "initial"}};
  Child hangs = StartRank(0, args);
  Child waits = StartRank(1, args.With({{"pause", ""}}));
  AwaitPause(args, "initial", 0);
  std::ofstream(file) << "0 copy\n" << std::flush;
  ASSERT_TRUE(PollUntil([&] { return access((file + ".seen").c_str(), F_OK) == 0; }));
  LetGo(args, "initial", 0);
  ASSERT_TRUE(PollUntil([&] {
    const std::vector<v1::Rank> ranks = Ranks();
    return ranks.size() == 2 && ranks[0].last_command() == "WriteParameters" && ranks[0].last_command_age_ms() > 500;
  }));
  const int64_t before = Job("other").committed_step();
  EXPECT_TRUE(PollUntil([&] { return Job("other").committed_step() > before + 10; }));
  EXPECT_EQ(Job().name(), "job") << "the copy has been given up before the other job went on";
  // It is given up in the end, with a reason.
  EXPECT_EQ(hangs.Wait(), 0);
  EXPECT_EQ(waits.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(Report(args, 0).message, "copy between host and cuda:0: the GPU hangs"))
      << Report(args, 0).message;
  const int64_t after = Job("other").committed_step();
  EXPECT_TRUE(PollUntil([&] { return Job("other").committed_step() > after; }));
  EXPECT_EQ(StopDaemon(), 0);
}

TEST_F(OnGpus, ALostGpuEndsItsJobsWithTheDriversWords) {
  SHARDD_NEEDS_FAKE_GPUS("it is lost");
  const std::string file = File("lose");
  std::ofstream(file).flush();
  StartOnGpus(1, {"FAKE_CUDA_LOSE_FILE=" + file});
  const Args args = {{"device_memory", "1"}, {"steps", "1000000"}, {"recover", "1"}, {"timeout_ms", "20000"}};
  for (const TrainerReport& report : RunUntilTheGpuIsLost(args, file)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kNotFound)) << report.message;
    EXPECT_TRUE(absl::StrContains(report.message, "CUDA_ERROR_ECC_UNCORRECTABLE")) << report.message;
  }
  EXPECT_TRUE(DaemonAlive());
}

}  // namespace
}  // namespace shardd::e2e
