// Which elements of which parameters the shards of a flat parameter have, through the C ABI.

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

class ShardPiecesTest : public ::testing::Test {
 protected:
  void Attach(v1::Layout layout) {
    v1::JobSpec spec = SmallSpec("pieces", kWorld);
    spec.mutable_config()->set_layout(layout);
    for (int i = 0; i < kWorld; ++i) ASSERT_C_OK(ranks_[static_cast<size_t>(i)].Attach(daemon_.address(), spec, i));
    flat_param_ = ranks_[0].ParamInfo(ranks_[0].Param("a.weight")).flat_param;
  }
  shardd_job* job() const { return ranks_[0].job(); }
  shardd_flat_param_info Info() const {
    shardd_flat_param_info info{};
    info.struct_size = sizeof(info);
    EXPECT_C_OK(shardd_get_flat_param_info(job(), flat_param_, &info));
    return info;
  }
  std::vector<shardd_shard_piece> Pieces(int rank, int64_t* padding) const {
    std::vector<shardd_shard_piece> pieces(static_cast<size_t>(Info().param_count));
    int32_t count = 0;
    EXPECT_C_OK(shardd_get_shard_pieces(job(), flat_param_, rank, pieces.data(), Info().param_count, &count, padding));
    pieces.resize(static_cast<size_t>(count));
    return pieces;
  }

  Daemon daemon_{kWorld};
  std::vector<Rank> ranks_{kWorld};
  int32_t flat_param_ = -1;
};

TEST_F(ShardPiecesTest, CoverEveryElementOnceAndTheRestIsPadding) {
  Attach(v1::LAYOUT_FLAT);
  const shardd_flat_param_info info = Info();
  EXPECT_EQ(info.padded_numel, kWorld * info.shard_numel);
  int64_t reached = 0;
  int64_t padding = 0;
  int64_t numel = 0;
  for (int rank = 0; rank < kWorld; ++rank) {
    int64_t of_shard = 0;
    for (const shardd_shard_piece& piece : Pieces(rank, &of_shard)) {
      const shardd_param_info param = ranks_[0].ParamInfo(piece.param);
      EXPECT_EQ(piece.offset_numel, param.offset_numel + piece.first);
      EXPECT_GE(piece.offset_numel, reached);
      EXPECT_LE(piece.first + piece.numel, param.numel);
      reached = piece.offset_numel + piece.numel;
      numel += piece.numel;
    }
    padding += of_shard;
  }
  EXPECT_EQ(numel, 33 * 17 + 33);
  EXPECT_GT(padding, 0);
  EXPECT_EQ(numel + padding, info.padded_numel);
}

TEST_F(ShardPiecesTest, OfWholeRowsHaveNoPadding) {
  Attach(v1::LAYOUT_DIM0);
  int64_t padding = -1;
  const std::vector<shardd_shard_piece> pieces = Pieces(1, &padding);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].first, 17 * 17);
  EXPECT_EQ(pieces[0].numel, 16 * 17);
  EXPECT_EQ(padding, 0);
}

TEST_F(ShardPiecesTest, OfRanksAndFlatParametersThatAreNotThereAreRefused) {
  Attach(v1::LAYOUT_FLAT);
  int32_t count = -1;
  int64_t padding = 0;
  EXPECT_C_OK(shardd_get_shard_pieces(job(), flat_param_, 0, nullptr, 0, &count, &padding));
  EXPECT_GT(count, 0);
  EXPECT_C_ERROR(shardd_get_shard_pieces(job(), flat_param_, kWorld, nullptr, 0, &count, &padding), kInvalidArgument,
                 "no such rank (got 2, want 0 <= rank < 2)");
  EXPECT_C_ERROR(shardd_get_shard_pieces(job(), 99, 0, nullptr, 0, &count, &padding), kInvalidArgument,
                 "no such flat parameter");
  EXPECT_C_ERROR(shardd_get_shard_pieces(job(), flat_param_, 0, nullptr, 1, &count, &padding), kInvalidArgument,
                 "capacity");
  shardd_flat_param_info info{};
  info.struct_size = sizeof(info);
  EXPECT_C_ERROR(shardd_get_flat_param_info(job(), -1, &info), kInvalidArgument, "out of range");
}

}  // namespace
}  // namespace shardd::testing_client
