#include "server/daemon/heap_trim.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

class HeapTrimTest : public ::testing::Test {
 protected:
  size_t free_bytes_ = 0;
  int trims_ = 0;
  HeapTrim trim_{[this] { return free_bytes_; }, [this] { ++trims_; }};
};

TEST_F(HeapTrimTest, WaitsUntilNoRankIsAttached) {
  EXPECT_FALSE(trim_.TakeDue(/*quiet=*/true)) << "nothing was freed";
  free_bytes_ = HeapTrim::kMostKeptBytes;
  trim_.Freed();
  EXPECT_EQ(trims_, 0);
  EXPECT_FALSE(trim_.TakeDue(/*quiet=*/false));
  EXPECT_TRUE(trim_.TakeDue(/*quiet=*/true));
  EXPECT_FALSE(trim_.TakeDue(/*quiet=*/true));
}

TEST_F(HeapTrimTest, WaitsNoLongerWhenTheHeapKeepsMuch) {
  free_bytes_ = HeapTrim::kMostKeptBytes + 1;
  trim_.Freed();
  EXPECT_EQ(trims_, 1);
  EXPECT_FALSE(trim_.TakeDue(/*quiet=*/true));
}

}  // namespace
}  // namespace shardd
