#ifndef SHARDD_COMMON_PROCESS_PROCESS_STAT_H_
#define SHARDD_COMMON_PROCESS_PROCESS_STAT_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace shardd {

// Facts of /proc/PID/stat. The start time tells a process from a later one with the same id.
struct ProcessStat {
  pid_t parent = 0;
  uint64_t start_ticks = 0;  // since the machine was started, in clock ticks; the same in all pid namespaces
  uid_t uid = 0;             // effective
};

// The current time on the scale of start_ticks.
uint64_t TicksSinceBoot();

// Empty: the process has ended, or is not visible.
std::optional<ProcessStat> ReadProcessStat(pid_t pid);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_PROCESS_STAT_H_
