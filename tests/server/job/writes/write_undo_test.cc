#include "server/job/writes/write_undo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace shardd {
namespace {

using ::testing::ElementsAre;

class WriteUndoTest : public ::testing::Test {
 protected:
  WriteUndo undo_;
  std::vector<int64_t> counts_ = {5, 6};
};

TEST_F(WriteUndoTest, OldBytesGoBackThatWereOfTheVersion) {
  undo_.WillSave(/*version=*/3);
  EXPECT_EQ(undo_.BeginUndo(&counts_), 3u);
  EXPECT_TRUE(undo_.undoing());
  undo_.EndUndo();
  EXPECT_FALSE(undo_.undoing());
  EXPECT_FALSE(undo_.BeginUndo(&counts_).has_value()) << "once";
}

TEST_F(WriteUndoTest, AnotherEndBeforeTheyAreBackChangesNothing) {
  undo_.WillSave(/*version=*/3);
  EXPECT_EQ(undo_.BeginUndo(&counts_), 3u);
  EXPECT_FALSE(undo_.BeginUndo(&counts_).has_value());
  EXPECT_TRUE(undo_.undoing()) << "nobody may read what is half put back";
}

TEST_F(WriteUndoTest, ACommitForgetsOldBytes) {
  undo_.WillSave(/*version=*/3);
  ASSERT_TRUE(undo_.BeginCommit());
  EXPECT_FALSE(undo_.BeginUndo(&counts_).has_value());
  EXPECT_FALSE(undo_.undoing());
}

TEST_F(WriteUndoTest, CountsGoBackWithoutACopy) {
  undo_.SaveCount(1, counts_[1]);
  counts_[1] = 100;
  undo_.SaveCount(1, counts_[1]);
  counts_[1] = 200;
  EXPECT_FALSE(undo_.BeginUndo(&counts_).has_value()) << "no bytes were written";
  EXPECT_THAT(counts_, ElementsAre(5, 6));
}

TEST_F(WriteUndoTest, CommittedCountsStay) {
  undo_.SaveCount(0, counts_[0]);
  counts_[0] = 100;
  EXPECT_FALSE(undo_.BeginCommit());
  EXPECT_FALSE(undo_.BeginUndo(&counts_).has_value());
  EXPECT_THAT(counts_, ElementsAre(100, 6));
}

}  // namespace
}  // namespace shardd
