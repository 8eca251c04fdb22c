#include "server/storage/undo_slab.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/shm/slab.h"
#include "server/storage/job_slab.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 10;
constexpr int64_t kShardsBytes = 130 * kChunkBytes + 4096;
constexpr int64_t kOptimizerBytes = 2 * kChunkBytes;
constexpr uint64_t kVersion = 3;

class UndoSlabTest : public ::testing::Test {
 protected:
  UndoSlabTest()
      : shards_(*Slab::Create("shards", SlabBacking::kSealedMemfd, kShardsBytes)),
        optimizer_(*Slab::Create("optimizer", SlabBacking::kSealedMemfd, kOptimizerBytes)) {
    plan_.memory.shards_bytes = kShardsBytes;
    plan_.memory.optimizer_bytes = kOptimizerBytes;
    undo_ = *UndoSlab::Create(plan_, {&shards_, &optimizer_});
    Fill(shards_, 0, kShardsBytes, 'o');
    Fill(optimizer_, 0, kOptimizerBytes, 'o');
  }
  static void Fill(const JobSlab& slab, int64_t offset_bytes, int64_t size_bytes, char with) {
    const std::string bytes(static_cast<size_t>(size_bytes), with);
    ASSERT_TRUE(slab.Write(offset_bytes, bytes.data(), size_bytes).ok());
  }
  // As a copy of a writeback does.
  void Write(const JobSlab& slab, int64_t offset_bytes, int64_t size_bytes, char with, uint64_t version = kVersion) {
    ASSERT_TRUE(undo_->Save(&slab, offset_bytes, size_bytes, version).ok());
    Fill(slab, offset_bytes, size_bytes, with);
  }
  static bool AllAre(const JobSlab& slab, char wanted) {
    std::string bytes(static_cast<size_t>(slab.size_bytes()), '\0');
    EXPECT_TRUE(slab.Read(0, bytes.data(), slab.size_bytes()).ok());
    return std::all_of(bytes.begin(), bytes.end(), [&](char byte) { return byte == wanted; });
  }
  static void PutBack(UndoSlab& undo, uint64_t version = kVersion) {
    for (bool more = true; more;) ASSERT_TRUE(undo.PutBack(version, &more).ok());
  }
  static void Forget(UndoSlab& undo) {
    for (bool more = true; more;) undo.Forget(&more);
  }
  // What the next daemon has of it.
  std::unique_ptr<UndoSlab> Next() {
    return *UndoSlab::TakeUp(UniqueFd(fcntl(undo_->fd(), F_DUPFD_CLOEXEC, 0)), plan_, {&shards_, &optimizer_});
  }
  int64_t PageBytes() const {
    struct stat object {};
    EXPECT_EQ(fstat(undo_->fd(), &object), 0);
    return object.st_blocks * int64_t{512};
  }

  ShardPlan plan_;
  const JobSlab shards_;
  const JobSlab optimizer_;
  std::unique_ptr<UndoSlab> undo_;
};

// By copies that devices make, of which other parts of the step want some, too.
TEST_F(UndoSlabTest, CopiesOfOthersCountWhenAllAreMade) {
  const auto save = [this](const JobSlab& slab, int64_t offset_bytes, int64_t size_bytes) {
    std::vector<CopyOp> copies;
    EXPECT_TRUE(undo_->BeginSave(&slab, offset_bytes, size_bytes, kVersion, &copies).ok());
    for (const CopyOp& copy : copies) {
      std::copy_n(static_cast<const char*>(copy.src), copy.size_bytes, static_cast<char*>(copy.dst));
    }
    return copies.size();
  };
  EXPECT_EQ(save(shards_, kChunkBytes - 8, 2 * kChunkBytes), 1u) << "neighbours are one copy";
  EXPECT_EQ(save(shards_, kChunkBytes, 16), 0u) << "it is being kept";
  EXPECT_EQ(save(shards_, kShardsBytes - 1, 1), 1u);
  EXPECT_EQ(save(optimizer_, 0, kOptimizerBytes), 1u);
  EXPECT_FALSE(undo_->Has(kVersion));
  undo_->EndSave(kVersion);
  EXPECT_TRUE(undo_->Has(kVersion));
  EXPECT_EQ(undo_->bytes(), 3 * kChunkBytes + 4096 + kOptimizerBytes);
  Fill(shards_, kChunkBytes - 8, 2 * kChunkBytes, 'a');
  Fill(optimizer_, 0, kOptimizerBytes, 'b');
  EXPECT_EQ(save(shards_, kChunkBytes - 8, 2 * kChunkBytes), 0u) << "it is kept as it was before the first part";
  Write(shards_, 5 * kChunkBytes, 8, 'c');
  PutBack(*Next());
  EXPECT_TRUE(AllAre(shards_, 'o'));
  EXPECT_TRUE(AllAre(optimizer_, 'o'));
  // Of the next version it is kept anew, where it was.
  std::vector<CopyOp> copies;
  ASSERT_TRUE(undo_->BeginSave(&optimizer_, 0, 1, kVersion + 1, &copies).ok());
  EXPECT_EQ(copies.size(), 1u);
  EXPECT_EQ(undo_->bytes(), 4 * kChunkBytes + 4096 + kOptimizerBytes);
  EXPECT_FALSE(undo_->BeginSave(&shards_, kShardsBytes, kChunkBytes, kVersion + 1, &copies).ok());
}

TEST_F(UndoSlabTest, PutsBackTheBytesBeforeTheFirstWrite) {
  Write(shards_, kChunkBytes - 8, 16, 'a');
  Write(shards_, kChunkBytes - 8, 16, 'b');
  Write(shards_, kShardsBytes - 1, 1, 'c');
  Write(optimizer_, kOptimizerBytes - 1, 1, 'd');
  PutBack(*undo_);
  EXPECT_TRUE(AllAre(shards_, 'o'));
  EXPECT_TRUE(AllAre(optimizer_, 'o'));
  EXPECT_TRUE(undo_->Has(kVersion)) << "what is made of them may be behind";
  Forget(*undo_);
  EXPECT_FALSE(undo_->Has(kVersion));
  EXPECT_EQ(undo_->bytes(), 0);
}

TEST_F(UndoSlabTest, TheNextDaemonPutsThemBackToo) {
  Write(shards_, 5, 3 * kChunkBytes, 'a');
  const std::unique_ptr<UndoSlab> next = Next();
  EXPECT_EQ(next->bytes(), 4 * kChunkBytes);
  EXPECT_TRUE(next->Has(kVersion));
  PutBack(*next);
  EXPECT_TRUE(AllAre(shards_, 'o'));
}

TEST_F(UndoSlabTest, OfAVersionThatIsCommittedNothingCounts) {
  Write(shards_, 0, 8, 'a');
  const std::unique_ptr<UndoSlab> next = Next();
  EXPECT_FALSE(next->Has(kVersion + 1));
  PutBack(*next, kVersion + 1);
  EXPECT_EQ(*shards_.At(0), 'a');
  Write(shards_, 0, 8, 'b', kVersion + 1);
  PutBack(*undo_, kVersion + 1);
  EXPECT_EQ(*shards_.At(0), 'a');
}

TEST_F(UndoSlabTest, OldBytesGoInPiecesAndSoDoTheirPages) {
  const int64_t empty_bytes = PageBytes();
  ASSERT_TRUE(undo_->Save(&shards_, 0, kShardsBytes, kVersion).ok());
  EXPECT_GE(PageBytes(), kShardsBytes);
  int pieces = 0;
  for (bool more = true; more; ++pieces) ASSERT_TRUE(undo_->PutBack(kVersion, &more).ok());
  EXPECT_EQ(pieces, 3);
  EXPECT_EQ(undo_->bytes(), kShardsBytes);
  pieces = 0;
  int64_t largest_bytes = 0;
  for (bool more = true; more; ++pieces) {
    const int64_t before = undo_->bytes();
    undo_->Forget(&more);
    largest_bytes = std::max(largest_bytes, before - undo_->bytes());
  }
  EXPECT_EQ(pieces, 3);
  EXPECT_EQ(largest_bytes, int64_t{4} << 20);
  EXPECT_EQ(undo_->bytes(), 0);
  EXPECT_LE(PageBytes(), empty_bytes + kChunkBytes) << "the index";
}

TEST_F(UndoSlabTest, AChunkIsSavedOnce) {
  for (int i = 0; i < 3; ++i) Write(shards_, 8, 8, 'a');
  EXPECT_EQ(undo_->bytes(), kChunkBytes);
  Write(shards_, kShardsBytes - 8, 8, 'a');
  EXPECT_EQ(undo_->bytes(), kChunkBytes + 4096) << "the slab's last chunk is short";
}

// Where parameters are cut over nodes, ranges of a few pages that lie apart: chunks have much that others hold.
TEST(UndoOfCut, WhatOtherNodesHoldGetsNoMemory) {
  SpecBuilder builder(1);
  builder.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  for (int node = 0; node < 4; ++node) {
    builder.config().mutable_nodes()->add_addresses("host" + std::to_string(node) + ":7000");
  }
  for (int i = 0; i < 12; ++i) {
    builder.Param(builder.AddSharded(0, "a" + std::to_string(i)), "w", {5 * 4096});
  }
  const ShardPlan plan = *PlanShards(builder.spec(), 1);
  ASSERT_TRUE(plan.cut_over_nodes);
  const auto pages = [](int fd) {
    struct stat object {};
    EXPECT_EQ(fstat(fd, &object), 0);
    return object.st_blocks * int64_t{512};
  };
  const auto make = [](int64_t bytes, const std::vector<ByteRange>& held) {
    std::vector<Slab::Range> ranges;
    for (const ByteRange& range : held) ranges.push_back({range.first, range.end});
    return *Slab::CreateParts("shards", SlabBacking::kSealedMemfd, bytes, ranges);
  };
  const std::vector<ByteRange> held = HeldRanges(plan, HeldSlab::kShards);
  const JobSlab shards(make(plan.memory.shards_bytes, held));
  const JobSlab optimizer(make(plan.memory.optimizer_bytes, HeldRanges(plan, HeldSlab::kOptimizer)));
  for (const ByteRange& range : held) std::fill(shards.At(range.first), shards.At(range.first) + 4096, 'o');
  const int64_t before = pages(shards.fd());
  const auto undo = *UndoSlab::Create(plan, {&shards, &optimizer});
  const int64_t empty = pages(undo->fd());
  int64_t held_bytes = 0;
  for (const ByteRange& range : held) {
    ASSERT_TRUE(undo->Save(&shards, range.first, range.end - range.first, kVersion).ok());
    std::fill(shards.At(range.first), shards.At(range.first) + 4096, 'n');
    held_bytes += range.end - range.first;
  }
  EXPECT_LE(undo->bytes(), HeldChunksBytes(plan, HeldSlab::kShards)) << "what there has to be room for";
  EXPECT_LE(pages(undo->fd()) - empty, held_bytes + kChunkBytes) << "with the index";
  EXPECT_EQ(pages(shards.fd()), before);
  for (bool more = true; more;) ASSERT_TRUE(undo->PutBack(kVersion, &more).ok());
  EXPECT_EQ(pages(shards.fd()), before);
  for (const ByteRange& range : held) EXPECT_EQ(*shards.At(range.first), 'o');
  // Likewise by copies of others, of parts of steps.
  for (bool more = true; more;) undo->Forget(&more);
  std::vector<CopyOp> copies;
  for (const ByteRange& range : held) {
    ASSERT_TRUE(undo->BeginSave(&shards, range.first, range.end - range.first, kVersion, &copies).ok());
  }
  int64_t copied_bytes = 0;
  for (const CopyOp& copy : copies) {
    const char* const from = static_cast<const char*>(copy.src);
    std::copy(from, from + copy.size_bytes, static_cast<char*>(copy.dst));
    copied_bytes += copy.size_bytes;
  }
  undo->EndSave(kVersion);
  EXPECT_EQ(copied_bytes, held_bytes);
  EXPECT_EQ(pages(shards.fd()), before) << "what other nodes hold has no memory here";
  for (const ByteRange& range : held) std::fill(shards.At(range.first), shards.At(range.first) + 4096, 'n');
  for (bool more = true; more;) ASSERT_TRUE(undo->PutBack(kVersion, &more).ok());
  EXPECT_EQ(pages(shards.fd()), before);
  for (const ByteRange& range : held) EXPECT_EQ(*shards.At(range.first), 'o');
}

TEST_F(UndoSlabTest, AnotherSlabIsRefused) {
  const JobSlab other(*Slab::Create("other", SlabBacking::kSealedMemfd, kChunkBytes));
  EXPECT_EQ(undo_->Save(&other, 0, 8, kVersion).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(
      UndoSlab::TakeUp(UniqueFd(fcntl(other.fd(), F_DUPFD_CLOEXEC, 0)), plan_, {&shards_, &optimizer_}).status().code(),
      absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace shardd
