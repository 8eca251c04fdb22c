#ifndef SHARDD_TESTS_E2E_GPUS_CUDA_DEATH_H_
#define SHARDD_TESTS_E2E_GPUS_CUDA_DEATH_H_

// A daemon on GPUs with a custodian, which is killed while ranks train, and its successors.

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/daemon_death.h"
#include "tests/e2e/gpus/purposes.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {

class CudaDeath : public DaemonDeath {
 protected:
  void SetUp() override {
    SHARDD_NEEDS_GPUS(1);
    const char* const mps = std::getenv("SHARDD_GPU_MPS");
    if (mps != nullptr && std::string(mps) == "on") {
      GTEST_SKIP() << "a client of MPS that is killed while its kernel runs takes all clients of the GPU along";
    }
  }
  void StartOnGpus(int gpus, std::vector<std::string> daemon_only = {}) {
    RanksFind(testing::FakeCudaEnvironment(gpus));
    daemon_only.push_back("FAKE_CUDA_DELAY_SEED=7");
    KeptOn("cuda:all", testing::FakeCudaEnvironment(gpus, daemon_only));
    StartCustodian();
  }
  static Args Training(int steps, const Args& more = {}) {
    return more.With(
        {{"steps", absl::StrCat(steps)}, {"recover", "1"}, {"device_memory", "1"}, {"timeout_ms", "60000"}});
  }
  const std::string daemon_folder_ = File("").substr(0, File("").size() - 1);
  // One that dies in the nth of these, perhaps before it listens. The ranks' address is its, too.
  std::unique_ptr<testing::DaemonProcess> StartDying(const std::string& what, int nth) {
    std::vector<std::string> environment = environment_;
    environment.push_back(absl::StrCat("FAKE_CUDA_DIE=", what, ":", nth));
    return std::make_unique<testing::DaemonProcess>(
        daemon_folder_, "cuda:all", std::vector<std::string>{"--custodian=unix:" + Custody()}, environment);
  }
  // A daemon is killed, and replaced, where two ranks pause before a step.
  std::vector<testing::Child> KillBeforeTheStep(const Args& args) {
    StartOnGpus(1);
    StartKept();
    std::vector<testing::Child> ranks = StartRanks(args);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "before_step", rank);
    KillDaemon();
    StartKept();
    return ranks;
  }
  std::map<std::string, v1::Purpose> Purposes() { return PurposesOf(jobs()); }
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_GPUS_CUDA_DEATH_H_
