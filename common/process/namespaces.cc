#include "common/process/namespaces.h"

#include <poll.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

// Empty: the kernel does not show it.
std::optional<bool> SharesNamespace(pid_t pid, const char* kind) {
  struct stat own = {};
  struct stat other = {};
  if (stat(absl::StrCat("/proc/self/ns/", kind).c_str(), &own) != 0 ||
      stat(absl::StrCat("/proc/", pid, "/ns/", kind).c_str(), &other) != 0) {
    return std::nullopt;
  }
  return own.st_dev == other.st_dev && own.st_ino == other.st_ino;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A process has a number in each PID namespace from /proc's to its own.
bool HasOnePid(pid_t pid) {
  std::istringstream lines(ReadFile(absl::StrCat("/proc/", pid, "/status")));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    if (words >> word && word == "NSpid:") {
      int count = 0;
      while (words >> word) {
        ++count;
      }
      return count == 1;
    }
  }
  return false;
}

std::string MapOfUids(pid_t pid) { return ReadFile(absl::StrCat("/proc/", pid, "/uid_map")); }

bool HasOwnMapOfUids(pid_t pid) {
  const std::string map = MapOfUids(pid);
  return !map.empty() && map == ReadFile("/proc/self/uid_map");
}

}  // namespace

bool SharesNamespaces(pid_t pid, int pidfd) {
  if (pid <= 0) {
    return false;
  }
  const std::optional<bool> pids = SharesNamespace(pid, "pid");
  const std::optional<bool> users = SharesNamespace(pid, "user");
  const bool shares =
      (pids.has_value() ? *pids : HasOnePid(pid)) && (users.has_value() ? *users : HasOwnMapOfUids(pid));
  // Behind the reading: what lives still had the number all the time.
  pollfd ended{pidfd, POLLIN, 0};
  return shares && (pidfd < 0 || poll(&ended, 1, 0) == 0);
}

bool IsInOtherUserNamespace(pid_t pid) {
  if (pid <= 0) {
    return false;
  }
  const std::optional<bool> shares = SharesNamespace(pid, "user");
  return shares.has_value() ? !*shares : !MapOfUids(pid).empty() && !HasOwnMapOfUids(pid);
}

}  // namespace shardd
