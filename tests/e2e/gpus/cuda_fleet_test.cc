// Jobs over four and two GPUs of one daemon, on the fake driver in every process or on real GPUs: ranks that die and
// are replaced, jobs that train more than they did.

#include <signal.h>
#include <sys/resource.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class OverManyGpus : public GpuCluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
};

// Each kills another rank, so that every GPU but the first loses its trainer once.
TEST_F(OverManyGpus, ReplacingAKilledRankOnItsGpuChangesNoResult) {
  SHARDD_NEEDS_GPUS(4);
  StartOnGpus(4);
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"}, {"world", "4"}, {"steps", "8"}, {"recover", "1"}, {"filler", "3000000"}};
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  int victim_rank = 1;
  for (const char* moment : {"some_gradients@3", "before_step@4", "step_sent@5"}) {
    SCOPED_TRACE(moment);
    std::vector<Child> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.push_back(StartRank(rank, rank == victim_rank ? args.With({{"kill", moment}}) : args));
    }
    EXPECT_EQ(ranks[static_cast<size_t>(victim_rank)].Wait(), 1000 + SIGKILL);
    Child replacement = StartRank(victim_rank, args.With({{"pause", "end"}}));
    AwaitPause(args, "end", victim_rank);
    EXPECT_EQ(Ranks()[static_cast<size_t>(victim_rank)].device(), absl::StrCat("cuda:", victim_rank));
    LetGo(args, "end", victim_rank);
    std::vector<TrainerReport> reports;
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ((rank == victim_rank ? replacement : ranks[static_cast<size_t>(rank)]).Wait(), 0);
      reports.push_back(Report(args, rank));
    }
    ExpectAllOk(reports);
    EXPECT_FALSE(reports[0].Note("aborted").empty());
    ExpectSame(reports, want);
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
    ++victim_rank;
  }
  ExpectNothingLeaks(before);
}

// What the wider job takes over lies in pieces on both GPUs: parameters, optimizer state, counts of updates.
TEST_F(OverManyGpus, AnExtendedJobTakesOverWhatEveryGpuHas) {
  const Args args = {{"model", "blocks"}, {"blocks", "3"}, {"numel", "1500000"},   {"steps", "6"},
                     {"world", "2"},      {"extend", "3"}, {"timeout_ms", "60000"}};
  StartDaemon();
  const std::vector<TrainerReport> want = RunRanks(args);
  ExpectAllOk(want);
  EXPECT_EQ(StopDaemon(), 0);
  StartOnGpus(2);
  const Footprint before = DaemonFootprint();
  const Args on_gpus = args.With({{"device_memory", "1"}});
  v1::Job job;
  std::vector<v1::Rank> ranks;
  const std::vector<TrainerReport> reports = RunRanks(on_gpus, {}, [&] {
    job = Job();
    ranks = Ranks();
  });
  ExpectAllOk(reports);
  EXPECT_EQ(job.committed_step(), 6);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].device(), absl::StrCat("cuda:", testing::GpusAtMost(2) - 1));
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(reports[rank].Note("extended"), "extended at 3");
    ASSERT_EQ(reports[rank].losses.size(), 6u);
    EXPECT_EQ(reports[rank].losses, want[rank].losses) << "as on the host";
  }
  // Biases stand still before step 3 and not from there on.
  EXPECT_NE(reports[0].losses[4], reports[0].losses[3]);
  ExpectNothingLeaks(before);
}

// A call that NCCL refuses ends the epoch; GPUs and ranks are as they were.
TEST_F(OverManyGpus, ABrokenCommunicatorIsMadeAnewAndStatusSaysSo) {
  SHARDD_NEEDS_FAKE_GPUS("a call of NCCL fails");
  RanksFind(testing::FakeCudaEnvironment(2));
  StartDaemon({"--collective=nccl"}, "cuda:all", testing::FakeCudaEnvironment(2, {"FAKE_NCCL_FAIL=ReduceScatter:40"}));
  const Args args = {{"device_memory", "1"}, {"steps", "50"}, {"recover", "1"}};
  v1::Job job;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_TRUE(absl::StrContains(reports[0].Note("aborted"), "ncclReduce")) << reports[0].Note("aborted");
  EXPECT_EQ(job.counters().aborts(), 1);
  for (const char* part :
       {"nccl 2.28.9 over cuda:0, cuda:1: ", "aborted and made anew 1 time(s), last because", "an error of the fake"}) {
    EXPECT_TRUE(absl::StrContains(job.collective(), part)) << part << ": " << job.collective();
  }
  EXPECT_FALSE(absl::StrContains(job.collective(), "all by copies")) << job.collective();
}

// What a replacement brings is other memory: the window of before ends, and there is one with its slots. Sums are
// NCCL's throughout, so all ends with the bits of the run that nobody disturbed.
TEST_F(OverManyGpus, WindowsFollowTheSlotsOfReplacedRanks) {
  SHARDD_NEEDS_FAKE_GPUS("real ones would need NVLink");
  RanksFind(testing::FakeCudaEnvironment(4, {"FAKE_CUDA_DELAY_SEED=11"}));
  StartDaemon({"--collective=nccl", "--nccl_windows"}, "cuda:all",
              testing::FakeCudaEnvironment(4, {"FAKE_CUDA_DELAY_SEED=7"}));
  const Footprint before = DaemonFootprint();
  const Args args = {{"device_memory", "1"}, {"world", "4"}, {"steps", "8"}, {"recover", "1"}};
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  for (const char* moment : {"some_gradients@3", "before_step@4"}) {
    SCOPED_TRACE(moment);
    std::vector<Child> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.push_back(StartRank(rank, rank == 1 ? args.With({{"kill", moment}}) : args));
    }
    EXPECT_EQ(ranks[1].Wait(), 1000 + SIGKILL);
    Child replacement = StartRank(1, args.With({{"pause", "end"}}));
    AwaitPause(args, "end", 1);
    const std::string status = Job().collective();  // others may have left already, and the window with them
    EXPECT_TRUE(absl::StrContains(status, "registered 2 time(s)")) << status;
    EXPECT_TRUE(absl::StrContains(status, "; sums in it: ")) << status;
    for (const char* part : {"along rings", "made anew"}) EXPECT_FALSE(absl::StrContains(status, part)) << status;
    LetGo(args, "end", 1);
    std::vector<TrainerReport> reports;
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ((rank == 1 ? replacement : ranks[static_cast<size_t>(rank)]).Wait(), 0);
      reports.push_back(Report(args, rank));
    }
    ExpectAllOk(reports);
    EXPECT_FALSE(reports[0].Note("aborted").empty());
    ExpectSame(reports, want);
    ASSERT_TRUE(PollUntil([&] { return Job().name().empty(); }));
  }
  ExpectNothingLeaks(before);
}

TEST_F(OverManyGpus, ANewCommunicatorGetsAWindowOrReducesWithoutOne) {
  SHARDD_NEEDS_FAKE_GPUS("a call of NCCL fails");
  const std::vector<std::string> flags = {"--collective=nccl", "--nccl_windows"};
  RanksFind(testing::FakeCudaEnvironment(2));
  StartDaemon(flags, "cuda:all", testing::FakeCudaEnvironment(2, {"FAKE_NCCL_FAIL=ReduceScatter:40"}));
  const Args args = {{"device_memory", "1"}, {"steps", "50"}, {"recover", "1"}};
  v1::Job job;
  std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_TRUE(absl::StrContains(reports[0].Note("aborted"), "ncclReduceScatter")) << reports[0].Note("aborted");
  for (const char* part : {"aborted and made anew 1 time(s)", "symmetric window of ", "; sums in it: "}) {
    EXPECT_TRUE(absl::StrContains(job.collective(), part)) << part << ": " << job.collective();
  }
  EXPECT_EQ(StopDaemon(), 0);
  StartDaemon(flags, "cuda:all", testing::FakeCudaEnvironment(2, {"FAKE_NCCL_FAIL=CommWindowRegister:2"}));
  reports = RunRanks(args, {}, [&] { job = Job(); });
  ExpectParity(args, reports);
  EXPECT_EQ(job.counters().aborts(), 0);
  for (const char* part :
       {"no symmetric window, registered 0 time(s): ncclCommWindowRegister cuda:1", "along rings: "}) {
    EXPECT_TRUE(absl::StrContains(job.collective(), part)) << part << ": " << job.collective();
  }
  EXPECT_TRUE(absl::StrContains(job.collective(), " 0 by copies")) << job.collective();
}

// Jobs whose slabs would be of hundreds of pieces, each of which is open files.
class ManyPieces : public OverManyGpus {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(2); }
  // The daemon may open so many files more than it has now. Returns what it had.
  rlim_t LeaveTheDaemon(int files) {
    rlimit limit{}, before{};
    EXPECT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, nullptr, &before), 0);
    limit = before;
    limit.rlim_cur = static_cast<rlim_t>(DaemonFootprint().descriptors + files);
    EXPECT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
    return before.rlim_cur;
  }
  const Args args_ = {{"device_memory", "1"}, {"model", "blocks"},  {"blocks", "68"}, {"numel", "1048576"},
                      {"steps", "2"},         {"optimizer", "sgd"}, {"world", "2"},   {"timeout_ms", "60000"}};
};

TEST_F(ManyPieces, AreFewerWhereTheDaemonMayOpenFewFiles) {
  StartOnGpus(2);
  const Footprint idle = DaemonFootprint();
  const std::vector<TrainerReport> want = RunRanks(args_.With({{"name", "near"}}));
  ExpectAllOk(want);
  ASSERT_TRUE(PollUntil([&] { return DaemonFootprint() <= idle; }));
  (void)LeaveTheDaemon(260);
  const int before = DaemonFootprint().descriptors;
  int after = 0;
  v1::Memory memory;
  const std::vector<TrainerReport> reports = RunRanks(args_, {}, [&] {
    after = DaemonFootprint().descriptors;
    grpc::ClientContext context;
    v1::JobRef ref;
    ref.set_job("job");
    EXPECT_TRUE(jobs().GetMemory(&context, ref, &memory).ok());
  });
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].losses, want[0].losses);
  EXPECT_GT(after, before);
  EXPECT_LT(after - before, 200);
  for (const v1::Purpose& purpose : memory.purposes()) {
    if (purpose.purpose() != "shards" && purpose.purpose() != "gradients") continue;
    ASSERT_EQ(purpose.devices_size(), 2) << purpose.purpose();
    EXPECT_NEAR(static_cast<double>(purpose.devices(0).allocated_bytes()),
                static_cast<double>(purpose.devices(1).allocated_bytes()),
                static_cast<double>(purpose.allocated_bytes()) / 8);
  }
}

TEST_F(ManyPieces, AreHarmlesslyRefusedNamingTheLowLimit) {
  StartOnGpus(2);
  (void)LeaveTheDaemon(40);
  EXPECT_EQ(StartRank(0, args_).Wait(), 0);
  const TrainerReport report = Report(args_, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
  for (const char* part : {"open job \"job\"", "the daemon may not open as many files", "want at least", "ulimit -n"}) {
    EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
  }
  (void)LeaveTheDaemon(260);
  ExpectAllOk(RunRanks(args_.With({{"blocks", "2"}})));
}

TEST_F(ManyPieces, ATrainerThatMayNotOpenThemIsToldSo) {
  StartOnGpus(2);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Child poor = StartRank(0, args_);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(poor.Wait(), 0);
  const TrainerReport report = Report(args_, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kResourceExhausted)) << report.message;
  for (const char* part : {"attach: this process may not open the files", " of 100", "ulimit -n"}) {
    EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
  }
  ExpectAllOk(RunRanks(args_));
}

}  // namespace
}  // namespace shardd::e2e
