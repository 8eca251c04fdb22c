#ifndef SHARDD_TESTS_TESTING_PROCESS_H_
#define SHARDD_TESTS_TESTING_PROCESS_H_

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/testing/poll.h"

namespace shardd::testing {

struct SpawnOptions;

// A process that a test has started. Killed and reaped with this object at the latest. Then what a sanitizer has
// reported into the log of one that was spawned fails the test: a daemon that is killed has no exit code that could.
class Child {
 public:
  // A forked process that runs `body` and leaves with its result.
  explicit Child(const std::function<int()>& body);
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;
  ~Child();
  pid_t pid() const { return pid_; }  // also after its end; -1: moved from
  // Nothing happens when the end is known already.
  void Kill(int signal_number = SIGKILL) const;
  // Does not wait.
  bool Ended();
  // The exit code; 1000 + signal for a death by signal; -1 when it is still there after `limit`.
  int Wait(absl::Duration limit = kLimit);

 private:
  friend Child Spawn(const std::vector<std::string>& argv, const SpawnOptions& options);
  pid_t pid_;
  std::optional<int> code_;  // as Wait gives it
  std::string log_;          // of one that was spawned
};

struct SpawnOptions {
  std::vector<std::string> environment = {};  // "NAME=value", in place of this process's where both have one
  std::string log = {};                       // standard output and error go to its end; empty: where this process's go
  bool own_group = false;                     // so that what it forks can be ended with it: kill(-pid, SIGKILL)
};

// A process that becomes argv[0] with these arguments; its code is 127 where that cannot be run. It ends with the
// thread that has started it at the latest, however that ends.
Child Spawn(const std::vector<std::string>& argv, const SpawnOptions& options = {});

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_PROCESS_H_
