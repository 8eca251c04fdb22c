// Ranks that live on when their epoch has ended, and are in the middle of an update of their shards then: what they
// still store reaches nothing that counts. As processes (pass_trainer.h); all bits of the result are those of the
// unsharded model.

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/e2e/cluster.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

struct Case {
  const char* name;
  Args args;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class LateStores : public Cluster, public ::testing::WithParamInterface<Case> {
 protected:
  const Args args_ =
      Args{{"model", "pass"}, {"trainers_write", "1"}, {"trained", "sgd"}, {"blocks", "3"}, {"numel", "20011"},
           {"steps", "6"},    {"keep_every", "1"},     {"recover", "1"},   {"exact", "1"},  {"timeout_ms", "20000"}}
          .With(GetParam().args);
  // Two ranks; rank 0 stands still in the middle of the update of step 4 when rank 1 dies behind its own.
  void DieBesideAnUpdate() {
    StartDaemon({}, "cpu:2");
    survivor_.emplace(StartRank(0, args_.With({{"pause", "updating@4"}})));
    Child victim = StartRank(1, args_.With({{"pause", "updated@4"}}));
    AwaitPause(args_, "updating", 0);
    AwaitPause(args_, "updated", 1);
    victim.Kill();
    EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
    const std::string restore =
        absl::StrCat("go back to the snapshot of step 4, when the process of rank 0 (pid ", survivor_->pid(), ")");
    ASSERT_TRUE(PollUntil([&] { return HasEvent("job", "restore", restore); }));
  }
  bool AnybodyAttaches(absl::Duration limit) {
    return PollUntil([&] { return Job().counters().attaches() > 2; }, limit);
  }
  std::optional<Child> survivor_;
};

TEST_P(LateStores, OfARankThatComesBackAreGone) {
  DieBesideAnUpdate();
  Child replacement = StartRank(1, args_);
  EXPECT_FALSE(AnybodyAttaches(absl::Seconds(1))) << "while rank 0 may store";
  LetGo(args_, "updating", 0);
  EXPECT_EQ(survivor_->Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);
  ExpectAllOk({Report(args_, 0), Report(args_, 1)});
}

TEST_P(LateStores, OfAStoppedRankThatIsReplacedAreNeverMade) {
  DieBesideAnUpdate();
  survivor_->Kill(SIGSTOP);
  Child ranks[] = {StartRank(0, args_.With({{"replace", "1"}, {"pause", "entered@5"}})),
                   StartRank(1, args_.With({{"pause", "entered@5"}}))};
  LetGo(args_, "updating", 0);
  for (int rank : {0, 1}) AwaitPause(args_, "entered", rank);
  survivor_->Kill(SIGCONT);
  EXPECT_EQ(survivor_->Wait(), 1000 + SIGKILL);
  for (int rank : {0, 1}) LetGo(args_, "entered", rank);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk({Report(args_, 0), Report(args_, 1)});
}

INSTANTIATE_TEST_SUITE_P(Cases, LateStores,
                         ::testing::Values(Case{"BesideCopies", {}},
                                           Case{"BesideCopiesOfLowerPrecision", {{"param_dtype", "bf16"}}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd::e2e
