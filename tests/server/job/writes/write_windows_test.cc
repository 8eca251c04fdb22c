#include "server/job/writes/write_windows.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

TEST(WriteWindowsTest, AWindowIsOpenFromItsGrantToTheNextPass) {
  WriteWindows windows(2);
  windows.Ask(0);
  EXPECT_TRUE(windows.wants(0) && !windows.open(0));
  windows.Open(0);
  EXPECT_TRUE(!windows.wants(0) && windows.open(0));
  windows.Close(0);
  EXPECT_FALSE(windows.open(0));
  EXPECT_TRUE(windows.any_since_version()) << "what it wrote is no version yet";
  EXPECT_TRUE(windows.Commit());
  EXPECT_FALSE(windows.any_since_version());
  EXPECT_FALSE(windows.Commit());
}

TEST(WriteWindowsTest, AStepTakesARequestBack) {
  WriteWindows windows(1);
  windows.Ask(0);
  windows.CloseWithStep(0);
  EXPECT_FALSE(windows.wants(0));
}

TEST(WriteWindowsTest, AnEndedPassIsHeardOfOnce) {
  WriteWindows windows(1);
  windows.Overtake(0);
  EXPECT_TRUE(windows.overtaken(0));
  EXPECT_TRUE(windows.TakeOvertaken(0));
  EXPECT_FALSE(windows.TakeOvertaken(0));
}

TEST(WriteWindowsTest, WithPassCopiesNoWindowOpens) {
  WriteWindows windows(1);
  EXPECT_FALSE(windows.LetStore(0));
  windows.Ask(0);
  EXPECT_TRUE(windows.LetStore(0));
  EXPECT_FALSE(windows.wants(0) || windows.open(0) || windows.any_since_version());
}

TEST(WriteWindowsTest, APollOutlivesTheEpoch) {
  WriteWindows windows(1);
  windows.Open(0);
  windows.PollPauses(true);
  windows.AwaitDevices(true);
  windows.EndEpoch();
  EXPECT_FALSE(windows.open(0) || windows.any_since_version() || windows.awaits_devices());
  EXPECT_TRUE(windows.polls_pauses()) << "its timer still runs";
}

}  // namespace
}  // namespace shardd
