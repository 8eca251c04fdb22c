#ifndef SHARDD_SERVER_METRICS_METRICS_PROCESS_H_
#define SHARDD_SERVER_METRICS_METRICS_PROCESS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "common/process/spawn.h"
#include "server/metrics/http/listen_address.h"

namespace shardd {

// The daemon's shardd-metrics, a process beside it: no HTTP is parsed where jobs' memory is. It ends by itself when the
// daemon has ended, however that was. Thread-compatible.
class MetricsProcess {
 public:
  struct Options {
    std::string socket;  // the daemon's
    std::string listen;  // where it serves; empty: nowhere
    bool insecure = false;
    std::string status_page = {};  // its --status_page; empty: as that is without
    std::string program = {};      // its path; empty: it lies beside this program
    TlsFiles tls = {};             // for an address that others reach, where it is not insecure; no certificate: none
  };
  // Null: it is to serve nowhere. NOT_FOUND: there is no such program. Errors of ParseMetricsAddress and
  // ParsePagePolicy.
  static absl::StatusOr<std::unique_ptr<MetricsProcess>> Create(Options options);

  // Starts it, and again if it has ended, then after kPause; says so in the log. To be called every so often, from when
  // the daemon serves. `now`: MonotonicNow.
  void Review(absl::Time now);
  // Ends it, so that its port is free.
  void Terminate() { TerminateDetached(process_); }

  static constexpr absl::Duration kPause = absl::Seconds(10);

 private:
  explicit MetricsProcess(std::vector<std::string> argv) : argv_(std::move(argv)) {}

  const std::vector<std::string> argv_;
  DetachedProcess process_;
  absl::Time start_at_ = absl::InfinitePast();  // infinite future: it has started
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_METRICS_PROCESS_H_
