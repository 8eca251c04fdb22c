#include "tests/e2e/gpus/gpu_cluster.h"

#include <signal.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {

using testing::Child;
using testing::PollUntil;

void GpuCluster::StartOnGpus(int gpus, const std::vector<std::string>& of_ranks,
                             const std::vector<std::string>& of_daemon) {
  gpus_ = gpus;
  SetRanks(of_ranks);
  StartDaemon({}, "cuda:all", testing::FakeCudaEnvironment(gpus, of_daemon));
}

void GpuCluster::SetRanks(const std::vector<std::string>& of_ranks) {
  std::vector<std::string> environment = {"FAKE_CUDA_DELAY_SEED=11"};
  environment.insert(environment.end(), of_ranks.begin(), of_ranks.end());
  RanksFind(testing::FakeCudaEnvironment(gpus_, environment));
}

Child GpuCluster::StartRankWithHeldSignals(const Args& args, const std::string& hold) {
  SetRanks({"FAKE_CUDA_HOLD_WRITES_FILE=" + hold});
  Child rank = StartRank(1, args.With({{"pause", "before_step@4"}}));
  SetRanks({});
  AwaitPause(args, "before_step", 1);
  std::ofstream(hold).flush();  // from here on no signal of its stream lands
  LetGo(args, "before_step", 1);
  EXPECT_TRUE(PollUntil([&] { return access((hold + ".held").c_str(), F_OK) == 0; }));
  return rank;
}

std::vector<TrainerReport> GpuCluster::ReplaceKilledRank(const Args& args, Child& victim, Child& survivor) {
  EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
  Child replacement = StartRank(1, args);
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  return reports;
}

std::vector<TrainerReport> GpuCluster::RunUntilTheGpuIsLost(const Args& args, const std::string& file) {
  Child first = StartRank(0, args);
  Child second = StartRank(1, args);
  EXPECT_TRUE(PollUntil([&] { return Job().committed_step() > 3; }));
  std::ofstream(file) << "0 214\n" << std::flush;
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  return {Report(args, 0), Report(args, 1)};
}

TrainerReport GpuCluster::Refusal(const Args& args) {
  const Args one = args.With({{"world", "2"}, {"steps", "1"}, {"timeout_ms", "20000"}});
  EXPECT_EQ(StartRank(0, one).Wait(), 0);
  return Report(one, 0);
}

void GpuCluster::ExpectNothingLeaks(const Footprint& before) {
  EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() <= before; })) << DaemonFootprint() << ", want " << before;
}

std::string GpuCluster::Log(const Args& args, int rank) const {
  return testing::ReadWholeFile(absl::StrCat(Folder(args), "/log.", rank));
}

}  // namespace shardd::e2e
