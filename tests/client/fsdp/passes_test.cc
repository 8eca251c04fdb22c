#include "client/fsdp/passes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace shardd::fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Writes down what it is asked, and is inside of a pass as the library is.
class FakePasses final : public PassShell {
 public:
  bool InsidePass() override { return inside_; }
  Status EnterPass(bool stepped, const std::string& state) override {
    return Asked("enter" + std::string(stepped ? " stepped" : "") + (state.empty() ? "" : " " + state), true);
  }
  Status LeavePass() override { return Asked("leave", false); }
  Status StopReading() override { return Asked("stop reading", true); }
  Status ResumeReading() override { return Asked("resume reading", true); }
  Status ReshardAll() override { return Asked("reshard", inside_); }
  void StepCommitted() override { asked_.push_back("committed"); }
  std::vector<std::string> Take() { return std::exchange(asked_, {}); }
  void FailAt(const std::string& what) { fails_ = what; }
  // An edit between a forward and its backward has ended the pass.
  void EndPass() { inside_ = false; }

 private:
  Status Asked(const std::string& what, bool inside_after) {
    asked_.push_back(what);
    if (what == fails_) {
      return Status(Code::kAborted, what);
    }
    inside_ = inside_after;
    return Status();
  }
  bool inside_ = false;
  std::vector<std::string> asked_;
  std::string fails_;
};

class PassesTest : public ::testing::Test {
 protected:
  void Use(bool copies = false) { passes_.Use(copies); }
  void Ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }
  // Entered, its forward over, and what was asked for it forgotten.
  void PassAfterForward() {
    Ok(passes_.EnterForward());
    Ok(passes_.StopReading());
    shell_.Take();
  }

  FakePasses shell_;
  Passes passes_{shell_};
};

TEST_F(PassesTest, UnusedPassesAskForNothing) {
  Ok(passes_.EnterForward());
  Ok(passes_.EnterByHand(/*backward=*/false));
  Ok(passes_.StopReading());
  Ok(passes_.Commit());
  Ok(passes_.End(/*reads_shards=*/true));
  EXPECT_THAT(shell_.Take(), IsEmpty());
  EXPECT_FALSE(passes_.inside());
}

TEST_F(PassesTest, BackwardResumesThePassOfItsForward) {
  Use();
  Ok(passes_.EnterForward());
  Ok(passes_.StopReading());
  EXPECT_TRUE(passes_.stopped_reading());
  Ok(passes_.ResumeReading());
  Ok(passes_.ResumeReading());
  Ok(passes_.End(/*reads_shards=*/false));
  EXPECT_FALSE(passes_.inside());
  EXPECT_THAT(shell_.Take(), ElementsAre("enter", "stop reading", "resume reading", "reshard", "leave"));
}

TEST_F(PassesTest, OnlyTheModelsNextForwardLeavesThePass) {
  Use();
  PassAfterForward();
  Ok(passes_.LeaveBefore(/*whole=*/false));
  EXPECT_THAT(shell_.Take(), IsEmpty());
  Ok(passes_.LeaveBefore(/*whole=*/true));
  EXPECT_THAT(shell_.Take(), ElementsAre("reshard", "leave"));
}

TEST_F(PassesTest, APassThatEditsHaveEndedIsEnteredAnew) {
  Use();
  PassAfterForward();
  shell_.EndPass();
  Ok(passes_.EnterForward());
  EXPECT_THAT(shell_.Take(), ElementsAre("reshard", "enter"));
  EXPECT_FALSE(passes_.stopped_reading());
}

TEST_F(PassesTest, ARefusedBackwardLeavesThePassAsItWas) {
  Use();
  PassAfterForward();
  shell_.FailAt("resume reading");
  EXPECT_TRUE(passes_.EnterForward().aborted());
  EXPECT_TRUE(passes_.ResumeReading().aborted());
  EXPECT_TRUE(passes_.stopped_reading());
}

TEST_F(PassesTest, AMarkedStepIsCommittedOnceByTheNextPass) {
  Use();
  passes_.MarkStepped("a");
  passes_.MarkState("b");
  Ok(passes_.EnterForward());
  Ok(passes_.Leave());
  Ok(passes_.EnterForward());
  EXPECT_THAT(shell_.Take(), ElementsAre("enter stepped b", "committed", "reshard", "leave", "enter"));
}

TEST_F(PassesTest, AStepWhosePassFailsStaysMarked) {
  Use();
  passes_.MarkStepped("a");
  shell_.FailAt("enter stepped a");
  EXPECT_TRUE(passes_.Enter().aborted());
  EXPECT_FALSE(passes_.inside());
  shell_.FailAt("");
  Ok(passes_.Enter());
  EXPECT_THAT(shell_.Take(), ElementsAre("enter stepped a", "enter stepped a", "committed"));
}

TEST_F(PassesTest, ManualUnshardsAreAPassUntilAForwardTakesOver) {
  Use();
  Ok(passes_.EnterByHand(/*backward=*/false));
  EXPECT_TRUE(passes_.by_hand());
  Ok(passes_.EnterForward());
  EXPECT_FALSE(passes_.by_hand());
  Ok(passes_.LeaveByHand());
  EXPECT_TRUE(passes_.inside());
}

TEST_F(PassesTest, AManualUnshardInsideAPassDoesNotEndIt) {
  Use();
  Ok(passes_.EnterForward());
  Ok(passes_.EnterByHand(/*backward=*/false));
  Ok(passes_.EnterByHand(/*backward=*/true));
  Ok(passes_.LeaveByHand());
  EXPECT_TRUE(passes_.inside());
}

TEST_F(PassesTest, AManualUnshardAfterEditsHasItsOwnPass) {
  Use();
  PassAfterForward();
  shell_.EndPass();
  Ok(passes_.EnterByHand(/*backward=*/false));
  EXPECT_TRUE(passes_.by_hand());
}

TEST_F(PassesTest, ParametersThatStayUnshardedKeepThePassByHand) {
  Use();
  Ok(passes_.EnterForward());
  Ok(passes_.StopReadingByHand());
  EXPECT_TRUE(passes_.stopped_reading());
  Ok(passes_.LeaveByHand());
  EXPECT_FALSE(passes_.inside());
}

TEST_F(PassesTest, APassWhoseLeaveFailsIsOverAnyway) {
  Use();
  Ok(passes_.EnterForward());
  shell_.FailAt("leave");
  EXPECT_TRUE(passes_.Leave().aborted());
  EXPECT_FALSE(passes_.inside());
}

TEST_F(PassesTest, OneThatReadShardsIsLeftByAllBeforeStores) {
  Use(/*copies=*/true);
  Ok(passes_.EnterForward());
  Ok(passes_.End(/*reads_shards=*/true));
  EXPECT_THAT(shell_.Take(), ElementsAre("enter", "reshard", "leave", "enter", "reshard", "leave"));
}

TEST_F(PassesTest, WithCopiesAStoreCountsInAPartsNextForward) {
  Use(/*copies=*/true);
  Ok(passes_.BeginWriting());
  PassAfterForward();
  Ok(passes_.BeginWriting());
  Ok(passes_.LeaveBefore(/*whole=*/false));
  EXPECT_THAT(shell_.Take(), ElementsAre("reshard", "leave"));
}

TEST_F(PassesTest, WithCopiesAStoreEndsWhatIsUnshardedByHand) {
  Use(/*copies=*/true);
  Ok(passes_.EnterByHand(/*backward=*/false));
  Ok(passes_.BeginWriting());
  EXPECT_FALSE(passes_.inside());
}

TEST_F(PassesTest, TheDaemonsStepEndsThePass) {
  Use();
  PassAfterForward();
  passes_.Stepped();
  Ok(passes_.Leave());
  EXPECT_THAT(shell_.Take(), IsEmpty());
}

TEST_F(PassesTest, NothingOutlivesAnAttachment) {
  Use();
  PassAfterForward();
  passes_.MarkStepped("a");
  passes_.Forget();
  shell_.EndPass();
  Ok(passes_.EnterForward());
  EXPECT_THAT(shell_.Take(), ElementsAre("enter"));
}

}  // namespace
}  // namespace shardd::fsdp
