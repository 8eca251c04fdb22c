#ifndef SHARDD_TESTS_BENCH_BENCH_DAEMON_H_
#define SHARDD_TESTS_BENCH_BENCH_DAEMON_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"

namespace shardd::bench {

// A daemon with `devices` CPU devices on a socket of its own; killed with this object. Exits the process with a message
// when it does not come up within ten seconds.
class BenchDaemon {
 public:
  explicit BenchDaemon(int devices);
  ~BenchDaemon();
  const std::string& address() const { return address_; }
  double CpuSeconds() const;  // user and system time of the daemon so far

 private:
  std::string directory_;
  std::string address_;
  pid_t pid_ = -1;
};

// `groups` fully sharded modules of `numel` fp32 elements each.
std::string GroupsSpec(const std::string& name, int world, int groups, int64_t numel, const std::string& config);

// Attaches, gives zeros as initial values and commits them. Exits with a message on any error.
std::unique_ptr<Job> AttachOrDie(const std::string& spec, int rank, const std::string& address);
void CheckOrDie(const Status& status);

}  // namespace shardd::bench

#endif  // SHARDD_TESTS_BENCH_BENCH_DAEMON_H_
