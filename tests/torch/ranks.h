#ifndef SHARDD_TESTS_TORCH_RANKS_H_
#define SHARDD_TESTS_TORCH_RANKS_H_

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/torch/worker_options.h"

namespace shardd_test {

// A daemon and worker processes of one test, in a directory of their own. The destructor ends what still runs.
class Ranks {
 public:
  // Starts a daemon with `devices` CPU devices. A failure is a test failure.
  explicit Ranks(int devices);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  const std::string& address() const { return address_; }

  // Starts one worker; options.out is set where it is empty.
  pid_t Start(WorkerOptions options);
  // Its wait status (waitpid). Kills it and fails the test after kWorkerLimit.
  int Wait(pid_t worker);

  // All ranks of `options` through the daemon: their results, by rank.
  std::vector<nlohmann::json> RunSharded(WorkerOptions options);
  // The unsharded run of the same.
  nlohmann::json RunReference(WorkerOptions options);
  // A result file.
  nlohmann::json Read(const WorkerOptions& options) const;
  std::string OutOf(const std::string& name, int rank) const;

 private:
  pid_t Spawn(const std::vector<std::string>& arguments);

  std::string directory_;
  std::string address_;
  pid_t daemon_ = -1;
  std::vector<pid_t> children_;
  int jobs_ = 0;
};

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_RANKS_H_
