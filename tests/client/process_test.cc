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
#include <functional>
#include <map>
#include <regex>
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

template <typename Struct>
Struct Sized() {
  Struct value = {};
  value.struct_size = sizeof(value);
  return value;
}

// What the header declares.
std::set<std::string> DeclaredFunctions() {
  const std::string header = ReadWholeFile(SHARDD_SOURCE_DIR "/client/c/shardd.h");
  const std::regex function("SHARDD_API [^;(]*?(shardd_[a-z_0-9]+)\\(");
  std::set<std::string> names;
  for (std::sregex_iterator it(header.begin(), header.end(), function), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

TEST(Process, EveryCallInAForkedChildIsRefused) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  rank.Unshard(0, SHARDD_FORWARD);
  shardd_job* job = rank.job();
  const auto refused = [](shardd_status* status) {
    const Result result = status;
    return result.code() == kFailedPrecondition && result.message().find("forked child") != std::string::npos;
  };
  const shardd_hyperparameters sgd = Sgd(0.5);
  const float value = 1;
  char* text = nullptr;
  size_t size = 1;
  auto job_info = Sized<shardd_job_info>();
  auto group_info = Sized<shardd_group_info>();
  auto param_info = Sized<shardd_param_info>();
  auto step_options = Sized<shardd_step_options>();
  auto step_result = Sized<shardd_step_result>();
  auto counters = Sized<shardd_counters>();
  const int group = rank.Group("a");
  const int param = rank.Param("a.weight");
  const int unsharded = rank.GroupInfo(0).params[0];
  ASSERT_NE(shardd_parameter_data(job, unsharded), nullptr);
  const std::string json = ToJson(SmallSpec("other", 1));
  const std::string address = daemon.address();
  const std::map<std::string, std::function<bool()>> calls = {
      {"shardd_attach",
       [&] {
         shardd_attach_options options = {};
         options.struct_size = sizeof(options);
         options.spec_json = json.c_str();
         options.address = address.c_str();
         shardd_job* other = nullptr;
         return refused(shardd_attach(&options, &other)) && other == nullptr;
       }},
      {"shardd_reattach", [&] { return refused(shardd_reattach(job)); }},
      {"shardd_detach", [&] { return refused(shardd_detach(job, 1)); }},
      {"shardd_get_job_info", [&] { return refused(shardd_get_job_info(job, &job_info)); }},
      {"shardd_trainer_state", [&] { return shardd_trainer_state(job, &size) == nullptr && size == 0; }},
      {"shardd_get_group_info", [&] { return refused(shardd_get_group_info(job, group, &group_info)); }},
      {"shardd_get_param_info", [&] { return refused(shardd_get_param_info(job, param, &param_info)); }},
      {"shardd_find_param", [&] { return shardd_find_param(job, "a.weight") == -1; }},
      {"shardd_find_group", [&] { return shardd_find_group(job, "a") == -1; }},
      {"shardd_write_parameter", [&] { return refused(shardd_write_parameter(job, param, &value, 0, 1)); }},
      {"shardd_commit_parameters", [&] { return refused(shardd_commit_parameters(job)); }},
      {"shardd_unshard", [&] { return refused(shardd_unshard(job, group, SHARDD_FORWARD)); }},
      {"shardd_wait_unshard", [&] { return refused(shardd_wait_unshard(job, 0)); }},
      {"shardd_parameter_data", [&] { return shardd_parameter_data(job, unsharded) == nullptr; }},
      {"shardd_reshard", [&] { return refused(shardd_reshard(job, 0)); }},
      {"shardd_wait_gradient_slot", [&] { return refused(shardd_wait_gradient_slot(job, group)); }},
      {"shardd_gradient_data", [&] { return shardd_gradient_data(job, param) == nullptr; }},
      {"shardd_submit_gradients", [&] { return refused(shardd_submit_gradients(job, group, nullptr, nullptr)); }},
      {"shardd_backward_done", [&] { return refused(shardd_backward_done(job, 1)); }},
      {"shardd_stored_parameter_data", [&] { return shardd_stored_parameter_data(job, param) == nullptr; }},
      {"shardd_gradient_shard_data", [&] { return shardd_gradient_shard_data(job, param) == nullptr; }},
      {"shardd_wait_gradients", [&] { return refused(shardd_wait_gradients(job)); }},
      {"shardd_set_interrupt", [&] { return refused(shardd_set_interrupt(job, nullptr, nullptr)); }},
      {"shardd_step", [&] { return refused(shardd_step(job, &sgd, 1, 0, nullptr, 0)); }},
      {"shardd_step_with", [&] { return refused(shardd_step_with(job, &step_options)); }},
      {"shardd_wait_step", [&] { return refused(shardd_wait_step(job, &step_result)); }},
      {"shardd_enter_pass", [&] { return refused(shardd_enter_pass(job, 0, nullptr, 0)); }},
      {"shardd_leave_pass", [&] { return refused(shardd_leave_pass(job)); }},
      {"shardd_open_window", [&] { return refused(shardd_open_window(job)); }},
      {"shardd_watch_writes", [&] { return refused(shardd_watch_writes(job, 1)); }},
      {"shardd_optimizer_state_data", [&] { return shardd_optimizer_state_data(job, param, 0) == nullptr; }},
      {"shardd_enter_full_params", [&] { return refused(shardd_enter_full_params(job, 0)); }},
      {"shardd_full_parameter_data", [&] { return shardd_full_parameter_data(job, param) == nullptr; }},
      {"shardd_leave_full_params", [&] { return refused(shardd_leave_full_params(job)); }},
      {"shardd_plan_json", [&] { return refused(shardd_plan_json(json.c_str(), &text)) && text == nullptr; }},
      {"shardd_describe_job", [&] { return refused(shardd_describe_job(job, &text)) && text == nullptr; }},
      {"shardd_get_counters", [&] { return refused(shardd_get_counters(job, &counters)); }},
  };
  // Those touch nothing but what they are given.
  const std::set<std::string> harmless = {"shardd_status_code", "shardd_status_message", "shardd_status_free",
                                          "shardd_version", "shardd_string_free"};
  for (const std::string& name : DeclaredFunctions()) {
    EXPECT_TRUE(calls.count(name) > 0 || harmless.count(name) > 0) << name << " is declared and not tried here";
  }

  int answer[2];
  ASSERT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, call] : calls) {
      if (!call()) {
        (void)!write(answer[1], (name + " ").data(), name.size() + 1);
      }
    }
    (void)!write(answer[1], ".", 1);
    _exit(0);
  }
  close(answer[1]);
  std::string answered;
  char buffer[256];
  for (ssize_t got = 0; (got = read(answer[0], buffer, sizeof(buffer))) > 0;) {
    answered.append(buffer, static_cast<size_t>(got));
  }
  close(answer[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(answered, ".") << "these went through in the child";
  // The parent's session has not noticed, and each of them works there.
  EXPECT_NE(shardd_find_param(job, "a.weight"), -1);
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
