#ifndef SHARDD_TESTS_E2E_GPUS_GPU_CLUSTER_H_
#define SHARDD_TESTS_E2E_GPUS_GPU_CLUSTER_H_

#include <map>
#include <string>
#include <vector>

#include "tests/e2e/cluster.h"
#include "tests/e2e/gpus/purposes.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {

// Verbs of jobs of two ranks whose memory lies on GPUs.
class GpuCluster : public Cluster {
 protected:
  // Daemon and ranks find so many GPUs. On the fake driver every operation of a stream starts late, by a seed;
  // `of_ranks` and `of_daemon` tell it more ("NAME=value").
  void StartOnGpus(int gpus, const std::vector<std::string>& of_ranks = {},
                   const std::vector<std::string>& of_daemon = {"FAKE_CUDA_DELAY_SEED=7"});
  // `of_ranks` of those that are started from now on.
  void SetRanks(const std::vector<std::string>& of_ranks);
  // Rank 1, which has sent its fifth step, and whose GPU's signals land when `hold` is gone.
  testing::Child StartRankWithHeldSignals(const Args& args, const std::string& hold);
  // Rank 1 is killed, or will be; another process comes in its place. The reports of both ranks, which have ended well.
  std::vector<TrainerReport> ReplaceKilledRank(const Args& args, testing::Child& victim, testing::Child& survivor);
  // Two ranks train until their GPU is lost, which its driver learns from this file. Their reports.
  std::vector<TrainerReport> RunUntilTheGpuIsLost(const Args& args, const std::string& file);
  // Of a job of two, whose first rank is to be refused.
  TrainerReport Refusal(const Args& args);
  void ExpectNothingLeaks(const Footprint& before);
  std::string Log(const Args& args, int rank) const;
  std::map<std::string, v1::Purpose> Purposes(const std::string& job = "job") { return PurposesOf(jobs(), job); }

 private:
  int gpus_ = 0;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_GPUS_GPU_CLUSTER_H_
