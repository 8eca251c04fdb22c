#ifndef SHARDD_TESTS_TESTING_RUN_AS_UID_H_
#define SHARDD_TESTS_TESTING_RUN_AS_UID_H_

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace shardd::testing {

// Runs `body` on a thread whose credentials, and no other thread's, are those of `uid` (and a group of the same
// number, and `groups`). A socket that it connects there stays that user's. Needs root.
inline void RunAsUid(uint32_t uid, const std::function<void()>& body, const std::vector<gid_t>& groups = {}) {
  std::thread([&] {
    // The system calls themselves: glibc's wrappers would change every thread of the process.
    ASSERT_EQ(::syscall(SYS_setgroups, groups.size(), groups.data()), 0);
    ASSERT_EQ(::syscall(SYS_setresgid, uid, uid, uid), 0);
    ASSERT_EQ(::syscall(SYS_setresuid, uid, uid, uid), 0);
    body();
  }).join();
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_RUN_AS_UID_H_
