#include "server/job/writes/value_commit.h"

#include <gtest/gtest.h>

#include "server/job/step/committed.h"

namespace shardd {
namespace {

TEST(ValueCommitTest, ACommitForgetsWhoAskedForIt) {
  ValueCommit commit(2);
  commit.Ask(1);
  EXPECT_TRUE(commit.any_asked() && commit.asked(1) && !commit.asked(0));
  commit.Committed();
  EXPECT_FALSE(commit.any_asked());
}

TEST(ValueCommitTest, ReadingOutlivesTheEpoch) {
  ValueCommit commit(1);
  commit.BeginSaying();
  EXPECT_TRUE(commit.said() && commit.reading());
  commit.EndEpoch();
  EXPECT_FALSE(commit.said());
  EXPECT_TRUE(commit.reading()) << "a thread still reads the slabs";
  commit.EndReading();
  EXPECT_FALSE(commit.reading());
}

}  // namespace
}  // namespace shardd
