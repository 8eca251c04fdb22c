// Node 0's daemon, which coordinates a job over several nodes, is lost with its machine: another at its address takes
// the job's state from a node that is left, and training ends as if nothing had been.

#include <signal.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class Node0Test : public Nodes {
 protected:
  // One of each node.
  std::vector<Child> StartRanks(int first, int last, const Args& args) {
    std::vector<Child> children;
    for (int k = first; k <= last; ++k) children.push_back(StartRank(k, 0, args));
    return children;
  }
  void KillNode0(Child& rank) {
    ASSERT_EQ(kill(node(0).daemon_pid(), SIGKILL), 0);
    rank.Kill(SIGKILL);
    rank.Wait();
  }
  // `parity`: so few steps that sums in another order still give what the unsharded run does.
  void ExpectAsUndisturbed(const Args& args, bool parity = true) {
    std::vector<TrainerReport> reports;
    for (int k = 0; k < count(); ++k) reports.push_back(Report(k, 0, args));
    ExpectAllOk(reports);
    const std::vector<TrainerReport> undisturbed = RunAll(args.With({{"name", "undisturbed"}}));
    if (parity) ExpectParity(World(args), undisturbed);
    ExpectSame(reports, undisturbed);
    for (const TrainerReport& report : reports) EXPECT_EQ(report.values, reports[0].values);
  }
};

// Wherever a step is: some nodes may have heard that it is decided, or all, or none.
TEST_F(Node0Test, ItsDeathAtAnyMomentLosesNoOtherNodesStep) {
  Start(3, 1);
  const Args args = {{"steps", "400"}, {"recover", "1"}, {"optimizer", "adamw"}, {"of_any_rank", "1"}};
  std::vector<Child> survivors = StartRanks(1, 2, args);
  std::vector<Child> lives = StartRanks(0, 0, args);
  for (int64_t life = 1; life <= 4; ++life) {
    ASSERT_TRUE(PollUntil([&] { return node(0).Job().committed_step() >= 10 * life; }));
    KillNode0(lives.back());
    int64_t most = 0;
    for (int k = 1; k < 3; ++k) most = std::max(most, node(k).Job().committed_step());
    StartAgain(0);
    lives.push_back(StartRank(0, 0, args));
    ASSERT_TRUE(PollUntil([&] { return node(0).Job().committed_step() >= most; }));
    EXPECT_TRUE(node(0).HasEvent("job", "state", "came from node"));
  }
  EXPECT_EQ(lives.back().Wait(), 0);
  for (Child& child : survivors) EXPECT_EQ(child.Wait(), 0);
  ExpectAsUndisturbed(args, /*parity=*/false);
}

TEST_F(Node0Test, AnotherNodesDaemonDiesWithIt) {
  Start(3, 1);
  const Args args = {{"steps", "12"}, {"recover", "1"}, {"of_any_rank", "1"}};
  Child survivor = StartRank(2, 0, args.With({{"pause", "before_step@5"}}));
  std::vector<Child> victims = StartRanks(0, 1, args);
  node(2).AwaitPause(Of(2, args), "before_step", 0);
  KillNode0(victims[0]);
  ASSERT_EQ(kill(node(1).daemon_pid(), SIGKILL), 0);
  victims[1].Kill(SIGKILL);
  victims[1].Wait();
  node(2).LetGo(Of(2, args), "before_step", 0);
  for (int k = 0; k < 2; ++k) StartAgain(k);
  std::vector<Child> again = StartRanks(0, 1, args);
  for (Child& child : again) EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  ExpectAsUndisturbed(args);
}

TEST_F(Node0Test, AnotherJobThatComesInItsPlaceIsNamed) {
  Start(2, 1);
  const Args args = {{"steps", "400"}, {"recover", "1"}, {"timeout_ms", "20000"}};
  Child victim = StartRank(0, 0, args);
  Child survivor = StartRank(1, 0, args.With({{"pause", "before_step@5"}}));
  node(1).AwaitPause(Of(1, args), "before_step", 0);
  KillNode0(victim);
  StartAgain(0);
  Child other = StartRank(0, 0, args.With({{"layout", "DIM0"}, {"recover", "0"}}));
  EXPECT_EQ(other.Wait(), 0);
  node(1).LetGo(Of(1, args), "before_step", 0);
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "layout")) << Report(0, 0, args).message;
}

TEST_F(Node0Test, WhereAllDaemonsAreLostTheJobBeginsAnew) {
  Start(2, 1);
  const Args args = {{"steps", "8"}, {"recover", "1"}};
  std::vector<Child> victims = StartRanks(0, 1, args.With({{"pause", "before_step@5"}}));
  for (int k = 0; k < 2; ++k) node(k).AwaitPause(Of(k, args), "before_step", 0);
  for (int k = 0; k < 2; ++k) {
    ASSERT_EQ(kill(node(k).daemon_pid(), SIGKILL), 0);
    victims[static_cast<size_t>(k)].Kill(SIGKILL);
    victims[static_cast<size_t>(k)].Wait();
  }
  for (int k = 0; k < 2; ++k) StartAgain(k);
  std::vector<Child> again = StartRanks(0, 1, args);
  for (Child& child : again) EXPECT_EQ(child.Wait(), 0);
  for (int k = 0; k < 2; ++k) EXPECT_EQ(Report(k, 0, args).Note("attached"), "attached 0");
  ExpectAsUndisturbed(args);
}

}  // namespace
}  // namespace shardd::e2e
