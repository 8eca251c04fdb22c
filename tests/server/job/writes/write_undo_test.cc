#include "server/job/writes/write_undo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/shm/slab.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kChunkBytes = int64_t{64} << 10;

class WriteUndoTest : public ::testing::Test {
 protected:
  WriteUndoTest() : slab_(*Slab::Create("shards", SlabBacking::kSealedMemfd, kSlabBytes)) { Fill(0, kSlabBytes, 'o'); }
  void Fill(int64_t offset_bytes, int64_t size_bytes, char with) {
    const std::string bytes(static_cast<size_t>(size_bytes), with);
    ASSERT_TRUE(slab_.Write(offset_bytes, bytes.data(), size_bytes).ok());
  }
  // As a copy of a writeback does.
  void Write(int64_t offset_bytes, int64_t size_bytes, char with) {
    undo_.WillSave();
    ASSERT_TRUE(undo_.Save(&slab_, offset_bytes, size_bytes).ok());
    Fill(offset_bytes, size_bytes, with);
  }
  bool AllAre(char wanted) {
    std::string bytes(kSlabBytes, '\0');
    EXPECT_TRUE(slab_.Read(0, bytes.data(), kSlabBytes).ok());
    return std::all_of(bytes.begin(), bytes.end(), [&](char byte) { return byte == wanted; });
  }

  static constexpr int64_t kSlabBytes = 2 * kChunkBytes + 4096;
  JobSlab slab_;
  WriteUndo undo_;
  std::vector<int64_t> counts_ = {5, 6};
};

TEST_F(WriteUndoTest, PutsBackTheBytesBeforeTheFirstWrite) {
  Write(kChunkBytes - 8, 16, 'a');
  Write(kChunkBytes - 8, 16, 'b');
  Write(kSlabBytes - 1, 1, 'c');
  ASSERT_TRUE(undo_.BeginUndo(&counts_));
  EXPECT_TRUE(undo_.undoing());
  bool more = true;
  EXPECT_TRUE(undo_.PutBack(&more).ok());
  EXPECT_FALSE(more);
  undo_.EndUndo();
  EXPECT_TRUE(AllAre('o'));
  EXPECT_FALSE(undo_.undoing());
}

TEST_F(WriteUndoTest, OldBytesGoInPieces) {
  constexpr int64_t kSizeBytes = int64_t{9} << 20;
  const JobSlab slab{*Slab::Create("shards", SlabBacking::kSealedMemfd, kSizeBytes)};
  for (const bool put_back : {true, false}) {
    ASSERT_TRUE(undo_.Save(&slab, 0, kSizeBytes).ok());
    int pieces = 0;
    int64_t largest_bytes = 0;
    for (bool more = true; more; ++pieces) {
      const int64_t before = undo_.bytes();
      if (put_back) {
        EXPECT_TRUE(undo_.PutBack(&more).ok());
      } else {
        undo_.Forget(&more);
      }
      largest_bytes = std::max(largest_bytes, before - undo_.bytes());
    }
    EXPECT_EQ(pieces, 3);
    EXPECT_EQ(largest_bytes, int64_t{4} << 20);
    EXPECT_EQ(undo_.bytes(), 0);
  }
}

TEST_F(WriteUndoTest, AChunkIsSavedOnce) {
  for (int i = 0; i < 3; ++i) Write(8, 8, 'a');
  EXPECT_EQ(undo_.bytes(), kChunkBytes);
  Write(kSlabBytes - 8, 8, 'a');
  EXPECT_EQ(undo_.bytes(), kChunkBytes + 4096) << "the slab's last chunk is short";
}

TEST_F(WriteUndoTest, ACommitForgetsOldBytes) {
  Write(8, 8, 'a');
  ASSERT_TRUE(undo_.BeginCommit());
  bool more = true;
  undo_.Forget(&more);
  EXPECT_FALSE(more);
  EXPECT_EQ(undo_.bytes(), 0);
  EXPECT_FALSE(undo_.BeginUndo(&counts_));
  EXPECT_FALSE(undo_.undoing());
}

TEST_F(WriteUndoTest, CountsGoBackWithoutACopy) {
  undo_.SaveCount(1, counts_[1]);
  counts_[1] = 100;
  undo_.SaveCount(1, counts_[1]);
  counts_[1] = 200;
  EXPECT_FALSE(undo_.BeginUndo(&counts_)) << "no bytes were written";
  EXPECT_THAT(counts_, ElementsAre(5, 6));
}

TEST_F(WriteUndoTest, CommittedCountsStay) {
  undo_.SaveCount(0, counts_[0]);
  counts_[0] = 100;
  EXPECT_FALSE(undo_.BeginCommit());
  EXPECT_FALSE(undo_.BeginUndo(&counts_));
  EXPECT_THAT(counts_, ElementsAre(100, 6));
}

}  // namespace
}  // namespace shardd
