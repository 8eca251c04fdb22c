// What a daemon says of slabs on GPUs is checked before a driver is asked for.

#include "client/c/gpu/device_slabs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/slab_holes.h"
#include "common/plan/slab_spread.h"
#include "tests/common/plan/real_models.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = int64_t{2} << 20;

class DeviceSlabsTest : public ::testing::Test {
 protected:
  DeviceSlabsTest() {
    plan_.memory.shards_bytes = 3 * kPage - 5;
    plan_.memory.gradients_bytes = kPage;
    for (int i = 0; i < kSessionFdCount; ++i) fds_.emplace_back(dup(STDERR_FILENO));
    attach_.set_device("cuda:0");
  }
  v1::DeviceSlab& Add(int which, int64_t size_bytes, const std::vector<int64_t>& pieces = {}) {
    v1::DeviceSlab* slab = attach_.add_device_slabs();
    slab->set_descriptor_index(which);
    slab->set_size_bytes(size_bytes);
    for (const int64_t piece : pieces) slab->add_piece_bytes(piece);
    return *slab;
  }
  absl::Status Map() {
    return DeviceSlabs::Map(attach_, plan_, fds_,
                            [this](FdRange) {
                              ++fetched_;
                              return absl::UnavailableError("the daemon is gone");
                            })
        .status();
  }

  ShardPlan plan_;
  v1::AttachRankResponse attach_;
  std::vector<UniqueFd> fds_;
  int fetched_ = 0;
};

TEST_F(DeviceSlabsTest, NothingOnDevicesIsNothingToMap) {
  EXPECT_TRUE(Map().ok());
  EXPECT_EQ(fetched_, 0);
}

// The descriptions are fine; what there is none of here is a driver, or the GPU.
TEST_F(DeviceSlabsTest, AnHonestDescriptionComesAsFarAsTheDriver) {
  Add(kFdShards, 3 * kPage, {kPage, 2 * kPage});
  Add(kFdGradients, kPage);
  EXPECT_NE(Map().code(), absl::StatusCode::kInternal);
  attach_.clear_device_slabs();
  Add(kFdShards, 3 * kPage, {kPage, -kPage, kPage});
  EXPECT_NE(Map().code(), absl::StatusCode::kInternal) << "other nodes hold what is in the middle";
}

// They have nearly as many pieces as a client takes, holes counted.
TEST_F(DeviceSlabsTest, SlabsOfTheLargestModelsComeAsFarAsTheDriver) {
  plan_ = PlanOn(ModelOf(kOf70B, v1::OPTIMIZER_KIND_ADAMW), /*node=*/3);
  size_t most = 0;
  for (const auto& [which, spread] : {std::pair{kFdShards, SpreadSlab::kShards},
                                      {kFdGradients, SpreadSlab::kGradients},
                                      {kFdOptimizer, SpreadSlab::kOptimizer}}) {
    std::vector<int64_t> piece_bytes;
    for (const SlabPiece& piece : SpreadOverGpus(plan_, spread, /*gpus=*/8, kGpuPageBytes)) {
      piece_bytes.push_back(piece.gpu == kNoGpu ? -piece.size_bytes : piece.size_bytes);
    }
    most = std::max(most, piece_bytes.size());
    Add(which, SlabBytesOnGpus(plan_, spread, kGpuPageBytes), piece_bytes);
  }
  EXPECT_GT(most, static_cast<size_t>(kMaxSlabPieces) * 9 / 10);
  const absl::Status status = Map();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.code(), absl::StatusCode::kInternal) << status;
}

TEST_F(DeviceSlabsTest, PiecesThatAreNotTheSlabAreRefused) {
  const std::vector<std::vector<int64_t>> wrong = {{kPage, kPage},
                                                   {kPage, 2 * kPage, kPage},
                                                   {3 * kPage, 0},
                                                   {4 * kPage, -kPage},
                                                   {-kPage, 4 * kPage},
                                                   {-kPage, kPage, kPage},
                                                   {kPage, -2 * kPage, kPage},
                                                   {INT64_MAX, INT64_MAX, 5 * kPage},
                                                   {INT64_MIN, INT64_MIN, 3 * kPage}};
  for (const std::vector<int64_t>& pieces : wrong) {
    attach_.clear_device_slabs();
    Add(kFdShards, 3 * kPage, pieces);
    const absl::Status status = Map();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("that do not add up to that"));
  }
}

TEST_F(DeviceSlabsTest, SlabsSmallerThanPlannedOrUnplannedAreRefused) {
  for (const auto& [which, size_bytes] : std::vector<std::pair<int, int64_t>>{{kFdShards, 3 * kPage - 6},
                                                                              {kFdShards, 0},
                                                                              {kFdShards, -kPage},
                                                                              {kFdGradients, kPage - 1},
                                                                              {kFdPool, kPage}}) {
    attach_.clear_device_slabs();
    Add(which, size_bytes);
    const absl::Status status = Map();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("wrong size (got ", size_bytes, " bytes")));
  }
}

TEST_F(DeviceSlabsTest, TooManyPiecesAndPlacesThatAreNoneAreRefused) {
  Add(kFdShards, kPage * (kMaxSlabPieces + 1), std::vector<int64_t>(kMaxSlabPieces + 1, kPage));
  EXPECT_THAT(std::string(Map().message()), HasSubstr("too many pieces (got 1025, want at most 1024)"));
  for (const int which : {-1, 0, static_cast<int>(kFdDoorbell), static_cast<int>(kSessionFdCount)}) {
    attach_.clear_device_slabs();
    Add(which, 3 * kPage);
    EXPECT_THAT(std::string(Map().message()), HasSubstr(absl::StrCat("(got index ", which, ")")));
  }
  attach_.clear_device_slabs();
  Add(kFdShards, 3 * kPage);
  Add(kFdShards, 3 * kPage);
  EXPECT_THAT(std::string(Map().message()), HasSubstr("twice"));
  attach_.clear_device_slabs();
  Add(kFdShards, 3 * kPage);
  fds_[kFdShards].reset();
  EXPECT_THAT(std::string(Map().message()), HasSubstr("no descriptor of a slab"));
  EXPECT_EQ(fetched_, 0);
}

}  // namespace
}  // namespace shardd
