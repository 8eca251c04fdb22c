#ifndef SHARDD_TESTS_E2E_HANDOVER_CLUSTER_H_
#define SHARDD_TESTS_E2E_HANDOVER_CLUSTER_H_

// A cluster whose daemon gives its place to another one.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "common/status/grpc_status.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {

// A long run: SHARDD_HANDOVERS=100.
inline int Handovers() { return testing::LongRun("SHARDD_HANDOVERS", 6); }

class HandoverCluster : public KeptCluster {
 protected:
  // Successors are nobody's children.
  ~HandoverCluster() override {
    int64_t pid = DaemonStatus().pid();
    if (pid == 0) pid = DaemonStatus().pid();  // the first call may find that the connection was the former daemon's
    if (pid > 0 && pid != daemon_pid()) {
      kill(static_cast<pid_t>(pid), SIGTERM);
      EXPECT_TRUE(testing::PollUntil([pid] { return kill(static_cast<pid_t>(pid), 0) != 0; }));
    }
  }
  // A program that can be replaced, in File("shardd"): what lies there at a handover takes the daemon's place.
  void PutThere(const std::string& program) {
    const std::string next = File("shardd.next");
    std::filesystem::copy_file(program, next, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::rename(next, File("shardd"));
  }
  void StartReplaceable() { StartDaemon({"--custodian=unix:" + Custody()}, devices_, environment_, File("shardd")); }
  // The code of `shardctl handover`; what it prints is in Said().
  int HandOver(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> command = {testing::ProgramPath("shardctl"), "handover", "--address=unix:" + socket()};
    command.insert(command.end(), flags.begin(), flags.end());
    unlink(File("handover.log").c_str());
    return testing::Spawn(command, {.log = File("handover.log")}).Wait();
  }
  // Prints the longest step of any rank for each handover (the median and the longest of them), which began at these
  // times (NowMs).
  static void PrintPauses(const std::vector<int64_t>& begins_ms, const std::vector<TrainerReport>& reports) {
    std::vector<double> pauses;
    for (size_t i = 0; i < begins_ms.size(); ++i) {
      const auto begin = static_cast<double>(begins_ms[i]);
      const double end = i + 1 < begins_ms.size() ? static_cast<double>(begins_ms[i + 1]) : HUGE_VAL;
      double longest = 0;
      for (const TrainerReport& report : reports) {
        for (size_t step = 1; step < report.stepped_ms.size(); ++step) {
          const double at = report.stepped_ms[step];
          if (at >= begin && at < end) longest = std::max(longest, at - report.stepped_ms[step - 1]);
        }
      }
      pauses.push_back(longest);
    }
    ASSERT_FALSE(pauses.empty());
    std::sort(pauses.begin(), pauses.end());
    std::printf("%zu handovers: a step took %.0f ms (median), and %.0f ms at most\n", pauses.size(),
                pauses[pauses.size() / 2], pauses.back());
    EXPECT_LT(pauses[pauses.size() / 2], 2000) << "ms";
  }
  std::string Said() const { return testing::ReadWholeFile(File("handover.log")); }
  // Asks the daemon itself, as the next one does.
  absl::Status Ask() {
    grpc::ClientContext context;
    v1::HandOverResponse response;
    return FromGrpcStatus(jobs().HandOver(&context, v1::HandOverRequest(), &response));
  }
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_HANDOVER_CLUSTER_H_
