#include "tests/bench/bench_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

extern char** environ;

namespace shardd::bench {
namespace {

pid_t g_daemon = -1;  // must not outlive this process: it holds the same standard output

[[noreturn]] void Die(const std::string& text) {
  if (g_daemon > 0) {
    kill(g_daemon, SIGKILL);
  }
  std::fprintf(stderr, "bench: %s\n", text.c_str());
  std::_Exit(1);
}

bool Accepts(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool ok = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return ok;
}

}  // namespace

BenchDaemon::BenchDaemon(int devices) {
  char pattern[] = "/dev/shm/shardd-bench-XXXXXX";
  if (mkdtemp(pattern) == nullptr) {
    Die("mkdtemp");
  }
  directory_ = pattern;
  const std::string socket_path = directory_ + "/socket";
  address_ = "unix:" + socket_path;
  const std::string flags[] = {SHARDD_DAEMON_PATH, "--listen=" + address_, "--devices=cpu:" + std::to_string(devices),
                               "--state_dir=" + directory_ + "/state", "--log_level=warning"};
  std::vector<char*> argv;
  for (const std::string& flag : flags) {
    argv.push_back(const_cast<char*>(flag.c_str()));
  }
  argv.push_back(nullptr);
  if (posix_spawn(&pid_, SHARDD_DAEMON_PATH, nullptr, nullptr, argv.data(), environ) != 0) {
    Die(std::string("spawn ") + SHARDD_DAEMON_PATH);
  }
  g_daemon = pid_;
  for (int i = 0; i < 1000 && !Accepts(socket_path); ++i) {
    usleep(10'000);
  }
  if (!Accepts(socket_path)) {
    Die("the daemon did not come up");
  }
}

BenchDaemon::~BenchDaemon() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  g_daemon = -1;
  std::error_code error;
  std::filesystem::remove_all(directory_, error);
}

double BenchDaemon::CpuSeconds() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skip;
  for (int i = 0; i < 11; ++i) {
    fields >> skip;
  }
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void CheckOrDie(const Status& status) {
  if (!status.ok()) {
    Die(status.message());
  }
}

std::string GroupsSpec(const std::string& name, int world, int groups, int64_t numel, const std::string& config) {
  std::ostringstream spec;
  spec << R"({"name": ")" << name << R"(", "worldSize": )" << world
       << R"(, "tree": {"modules": [{"className": "Root", "parent": -1})";
  for (int g = 0; g < groups; ++g) {
    spec << R"(, {"name": "g)" << g
         << R"(", "className": "Block", "parent": 0, "mark": "MODULE_MARK_FULLY_SHARD", "parameters": [)"
         << R"({"name": "w", "shape": [)" << numel << R"(], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]})";
  }
  spec << R"(]}, "config": {"trainersNeverWrite": true, "optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"})" << config
       << "}}";
  return spec.str();
}

std::unique_ptr<Job> AttachOrDie(const std::string& spec, int rank, const std::string& address) {
  Job::Options options;
  options.spec_json = spec;
  options.rank = rank;
  options.address = address;
  std::unique_ptr<Job> job;
  CheckOrDie(Job::Attach(options, &job));
  if (job->info().version == 0) {
    CheckOrDie(job->CommitParameters());
  }
  return job;
}

}  // namespace shardd::bench
