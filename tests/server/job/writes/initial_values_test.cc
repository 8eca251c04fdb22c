#include "server/job/writes/initial_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/job/step/committed.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(InitialValuesTest, OneEpochWritesAPartInPieces) {
  InitialValues values;
  EXPECT_FALSE(values.any());
  EXPECT_FALSE(values.Write(0, 0, /*epoch=*/1));
  EXPECT_FALSE(values.Write(0, 0, 1));
  EXPECT_THAT(values.WrittenBefore(1), IsEmpty());
  EXPECT_TRUE(values.any());
}

TEST(InitialValuesTest, TheNextEpochClearsAPartOnce) {
  InitialValues values;
  values.Write(0, 0, 1);
  values.Write(0, 1, 1);
  EXPECT_TRUE(values.Write(0, 0, 2));
  EXPECT_FALSE(values.Write(0, 0, 2));
  EXPECT_THAT(values.WrittenBefore(2), ElementsAre(Pair(0, 1)))
      << "what it does not write again is cleared at its commit";
}

TEST(InitialValuesTest, ATornPartIsClearedInTheFirstEpochToo) {
  InitialValues values;
  values.MarkTorn(3, 0);
  EXPECT_THAT(values.WrittenBefore(1), ElementsAre(Pair(3, 0)));
  EXPECT_TRUE(values.Write(3, 0, 1));
}

TEST(InitialValuesTest, ACommitForgetsAll) {
  InitialValues values;
  values.Write(0, 0, 1);
  values.Committed();
  EXPECT_FALSE(values.any());
  EXPECT_THAT(values.WrittenBefore(2), IsEmpty());
}

}  // namespace
}  // namespace shardd
