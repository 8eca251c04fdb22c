// Two jobs over the same nodes' GPUs at a time: each trains as if it were alone, and whatever dies, stops or ends of
// one of them, the other goes on. The fakes make orders of NCCL's operations that differ between nodes deadly: the
// streams of a GPU share one queue, and it has room for one kernel that waits.

#include <signal.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

struct TwoJobsCase {
  const char* name;
  const char* strategy;
  // A job's own gathers and sums must be able to wait side by side (server/collective/nodes/nccl/README.md).
  std::vector<std::string> gpus_find;
};

class NodesTwoJobs : public Nodes, public ::testing::WithParamInterface<TwoJobsCase> {
 protected:
  void SetUp() override {
    SHARDD_NEEDS_FAKE_GPUS("what has room beside what");
    OnGpus(1);
    DaemonsFind(GetParam().gpus_find);
  }
  // One rank a node. Of two jobs with other values.
  static Args Of(const char* job) {
    return Args({{"strategy", GetParam().strategy}, {"name", job}, {"lr", *job == 'a' ? "0.01" : "0.003"}});
  }
  std::string Enough(const Args& args) { return node(0).File("enough." + args.Text("name")); }
  // Trains until SayEnough(Enough(args)), whatever happens to its daemons.
  Args Outliving(const char* job) {
    const Args args = kOutlivesDaemons.With(Of(job));
    return e2e::UntilEnough(args, Enough(args));
  }
  int64_t StepOf(const Args& args) {
    return std::max(node(0).Job(args.Text("name")).committed_step(), node(1).Job(args.Text("name")).committed_step());
  }
  bool Trains(const Args& args, int64_t steps) {
    const int64_t until = StepOf(args) + steps;
    return PollUntil([&] { return StepOf(args) >= until; });
  }
  bool TakesTurns(const Args& args, const Args& with) {
    const std::string want = absl::StrCat("takes turns with job \"", with.Text("name"), "\"");
    return PollUntil([&] { return absl::StrContains(node(0).Job(args.Text("name")).collective(), want); });
  }
  void ExpectEnd(const Args& args, std::vector<Child>& ranks) {
    e2e::SayEnough(Enough(args));
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(2 * testing::kLimit), 0) << args.Text("name");
  }
  // Both have ended.
  void ExpectAsUndisturbed(const Args& args) {
    const std::vector<TrainerReport> reports = Reports(args);
    ExpectAllOk(reports);
    ExpectSame(reports, RunAll(AsManySteps(args).With({{"name", args.Text("name") + "-undisturbed"}})));
  }
};

TEST_P(NodesTwoJobs, EachEqualsTheUnshardedRun) {
  Start(2, 1);
  const std::array jobs = {Of("a").With({{"pause", "end@50"}}), Of("b").With({{"pause", "end@50"}})};
  std::vector<Child> ranks;
  for (const auto& [job, on] : {std::pair{0, 0}, {1, 1}, {1, 0}, {0, 1}}) ranks.push_back(StartRank(on, 0, jobs[job]));
  for (const Args& args : jobs) {
    for (const int on : {0, 1}) node(on).AwaitPause(args, "end", 0);
  }
  EXPECT_TRUE(TakesTurns(jobs[0], jobs[1]));
  EXPECT_TRUE(TakesTurns(jobs[1], jobs[0]));
  for (const Args& args : jobs) {
    for (const int on : {0, 1}) node(on).LetGo(args, "end", 0);
  }
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  for (const Args& args : jobs) ExpectParity(World(args), Reports(args));
}

TEST_P(NodesTwoJobs, ARankThatIsKilledEndsNoOtherJobsStep) {
  Start(2, 1);
  const Args a = Outliving("a");
  const Args b = Outliving("b");
  std::vector<Child> of_b = StartRanks(b);
  std::vector<Child> of_a;
  of_a.push_back(StartRank(0, 0, a));
  Child victim = StartRank(1, 0, a.With({{"kill", "backward_done@5"}}));
  EXPECT_EQ(victim.Wait(), kKilled);
  EXPECT_TRUE(Trains(b, 20)) << "while a rank is missing there";
  of_a.push_back(StartRank(1, 0, a));
  EXPECT_TRUE(Trains(a, 5));
  ExpectEnd(b, of_b);
  EXPECT_TRUE(Trains(a, 5)) << "alone again";
  ExpectEnd(a, of_a);
  ExpectAsUndisturbed(a);
  ExpectAsUndisturbed(b);
}

TEST_P(NodesTwoJobs, ARankThatIsStoppedHoldsOnlyItsOwnJob) {
  Start(2, 1);
  const Args a = Outliving("a");
  const Args b = Outliving("b");
  std::vector<Child> of_a = StartRanks(a);
  ASSERT_TRUE(Trains(a, 3)) << "alone";
  std::vector<Child> of_b = StartRanks(b);
  ASSERT_TRUE(Trains(b, 3));
  ASSERT_TRUE(Trains(a, 3));
  of_a[1].Kill(SIGSTOP);
  EXPECT_TRUE(Trains(b, 20));
  const int64_t stopped = StepOf(a);
  EXPECT_TRUE(Trains(b, 5));
  EXPECT_EQ(StepOf(a), stopped);
  of_a[1].Kill(SIGCONT);
  EXPECT_TRUE(Trains(a, 5));
  ExpectEnd(a, of_a);
  ExpectEnd(b, of_b);
  ExpectAsUndisturbed(a);
  ExpectAsUndisturbed(b);
}

TEST_P(NodesTwoJobs, BothOutliveTheirDaemons) {
  WithCustodians();
  Start(2, 1);
  const Args a = Outliving("a");
  const Args b = Outliving("b");
  std::vector<Child> of_a = StartRanks(a);
  std::vector<Child> of_b = StartRanks(b);
  ASSERT_TRUE(Trains(a, 3) && Trains(b, 3));
  // The one that gives turns, and the other; killed, and to hand over.
  for (const auto& [on, by] : {std::pair{1, SIGKILL}, {0, SIGKILL}, {0, SIGTERM}, {1, SIGTERM}}) {
    ASSERT_NO_FATAL_FAILURE(ReplaceDaemon(on, by));
    EXPECT_TRUE(Trains(a, 5) && Trains(b, 5)) << "node " << on << ", signal " << by;
  }
  ExpectEnd(a, of_a);
  ExpectEnd(b, of_b);
  ExpectAsUndisturbed(a);
  ExpectAsUndisturbed(b);
}

TEST_P(NodesTwoJobs, AThirdAndOneOfOtherNodesAreRefusedByName) {
  Start(2, 1);
  const Args a = Outliving("a");
  std::vector<Child> of_a = StartRanks(a);
  ASSERT_TRUE(Trains(a, 3));
  const std::string reversed = absl::StrCat(addresses()[1], ",", addresses()[0]);
  const Args other = Of("b").With({{"steps", "3"}, {"name", "reversed"}});
  std::vector<Child> of_other;
  for (const int on : {0, 1}) {
    const Args there = Nodes::Of(on, other).With({{"nodes", reversed}, {"node", absl::StrCat(1 - on)}});
    of_other.push_back(node(on).StartRank(0, there));
  }
  for (Child& rank : of_other) rank.Wait();
  for (const TrainerReport& report : Reports(other)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kFailedPrecondition)) << report.message;
    EXPECT_TRUE(absl::StrContains(report.message,
                                  "two jobs on a daemon's GPUs must have the same nodes in the same "
                                  "order"))
        << report.message;
  }
  const Args b = Outliving("b");
  std::vector<Child> of_b = StartRanks(b);
  ASSERT_TRUE(Trains(b, 3));
  const Args third = Of("b").With({{"steps", "3"}, {"name", "third"}});
  for (const TrainerReport& report : RunAll(third)) {
    EXPECT_EQ(report.code, static_cast<int>(Code::kFailedPrecondition)) << report.message;
    EXPECT_TRUE(absl::StrContains(report.message,
                                  "open job \"third\": NCCL adds gradients over nodes for at most two "
                                  "jobs at a time on a daemon's GPUs"))
        << report.message;
  }
  ExpectEnd(a, of_a);
  for (const int on : {0, 1}) EXPECT_TRUE(PollUntil([&] { return node(on).Job("a").name().empty(); }));
  ExpectAllOk(RunAll(third));
  ExpectEnd(b, of_b);
}

INSTANTIATE_TEST_SUITE_P(
    OnGpus, NodesTwoJobs,
    ::testing::Values(TwoJobsCase{"Replicas", "HYBRID_SHARD", {"FAKE_CUDA_ONE_QUEUE=1", "FAKE_NCCL_ROOM=1"}},
                      TwoJobsCase{"Cut", "FULL_SHARD", {"FAKE_NCCL_ROOM=2"}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
