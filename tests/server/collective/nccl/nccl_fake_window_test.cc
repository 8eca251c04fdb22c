// What the fake NCCL refuses of windows, as NVIDIA's does, or where NVIDIA's goes on with wrong memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "server/collective/nccl/nccl_api.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class FakeNcclWindowTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  static constexpr size_t kBytes = 8192;

  void SetUp() override {
    ncclUniqueId id;
    ASSERT_EQ(nccl_.GetUniqueId(&id), ncclSuccess);
    ASSERT_EQ(nccl_.GroupStart(), ncclSuccess);
    for (int rank = 0; rank < kRanks; ++rank) {
      (void)gpus_.driver()->DevicePrimaryCtxRetain(&contexts_[rank], rank);
      const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      ASSERT_EQ(nccl_.CommInitRankConfig(&comms_[rank], kRanks, id, rank, &config), ncclInProgress);
      (void)gpus_.driver()->StreamCreateWithPriority(&streams_[rank], 1, 0);
      buffers_[rank] = static_cast<char*>(gpus_.memory()->allocate(4 * kBytes, 4096));
    }
    ASSERT_EQ(nccl_.GroupEnd(), ncclInProgress);
    ASSERT_EQ(Ask(0), ncclSuccess);
    ASSERT_EQ(Ask(1), ncclSuccess);
  }
  void TearDown() override {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (comms_[rank] != nullptr) (void)nccl_.CommAbort(comms_[rank]);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
      (void)gpus_.driver()->StreamSynchronize(streams_[rank]);
      (void)gpus_.driver()->StreamDestroy(streams_[rank]);
      (void)gpus_.driver()->DevicePrimaryCtxRelease(rank);
    }
  }
  ncclResult_t Ask(int rank) {
    ncclResult_t result = ncclInProgress;
    for (int i = 0; i < 3 && result == ncclInProgress; ++i) {
      EXPECT_EQ(nccl_.CommGetAsyncError(comms_[rank], &result), ncclSuccess);
    }
    return result;
  }
  struct Range {
    char* p;
    size_t size_bytes;
  };
  // In a group, one after the other; windows by rank.
  ncclResult_t Register(const std::vector<std::vector<Range>>& by_rank,
                        std::vector<std::vector<ncclWindow_t>>* windows) {
    windows->assign(by_rank.size(), {});
    EXPECT_EQ(nccl_.GroupStart(), ncclSuccess);
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      (*windows)[rank].resize(by_rank[rank].size());
      for (size_t i = 0; i < by_rank[rank].size(); ++i) {
        const Range& range = by_rank[rank][i];
        EXPECT_EQ(nccl_.CommWindowRegister(comms_[rank], range.p, range.size_bytes, &(*windows)[rank][i],
                                           NCCL_WIN_COLL_SYMMETRIC),
                  ncclSuccess);
      }
    }
    EXPECT_EQ(nccl_.GroupEnd(), ncclInProgress);
    const ncclResult_t first = Ask(0);
    return first == ncclSuccess ? Ask(1) : first;
  }
  ncclResult_t Scatter(int rank, char* p) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    return nccl_.ReduceScatter(p, p + rank * 64, 16, ncclFloat32, ncclSum, comms_[rank], streams_[rank]);
  }

  FakeCudaWorld gpus_{/*delay_seed=*/3, kRanks, /*queue_limit=*/1024};
  const nccl::Table nccl_ = fake_nccl::Table();
  CUcontext contexts_[kRanks] = {};
  CUstream streams_[kRanks] = {};
  ncclComm_t comms_[kRanks] = {};
  char* buffers_[kRanks] = {};
  std::vector<std::vector<ncclWindow_t>> windows_;
};

TEST_F(FakeNcclWindowTest, WindowsExistOnceAllMembersCameAndGoWithEach) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), ncclSuccess);
  EXPECT_NE(windows_[0][0], nullptr);
  EXPECT_NE(windows_[0][0], windows_[1][0]);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[1][0]), ncclInvalidArgument) << "the other's";
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), ncclSuccess);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), ncclInvalidArgument) << "twice";
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[1], windows_[1][0]), ncclSuccess);
}

TEST_F(FakeNcclWindowTest, AnAbsentMemberLeavesTheOthersInProgress) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}}, {}}, &windows_), ncclInProgress);
  EXPECT_EQ(windows_[0][0], nullptr);
}

TEST_F(FakeNcclWindowTest, OtherSizesOrAnotherOrderOfThemAreRefused) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}, {buffers_[0] + kBytes, 4096}},
                      {{buffers_[1] + kBytes, 4096}, {buffers_[1], kBytes}}},
                     &windows_),
            ncclInvalidArgument);
  EXPECT_THAT(nccl_.GetLastError(nullptr), HasSubstr("window 0 is of 8192 bytes and of 4096"));
}

TEST_F(FakeNcclWindowTest, StartsThatAreNotAlignedAreRefused) {
  EXPECT_EQ(Register({{{buffers_[0] + 512, kBytes}}, {{buffers_[1] + 512, kBytes}}}, &windows_), ncclInvalidArgument);
  EXPECT_THAT(nccl_.GetLastError(nullptr), HasSubstr("suitably aligned"));
}

TEST_F(FakeNcclWindowTest, ABufferTwiceIsRefused) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}, {buffers_[0] + 4096, kBytes}},
                      {{buffers_[1], kBytes}, {buffers_[1] + 4096, kBytes}}},
                     &windows_),
            ncclInvalidArgument);
}

TEST_F(FakeNcclWindowTest, NothingIsRegisteredOutsideAGroupOrAfterAnAbort) {
  ncclWindow_t window = nullptr;
  const int symmetric = NCCL_WIN_COLL_SYMMETRIC;
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], buffers_[0], kBytes, &window, symmetric), ncclInvalidUsage);
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], nullptr, kBytes, &window, symmetric), ncclInvalidArgument);
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], buffers_[0], 0, &window, symmetric), ncclInvalidArgument);
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), ncclSuccess);
  const ncclComm_t aborted = comms_[0];
  ASSERT_EQ(nccl_.CommAbort(aborted), ncclSuccess);
  comms_[0] = nullptr;
  ncclResult_t result = ncclSuccess;
  EXPECT_EQ(nccl_.CommWindowDeregister(aborted, windows_[0][0]), ncclInvalidArgument);
  EXPECT_EQ(nccl_.CommWindowRegister(aborted, buffers_[0], kBytes, &window, symmetric), ncclInvalidArgument);
  EXPECT_EQ(nccl_.CommGetAsyncError(aborted, &result), ncclInvalidArgument);
}

TEST_F(FakeNcclWindowTest, AWindowThatASumReadsIsNotDeregistered) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), ncclSuccess);
  ASSERT_EQ(Scatter(0, buffers_[0]), ncclInProgress);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), ncclInvalidUsage) << "it waits for the other";
  ASSERT_EQ(Scatter(1, buffers_[1]), ncclInProgress);
  for (int rank = 0; rank < kRanks; ++rank) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    ASSERT_EQ(gpus_.driver()->StreamSynchronize(streams_[rank]), CUDA_SUCCESS);
    EXPECT_EQ(nccl_.CommWindowDeregister(comms_[rank], windows_[static_cast<size_t>(rank)][0]), ncclSuccess);
  }
  EXPECT_EQ(Ask(0), ncclSuccess);
}

TEST_F(FakeNcclWindowTest, MixingWindowAndOtherMemoryInASumIsRefused) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), ncclSuccess);
  ASSERT_EQ(Scatter(0, buffers_[0]), ncclInProgress);
  ASSERT_EQ(Scatter(1, buffers_[1] + kBytes), ncclInProgress);
  for (int rank = 0; rank < kRanks; ++rank) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    ASSERT_EQ(gpus_.driver()->StreamSynchronize(streams_[rank]), CUDA_SUCCESS);
  }
  EXPECT_EQ(Ask(0), ncclInvalidUsage);
}

}  // namespace
}  // namespace shardd
