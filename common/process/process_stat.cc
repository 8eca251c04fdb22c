#include "common/process/process_stat.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/shm/unique_fd.h"

namespace shardd {
namespace {

constexpr size_t kParentField = 1;  // index among the fields after the name: state, parent, ...
constexpr size_t kStartField = 19;

}  // namespace

uint64_t TicksSinceBoot() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  const auto ticks_per_second = static_cast<uint64_t>(sysconf(_SC_CLK_TCK));
  return static_cast<uint64_t>(now.tv_sec) * ticks_per_second +
         static_cast<uint64_t>(now.tv_nsec) * ticks_per_second / 1'000'000'000;
}

std::optional<ProcessStat> ReadProcessStat(pid_t pid) {
  const UniqueFd file(open(absl::StrCat("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  char text[1024];
  const ssize_t size = file.valid() && fstat(file.get(), &info) == 0 ? read(file.get(), text, sizeof(text)) : -1;
  if (size <= 0) {
    return std::nullopt;
  }
  const absl::string_view all(text, static_cast<size_t>(size));
  const size_t name_end = all.rfind(')');  // the name may contain anything
  if (name_end == absl::string_view::npos) {
    return std::nullopt;
  }
  const std::vector<absl::string_view> fields = absl::StrSplit(all.substr(name_end + 1), ' ', absl::SkipEmpty());
  ProcessStat result;
  result.uid = info.st_uid;
  if (fields.size() <= kStartField || !absl::SimpleAtoi(fields[kParentField], &result.parent) ||
      !absl::SimpleAtoi(fields[kStartField], &result.start_ticks)) {
    return std::nullopt;
  }
  return result;
}

}  // namespace shardd
