#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/shm/slab.h"

namespace shardd {
namespace {

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return std::nullopt;
  }
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// The number in a file of one number; nothing for "max" and for a missing file.
std::optional<int64_t> ReadNumber(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  uint64_t value = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) {
    return std::nullopt;
  }
  return static_cast<int64_t>(std::min<uint64_t>(value, INT64_MAX));
}

// The number after `key` in lines of "key number" or "key: number kB".
std::optional<int64_t> ReadField(const std::string& path, absl::string_view key) {
  const std::optional<std::string> text = ReadFile(path);
  if (!text.has_value()) {
    return std::nullopt;
  }
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t:"), absl::SkipEmpty());
    int64_t value = 0;
    if (words.size() >= 2 && words[0] == key && absl::SimpleAtoi(words[1], &value)) {
      return value;
    }
  }
  return std::nullopt;
}

struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // field of memory.stat: file pages that the kernel drops before it refuses
};
constexpr CgroupFiles kV2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV2Hybrid = {"/sys/fs/cgroup/unified", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};

// Lowers `limits` to what the tightest of the cgroup and its ancestors leaves. A container may show a path of its host
// that is not mounted inside; then only the ancestors, up to the mount, exist.
void ApplyCgroup(const std::string& root, const CgroupFiles& files, std::string group, MemoryLimits& limits) {
  bool own = true;
  while (true) {
    const std::string folder = absl::StrCat(root, files.mount, group == "/" ? "" : group, "/");
    const std::optional<int64_t> limit = ReadNumber(folder + files.limit);
    const std::optional<int64_t> usage = ReadNumber(folder + files.usage);
    if (limit.has_value() && usage.has_value()) {
      const int64_t reclaimable = ReadField(folder + "memory.stat", files.reclaimable).value_or(0);
      const int64_t used = std::max<int64_t>(*usage - reclaimable, 0);
      const int64_t free_bytes = std::max<int64_t>(*limit - used, 0);
      if (free_bytes < limits.free_bytes) {
        limits.free_bytes = free_bytes;
        limits.limited_by = absl::StrCat("cgroup ", files.limit);
        limits.of_own_cgroup = own;
      }
      own = false;
    }
    const size_t slash = group.rfind('/');
    if (group.size() <= 1 || slash == std::string::npos) {
      return;
    }
    group.resize(slash);
  }
}

}  // namespace

absl::StatusOr<MemoryLimits> GetMemoryLimits(const std::string& root) {
  MemoryLimits limits;
  const std::string meminfo = root + "/proc/meminfo";
  const std::optional<int64_t> available_kib = ReadField(meminfo, "MemAvailable");
  if (!available_kib.has_value()) {
    return absl::InternalError(absl::StrCat("read free memory \"", meminfo, "\": no field MemAvailable"));
  }
  limits.free_bytes = *available_kib * 1024;
  limits.limited_by = "MemAvailable";

  const std::string cgroups = ReadFile(root + "/proc/self/cgroup").value_or("");
  for (absl::string_view line : absl::StrSplit(cgroups, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) {
      continue;
    }
    const std::string group(parts[2]);
    if (parts[0] == "0" && parts[1].empty()) {
      ApplyCgroup(root, kV2, group, limits);
      ApplyCgroup(root, kV2Hybrid, group, limits);
    } else {
      for (absl::string_view controller : absl::StrSplit(parts[1], ',')) {
        if (controller == "memory") {
          ApplyCgroup(root, kV1, group, limits);
        }
      }
    }
  }
  return limits;
}

absl::Status CheckMemory(const MemoryLimits& limits, int64_t want_bytes) {
  if (want_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("reserve memory: size is out of range (got ", want_bytes, " bytes, want 0 or more)"));
  }
  if (want_bytes > limits.free_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("reserve memory: too little is left by ", limits.limited_by, " (got ", limits.free_bytes,
                     " bytes free, want ", want_bytes, " bytes); ",
                     limits.limited_by == "MemAvailable" ? "free memory on this node or use a smaller job"
                                                         : "raise the memory limit of the container or service"));
  }
  return absl::OkStatus();
}

}  // namespace shardd
