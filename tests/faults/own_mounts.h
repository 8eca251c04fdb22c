#ifndef SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_
#define SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_

// Tests that mount file systems run in a process that has mounts of its own, which end with it: as root, or, where
// root may not mount (containers) or the user is not root, in a user namespace.

#include <cstdint>
#include <string>

namespace shardd::faults {

// Of main, before any thread: whether this process was started by RunThisTestWithOwnMounts. Takes its word out of the
// arguments. When there are to be no mounts of its own, says so on standard error and ends the process.
void EnterOwnMountsIfTold(int* argc, char** argv);

bool HasOwnMounts();

// The running test once more, in such a process: fails or is skipped as that one was. Use as
//   if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
void RunThisTestWithOwnMounts();

// A tmpfs at `path`, which it creates and removes. A daemon that still has files there keeps them. REQUIRES:
// HasOwnMounts.
class SmallTmpfs {
 public:
  SmallTmpfs(const std::string& path, int64_t size_bytes);
  ~SmallTmpfs();
  SmallTmpfs(const SmallTmpfs&) = delete;
  SmallTmpfs& operator=(const SmallTmpfs&) = delete;
  bool mounted() const { return mounted_; }

 private:
  const std::string path_;
  bool mounted_ = false;
};
int64_t FreeBytes(const std::string& path);
// Until so much is left.
bool FillTo(const std::string& path, int64_t free_bytes);

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_
