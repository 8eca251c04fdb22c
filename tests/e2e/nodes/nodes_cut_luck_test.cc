// Bad luck of jobs that are cut over nodes: a daemon that stands still for a while, as with a paused machine, while
// others need what it holds.

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/nodes/nodes.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// How soon a daemon that says nothing is lost: two of these.
const std::vector<std::string>& SoonLost() {
  static const std::vector<std::string> flags = {"--peer_keepalive_ms=1000"};
  return flags;
}

class NodesCutStopped : public Nodes {
 protected:
  static Args Cut(const Args& args) {
    return Args({{"strategy", "FULL_SHARD"}, {"optimizer", "adamw"}, {"recover", "1"}}).With(args);
  }
  // All its threads stand still: one of them is told, and the others only by that.
  void Stop(int node) {
    const pid_t daemon = this->node(node).daemon_pid();
    ASSERT_EQ(kill(daemon, SIGSTOP), 0);
    ASSERT_TRUE(PollUntil([daemon] {
      siginfo_t stopped = {};
      return waitid(P_PID, static_cast<id_t>(daemon), &stopped, WSTOPPED | WNOHANG) == 0 && stopped.si_pid == daemon;
    }));
  }
  void Continue(int node) { ASSERT_EQ(kill(this->node(node).daemon_pid(), SIGCONT), 0); }
  bool Trained(int node, int64_t step) {
    return PollUntil([&] { return this->node(node).Job().committed_step() >= step; });
  }
  // All are rid of the job, and what is opened next trains.
  void ExpectNextJobTrains(const Args& args) {
    for (int k = 0; k < count(); ++k) {
      EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << k;
      EXPECT_TRUE(node(k).DaemonAlive()) << k;
    }
    const Args next = args.With({{"steps", "5"}});
    ExpectParity(World(next), RunAll(next));
  }
  static std::string AllMessages(const std::vector<TrainerReport>& reports) {
    std::string all;
    for (const TrainerReport& report : reports) absl::StrAppend(&all, report.code, " ", report.message, "\n");
    return all;
  }
};

// At any moment of steps: gathers, sums and decisions are under way, and all are of the nodes.
TEST_F(NodesCutStopped, ShorterThanItsGraceItHarmsNothing) {
  Start(3, 1);
  const Args args = Cut({{"steps", "60"}, {"silence_ms", "20000"}, {"grace_ms", "20000"}, {"filler", "100000"}});
  std::vector<Child> ranks = StartRanks(args.With({{"pause", "before_step@50"}}));  // not before the last stop
  for (int stop = 0; stop < 9; ++stop) {
    const int stopped = stop % count();
    ASSERT_TRUE(Trained(stopped, 3 * stop + 2));
    Stop(stopped);
    absl::SleepFor(absl::Milliseconds(120));
    Continue(stopped);
  }
  for (int k = 0; k < count(); ++k) {
    node(k).AwaitPause(Of(k, args), "before_step", 0);
    node(k).LetGo(Of(k, args), "before_step", 0);
  }
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.Note("aborted"), "");
  const std::vector<TrainerReport> undisturbed = RunAll(args.With({{"name", "undisturbed"}}));
  ExpectSame(reports, undisturbed);
  for (int k = 0; k < count(); ++k) EXPECT_EQ(reports[k].losses, undisturbed[k].losses) << k;
}

// So long that its links are lost, but not for good: the epoch ends, and nothing else.
TEST_F(NodesCutStopped, ANodeStoppedUntilItsLinksAreLostLosesNothing) {
  Start(2, 1, SoonLost());
  const Args args = Cut({{"steps", "50"}, {"silence_ms", "30000"}, {"grace_ms", "30000"}});
  for (int stopped = 0; stopped < 2; ++stopped) {
    const Args own = args.With({{"name", absl::StrCat("stopped", stopped)}});
    std::vector<Child> ranks = StartRanks(own.With({{"pause", "before_step@40"}}));
    for (int k = 0; k < 2; ++k) node(k).AwaitPause(Of(k, own), "before_step", 0);
    Stop(stopped);
    for (int k = 0; k < 2; ++k) node(k).LetGo(Of(k, own), "before_step", 0);
    const std::string other = own.Text("name");
    EXPECT_TRUE(PollUntil([&] { return node(1 - stopped).HasEvent(other, "abort", absl::StrCat("node ", stopped)); }));
    Continue(stopped);
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    ExpectParity(World(own), Reports(own));
  }
}

// Its links live: steps are given up for as long as others have waited too long for its part of a group.
TEST_F(NodesCutStopped, NodesStoppedTooLongAreNamedAndGoOnLater) {
  Start(2, 1);
  const Args args = Cut({{"steps", "40"}, {"silence_ms", "700"}, {"grace_ms", "30000"}});
  for (int stopped = 0; stopped < 2; ++stopped) {
    const int waits = 1 - stopped;
    const Args own = args.With({{"name", absl::StrCat("stopped", stopped)}, {"pause", "unsharded@20"}});
    std::vector<Child> ranks = StartRanks(own);
    for (int k = 0; k < 2; ++k) node(k).AwaitPause(Of(k, own), "unsharded", 0);
    Stop(stopped);
    node(waits).LetGo(Of(waits, own), "unsharded", 0);
    const std::string late = absl::StrCat("Unshard: node ", stopped, " has not sent its part of group \"");
    EXPECT_TRUE(PollUntil([&] { return node(waits).HasEvent(own.Text("name"), "abort", late); }));
    Continue(stopped);
    node(stopped).LetGo(Of(stopped, own), "unsharded", 0);
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    ExpectParity(World(own), Reports(own));
  }
}

class LongerThanItsGrace : public NodesCutStopped, public ::testing::WithParamInterface<int> {};

TEST_P(LongerThanItsGrace, TheJobEndsOnAllNodesNamingTheStoppedOne) {
  const int stopped = GetParam();
  Start(3, 1, SoonLost());
  const Args args = Cut({{"steps", "100000"}, {"silence_ms", "20000"}, {"grace_ms", "1000"}, {"timeout_ms", "20000"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int k = 0; k < count(); ++k) ASSERT_TRUE(Trained(k, 10));
  Stop(stopped);
  for (int k = 0; k < count(); ++k) {
    EXPECT_EQ(k == stopped ? 0 : ranks[k].Wait(), 0) << k;
  }
  Continue(stopped);
  EXPECT_EQ(ranks[stopped].Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  const std::string all = AllMessages(reports);
  const std::string name = absl::StrCat("node ", stopped, " (", addresses()[stopped], ")");
  for (int k = 0; k < count(); ++k) {
    EXPECT_NE(reports[k].code, 0) << k;
    if (k != stopped) {
      EXPECT_TRUE(absl::StrContains(reports[k].message, name + " is not reached")) << k << ": " << all;
      EXPECT_TRUE(absl::StrContains(reports[k].message, "no other node sends what its ranks held")) << k << ": " << all;
    }
  }
  EXPECT_NE(reports[stopped].message, "") << all;
  ExpectNextJobTrains(args);
}

// Nobody has told the one that stood still: its old job meets the next of that name.
TEST_P(LongerThanItsGrace, TheOldJobStaysOutOfTheNextOne) {
  const int stopped = GetParam();
  Start(3, 1, SoonLost());
  // It has its links again before its own grace has ended.
  const Args args = Cut({{"steps", "100000"}, {"silence_ms", "20000"}, {"grace_ms", "5000"}, {"timeout_ms", "20000"}});
  std::vector<Child> old = StartRanks(args);
  for (int k = 0; k < count(); ++k) ASSERT_TRUE(Trained(k, 10));
  Stop(stopped);
  for (int k = 0; k < count(); ++k) EXPECT_EQ(k == stopped ? 0 : old[k].Wait(), 0) << k;
  const Args next = args.With({{"steps", "5"}});
  std::vector<Child> ranks;
  for (int k = 0; k < count(); ++k) {
    if (k != stopped) ranks.push_back(StartRank(k, 0, next));
  }
  const auto waits = [&](int k) {  // of the new job; it hears of its end when it has a link to who ends it
    const v1::Job job = node(k).Job();
    return job.epoch() == 1 && job.nodes_size() == count() && job.nodes(3 - stopped - k).state() == "up";
  };
  EXPECT_TRUE(PollUntil([&] { return waits((stopped + 1) % 3) && waits((stopped + 2) % 3); }));
  Continue(stopped);
  EXPECT_EQ(old[stopped].Wait(), 0);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<TrainerReport> reports = Reports(next);
  for (const TrainerReport& report : reports) EXPECT_NE(report.code, 0) << report.message;
  EXPECT_TRUE(absl::StrContains(AllMessages(reports), "or the job was opened anew there")) << AllMessages(reports);
  ExpectNextJobTrains(args);
}

INSTANTIATE_TEST_SUITE_P(Stopped, LongerThanItsGrace, ::testing::Values(0, 1),
                         [](const auto& info) { return absl::StrCat("Node", info.param); });

}  // namespace
}  // namespace shardd::e2e
