// A daemon of this user's own, which the library starts where none listens.

#include "client/c/daemon/autostart.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/daemon/connect.h"
#include "client/c/shardd.h"
#include "common/cuda/no_kernels.h"
#include "common/process/daemon_address.h"
#include "tests/client/client_fixture.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::testing_client {
namespace {

std::vector<std::string> OpenFiles(pid_t pid) {
  std::vector<std::string> files;
  const std::string folder = absl::StrCat("/proc/", pid, "/fd");
  DIR* dir = opendir(folder.c_str());
  while (const dirent* entry = dir == nullptr ? nullptr : readdir(dir)) {
    char target[4096];
    const ssize_t size = readlink(absl::StrCat(folder, "/", entry->d_name).c_str(), target, sizeof(target));
    if (size > 0) {
      files.emplace_back(target, static_cast<size_t>(size));
    }
  }
  if (dir != nullptr) {
    closedir(dir);
  }
  return files;
}

class Autostart : public ::testing::Test {
 protected:
  void SetUp() override {
    if (ConnectUnix(kSystemSocket).ok()) {
      GTEST_SKIP() << "a daemon listens on " << kSystemSocket;
    }
    ASSERT_EQ(pipe2(input_, O_CLOEXEC), 0);
    setenv("XDG_RUNTIME_DIR", runtime_.path().c_str(), 1);
    setenv("SHARDD_DAEMON", built::kDaemon.c_str(), 1);
    unsetenv("SHARDD_ADDRESS");
  }
  void TearDown() override {
    EndTrainers();
    if (const auto folder = UserFolder(); folder.ok()) {
      EXPECT_TRUE(Eventually([&] { return !ConnectUnix(*folder + "/" + socket_).ok(); })) << DaemonLog();
    }
    unsetenv("XDG_RUNTIME_DIR");
    unsetenv("SHARDD_DAEMON");
  }
  // A shell's program in its place.
  void DaemonIs(const std::string& text) {
    const std::string script = runtime_.path() + "/daemon";
    runtime_.Write("daemon", "#!/bin/sh\n" + text);
    ASSERT_EQ(chmod(script.c_str(), 0700), 0);
    setenv("SHARDD_DAEMON", script.c_str(), 1);
  }
  std::string Output(int rank) const { return absl::StrCat(runtime_.path(), "/output-", rank); }
  std::string DaemonLog() const { return ReadWholeFile(runtime_.path() + "/shardd/shardd.log"); }
  void StartTrainer(int rank, int world, std::vector<std::string> environment = {}) {
    // The trainer's standard input is our pipe: it stays until we close it.
    const int saved = dup(0);
    dup2(input_[0], 0);
    environment.push_back(absl::StrCat("TEST_RANK=", rank));
    environment.push_back(absl::StrCat("TEST_WORLD=", world));
    trainers_.push_back(SpawnProgram("stay", environment, Output(rank)));
    dup2(saved, 0);
    close(saved);
  }
  void ExpectAttached(int rank) {
    ASSERT_TRUE(Eventually([&] { return ReadWholeFile(Output(rank)).find('\n') != std::string::npos; }))
        << ReadWholeFile(Output(rank)) << DaemonLog();
    ASSERT_EQ(ReadWholeFile(Output(rank)).rfind(Address() + " ", 0), 0u) << ReadWholeFile(Output(rank));
  }
  std::string Address() const { return "unix:" + runtime_.path() + "/shardd/" + socket_; }
  std::vector<std::string> Devices() const {
    const v1::Daemon daemon = GetDaemon(Address());
    return {daemon.devices().begin(), daemon.devices().end()};
  }
  void EndTrainers() {
    for (int& end : input_) {
      if (end >= 0) {
        close(end);
        end = -1;
      }
    }
    for (Child& trainer : trainers_) {
      EXPECT_EQ(trainer.Wait(), 0) << DaemonLog();
    }
    trainers_.clear();
  }

  TempDir runtime_;
  std::string socket_ = "shardd.sock";
  int input_[2] = {-1, -1};
  std::vector<Child> trainers_;
};

TEST_F(Autostart, RanksThatStartTogetherShareADaemonThatInheritsNothing) {
  constexpr int kRanks = 4;
  const std::string leaked = runtime_.path() + "/leaked";
  const int leak = open(leaked.c_str(), O_RDWR | O_CREAT, 0600);  // no CLOEXEC: the trainers inherit it
  ASSERT_GE(leak, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    StartTrainer(rank, kRanks);
  }
  close(leak);
  int created = 0;
  std::set<pid_t> pids;
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(Eventually([&] { return ReadWholeFile(Output(rank)).find('\n') != std::string::npos; }))
        << ReadWholeFile(Output(rank)) << DaemonLog();
    std::istringstream line(ReadWholeFile(Output(rank)));
    std::string address;
    int created_here = -1;
    line >> address >> created_here;
    ASSERT_EQ(address, "unix:" + runtime_.path() + "/shardd/shardd.sock") << ReadWholeFile(Output(rank));
    created += created_here;
    pids.insert(static_cast<pid_t>(GetDaemon(address).pid()));
  }
  EXPECT_EQ(created, 1);
  ASSERT_EQ(pids.size(), 1u);
  const pid_t daemon = *pids.begin();
  EXPECT_EQ(getsid(daemon) == getsid(0), false);
  EXPECT_EQ(getpgid(daemon) == getpgid(0), false);
  for (const std::string& file : OpenFiles(daemon)) {
    EXPECT_NE(file, leaked);
    EXPECT_EQ(file.find("output-"), std::string::npos) << file;
  }
  char input[256] = {};
  EXPECT_GT(readlink(absl::StrCat("/proc/", daemon, "/fd/0").c_str(), input, sizeof(input)), 0);
  EXPECT_STREQ(input, "/dev/null");
  EndTrainers();
  // It ends after its last job.
  EXPECT_TRUE(Eventually([&] { return kill(daemon, 0) != 0; })) << DaemonLog();
}

TEST_F(Autostart, TheDaemonHasOneDeviceForEachLocalRank) {
  for (int rank = 0; rank < 3; ++rank) {
    StartTrainer(rank, 3);
  }
  for (int rank = 0; rank < 3; ++rank) {
    ExpectAttached(rank);
  }
  EXPECT_THAT(Devices(), ::testing::ElementsAre("cpu:0", "cpu:1", "cpu:2"));
  EXPECT_TRUE(GetDaemon(Address()).embedded());
}

TEST_F(Autostart, ProgramsThatUseGpusGetADaemonWithAllGpus) {
  socket_ = "shardd-cuda.sock";  // beside that of one with CPUs
  StartTrainer(0, 1, testing::FakeCudaEnvironment(2, {"FAKE_CUDA_DELAY_SEED=3", "TEST_DEVICE_MEMORY=1"}));
  ExpectAttached(0);
  EXPECT_THAT(Devices(), ::testing::ElementsAre("cuda:0", "cuda:1"));
  EXPECT_FALSE(ConnectUnix(runtime_.path() + "/shardd/shardd.sock").ok());
}

TEST_F(Autostart, WithoutGpusItGetsOneOfCpus) {
  StartTrainer(0, 1, testing::FakeCudaEnvironment(0, {"TEST_DEVICE_MEMORY=1"}));
  ExpectAttached(0);
  EXPECT_THAT(Devices(), ::testing::ElementsAre("cpu:0"));
}

TEST_F(Autostart, LocalWorldSizeSaysHowManyRanksAreLocal) {
  // The other three would be on another node.
  for (int rank = 0; rank < 2; ++rank) {
    StartTrainer(rank, 5, {"LOCAL_WORLD_SIZE=2"});
  }
  for (int rank = 0; rank < 2; ++rank) {
    ExpectAttached(rank);
  }
  EXPECT_THAT(Devices(), ::testing::ElementsAre("cpu:0", "cpu:1"));
  EndTrainers();
  CloseJob(Address(), "programs");  // else it waits for the other three
}

TEST_F(Autostart, TheDaemonIsFoundInPath) {
  unsetenv("SHARDD_DAEMON");
  const std::string folder = runtime_.File("programs");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  ASSERT_EQ(symlink(built::kDaemon.c_str(), (folder + "/shardd").c_str()), 0);
  // The daemon changes to "/" before it runs: a relative folder must not be looked up from there.
  const std::string relative = std::filesystem::relative(folder);
  ASSERT_NE(relative.front(), '/');
  for (const std::string& path : {folder, relative}) {
    // With a folder before it that has no daemon, and one whose `shardd` cannot be run.
    runtime_.Write("text/shardd", "no program");
    StartTrainer(0, 1, {"PATH=/nonexistent:" + runtime_.File("text") + ":" + path});
    ExpectAttached(0);
    const pid_t daemon = static_cast<pid_t>(GetDaemon(Address()).pid());
    const std::string command = ReadWholeFile(absl::StrCat("/proc/", daemon, "/cmdline"));
    const std::filesystem::path program = command.c_str();
    EXPECT_TRUE(program.is_absolute() && program.filename() == "shardd") << program;
    EXPECT_TRUE(std::filesystem::equivalent(program.parent_path(), folder)) << program << " for PATH " << path;
    EndTrainers();
    ASSERT_TRUE(Eventually([&] { return kill(daemon, 0) != 0; })) << DaemonLog();
    ASSERT_EQ(unlink(Output(0).c_str()), 0);
    ASSERT_EQ(pipe2(input_, O_CLOEXEC), 0);
  }
}

TEST_F(Autostart, TheErrorSaysWhereADaemonWasLookedFor) {
  unsetenv("SHARDD_DAEMON");
  const std::string before = getenv("PATH");
  setenv("PATH", runtime_.path().c_str(), 1);
  const auto found = FindDaemonBinary();
  setenv("PATH", before.c_str(), 1);
  EXPECT_TRUE(absl::IsNotFound(found.status())) << found.status();
  for (const std::string& part :
       {runtime_.path() + "/shardd", std::string("SHARDD_DAEMON"), std::string("SHARDD_ADDRESS")}) {
    EXPECT_NE(found.status().message().find(part), absl::string_view::npos) << found.status();
  }
}

TEST_F(Autostart, ADaemonThatIsJustEndingIsReplaced) {
  // Each round attaches while the previous round's daemon is on its way out.
  for (int round = 0; round < 5; ++round) {
    Rank rank;
    ASSERT_C_OK(rank.Attach("", SmallSpec("job", 1), 0));
    EXPECT_EQ(rank.Info().created, 1);
    EXPECT_C_OK(shardd_detach(rank.Release(), 1));
  }
}

TEST_F(Autostart, ADaemonThatDiesIsReportedWithItsLogsEnd) {
  DaemonIs("echo the disk is on fire\nexit 3\n");
  AutostartOptions options;
  const auto started = FindOrStartDaemon(options);
  EXPECT_TRUE(absl::IsUnavailable(started.status())) << started.status();
  EXPECT_NE(started.status().message().find("the disk is on fire"), absl::string_view::npos) << started.status();
}

TEST_F(Autostart, OnlyADaemonThatDoesNothingIsGivenUp) {
  AutostartOptions options;
  options.stall_timeout = absl::Seconds(1.5);
  DaemonIs("echo begins\nexec sleep 100\n");
  const absl::Time begin = absl::Now();
  const auto stalled = FindOrStartDaemon(options);
  EXPECT_TRUE(absl::IsUnavailable(stalled.status())) << stalled.status();
  EXPECT_GE(absl::Now() - begin, options.stall_timeout);
  for (const char* part : {"nothing done and nothing logged for 1.5", "begins"}) {
    EXPECT_NE(stalled.status().message().find(part), absl::string_view::npos) << stalled.status();
  }
  for (const char* slow : {"for i in 1 2 3 4 5 6; do echo GPU $i; sleep 0.5; done\n",  // it says so
                           "i=0; while [ $i -lt 2500000 ]; do i=$((i+1)); done\n"}) {  // it computes
    DaemonIs(absl::StrCat(slow, "exec ", built::kDaemon, " \"$@\"\n"));
    const auto started = FindOrStartDaemon(options);
    EXPECT_TRUE(started.ok()) << started.status();
    Rank rank;
    ASSERT_C_OK(rank.Attach("", SmallSpec("job", 1), 0));
    EXPECT_C_OK(shardd_detach(rank.Release(), 1));
    ASSERT_TRUE(Eventually([&] { return !ConnectUnix(runtime_.path() + "/shardd/" + socket_).ok(); }));
  }
}

TEST_F(Autostart, WithoutGpuKernelsADaemonWithCpusIsStartedInstead) {
  DaemonIs(absl::StrCat("case \"$*\" in *cuda*) echo load kernels: ", kNoCudaKernels, "; exit 1;; esac\nexec ",
                        built::kDaemon, " \"$@\"\n"));
  for (int rank = 0; rank < 2; ++rank) StartTrainer(rank, 2, testing::FakeCudaEnvironment(2, {"TEST_DEVICE_MEMORY=1"}));
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(Eventually([&] { return ReadWholeFile(Output(rank)).find(Address()) != std::string::npos; }))
        << ReadWholeFile(Output(rank)) << DaemonLog();
    EXPECT_NE(ReadWholeFile(Output(rank)).find("one with CPUs is started in its place"), std::string::npos);
  }
  EXPECT_THAT(Devices(), ::testing::ElementsAre("cpu:0", "cpu:1"));
}

TEST_F(Autostart, NoBinaryIsAnErrorThatSaysWhatToSet) {
  Rank rank;
  setenv("SHARDD_DAEMON", "/nonexistent/shardd", 1);
  EXPECT_C_ERROR(rank.Attach("", SmallSpec("job", 1), 0), kNotFound, "SHARDD_DAEMON");
}

TEST_F(Autostart, AFolderOthersCanEnterOrALinkIsRefused) {
  const std::string folder = runtime_.path() + "/shardd";
  ASSERT_EQ(mkdir(folder.c_str(), 0777), 0);
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(UserFolder().status())) << UserFolder().status();
  ASSERT_EQ(chmod(folder.c_str(), 0700), 0);
  EXPECT_TRUE(UserFolder().ok()) << UserFolder().status();
  ASSERT_EQ(rmdir(folder.c_str()), 0);
  ASSERT_EQ(symlink("/tmp", folder.c_str()), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(UserFolder().status())) << UserFolder().status();
}

}  // namespace
}  // namespace shardd::testing_client
