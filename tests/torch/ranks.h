#ifndef SHARDD_TESTS_TORCH_RANKS_H_
#define SHARDD_TESTS_TORCH_RANKS_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {

inline constexpr absl::Duration kWorkerLimit = absl::Seconds(120);

// A daemon and worker processes of one test, in a directory of their own. They end with this and with their handles.
class Ranks {
 public:
  // Starts a daemon with `devices` CPU devices. A failure is a test failure.
  explicit Ranks(int devices);

  std::string address() const { return daemon_.address(); }

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
  shardd::testing::DaemonProcess daemon_;
  int jobs_ = 0;
};

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_RANKS_H_
