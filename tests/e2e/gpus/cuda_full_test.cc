// GPUs without room: a job that does not fit beside another one, one that would fit without its ranks' gradient slots,
// and copies for which there is none.

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/gpus/purposes.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;

constexpr int64_t kMiB = int64_t{1} << 20;

class FullGpu : public Cluster {
 protected:
  void SetUp() override {
    SHARDD_NEEDS_FAKE_GPUS("their size");
    RanksFind(testing::FakeCudaEnvironment(2));
  }
  void StartOnGpus(const std::vector<std::string>& daemon_only) {
    StartDaemon({}, "cuda:all", testing::FakeCudaEnvironment(2, daemon_only));
  }
  void StartOnGpusOf(int64_t bytes) { StartOnGpus({absl::StrCat("FAKE_CUDA_MEMORY_BYTES=", bytes)}); }
  // Bytes of a purpose on a GPU, or of all purposes.
  int64_t BytesOn(const std::string& gpu, const std::string& purpose = "") {
    int64_t bytes = 0;
    for (const auto& [name, one] : PurposesOf(jobs())) {
      if (!purpose.empty() && name != purpose) continue;
      for (const v1::DeviceBytes& on : one.devices()) bytes += on.device() == gpu ? on.allocated_bytes() : 0;
    }
    return bytes;
  }
  void ExpectRefused(const Args& args, const std::vector<std::string>& parts) {
    EXPECT_EQ(StartRank(0, args).Wait(), 0);
    const TrainerReport report = Report(args, 0);
    EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
    }
  }
  const Args args_ = {
      {"device_memory", "1"}, {"optimizer", "sgd"}, {"filler", "1000000"}, {"steps", "3"}, {"timeout_ms", "20000"}};
};

TEST_F(FullGpu, ARefusedJobHearsWhatIsFreeAndDisturbsNobody) {
  StartOnGpusOf(40 * kMiB);
  int64_t held = 0;
  ExpectAllOk(RunRanks(args_, {}, [&] {
    held = BytesOn("cuda:0");
    EXPECT_GT(held, 20 * kMiB);
    const Footprint before = DaemonFootprint();
    ExpectRefused(args_.With({{"name", "second"}}),
                  {"open job \"second\": cuda:0 has no room for its slabs and gradient slots",
                   absl::StrCat(" bytes free of ", 40 * kMiB, ", want ", held),
                   absl::StrCat("slabs of other jobs hold ", held), "; cuda:1 has no room", "JobConfig.offload"});
    EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
    EXPECT_EQ(BytesOn("cuda:0"), held);
  }));
  ExpectAllOk(RunRanks(args_.With({{"name", "third"}})));
}

// Not when its ranks attach, one of them after hours perhaps.
TEST_F(FullGpu, AJobWithoutRoomForGradientSlotsDoesNotOpen) {
  StartOnGpus({});
  int64_t all = 0, slots = 0;
  ExpectAllOk(RunRanks(args_, {}, [&] {
    all = BytesOn("cuda:1");
    slots = BytesOn("cuda:1", "gradient slots");
  }));
  EXPECT_GT(slots, 0);
  EXPECT_EQ(StopDaemon(), 0);
  StartOnGpusOf(all - slots / 2);
  ExpectRefused(args_, {"cuda:1 has no room for its slabs and gradient slots"});
}

// All that a job takes of a GPU is there when it is open: nothing is asked for at its end, of daemon or ranks.
TEST_F(FullGpu, AJobThatFillsItsGpusTrainsAndWritesBack) {
  const Args args = args_.With({{"writeback_at_end", "1"}});
  StartOnGpus({});
  int64_t most = 0;
  const std::vector<TrainerReport> roomy =
      RunRanks(args, {}, [&] { most = std::max(BytesOn("cuda:0"), BytesOn("cuda:1")); });
  EXPECT_EQ(StopDaemon(), 0);
  RanksFind(testing::FakeCudaEnvironment(2, {"FAKE_CUDA_MEMORY_BYTES=1"}));
  StartOnGpusOf(most);
  EXPECT_EQ(StartRank(0, args).Wait(), 0);
  const std::string refused = Report(args, 0).message;  // what is free: the rest is the daemon's own
  const size_t free = refused.find("(got ");
  ASSERT_NE(free, std::string::npos) << refused;
  EXPECT_EQ(StopDaemon(), 0);
  StartOnGpusOf(2 * most - std::atoll(refused.c_str() + free + 5));
  const std::vector<TrainerReport> full = RunRanks(args);
  ExpectAllOk(full);
  ExpectSame(full, roomy);
}

// The driver takes memory for copies too, of values and in steps. Which copy it is depends on what ranks and GPUs do
// just then, so it is one of each, now and then.
TEST_F(FullGpu, CopiesWithoutMemoryEndTheirEpochOrJobByName) {
  for (const int nth : {60, 120, 240}) {
    SCOPED_TRACE(nth);
    StartOnGpus({absl::StrCat("FAKE_CUDA_FAIL=cuMemcpyAsync:", nth, ":2")});
    const Args args =
        args_.With({{"steps", "30"}, {"recover", "1"}, {"unshard_mode", "POOLED"}, {"writeback_at_end", "1"}});
    const std::vector<TrainerReport> reports = RunRanks(args);
    for (const TrainerReport& report : reports) {
      const std::string said = report.code == 0 ? report.Note("aborted") : report.message;
      EXPECT_TRUE(absl::StrContains(said, "CUDA_ERROR_OUT_OF_MEMORY")) << report.code << ": " << said;
    }
    EXPECT_TRUE(DaemonAlive());
    ExpectAllOk(RunRanks(args.With({{"name", "next"}})));
    EXPECT_EQ(StopDaemon(), 0);
  }
}

}  // namespace
}  // namespace shardd::e2e
