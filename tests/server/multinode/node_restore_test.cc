// A state that comes from another node is whole, or is not taken: pieces in order, of one transfer.

#include "server/multinode/node_restore.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/shm/slab.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr int64_t kBytes = 4096;

class NodeRestoreTest : public ::testing::Test {
 protected:
  NodeRestoreTest() {
    for (int i = 0; i < 2; ++i) {
      made_[i] = std::make_unique<JobSlab>(*Slab::Create("state", SlabBacking::kSealedMemfd, kBytes));
      slabs_[i] = made_[i].get();
    }
    restore_ = std::make_unique<NodeRestore>(
        7, StateSlabs{{{v1::SLAB_SHARDS, slabs_[0], kBytes}, {v1::SLAB_OPTIMIZER, slabs_[1], kBytes}}},
        [this](absl::Status status) {
          ++done_;
          status_ = std::move(status);
        });
  }
  void Take(v1::Slab slab, int64_t at_bytes, int64_t size_bytes, uint64_t transfer = 7, int64_t all_bytes = kBytes) {
    v1::PeerData header;
    header.set_sequence(transfer);
    header.set_slab(slab);
    header.set_offset(at_bytes / 4);
    header.set_numel(all_bytes / 4);
    restore_->Take(header, std::string(static_cast<size_t>(size_bytes), static_cast<char>('a' + slab)));
  }
  char At(int slab, int64_t byte) {
    char c = 0;
    EXPECT_TRUE(slabs_[slab]->Read(byte, &c, 1).ok());
    return c;
  }

  std::unique_ptr<JobSlab> made_[2];
  JobSlab* slabs_[2] = {};
  std::unique_ptr<NodeRestore> restore_;
  int done_ = 0;
  absl::Status status_;
};

TEST_F(NodeRestoreTest, BothSlabsInPiecesAreTheState) {
  Take(v1::SLAB_OPTIMIZER, 0, kBytes);
  Take(v1::SLAB_SHARDS, 0, 1024);
  EXPECT_EQ(done_, 0);
  Take(v1::SLAB_SHARDS, 1024, kBytes - 1024);
  EXPECT_EQ(done_, 1);
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(At(0, kBytes - 1), 'a' + v1::SLAB_SHARDS);
  EXPECT_EQ(At(1, 0), 'a' + v1::SLAB_OPTIMIZER);
  Take(v1::SLAB_SHARDS, 0, 1024);
  EXPECT_EQ(done_, 1);
}

// It was on its way when the link broke, and came over the next one.
TEST_F(NodeRestoreTest, APieceOfAnEarlierTransferCountsForNothing) {
  Take(v1::SLAB_SHARDS, 0, kBytes, /*transfer=*/6);
  Take(v1::SLAB_OPTIMIZER, 0, kBytes);
  EXPECT_EQ(done_, 0);
  EXPECT_EQ(At(0, 0), 0);
  Take(v1::SLAB_SHARDS, 0, kBytes);
  EXPECT_EQ(done_, 1);
  EXPECT_TRUE(status_.ok()) << status_;
}

TEST_F(NodeRestoreTest, AHoleIsAnError) {
  Take(v1::SLAB_SHARDS, 0, 1024);
  Take(v1::SLAB_SHARDS, 2048, 1024);
  EXPECT_EQ(done_, 1);
  EXPECT_EQ(status_.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status_.message().find("at 2048 of 4096, want SLAB_SHARDS at 1024"), std::string::npos) << status_;
}

// Of what is cut over nodes: the rest is no memory of this node's.
TEST_F(NodeRestoreTest, OnlyWhatTheNodeHoldsIsWritten) {
  StateSlab shards{v1::SLAB_SHARDS, slabs_[0], 64 + 512};
  shards.first_bytes = 1024;
  shards.held = {{128, 192}, {512, 1024}};
  restore_ = std::make_unique<NodeRestore>(7, StateSlabs{shards, {v1::SLAB_OPTIMIZER, slabs_[1], 0}},
                                           [this](absl::Status status) {
                                             ++done_;
                                             status_ = std::move(status);
                                           });
  Take(v1::SLAB_SHARDS, 0, 32, 7, 576);
  Take(v1::SLAB_SHARDS, 32, 48, 7, 576);
  Take(v1::SLAB_SHARDS, 80, 496, 7, 576);
  EXPECT_EQ(done_, 1);
  EXPECT_TRUE(status_.ok()) << status_;
  for (const int64_t byte : {1152, 1152 + 63, 1536, 1536 + 16, 2047}) EXPECT_EQ(At(0, byte), 'a' + v1::SLAB_SHARDS);
  for (const int64_t byte : {0, 1151, 1216, 1535, 2048}) EXPECT_EQ(At(0, byte), 0) << byte;
}

TEST_F(NodeRestoreTest, MoreThanTheSlabHoldsIsRefusedUnwritten) {
  Take(v1::SLAB_SHARDS, 0, 2 * kBytes);
  EXPECT_EQ(done_, 1);
  EXPECT_FALSE(status_.ok());
  EXPECT_EQ(At(0, 0), 0);
}

TEST_F(NodeRestoreTest, ASlabOfAnotherSizeIsAnError) {
  Take(v1::SLAB_OPTIMIZER, 0, 1024, 7, 2 * kBytes);
  EXPECT_EQ(done_, 1);
  EXPECT_FALSE(status_.ok());
}

}  // namespace
}  // namespace shardd
