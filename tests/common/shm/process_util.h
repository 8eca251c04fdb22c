#ifndef SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_
#define SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_

// Verbs for tests of shared memory with real processes: check inside a child, look at descriptors and mappings.

#include <dirent.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd::testing {

// In a child: ends it with code 1 and says where. gtest's own macros only count in the process that runs the test.
#define CHILD_CHECK(condition)                                                                      \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "%s:%d: child: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
      _exit(1);                                                                                     \
    }                                                                                               \
  } while (false)

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

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_COMMON_SHM_PROCESS_UTIL_H_
