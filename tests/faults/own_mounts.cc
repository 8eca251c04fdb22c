#include "tests/faults/own_mounts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/e2e/cluster.h"

namespace shardd::faults {
namespace {

constexpr char kFlag[] = "--own_mounts";
constexpr int kNoNamespace = 77;

bool g_own_mounts = false;

bool WriteFile(const char* path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return !file.fail();
}

bool MountsArePrivate() { return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0; }

// This user is root there, and nobody else is anybody.
bool EnterUserNamespace() {
  const std::string uid = absl::StrCat("0 ", geteuid(), " 1");
  const std::string gid = absl::StrCat("0 ", getegid(), " 1");
  return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && WriteFile("/proc/self/setgroups", "deny") &&
         WriteFile("/proc/self/uid_map", uid) && WriteFile("/proc/self/gid_map", gid) && MountsArePrivate();
}

}  // namespace

void EnterOwnMountsIfTold(int* argc, char** argv) {
  if (*argc < 2 || std::strcmp(argv[*argc - 1], kFlag) != 0) {
    return;
  }
  --*argc;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  g_own_mounts = (unshare(CLONE_NEWNS) == 0 && MountsArePrivate()) || EnterUserNamespace();
  if (!g_own_mounts) {
    std::perror("mounts of its own");
    std::exit(kNoNamespace);
  }
}

bool HasOwnMounts() { return g_own_mounts; }

void RunThisTestWithOwnMounts() {
  const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
  std::string filter = absl::StrCat("--gtest_filter=", test.test_suite_name(), ".", test.name());
  char self[] = "/proc/self/exe";
  char flag[sizeof(kFlag)];
  std::memcpy(flag, kFlag, sizeof(kFlag));
  char* const argv[] = {self, filter.data(), flag, nullptr};
  testing::Child child([&] {
    execv(self, argv);
    return 127;
  });
  const int code = child.Wait(2 * testing::kLimit);
  if (code == kNoNamespace) {
    GTEST_SKIP() << "this user can have no mounts of its own, also not in a user namespace (uid " << geteuid() << ")";
  }
  EXPECT_EQ(code, 0) << "see the output of the process above";
}

// Always as many bytes, so that nobody reads half of them.
void MemoryOfTheMachine::Say(int64_t available_kib) const {
  char text[64];
  const int size =
      std::snprintf(text, sizeof(text), "MemAvailable: %16lld kB\n", static_cast<long long>(available_kib));
  const bool is_new = access(path_.c_str(), F_OK) != 0;
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(pwrite(fd, text, static_cast<size_t>(size), 0), size);
  close(fd);
  if (is_new) {
    ASSERT_EQ(mount(path_.c_str(), "/proc/meminfo", nullptr, MS_BIND, nullptr), 0);
  }
}

}  // namespace shardd::faults
