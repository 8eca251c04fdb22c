#ifndef SHARDD_TESTS_TORCH_RANKS_H_
#define SHARDD_TESTS_TORCH_RANKS_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {

inline constexpr absl::Duration kWorkerLimit = absl::Seconds(120);

// Daemons and worker processes of one test, in directories of their own. They end with this and with their handles.
class Ranks {
 public:
  // Starts a daemon for each node, with `devices` CPU devices. A failure is a test failure.
  explicit Ranks(int devices, int nodes = 1);

  // The daemon of `options.rank`, and those of the nodes.
  void Place(WorkerOptions* options) const;
  pid_t daemon_pid(int node) const { return daemons_[static_cast<size_t>(node)]->pid(); }
  // Waits until the daemon of a node has died; another one then listens where it did.
  void ReplaceDeadDaemon(int node);

  // Starts one worker; options.out is set where it is empty.
  shardd::testing::Child Start(WorkerOptions options);

  // All ranks of `options` through the daemon: their results, by rank.
  std::vector<nlohmann::json> RunSharded(WorkerOptions options);
  // The unsharded run of the same.
  nlohmann::json RunReference(WorkerOptions options);
  // A result file.
  nlohmann::json Read(const WorkerOptions& options) const;
  std::string OutOf(const std::string& name, int rank) const;

 private:
  shardd::testing::TempDir folder_;
  void StartDaemon(int node);

  const int devices_;
  std::vector<std::string> nodes_;  // addresses for each other; none: one node
  std::vector<std::unique_ptr<shardd::testing::TempDir>> node_folders_;
  std::vector<std::unique_ptr<shardd::testing::DaemonProcess>> daemons_;
  int jobs_ = 0;
};

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_RANKS_H_
