#include "server/job/writes/passes.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

TEST(PassesTest, RanksEnterOneByOneAndAreLetInTogether) {
  Passes passes(2);
  passes.Enter(0, /*stepped=*/true, /*signal=*/7);
  EXPECT_TRUE(passes.entering(0) && passes.outside(1));
  EXPECT_TRUE(passes.stepped(0));
  EXPECT_EQ(passes.enter_signal(0), 7u);
  passes.Enter(1, true, 0);
  passes.LetInAll();
  EXPECT_TRUE(passes.inside(0) && passes.inside(1));
  EXPECT_FALSE(passes.stepped(0)) << "a step is said once";
  passes.Leave(0);
  EXPECT_TRUE(passes.outside(0) && passes.inside(1));
}

TEST(PassesTest, ALateRankGoesOnInTheOthersPass) {
  Passes passes(2);
  passes.LetInAll();
  passes.Leave(0);
  passes.Enter(0, false, 0);
  passes.Readmit(0);
  EXPECT_TRUE(passes.inside(0));
}

TEST(PassesTest, CopiesAreMadeForOnePass) {
  Passes passes(1);
  passes.Enter(0, false, 0);
  passes.Announce(/*tell=*/true, /*takes_snapshot=*/true);
  passes.AwaitDevices(true);
  passes.AwaitDevices(false);
  passes.CopiesMade();
  EXPECT_TRUE(passes.announced() && passes.copied() && !passes.awaits_devices());
  passes.LetInAll();
  EXPECT_FALSE(passes.announced() || passes.copied());
}

TEST(PassesTest, ATrainerStateIsTakenOnce) {
  Passes passes(1);
  passes.SetTrainerState(0, "a");
  EXPECT_EQ(passes.TakeTrainerState(0), "a");
  EXPECT_EQ(passes.TakeTrainerState(0), "");
  passes.SetTrainerState(0, "b");
  passes.ForgetTrainerStates();
  EXPECT_EQ(passes.TakeTrainerState(0), "") << "the step's came later";
}

TEST(PassesTest, AnEndedEpochForgetsAll) {
  Passes passes(1);
  passes.Enter(0, true, 7);
  passes.SetTrainerState(0, "a");
  passes.Announce(/*tell=*/true, /*takes_snapshot=*/true);
  passes.AwaitDevices(true);
  passes.EndEpoch();
  EXPECT_TRUE(passes.outside(0));
  EXPECT_FALSE(passes.stepped(0) || passes.announced() || passes.awaits_devices());
  EXPECT_EQ(passes.enter_signal(0), 0u);
  EXPECT_EQ(passes.TakeTrainerState(0), "");
}

}  // namespace
}  // namespace shardd
