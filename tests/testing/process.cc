#include "tests/testing/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "gtest/gtest.h"
#include "tests/testing/files.h"

namespace shardd::testing {
namespace {

std::vector<char*> Pointers(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  return pointers;
}

// From the first report of a sanitizer on; "": none.
std::string SanitizerReport(const std::string& log) {
  size_t first = std::string::npos;
  for (const char* beginning :
       {"WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "ERROR: LeakSanitizer", ": runtime error: "}) {
    first = std::min(first, log.find(beginning));
  }
  constexpr size_t kShown = 8000;
  return first == std::string::npos ? "" : log.substr(log.rfind('\n', first) + 1, kShown);
}

}  // namespace

Child::Child(const std::function<int()>& body) : pid_(fork()) {
  if (pid_ == 0) {
    _exit(body());
  }
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), code_(other.code_), log_(std::exchange(other.log_, {})) {}

Child::~Child() {
  if (pid_ > 0 && !code_.has_value()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (!log_.empty()) {
    const std::string report = SanitizerReport(ReadWholeFile(log_));
    EXPECT_EQ(report, "") << "process " << pid_ << ", " << log_;
  }
}

void Child::Kill(int signal_number) const {
  if (pid_ > 0 && !code_.has_value()) {
    kill(pid_, signal_number);
  }
}

bool Child::Ended() {
  int status = 0;
  if (!code_.has_value() && pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  return code_.has_value();
}

int Child::Wait(absl::Duration limit) {
  PollUntil([this] { return Ended(); }, limit);
  return code_.value_or(-1);
}

Child Spawn(const std::vector<std::string>& argv, const SpawnOptions& options) {
  std::vector<char*> arguments = Pointers(argv);
  arguments.push_back(nullptr);
  std::vector<char*> environment = Pointers(options.environment);  // getenv takes the first
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);
  const char* log = options.log.empty() ? nullptr : options.log.c_str();
  const bool own_group = options.own_group;
  // Other threads may have held any lock at the fork: system calls and nothing else from here on.
  Child child([&] {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (own_group) setpgid(0, 0);
    if (const int fd = log == nullptr ? -1 : open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600); fd >= 0) {
      dup2(fd, STDOUT_FILENO);
      dup2(fd, STDERR_FILENO);
    }
    execve(arguments[0], arguments.data(), environment.data());
    return 127;
  });
  child.log_ = options.log;
  return child;
}

}  // namespace shardd::testing
