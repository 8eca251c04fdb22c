#ifndef SHARDD_TESTS_BENCH_BENCH_DAEMON_H_
#define SHARDD_TESTS_BENCH_BENCH_DAEMON_H_

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"

namespace shardd::bench {

// A daemon with `devices` CPU devices on a socket of its own; killed with this object. Exits the process with a message
// when it does not come up.
class BenchDaemon {
 public:
  explicit BenchDaemon(int devices);
  std::string address() const { return daemon_.address(); }
  double CpuSeconds() const;  // user and system time of the daemon so far

 private:
  testing::TempDir folder_;
  testing::DaemonProcess daemon_;
};

// `groups` fully sharded modules of `numel` fp32 elements each.
std::string GroupsSpec(const std::string& name, int world, int groups, int64_t numel, const std::string& config);

// Attaches, gives zeros as initial values and commits them. Exits with a message on any error.
std::unique_ptr<Job> AttachOrDie(const std::string& spec, int rank, const std::string& address);
void CheckOrDie(const Status& status);
// A step with lr 0, until it is committed.
void StepAndWait(Job& job);

}  // namespace shardd::bench

#endif  // SHARDD_TESTS_BENCH_BENCH_DAEMON_H_
