// A host without memory for the old values of a writeback when it begins: that call is refused on all ranks, and
// nothing else is. In a process with mounts of its own, where /proc/meminfo is the test's.

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/faults/own_mounts.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::faults {
namespace {

struct Case {
  const char* name;
  const char* devices;
  int gpus;
  e2e::Args args;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class FullHost : public e2e::Cluster, public ::testing::WithParamInterface<Case> {
 protected:
  const MemoryOfTheMachine memory_{File("meminfo")};
};

TEST_P(FullHost, RefusesOnlyTheWritebackUntilThereIsMemoryAgain) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  const Case& c = GetParam();
  memory_.Say(int64_t{16} << 20);
  const std::vector<std::string> gpus = c.gpus == 0 ? std::vector<std::string>() : testing::FakeCudaEnvironment(c.gpus);
  RanksFind(gpus);
  StartDaemon({}, c.devices, gpus);
  const e2e::Args args =
      e2e::Args{
          {"steps", "6"}, {"writeback_at_end", "1"}, {"writeback_again", "1"}, {"pause", "backward_done@0,refused@6"}}
          .With(c.args);
  std::vector<testing::Child> ranks;
  for (int rank : {0, 1}) ranks.push_back(StartRank(rank, args));
  for (int rank : {0, 1}) AwaitPause(args, "backward_done", rank);
  memory_.Say(1);
  for (int rank : {0, 1}) LetGo(args, "backward_done", rank);
  for (int rank : {0, 1}) AwaitPause(args, "refused", rank);
  EXPECT_EQ(Job().committed_step(), 6);
  EXPECT_EQ(Job().version(), 7u);
  memory_.Say(int64_t{16} << 20);
  for (int rank : {0, 1}) LetGo(args, "refused", rank);
  std::vector<e2e::TrainerReport> reports;
  for (int rank : {0, 1}) {
    EXPECT_EQ(ranks[static_cast<size_t>(rank)].Wait(), 0);
    reports.push_back(Report(args, rank));
    const std::string refused = reports.back().Note("refused ");
    for (const char* part : {"enter_full_params job \"job\": ", "too little is left", "for the undo of the writeback",
                             "without writeback it is served"}) {
      EXPECT_TRUE(absl::StrContains(refused, part)) << part << ": " << refused;
    }
  }
  const std::vector<e2e::TrainerReport> plain = RunRanks(e2e::Args{{"steps", "6"}, {"name", "plain"}}.With(c.args));
  e2e::ExpectAllOk(reports);
  for (int i = 0; i < e2e::kNumel[e2e::kB1]; ++i) {
    EXPECT_EQ(reports[0].values[e2e::kB1][i], plain[0].values[e2e::kB1][i] + 1) << i;
  }
  EXPECT_EQ(reports[0].values[e2e::kW1], plain[0].values[e2e::kW1]);
  e2e::ExpectSame({reports[1]}, {reports[0]});
  EXPECT_FALSE(HasEvent("job", "abort", ""));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, FullHost,
    ::testing::Values(Case{"OfCpus", "cpu:2", 0, {}}, Case{"OfGpus", "cuda:all", 2, {{"device_memory", "1"}}},
                      Case{"OfOffloadedState", "cuda:all", 2, {{"device_memory", "1"}, {"offload", "HOST"}}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd::faults
