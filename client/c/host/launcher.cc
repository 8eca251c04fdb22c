#include "client/c/host/launcher.h"

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/process/environment.h"
#include "common/process/process_stat.h"

namespace shardd {
namespace {

constexpr char kRunId[] = "TORCHELASTIC_RUN_ID";
constexpr int kMostParents = 16;  // as the daemon looks for it

bool HasEntry(const std::string& entries, const std::string& entry) {
  return absl::StrContains(std::string(1, '\0') + entries, std::string(1, '\0') + entry + std::string(1, '\0'));
}

bool IsThisProgram(pid_t pid) {
  struct stat its {
  }, own{};
  return stat(absl::StrCat("/proc/", pid, "/exe").c_str(), &its) == 0 && stat("/proc/self/exe", &own) == 0 &&
         its.st_dev == own.st_dev && its.st_ino == own.st_ino;
}

}  // namespace

uint64_t LauncherStartTicks() {
  const std::string run = Environment(kRunId);
  if (run.empty()) {
    return 0;
  }
  pid_t pid = getppid();
  for (int level = 0; level < kMostParents && pid > 0; ++level) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/environ"), std::ios::binary);
    const std::string entries{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const std::optional<ProcessStat> process = ReadProcessStat(pid);
    if (!file.is_open() || !process.has_value()) {
      return 0;
    }
    if (!HasEntry(entries, absl::StrCat(kRunId, "=", run))) {
      return pid > 1 || IsThisProgram(pid) ? process->start_ticks : 0;
    }
    pid = process->parent;
  }
  return 0;
}

}  // namespace shardd
