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
    nccl::UniqueId id;
    ASSERT_EQ(nccl_.GetUniqueId(&id), nccl::kSuccess);
    ASSERT_EQ(nccl_.GroupStart(), nccl::kSuccess);
    for (int rank = 0; rank < kRanks; ++rank) {
      (void)gpus_.driver()->DevicePrimaryCtxRetain(&contexts_[rank], rank);
      const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
      nccl::Config config;
      config.blocking = 0;
      ASSERT_EQ(nccl_.CommInitRankConfig(&comms_[rank], kRanks, id, rank, &config), nccl::kInProgress);
      (void)gpus_.driver()->StreamCreateWithPriority(&streams_[rank], 1, 0);
      buffers_[rank] = static_cast<char*>(gpus_.memory()->allocate(4 * kBytes, 4096));
    }
    ASSERT_EQ(nccl_.GroupEnd(), nccl::kInProgress);
    ASSERT_EQ(Ask(0), nccl::kSuccess);
    ASSERT_EQ(Ask(1), nccl::kSuccess);
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
  nccl::Result Ask(int rank) {
    nccl::Result result = nccl::kInProgress;
    for (int i = 0; i < 3 && result == nccl::kInProgress; ++i) {
      EXPECT_EQ(nccl_.CommGetAsyncError(comms_[rank], &result), nccl::kSuccess);
    }
    return result;
  }
  struct Range {
    char* p;
    size_t size_bytes;
  };
  // In a group, one after the other; windows by rank.
  nccl::Result Register(const std::vector<std::vector<Range>>& by_rank,
                        std::vector<std::vector<nccl::Window>>* windows) {
    windows->assign(by_rank.size(), {});
    EXPECT_EQ(nccl_.GroupStart(), nccl::kSuccess);
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      (*windows)[rank].resize(by_rank[rank].size());
      for (size_t i = 0; i < by_rank[rank].size(); ++i) {
        const Range& range = by_rank[rank][i];
        EXPECT_EQ(nccl_.CommWindowRegister(comms_[rank], range.p, range.size_bytes, &(*windows)[rank][i],
                                           nccl::kWinCollSymmetric),
                  nccl::kSuccess);
      }
    }
    EXPECT_EQ(nccl_.GroupEnd(), nccl::kInProgress);
    const nccl::Result first = Ask(0);
    return first == nccl::kSuccess ? Ask(1) : first;
  }
  nccl::Result Scatter(int rank, char* p) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    return nccl_.ReduceScatter(p, p + rank * 64, 16, nccl::kFloat32, nccl::kSum, comms_[rank], streams_[rank]);
  }

  FakeCudaWorld gpus_{/*delay_seed=*/3, kRanks, /*queue_limit=*/1024};
  const nccl::Table nccl_ = fake_nccl::Table();
  cu::Context contexts_[kRanks] = {};
  cu::Stream streams_[kRanks] = {};
  nccl::Comm comms_[kRanks] = {};
  char* buffers_[kRanks] = {};
  std::vector<std::vector<nccl::Window>> windows_;
};

TEST_F(FakeNcclWindowTest, WindowsExistOnceAllMembersCameAndGoWithEach) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), nccl::kSuccess);
  EXPECT_NE(windows_[0][0], nullptr);
  EXPECT_NE(windows_[0][0], windows_[1][0]);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[1][0]), nccl::kInvalidArgument) << "the other's";
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), nccl::kSuccess);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), nccl::kInvalidArgument) << "twice";
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[1], windows_[1][0]), nccl::kSuccess);
}

TEST_F(FakeNcclWindowTest, AnAbsentMemberLeavesTheOthersInProgress) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}}, {}}, &windows_), nccl::kInProgress);
  EXPECT_EQ(windows_[0][0], nullptr);
}

TEST_F(FakeNcclWindowTest, OtherSizesOrAnotherOrderOfThemAreRefused) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}, {buffers_[0] + kBytes, 4096}},
                      {{buffers_[1] + kBytes, 4096}, {buffers_[1], kBytes}}},
                     &windows_),
            nccl::kInvalidArgument);
  EXPECT_THAT(nccl_.GetLastError(nullptr), HasSubstr("window 0 is of 8192 bytes and of 4096"));
}

TEST_F(FakeNcclWindowTest, StartsThatAreNotAlignedAreRefused) {
  EXPECT_EQ(Register({{{buffers_[0] + 512, kBytes}}, {{buffers_[1] + 512, kBytes}}}, &windows_),
            nccl::kInvalidArgument);
  EXPECT_THAT(nccl_.GetLastError(nullptr), HasSubstr("suitably aligned"));
}

TEST_F(FakeNcclWindowTest, ABufferTwiceIsRefused) {
  EXPECT_EQ(Register({{{buffers_[0], kBytes}, {buffers_[0] + 4096, kBytes}},
                      {{buffers_[1], kBytes}, {buffers_[1] + 4096, kBytes}}},
                     &windows_),
            nccl::kInvalidArgument);
}

TEST_F(FakeNcclWindowTest, NothingIsRegisteredOutsideAGroupOrAfterAnAbort) {
  nccl::Window window = nullptr;
  const int symmetric = nccl::kWinCollSymmetric;
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], buffers_[0], kBytes, &window, symmetric), nccl::kInvalidUsage);
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], nullptr, kBytes, &window, symmetric), nccl::kInvalidArgument);
  EXPECT_EQ(nccl_.CommWindowRegister(comms_[0], buffers_[0], 0, &window, symmetric), nccl::kInvalidArgument);
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), nccl::kSuccess);
  const nccl::Comm aborted = comms_[0];
  ASSERT_EQ(nccl_.CommAbort(aborted), nccl::kSuccess);
  comms_[0] = nullptr;
  nccl::Result result = nccl::kSuccess;
  EXPECT_EQ(nccl_.CommWindowDeregister(aborted, windows_[0][0]), nccl::kInvalidArgument);
  EXPECT_EQ(nccl_.CommWindowRegister(aborted, buffers_[0], kBytes, &window, symmetric), nccl::kInvalidArgument);
  EXPECT_EQ(nccl_.CommGetAsyncError(aborted, &result), nccl::kInvalidArgument);
}

TEST_F(FakeNcclWindowTest, AWindowThatASumReadsIsNotDeregistered) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), nccl::kSuccess);
  ASSERT_EQ(Scatter(0, buffers_[0]), nccl::kInProgress);
  EXPECT_EQ(nccl_.CommWindowDeregister(comms_[0], windows_[0][0]), nccl::kInvalidUsage) << "it waits for the other";
  ASSERT_EQ(Scatter(1, buffers_[1]), nccl::kInProgress);
  for (int rank = 0; rank < kRanks; ++rank) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    ASSERT_EQ(gpus_.driver()->StreamSynchronize(streams_[rank]), cu::kSuccess);
    EXPECT_EQ(nccl_.CommWindowDeregister(comms_[rank], windows_[static_cast<size_t>(rank)][0]), nccl::kSuccess);
  }
  EXPECT_EQ(Ask(0), nccl::kSuccess);
}

TEST_F(FakeNcclWindowTest, MixingWindowAndOtherMemoryInASumIsRefused) {
  ASSERT_EQ(Register({{{buffers_[0], kBytes}}, {{buffers_[1], kBytes}}}, &windows_), nccl::kSuccess);
  ASSERT_EQ(Scatter(0, buffers_[0]), nccl::kInProgress);
  ASSERT_EQ(Scatter(1, buffers_[1] + kBytes), nccl::kInProgress);
  for (int rank = 0; rank < kRanks; ++rank) {
    const ScopedCudaContext current(gpus_.driver(), contexts_[rank]);
    ASSERT_EQ(gpus_.driver()->StreamSynchronize(streams_[rank]), cu::kSuccess);
  }
  EXPECT_EQ(Ask(0), nccl::kInvalidUsage);
}

}  // namespace
}  // namespace shardd
