#include "tests/torch/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

namespace shardd_test {
namespace {

constexpr std::chrono::seconds kDaemonLimit(20);
constexpr std::chrono::seconds kWorkerLimit(120);
constexpr std::chrono::milliseconds kPollInterval(5);

// False when `done` is still false after `limit`.
bool PollUntil(std::chrono::steady_clock::duration limit, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

bool Connects(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  return connected;
}

}  // namespace

Ranks::Ranks(int devices) {
  char name[] = "/dev/shm/shardd_torch_XXXXXX";  // a state directory is on tmpfs
  directory_ = mkdtemp(name);
  const std::string socket_path = directory_ + "/s";
  address_ = "unix:" + socket_path;
  daemon_ = Spawn({SHARDD_DAEMON_PATH, "--devices=cpu:" + std::to_string(devices), "--listen=" + address_,
                   "--state_dir=" + directory_ + "/state"});
  EXPECT_TRUE(PollUntil(kDaemonLimit, [&] { return Connects(socket_path); })) << "daemon does not listen";
}

Ranks::~Ranks() {
  for (const pid_t child : children_) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

pid_t Ranks::Spawn(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  pid_t child = -1;
  const int error = posix_spawn(&child, argv[0], nullptr, nullptr, argv.data(), environ);
  EXPECT_EQ(error, 0) << "spawn " << argv[0] << ": " << std::strerror(error);
  if (error == 0) {
    children_.push_back(child);
  }
  return child;
}

std::string Ranks::OutOf(const std::string& name, int rank) const {
  return directory_ + "/" + name + "." + std::to_string(rank);
}

pid_t Ranks::Start(WorkerOptions options) {
  if (options.out.empty()) {
    options.out = OutOf(options.job, options.rank);
  }
  return Spawn({"/proc/self/exe", "--worker", ToJson(options)});
}

int Ranks::Wait(pid_t worker) {
  int status = 0;
  if (!PollUntil(kWorkerLimit, [&] { return waitpid(worker, &status, WNOHANG) != 0; })) {
    ADD_FAILURE() << "worker " << worker << " still runs after " << kWorkerLimit.count() << " s";
    kill(worker, SIGKILL);
    waitpid(worker, &status, 0);
  }
  children_.erase(std::remove(children_.begin(), children_.end(), worker), children_.end());
  return status;
}

nlohmann::json Ranks::Read(const WorkerOptions& options) const {
  std::ifstream file(options.out.empty() ? OutOf(options.job, options.rank) : options.out);
  nlohmann::json result = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(result.is_object()) << "no result of rank " << options.rank;
  return result.is_object() ? result : nlohmann::json::object();
}

std::vector<nlohmann::json> Ranks::RunSharded(WorkerOptions options) {
  options.address = address_;
  options.job = "job" + std::to_string(jobs_++);
  std::vector<pid_t> workers;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    workers.push_back(Start(options));
  }
  std::vector<nlohmann::json> results;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    EXPECT_EQ(Wait(workers[static_cast<size_t>(options.rank)]), 0) << "rank " << options.rank;
    results.push_back(Read(options));
  }
  return results;
}

nlohmann::json Ranks::RunReference(WorkerOptions options) {
  options.address.clear();
  options.out = directory_ + "/reference";
  EXPECT_EQ(Wait(Start(options)), 0) << "reference";
  return Read(options);
}

}  // namespace shardd_test
