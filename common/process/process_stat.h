#ifndef SHARDD_COMMON_PROCESS_PROCESS_STAT_H_
#define SHARDD_COMMON_PROCESS_PROCESS_STAT_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace shardd {

// Of /proc/PID/stat. With the time of its start a process is told from a later one of the same id.
struct ProcessStat {
  pid_t parent = 0;
  uint64_t start_ticks = 0;  // since the machine was started, in clock ticks; alike in all pid namespaces
  uid_t uid = 0;             // effective
};

// Now, as start_ticks count.
uint64_t TicksSinceBoot();

// Empty: the process has ended, or this one may not see it.
std::optional<ProcessStat> ReadProcessStat(pid_t pid);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_PROCESS_STAT_H_
