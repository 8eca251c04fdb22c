// What else becomes of jobs on GPUs whose daemon dies: stops, ranks that die with it or are replaced behind it, memory,
// and daemons that cannot have it.

#include "tests/e2e/gpus/cuda_death.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

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
  ExpectUndisturbed(args, ranks);
}

TEST_F(CudaDeath, WhereRanksLoadValuesTakesThemBack) {
  StartOnGpus(1);
  KillWhereRanksLoadValues(Training(5).With({{"writeback_at_end", "1"}}));
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
  std::vector<Child> ranks = KillTogetherWithRanks(args, 10);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk(Reports(args));
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Reports(args)[rank].values, want[rank].values);
}

// Who attaches again writes the gradient shards of before no more, so there are no others beside them.
TEST_F(CudaDeath, RanksThatAttachAgainFindTheGradientsThatTheyHad) {
  const Args args = Training(20, {{"pause", "before_step@10,end@20"}});
  std::vector<Child> ranks = KillBeforeTheStep(args);
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "before_step", rank);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  EXPECT_FALSE(HasEvent("job", "renew", ""));
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  ExpectUndisturbed(args.With({{"pause", ""}}), ranks);
}

// It may still write what it has mapped, and what was queued behind its stream's waits.
TEST_F(CudaDeath, AReplacedRanksLivingProcessKeepsItsGradientMemory) {
  const Args args = Training(20, {{"pause", "before_step@10,end@20"}});
  std::vector<Child> ranks = KillBeforeTheStep(args);
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
  ExpectAsUndisturbed(reports, args.With({{"pause", ""}}));
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
  ExpectAsUndisturbed(reports, args.With({{"pause", ""}}));
  EXPECT_TRUE(PollUntil([&] { return PeerOf(socket_path) < 0; })) << "it ends after its last job";
  EXPECT_TRUE(PollUntil([&] { return access((folder + "/shardd/shardd-cuda-custody.sock").c_str(), F_OK) != 0; }));
}

// A job whose memory no other process can have is served, and ends with its daemon.
TEST_F(CudaDeath, WithoutDriverImportsJobsEndWithTheDaemonAsLogged) {
  SHARDD_NEEDS_FAKE_GPUS("an import fails");
  StartOnGpus(1, {"FAKE_CUDA_FAIL=cuMemImportFromShareableHandle:1:801"});
  StartKept();
  const Args args = Training(2000);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  EXPECT_TRUE(absl::StrContains(testing::ReadWholeFile(DaemonLog()),
                                "job job ends with this daemon: its GPUs' memory cannot be taken up"));
  EXPECT_THAT(DaemonStatus().warnings(),
              ::testing::Contains(::testing::HasSubstr("jobs on GPUs end with this daemon")));
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
