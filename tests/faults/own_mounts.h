#ifndef SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_
#define SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_

// Tests that mount files run in a process that has mounts of its own, which end with it: as root, or, where
// root may not mount (containers) or the user is not root, in a user namespace.

#include <cstdint>
#include <string>
#include <utility>

namespace shardd::faults {

// Of main, before any thread: whether this process was started by RunThisTestWithOwnMounts. Takes its word out of the
// arguments. When there are to be no mounts of its own, says so on standard error and ends the process.
void EnterOwnMountsIfTold(int* argc, char** argv);

bool HasOwnMounts();

// The running test once more, in such a process: fails or is skipped as that one was. Use as
//   if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
void RunThisTestWithOwnMounts();

// What the machine says that it has free, to every process of this one's mounts. REQUIRES: HasOwnMounts.
class MemoryOfTheMachine {
 public:
  // In a file at `path`, which it creates and leaves.
  explicit MemoryOfTheMachine(std::string path) : path_(std::move(path)) {}
  void Say(int64_t available_kib) const;

 private:
  const std::string path_;
};

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_OWN_MOUNTS_H_
