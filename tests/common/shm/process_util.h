#ifndef SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_
#define SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_

// Verbs for tests with real processes: fork a child that runs a function, check inside it, wait for it with a limit.

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd::testing {

// Longer than anything here takes on a busy machine with sanitizers; only a hang gets there.
inline constexpr absl::Duration kLimit = absl::Seconds(60);

// In a child: ends it with code 1 and says where. gtest's own macros only count in the process that runs the test.
#define CHILD_CHECK(condition)                                                                      \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "%s:%d: child: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
      _exit(1);                                                                                     \
    }                                                                                               \
  } while (false)

// A forked process that runs `body` and leaves with its result. Killed and reaped with this object at the latest.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(fork()) {
    if (pid_ == 0) {
      _exit(body());
    }
  }
  // A forked process that becomes `argv`.
  static Child Exec(const std::function<void()>& exec) {
    return Child([&exec] {
      exec();
      return 127;
    });
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  pid_t pid() const { return pid_; }
  void Kill(int signal_number = SIGKILL) const { kill(pid_, signal_number); }
  // The exit code; 1000 + signal for a death by signal; -1 when it is still there after `limit`.
  int Wait(absl::Duration limit = kLimit) {
    for (const absl::Time end = absl::Now() + limit; absl::Now() < end; absl::SleepFor(absl::Milliseconds(1))) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
      }
    }
    return -1;
  }

 private:
  pid_t pid_;
};

inline bool PollUntil(const std::function<bool()>& condition, absl::Duration limit = kLimit) {
  for (const absl::Time end = absl::Now() + limit; absl::Now() < end; absl::SleepFor(absl::Milliseconds(1))) {
    if (condition()) {
      return true;
    }
  }
  return condition();
}

inline bool Readable(int fd, absl::Duration limit = kLimit) {
  pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) == 1;
}

// Open descriptors of this process, less the one that counts them.
inline int CountFds() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) {
    ++count;
  }
  closedir(folder);
  return count - 3;
}

inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The value of `field` ("Rss", "VmFlags") of the mapping that starts at `address`; "" when there is none.
inline std::string SmapsField(const void* address, const std::string& field) {
  std::ifstream smaps("/proc/self/smaps");
  char begin[32];
  std::snprintf(begin, sizeof(begin), "%08lx-", reinterpret_cast<unsigned long>(address));
  std::string line;
  bool ours = false;
  while (std::getline(smaps, line)) {
    const bool header = line.find('-') != std::string::npos && line.find('-') < line.find(' ');
    if (header) {
      ours = absl::StartsWith(line, begin);
    } else if (ours && absl::StartsWith(line, field + ":")) {
      return line.substr(field.size() + 1);
    }
  }
  return "";
}
inline int64_t SmapsBytes(const void* address, const std::string& field) {
  return std::atoll(SmapsField(address, field).c_str()) * 1024;
}

// A folder under /dev/shm (tmpfs), removed with everything in it.
class TempDir {
 public:
  TempDir() {
    char pattern[] = "/dev/shm/shardd-test-XXXXXX";
    path_ = mkdtemp(pattern) != nullptr ? pattern : "";
  }
  ~TempDir() { (void)!system(absl::StrCat("rm -rf '", path_, "'").c_str()); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }
  const std::string& path() const { return path_; }
  void Write(absl::string_view name, absl::string_view text) const {
    const std::string file = File(name);
    (void)!system(absl::StrCat("mkdir -p \"$(dirname '", file, "')\"").c_str());
    std::ofstream(file) << std::string(text);
  }

 private:
  std::string path_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_
