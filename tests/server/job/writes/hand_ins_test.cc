#include "server/job/writes/hand_ins.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

TEST(HandInsTest, RanksHandInFromTheirGrantToTheNextPass) {
  HandIns hand_ins(2);
  hand_ins.Ask(0);
  EXPECT_TRUE(hand_ins.wants(0) && !hand_ins.open(0));
  hand_ins.Open(0);
  EXPECT_TRUE(!hand_ins.wants(0) && hand_ins.open(0));
  hand_ins.Close(0);
  EXPECT_FALSE(hand_ins.open(0));
  EXPECT_TRUE(hand_ins.any_since_version()) << "what it wrote is no version yet";
  EXPECT_TRUE(hand_ins.Commit());
  EXPECT_FALSE(hand_ins.any_since_version());
  EXPECT_FALSE(hand_ins.Commit());
}

TEST(HandInsTest, AStepTakesARequestBack) {
  HandIns hand_ins(1);
  hand_ins.Ask(0);
  hand_ins.CloseWithStep(0);
  EXPECT_FALSE(hand_ins.wants(0));
}

TEST(HandInsTest, WithPassCopiesNobodyHandsIn) {
  HandIns hand_ins(1);
  EXPECT_FALSE(hand_ins.LetStore(0));
  hand_ins.Ask(0);
  EXPECT_TRUE(hand_ins.LetStore(0));
  EXPECT_FALSE(hand_ins.wants(0) || hand_ins.open(0) || hand_ins.any_since_version());
}

TEST(HandInsTest, TheEndOfAnEpochForgetsAll) {
  HandIns hand_ins(1);
  hand_ins.Open(0);
  hand_ins.AwaitDevices(true);
  hand_ins.EndEpoch();
  EXPECT_FALSE(hand_ins.open(0) || hand_ins.any_since_version() || hand_ins.awaits_devices());
}

}  // namespace
}  // namespace shardd
