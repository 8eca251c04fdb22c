#ifndef SHARDD_TESTS_TESTING_USER_NAMESPACE_H_
#define SHARDD_TESTS_TESTING_USER_NAMESPACE_H_

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <string>

#include "common/shm/unique_fd.h"

namespace shardd::testing {

// Makes this process root of a user namespace of its own, where its uid and gid alone are mapped, as a container's root
// may be. False where this user can have none. REQUIRES: the process has one thread.
inline bool BecomeRootOfUserNamespace() {
  const auto write_file = [](const char* path, const std::string& text) {
    const UniqueFd file(open(path, O_WRONLY | O_CLOEXEC));
    return write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  };
  const std::string uid = "0 " + std::to_string(geteuid()) + " 1";
  const std::string gid = "0 " + std::to_string(getegid()) + " 1";
  prctl(PR_SET_DUMPABLE, 1);  // who has changed its uid may write its own maps again
  return unshare(CLONE_NEWUSER) == 0 && write_file("/proc/self/setgroups", "deny") &&
         write_file("/proc/self/uid_map", uid) && write_file("/proc/self/gid_map", gid);
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_USER_NAMESPACE_H_
