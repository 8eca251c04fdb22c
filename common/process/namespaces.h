#ifndef SHARDD_COMMON_PROCESS_NAMESPACES_H_
#define SHARDD_COMMON_PROCESS_NAMESPACES_H_

#include <sys/types.h>

namespace shardd {

// Whether process `pid` is in this process's PID and user namespaces. False too if it has ended, cannot be seen (pid 0,
// hidepid), or is another one by now than `pidfd` (-1: not compared). If the kernel does not show the process's
// namespaces (it is another user's), its PIDs and its map of uids decide; a user namespace that maps all uids to
// themselves is not noticed then. Reads /proc; does not block.
bool SharesNamespaces(pid_t pid, int pidfd);

// Whether process `pid` is seen to be in another user namespace than this one, also as the same uid. False too if that
// cannot be told: it has ended, or has no number in this PID namespace (pid 0). Reads /proc; does not block.
bool IsInOtherUserNamespace(pid_t pid);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_NAMESPACES_H_
