#ifndef SHARDD_COMMON_PROCESS_KEPT_WRITE_H_
#define SHARDD_COMMON_PROCESS_KEPT_WRITE_H_

namespace shardd {

// Before, within and behind each write of what the daemon that takes this one's place goes by. It does nothing: in the
// programs of tests/deadly another function of this name ends the process (README.md there).
void AtKeptWrite();

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_KEPT_WRITE_H_
