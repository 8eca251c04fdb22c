// The library in a process that forks, exits without a word, or finds no daemon.

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/c/autostart.h"
#include "client/c/connect.h"
#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

TEST(Process, EveryCallInAForkedChildIsRefused) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  rank.Unshard(0, SHARDD_FORWARD);
  const pid_t child = fork();
  if (child == 0) {
    shardd_job_info info = {};
    info.struct_size = sizeof(info);
    shardd_status* const answers[] = {
        shardd_unshard(rank.job(), 1, SHARDD_FORWARD),
        shardd_wait_unshard(rank.job(), 0),
        shardd_reshard(rank.job(), 0),
        shardd_backward_done(rank.job(), 1),
        shardd_get_job_info(rank.job(), &info),
        shardd_reattach(rank.job()),
        shardd_detach(rank.job(), 1),
    };
    for (size_t i = 0; i < std::size(answers); ++i) {
      if (shardd_status_code(answers[i]) != kFailedPrecondition ||
          std::string(shardd_status_message(answers[i])).find("forked child") == std::string::npos) {
        _exit(static_cast<int>(i) + 10);
      }
    }
    if (shardd_parameter_data(rank.job(), 0) != nullptr || shardd_gradient_data(rank.job(), 0) != nullptr) {
      _exit(2);
    }
    Rank another;
    _exit(another.Attach(daemon.address(), SmallSpec("other", 1), 0).code() == kFailedPrecondition ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  // The parent's session has not noticed.
  EXPECT_C_OK(shardd_reshard(rank.job(), 0));
  rank.Unshard(1, SHARDD_FORWARD);
}

TEST(Process, AForkedChildThatExitsLeavesTheSessionAlone) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      exit(0);  // with exit handlers and static destructors, as a worker process of a data loader ends
    }
    int status = 0;
    ASSERT_TRUE(Eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  rank.Unshard(0, SHARDD_FORWARD);
  EXPECT_EQ(rank.Info().epoch, 1u);
}

class ExitPrograms : public ::testing::TestWithParam<const char*> {};

TEST_P(ExitPrograms, ExitWithoutDetachIsPromptAndClean) {
  Daemon daemon;
  for (int round = 0; round < 10; ++round) {
    const absl::Time start = absl::Now();
    Child process = SpawnProgram(GetParam(), {"TEST_WORLD=1", "TEST_RANK=0", "TEST_ADDRESS=" + daemon.address()});
    EXPECT_EQ(process.Wait(), 0);
    // gRPC's shutdown would take 10 s once in a while.
    EXPECT_LT(absl::Now() - start, absl::Seconds(8));
  }
}
INSTANTIATE_TEST_SUITE_P(All, ExitPrograms, ::testing::Values("exit_attached", "exit_with_static_job"),
                         [](const auto& info) { return std::string(info.param); });

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
    setenv("SHARDD_DAEMON", SHARDD_DAEMON_PATH, 1);
    unsetenv("SHARDD_ADDRESS");
  }
  void TearDown() override {
    EndTrainers();
    if (const auto folder = UserFolder(); folder.ok()) {
      EXPECT_TRUE(Eventually([&] { return !ConnectUnix(*folder + "/shardd.sock").ok(); })) << DaemonLog();
      std::error_code ignored;
      std::filesystem::remove_all(*StateFolder(*folder), ignored);
    }
    unsetenv("XDG_RUNTIME_DIR");
    unsetenv("SHARDD_DAEMON");
  }
  std::string Output(int rank) const { return absl::StrCat(runtime_.path(), "/output-", rank); }
  std::string DaemonLog() const { return ReadWholeFile(runtime_.path() + "/shardd/shardd.log"); }
  void StartTrainer(int rank, int world) {
    // The trainer's standard input is our pipe: it stays until we close it.
    const int saved = dup(0);
    dup2(input_[0], 0);
    trainers_.push_back(
        SpawnProgram("stay", {absl::StrCat("TEST_RANK=", rank), absl::StrCat("TEST_WORLD=", world)}, Output(rank)));
    dup2(saved, 0);
    close(saved);
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
  int input_[2] = {-1, -1};
  std::vector<Child> trainers_;
};

TEST_F(Autostart, RanksThatStartAtTheSameMomentGetOneDaemonWithNothingOfTheirs) {
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
    pids.insert(DaemonPid(address));
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

TEST_F(Autostart, ADaemonThatIsJustEndingIsReplaced) {
  // Each round attaches while the previous round's daemon is on its way out.
  for (int round = 0; round < 5; ++round) {
    Rank rank;
    ASSERT_C_OK(rank.Attach("", SmallSpec("job", 1), 0));
    EXPECT_EQ(rank.Info().created, 1);
    EXPECT_C_OK(shardd_detach(rank.Release(), 1));
  }
}

TEST_F(Autostart, ADaemonThatDiesIsReportedWithTheEndOfItsLog) {
  const std::string script = runtime_.path() + "/broken";
  const int fd = open(script.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
  const std::string text = "#!/bin/sh\necho the disk is on fire\nexit 3\n";
  ASSERT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  close(fd);
  setenv("SHARDD_DAEMON", script.c_str(), 1);
  AutostartOptions options;
  const auto started = FindOrStartDaemon(options);
  EXPECT_TRUE(absl::IsUnavailable(started.status())) << started.status();
  EXPECT_NE(started.status().message().find("the disk is on fire"), absl::string_view::npos) << started.status();
}

TEST_F(Autostart, NoBinaryIsAnErrorThatSaysWhatToSet) {
  Rank rank;
  setenv("SHARDD_DAEMON", "/nonexistent/shardd", 1);
  EXPECT_C_ERROR(rank.Attach("", SmallSpec("job", 1), 0), kNotFound, "SHARDD_DAEMON");
}

TEST_F(Autostart, AFolderThatOthersCanEnterOrALinkIsRefused) {
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
