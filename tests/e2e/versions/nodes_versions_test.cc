// A job over two nodes whose daemons are of two builds, as in the middle of an upgrade.

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/e2e/versions/builds.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using ::testing::HasSubstr;
using testing::PollUntil;

class NodesVersions : public Nodes {
 protected:
  void Replace(int node, const Build& build) {
    const ProgramsOf programs(build);
    ReplaceDaemon(node);
  }
  // Of the link to node 1, as node 0 sees it.
  v1::Node Other() { return node(0).Job().nodes_size() == 2 ? node(0).Job().nodes(1) : v1::Node(); }
};

TEST_F(NodesVersions, JobsTrainWhileTheirNodesAreUpgradedInTurn) {
  WithCustodians();
  Start(2, 1);
  const Args args = {{"steps", "600"},        {"recover", "1"},        {"optimizer", "adamw"},    {"of_any_rank", "1"},
                     {"silence_ms", "60000"}, {"timeout_ms", "60000"}, {"strategy", "FULL_SHARD"}};
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(AllTrained(5));
  int64_t step = 0;
  for (const auto& [which, build] :
       {std::pair{1, OtherBuild()}, std::pair{0, OtherBuild()}, std::pair{1, ThisBuild()}, std::pair{0, ThisBuild()}}) {
    Replace(which, build);
    if (HasFatalFailure()) return;
    step = LastStep() + 20;
    ASSERT_TRUE(AllTrained(step)) << "node " << which << " is of " << build.folder;
    const int spoken = Other().protocol_version();
    if (OtherIsNext()) {
      EXPECT_EQ(spoken, which == 0 && build.folder == OtherBuild().folder ? kProtocolVersions.newest + 1
                                                                          : kProtocolVersions.newest);
    }
  }
  EXPECT_LT(step, 590) << "the ranks were too fast";
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectNothingChanged(args);
}

TEST_F(NodesVersions, NodesWithoutACommonVersionSayWhoIsBehind) {
  Start(2, 1);
  Replace(1, LaterBuild());
  node(1).RanksFind(LaterBuild().RankEnvironment());
  const Args args = {{"steps", "5"}, {"timeout_ms", "60000"}};
  const Child first = StartRank(0, 0, args), second = StartRank(1, 0, args);
  const auto state = [this] {  // node 1 calls node 0
    const v1::Job job = node(1).Job();
    return job.nodes_size() == 2 ? job.nodes(0).state() : "";
  };
  EXPECT_TRUE(PollUntil([&] { return absl::StrContains(state(), "upgrade "); }));
  EXPECT_THAT(state(),
              HasSubstr(absl::StrCat("the daemon that refuses and node 1's daemon have no common protocol version "
                                     "(got 15 to 16, want ",
                                     kProtocolVersions.Text(), "); upgrade the daemon that refuses")));
}

}  // namespace
}  // namespace shardd::e2e
