// Daemons of two builds give their place to each other, there and back, while ranks of both builds train.

#include <gmock/gmock.h>

#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/handover_cluster.h"
#include "tests/e2e/versions/builds.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::PollUntil;

class HandoverVersions : public HandoverCluster {
 protected:
  void PutThereOf(const Build& build) { PutThere(build.bin() + "/shardd"); }
};

TEST_F(HandoverVersions, ThereAndBackLoseNoStep) {
  const Args args = Training(1000 + 400 * Handovers());
  StartCustodian();
  PutThereOf(ThisBuild());
  StartReplaceable();
  std::vector<Child> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    RanksFind((rank == 0 ? ThisBuild() : OtherBuild()).RankEnvironment());
    ranks.push_back(StartRank(rank, args));
  }
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
  std::mt19937 random(29);
  std::vector<int64_t> begins_ms;
  int handovers = 0;
  for (; handovers < Handovers() && !ranks[0].Ended(); ++handovers) {
    absl::SleepFor(absl::Microseconds(random() % 60000));
    const int64_t pid = DaemonStatus().pid();
    begins_ms.push_back(NowMs());
    PutThereOf(handovers % 2 == 0 ? OtherBuild() : ThisBuild());
    ASSERT_EQ(HandOver(), 0) << "handover " << handovers << ": " << Said();
    EXPECT_NE(DaemonStatus().pid(), pid);
    if (OtherIsNext()) {
      // A connection to the one before may just be ending.
      ASSERT_TRUE(PollUntil([this] { return DaemonStatus().pid() != 0; }));
      EXPECT_EQ(DaemonStatus().protocol_version(), kProtocolVersions.newest + (handovers % 2 == 0 ? 1 : 0));
    }
  }
  EXPECT_GE(handovers, Handovers() / 2) << "the ranks were too fast";
  RanksFind(ThisBuild().RankEnvironment());
  ExpectUndisturbed(args, ranks);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
  }
  PrintPauses(begins_ms, Reports(args));
}

// What this build does not know of a record it passes over, and trains on.
TEST_F(HandoverVersions, RecordsOfTheNextReleaseHaveAFieldMore) {
  if (!OtherIsNext()) GTEST_SKIP() << "SHARDD_OTHER_BUILD is set, and may write the same fields";
  const auto added = [this] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", custodian_->pid(), "/fd"))) {
      std::error_code error;
      const std::string target = std::filesystem::read_symlink(entry.path(), error);
      if (absl::StrContains(target, "memfd:") &&
          absl::StrContains(testing::ReadWholeFile(entry.path()), "added by the next release")) {
        names.insert(target.substr(0, target.find(" (deleted)")));
      }
    }
    return names;
  };
  const Args args = Training(6000);
  StartCustodian();
  PutThereOf(ThisBuild());
  StartReplaceable();
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  EXPECT_THAT(added(), IsEmpty());
  PutThereOf(OtherBuild());
  ASSERT_EQ(HandOver(), 0) << Said();
  const int64_t before = Committed();
  ASSERT_TRUE(PollUntil([&] { return Committed() > before + 5; }));
  EXPECT_TRUE(PollUntil([&] { return added().size() == 2; })) << ::testing::PrintToString(added());
  PutThereOf(ThisBuild());
  ASSERT_EQ(HandOver(), 0) << Said();
  ExpectUndisturbed(args, ranks);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(Report(args, rank).Note("lost a step"), "") << "rank " << rank;
}

// It would be left with memory that it cannot read.
TEST_F(HandoverVersions, ToOneThatDoesNotReadAJobIsRefused) {
  if (!OtherIsNext()) GTEST_SKIP() << "SHARDD_OTHER_BUILD is set, and may write the same formats";
  const Args undisturbed = Training(5);
  const Args args = undisturbed.With({{"pause", "end@5"}});
  StartCustodian();
  PutThereOf(OtherBuild());
  StartReplaceable();
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
  EXPECT_EQ(Job().kept_formats().job_record(), kCustodyFormats.newest + 1);
  const int64_t pid = DaemonStatus().pid();
  PutThereOf(ThisBuild());
  EXPECT_EQ(HandOver(), 1);
  EXPECT_THAT(testing::ReadWholeFile(DaemonLog()),
              HasSubstr(absl::StrCat("it does not read the format of the job record (got ", kCustodyFormats.newest + 1,
                                     ", want ", kCustodyFormats.Text(), ")")));
  EXPECT_EQ(DaemonStatus().pid(), pid);
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "end", rank);
  ExpectUndisturbed(undisturbed, ranks);
}

}  // namespace
}  // namespace shardd::e2e
