// The daemon dies while ranks train whose memory lies on GPUs, at any moment and in the middle of what its streams do,
// and its successor goes on with their jobs: no committed step is lost, and what comes of it has the bits of an
// undisturbed run.

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/daemon_death.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// For each case. A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills() {
  const char* const text = std::getenv("SHARDD_DEATHS");
  return text == nullptr ? 12 : std::atoi(text);
}

struct Case {
  std::string name;
  int gpus;
  Args args;
  friend void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }
};

class CudaDeath : public DaemonDeath {
 protected:
  void SetUp() override {
    SHARDD_NEEDS_GPUS(1);
    const char* const mps = std::getenv("SHARDD_GPU_MPS");
    if (mps != nullptr && std::string(mps) == "on") {
      GTEST_SKIP() << "a client of MPS that is killed while its kernel runs takes all clients of the GPU along";
    }
  }
  void StartOnGpus(int gpus, std::vector<std::string> daemon_only = {}) {
    RanksFind(testing::FakeCudaEnvironment(gpus));
    daemon_only.push_back("FAKE_CUDA_DELAY_SEED=7");
    KeptOn("cuda:all", testing::FakeCudaEnvironment(gpus, daemon_only));
    StartCustodian();
  }
  static Args Training(int steps, const Args& more = {}) {
    return more.With(
        {{"steps", absl::StrCat(steps)}, {"recover", "1"}, {"device_memory", "1"}, {"timeout_ms", "60000"}});
  }
  const std::string daemon_folder_ = File("").substr(0, File("").size() - 1);
  // One that dies in the nth of these, perhaps before it listens. The ranks' address is its, too.
  std::unique_ptr<testing::DaemonProcess> StartDying(const std::string& what, int nth) {
    std::vector<std::string> environment = environment_;
    environment.push_back(absl::StrCat("FAKE_CUDA_DIE=", what, ":", nth));
    return std::make_unique<testing::DaemonProcess>(
        daemon_folder_, "cuda:all", std::vector<std::string>{"--custodian=unix:" + CustodyPath()}, environment);
  }
  int CustodianDescriptors() const {
    int count = 0;
    DIR* const folder = opendir(absl::StrCat("/proc/", custodian_->pid(), "/fd").c_str());
    while (folder != nullptr && readdir(folder) != nullptr) ++count;
    if (folder != nullptr) closedir(folder);
    return count;
  }
  // All jobs have come to their end.
  void ExpectNothingLeft(const Footprint& daemon, int custodian) {
    EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() == daemon; })) << DaemonFootprint() << ", want " << daemon;
    EXPECT_TRUE(PollUntil([&] { return CustodianDescriptors() == custodian; })) << CustodianDescriptors();
  }
  std::map<std::string, v1::Purpose> Purposes() {
    grpc::ClientContext context;
    v1::JobRef ref;
    ref.set_job("job");
    v1::Memory memory;
    EXPECT_TRUE(jobs().GetMemory(&context, ref, &memory).ok());
    std::map<std::string, v1::Purpose> purposes;
    for (const v1::Purpose& purpose : memory.purposes()) purposes[purpose.purpose()] = purpose;
    return purposes;
  }
};

class CudaDeathOf : public CudaDeath, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaDeathOf, KillsAtAnyMomentLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  const Args args = Training(20 * Kills(), GetParam().args);
  StartOnGpus(GetParam().gpus);
  StartKept();
  const Footprint before = DaemonFootprint();
  const int descriptors = CustodianDescriptors();
  std::vector<Child> ranks = StartRanks(args);
  KillAgainAndAgain(ranks[0], Kills(), /*most_steps_lost=*/0);
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft(before, descriptors);
}

const Case kCases[] = {
    {"AdamWOnOne", 1, {{"max_norm", "0.1"}}},
    {"SgdOnOne", 1, {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}, {"trainer_sums", "2"}}},
    {"AdamWOverTwo", 2, {{"trainer_sums", "2"}, {"filler", "3000000"}, {"micro", "2"}}},
    {"SgdInBf16OverTwo",
     2,
     {{"optimizer", "sgd"}, {"param_dtype", "bf16"}, {"unshard_mode", "ZERO_COPY"}, {"forward_prefetch", "1"}}},
    {"ThreeRanksInDim0OverTwo", 2, {{"world", "3"}, {"layout", "DIM0"}, {"absent", "mixed"}}},
    {"FourHybridOverTwo", 2, {{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}}},
    {"ByTheStreamOverTwo", 2, {{"model", "stream"}}},
};
INSTANTIATE_TEST_SUITE_P(Jobs, CudaDeathOf, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Optimizers run in the ranks, which look at the values by themselves: an abort goes back to the snapshot.
class CudaDeathOfPasses : public CudaDeath, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaDeathOfPasses, KillsWhereRanksUpdateGoBackToTheSnapshot) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  constexpr int kKeepEvery = 3;
  const Args args = Training(5 * Kills(), GetParam().args)
                        .With({{"model", "pass"},
                               {"trainers_write", "1"},
                               {"blocks", "3"},
                               {"numel", "60013"},
                               {"keep_every", absl::StrCat(kKeepEvery)}});
  StartOnGpus(GetParam().gpus);
  StartKept();
  const Footprint before = DaemonFootprint();
  const int descriptors = CustodianDescriptors();
  std::vector<Child> ranks = StartRanks(args);
  KillAgainAndAgain(ranks[0], Kills(), /*most_steps_lost=*/kKeepEvery);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk(Reports(args));
  ExpectNothingLeft(before, descriptors);
}

const Case kPasses[] = {{"AdamByTheHost", 1, {{"trained", "adam"}, {"ordered", "0"}}},
                        {"SgdByTheStreamOverTwo", 2, {{"trained", "sgd"}, {"ordered", "1"}}}};
INSTANTIATE_TEST_SUITE_P(Jobs, CudaDeathOfPasses, ::testing::ValuesIn(kPasses),
                         [](const auto& info) { return info.param.name; });

// Where the fake driver's process dies by itself: in the nth of its kernels, copies or words, halfway.
struct DeathIn {
  const char* name;
  std::string what;
  std::vector<int> nth;
  int gpus;
  Args args;
  friend void PrintTo(const DeathIn& value, std::ostream* out) { *out << value.name; }
};

class CudaDeathIn : public CudaDeath, public ::testing::WithParamInterface<DeathIn> {};

TEST_P(CudaDeathIn, ACallOfItsStreamsLosesNothing) {
  SHARDD_NEEDS_FAKE_GPUS("a process dies in the nth of its calls");
  const Args args = Training(40, GetParam().args);
  StartOnGpus(GetParam().gpus);
  StartKept();  // whose address ranks are told
  const int descriptors = CustodianDescriptors();
  KillDaemon();
  std::unique_ptr<testing::DaemonProcess> dying = StartDying(GetParam().what, GetParam().nth.front());
  std::vector<Child> ranks = StartRanks(args);
  for (size_t i = 1; i <= GetParam().nth.size(); ++i) {
    ASSERT_EQ(dying->process().Wait(), 1000 + SIGKILL) << "death " << i;
    dying = i < GetParam().nth.size() ? StartDying(GetParam().what, GetParam().nth[i]) : nullptr;
  }
  StartKept();
  ExpectUndisturbed(args, ranks);
  EXPECT_TRUE(PollUntil([&] { return CustodianDescriptors() == descriptors; })) << CustodianDescriptors();
}

INSTANTIATE_TEST_SUITE_P(Calls, CudaDeathIn,
                         ::testing::Values(DeathIn{"AKernel", "shardd_adamw", {5, 2, 9, 3, 14, 30, 31}, 1, {}},
                                           DeathIn{"AKernelOfSgd",
                                                   "shardd_sgd",
                                                   {4, 2, 12, 7},
                                                   2,
                                                   {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}}},
                                           DeathIn{"AWord", "cuStreamWriteValue64", {3, 5, 1, 8, 22, 2, 41, 60}, 1, {}},
                                           DeathIn{"AWordOverTwo", "cuStreamWriteValue64", {7, 2, 31, 12}, 2, {}},
                                           DeathIn{"ACopy", "cuMemcpyAsync", {40, 9, 3, 70, 33, 120, 4}, 1, {}},
                                           DeathIn{"ACopyOverTwo", "cuMemcpyAsync", {60, 11, 5, 90, 150}, 2, {}}),
                         [](const auto& info) { return std::string(info.param.name); });

// More elements than a piece has, so that one operation is several pieces.
TEST_F(CudaDeath, InTheMiddleOfALargeUpdateLosesNothing) {
  SHARDD_NEEDS_FAKE_GPUS("a process dies in the nth of its calls");
  StartOnGpus(1);
  const Args args = Training(6, {{"model", "blocks"}, {"blocks", "1"}, {"numel", "10000001"}});
  StartKept();
  KillDaemon();
  std::unique_ptr<testing::DaemonProcess> dying = StartDying("shardd_adamw", 3);  // the first is the engine's own
  std::vector<Child> ranks = StartRanks(args);
  for (const int nth : {3, 2, 7, 5}) {
    ASSERT_EQ(dying->process().Wait(), 1000 + SIGKILL);
    dying = StartDying("shardd_adamw", nth);
  }
  ASSERT_EQ(dying->process().Wait(), 1000 + SIGKILL);
  StartKept();
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk(Reports(args));
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  for (size_t rank = 0; rank < 2; ++rank) {  // of all elements, in double
    EXPECT_EQ(Reports(args)[rank].losses, want[rank].losses);
    EXPECT_EQ(want[rank].losses.size(), 6u);
  }
}

TEST_F(CudaDeath, ASuccessorGoesOnAfterOneThatWasStopped) {
  StartOnGpus(1);
  StartKept();
  const Args args = Training(100);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 10; }));
  KillDaemon(SIGTERM);
  StartKept();
  ExpectUndisturbed(args, ranks);
}

TEST_F(CudaDeath, RanksOfTheJobMayDieWithIt) {
  StartOnGpus(testing::GpusAtMost(2));
  StartKept();
  const Args args = Training(60);
  {
    std::vector<Child> ranks = StartRanks(args);
    ASSERT_TRUE(PollUntil([this] { return Committed() >= 10; }));
    ASSERT_EQ(kill(daemon_pid(), SIGKILL), 0);
    for (Child& rank : ranks) {
      rank.Kill(SIGKILL);
      rank.Wait();
    }
    WaitForDaemon();
  }
  StartKept();
  EXPECT_GE(Committed(), 10);
  std::vector<Child> ranks = StartRanks(args);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk(Reports(args));
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Reports(args)[rank].values, want[rank].values);
}

// Who attaches again writes the gradient shards of before no more, so there are no others beside them.
TEST_F(CudaDeath, RanksThatAttachAgainFindTheGradientsThatTheyHad) {
  StartOnGpus(1);
  StartKept();
  const Args args = Training(20, {{"pause", "before_step@10,end@20"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "before_step", rank);
  KillDaemon();
  StartKept();
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "before_step", rank);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  EXPECT_FALSE(HasEvent("job", "renew", ""));
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  ExpectUndisturbed(args.With({{"pause", ""}}), ranks);
}

// It may still write what it has mapped, and what was queued behind its stream's waits.
TEST_F(CudaDeath, ARankThatIsReplacedBehindItLeavesItsGradientsToTheProcessThatLives) {
  StartOnGpus(1);
  StartKept();
  const Args args = Training(20, {{"pause", "before_step@10,end@20"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "before_step", rank);
  KillDaemon();
  StartKept();
  ASSERT_EQ(kill(ranks[1].pid(), SIGSTOP), 0);
  Child replacement = StartRank(1, args.With({{"pause", "end@20"}}));
  LetGo(args, "before_step", 0);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  EXPECT_TRUE(HasEvent("job", "renew", absl::StrCat("its last process (pid ", ranks[1].pid(), ") lives")));
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  EXPECT_EQ(ranks[0].Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  ExpectSame(reports, RunRanks(args.With({{"name", "undisturbed"}, {"pause", ""}})));
}

TEST_F(CudaDeath, OldValuesHaveTheirMemoryAndTheAccountShowsIt) {
  SHARDD_NEEDS_GPUS(2);
  StartOnGpus(2);
  StartKept();
  const Args args = Training(5, {{"world", "3"}, {"pause", "end"}, {"filler", "3000000"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 3; ++rank) AwaitPause(args, "end", rank);
  const auto check = [this] {
    const v1::Purpose old_values = Purposes()["old values"];
    EXPECT_GT(old_values.planned_bytes(), 0);
    EXPECT_EQ(old_values.allocated_bytes(), old_values.planned_bytes());
    ASSERT_EQ(old_values.devices_size(), 2);
    // Of three ranks alike, two are on the first.
    EXPECT_EQ(old_values.devices(0).allocated_bytes(), 2 * old_values.devices(1).allocated_bytes());
  };
  check();
  KillDaemon();
  StartKept();
  check();
  for (int rank = 0; rank < 3; ++rank) LetGo(args, "end", rank);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  // Without a custodian there is nothing to be completed.
  KillDaemon();
  StartDaemon({}, "cuda:all", testing::FakeCudaEnvironment(2));
  RunRanks(args.With({{"name", "job"}, {"pause", ""}}), {}, [&] { EXPECT_EQ(Purposes().count("old values"), 0u); });
}

// Neither the host nor other GPUs have the job's memory, and whoever starts the right daemon finds it.
TEST_F(CudaDeath, IsNotTakenUpByADaemonOnOtherDevices) {
  SHARDD_NEEDS_GPUS(2);
  StartOnGpus(2);
  const std::vector<std::string> environment = testing::FakeCudaEnvironment(2);
  KeptOn("cuda:0", environment);
  StartKept();
  const Args args = Training(100);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  for (Child& rank : ranks) kill(rank.pid(), SIGSTOP);  // nobody is to open another job of the name
  for (const char* const devices : {"cpu:2", "cuda:1"}) {
    KillDaemon();
    KeptOn(devices, environment);
    StartKept();
    EXPECT_TRUE(absl::StrContains(testing::ReadWholeFile(DaemonLog()), "start the daemon with the --devices of before"))
        << devices;
    EXPECT_TRUE(Job().name().empty());
  }
  KillDaemon();
  KeptOn("cuda:0", environment);
  StartKept();
  EXPECT_GE(Committed(), 5);
  for (Child& rank : ranks) kill(rank.pid(), SIGCONT);
  ExpectUndisturbed(args, ranks);
}

pid_t PeerOf(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ucred peer = {};
  socklen_t size = sizeof(peer);
  const bool known = connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0 &&
                     getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  close(fd);
  return known ? peer.pid : -1;
}

// The daemon that a rank has started, with all GPUs, has a custodian of its own, and a rank starts the next one.
TEST_F(CudaDeath, AnEmbeddedDaemonIsStartedAgainByItsRanks) {
  StartDaemon();  // of another folder; ranks are told of none
  const std::string folder = File("run");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  std::vector<std::string> environment = testing::FakeCudaEnvironment(testing::GpusAtMost(2));
  environment.insert(environment.end(), {"XDG_RUNTIME_DIR=" + folder,
                                         "SHARDD_ADDRESS=", "SHARDD_DAEMON=" + testing::ProgramPath("shardd")});
  RanksFind(environment);
  const Args args = Training(30, {{"address", ""}, {"pause", "before_step@7,step_sent@20"}});
  std::vector<Child> ranks = StartRanks(args);
  const std::string socket_path = folder + "/shardd/shardd-cuda.sock";
  for (const char* const moment : {"before_step", "step_sent"}) {
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, moment, rank);
    const pid_t daemon = PeerOf(socket_path);
    ASSERT_GT(daemon, 0);
    ASSERT_EQ(kill(daemon, SIGKILL), 0);
    for (int rank = 0; rank < 2; ++rank) LetGo(args, moment, rank);
  }
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  ExpectSame(reports, RunRanks(args.With({{"name", "undisturbed"}, {"pause", ""}})));
  EXPECT_TRUE(PollUntil([&] { return PeerOf(socket_path) < 0; })) << "it ends after its last job";
  EXPECT_TRUE(PollUntil([&] { return access((folder + "/shardd/shardd-cuda-custody.sock").c_str(), F_OK) != 0; }));
}

// A job whose memory no other process can have is served, and ends with its daemon.
TEST_F(CudaDeath, WhereTheDriverImportsNothingTheJobEndsWithTheDaemonAndTheLogSaysSo) {
  SHARDD_NEEDS_FAKE_GPUS("an import fails");
  StartOnGpus(1, {"FAKE_CUDA_FAIL=cuMemImportFromShareableHandle:1:801"});
  StartKept();
  const Args args = Training(2000);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  EXPECT_TRUE(absl::StrContains(testing::ReadWholeFile(DaemonLog()),
                                "job job ends with this daemon: its GPUs' memory cannot be taken up"));
  EXPECT_EQ(Purposes().count("old values"), 0u);
  KillDaemon();
  StartKept();
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  for (const TrainerReport& report : Reports(args)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kUnavailable)) << report.message;
  }
}

}  // namespace
}  // namespace shardd::e2e
