// Gradient shards whose memory went back to the system: what is read of them, and that the next sums are right.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

constexpr int64_t kRows = 512;
constexpr int64_t kNumel = kRows * 512;  // 1 MiB

// SmallSpec with a head of that size, SGD.
v1::JobSpec LargeSpec(const std::string& name, int world_size) {
  v1::JobSpec spec = SmallSpec(name, world_size);
  v1::Parameter* head = spec.mutable_tree()->mutable_modules(0)->mutable_parameters(0);
  head->set_shape(0, kRows);
  head->set_shape(1, kNumel / kRows);
  return spec;
}

class GiveBackTest : public ::testing::Test {
 protected:
  void Attach(int world_size) {
    world_ = world_size;
    ForEachRank(world_, [&](int r) {
      ASSERT_C_OK(ranks_[r].Attach(daemon_.address(), LargeSpec("job", world_), r));
      ranks_[r].WriteAll(1);
    });
  }
  int head(int r) const { return ranks_[r].Param("head"); }
  float* Gradient(int r) { return static_cast<float*>(shardd_gradient_shard_data(ranks_[r].job(), head(r))); }
  shardd_shard_range Range(int r) {
    shardd_shard_range range = {};
    range.struct_size = sizeof(range);
    EXPECT_C_OK(shardd_get_shard_range(ranks_[r].job(), head(r), &range));
    return range;
  }
  // Whole pages of the rank's rows that are in memory.
  int64_t PagesThere(int r) {
    const shardd_shard_range range = Range(r);
    const auto begin = (reinterpret_cast<uintptr_t>(Gradient(r) + range.gradient_first) + 4095) / 4096 * 4096;
    const auto end =
        reinterpret_cast<uintptr_t>(Gradient(r) + range.gradient_first + range.gradient_numel) / 4096 * 4096;
    std::vector<unsigned char> there((end - begin) / 4096);
    EXPECT_EQ(mincore(reinterpret_cast<void*>(begin), end - begin, there.data()), 0);
    return std::count_if(there.begin(), there.end(), [](unsigned char page) { return (page & 1) != 0; });
  }
  Result GiveBack(int r) { return shardd_give_back_gradient(ranks_[r].job(), head(r)); }
  // A backward with gradients of `value` in "head"; `add`: to what there is.
  void Backward(int r, float value, bool add = false, bool present = true) {
    Rank& rank = ranks_[r];
    const int group = rank.ParamInfo(head(r)).group;
    rank.Unshard(group, SHARDD_BACKWARD);
    ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
    std::fill_n(static_cast<float*>(shardd_gradient_data(rank.job(), head(r))), kNumel, value);
    const uint8_t bit = static_cast<uint8_t>(1u << rank.ParamInfo(head(r)).index_in_group);
    const uint8_t mask = present ? bit : 0;
    const uint8_t fresh = add ? 0 : bit;
    ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, &mask, &fresh));
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
    ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
    ASSERT_C_OK(shardd_wait_gradients(rank.job()));
  }
  void Step(int r, double max_grad_norm = 0) {
    const shardd_hyperparameters values = Sgd(0.5);
    ASSERT_C_OK(shardd_step(ranks_[r].job(), &values, 1, max_grad_norm, nullptr, 0));
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    ASSERT_C_OK(shardd_wait_step(ranks_[r].job(), &result));
  }
  void ExpectGradient(int r, float want) {
    const float* const gradient = Gradient(r);
    EXPECT_EQ(std::count(gradient, gradient + kNumel, want), kNumel) << "first: " << gradient[0];
  }
  void ExpectParameter(int r, float want) {
    const auto* stored = static_cast<const float*>(shardd_stored_parameter_data(ranks_[r].job(), head(r)));
    EXPECT_EQ(std::count(stored, stored + kNumel, want), kNumel) << "first: " << stored[0] << ", want " << want;
  }

  Daemon daemon_;
  int world_ = 0;
  Rank ranks_[2];
};

TEST_F(GiveBackTest, PagesGoAfterTheStepAndReturnWithNewSums) {
  Attach(2);
  ForEachRank(2, [&](int r) {
    Backward(r, 2);
    Step(r);
    ExpectParameter(r, 0);  // 1 - 0.5 * 2
    const int64_t pages = PagesThere(r);
    EXPECT_GE(pages, kNumel / 2 * 4 / 4096 - 2);
    ASSERT_C_OK(GiveBack(r));
    EXPECT_EQ(PagesThere(r), 0);
    Backward(r, 4);
    EXPECT_EQ(PagesThere(r), pages);
    ExpectGradient(r, 4);
    Backward(r, 2, /*add=*/true);
    ExpectGradient(r, 6);
    Step(r);
    ExpectParameter(r, -3);
  });
}

TEST_F(GiveBackTest, GivenBackPagesReadZeroAndMayGoAgain) {
  Attach(1);
  Backward(0, 2);
  Step(0);
  ExpectGradient(0, 2);  // as the step has left it
  ASSERT_C_OK(GiveBack(0));
  ASSERT_C_OK(GiveBack(0));
  const float* const gradient = Gradient(0);
  EXPECT_GE(std::count(gradient, gradient + kNumel, 0.0f), kNumel - 2048);
}

TEST_F(GiveBackTest, OneRankMayGiveBackAndAnotherNot) {
  Attach(2);
  ForEachRank(2, [&](int r) {
    Backward(r, 2);
    Step(r);
    if (r == 0) {
      ASSERT_C_OK(GiveBack(r));
    }
    Backward(r, 4);
    ExpectGradient(r, 4);
  });
}

TEST_F(GiveBackTest, WhoHasClosedABackwardHasPerhapsOthersGradients) {
  Attach(2);
  ForEachRank(2, [&](int r) {
    Backward(r, 2);
    Step(r);
    ASSERT_C_OK(GiveBack(r));
    ASSERT_C_OK(shardd_backward_done(ranks_[r].job(), 0));
    const Result refused = GiveBack(r);
    EXPECT_EQ(refused.code(), kFailedPrecondition);
  });
}

TEST_F(GiveBackTest, ARankWithoutAContributionCountsAsZero) {
  Attach(2);
  ForEachRank(2, [&](int r) {
    Backward(r, 2);
    Step(r);
    ASSERT_C_OK(GiveBack(r));
    Backward(r, 4, /*add=*/false, /*present=*/r == 0);
    ExpectGradient(r, 2);  // half of rank 0's
    Step(r);
    ExpectParameter(r, -1);
  });
}

TEST_F(GiveBackTest, TheStepTakesAGradientThatTheTrainerWrote) {
  Attach(1);
  Backward(0, 2);
  Step(0);
  ASSERT_C_OK(GiveBack(0));
  std::fill_n(Gradient(0), kNumel, 8.0f);
  ASSERT_C_OK(shardd_set_gradient_presence(ranks_[0].job(), head(0), 1));
  EXPECT_C_ERROR(GiveBack(0), kFailedPrecondition, "the running step has gradients");
  Step(0);
  ExpectParameter(0, -4);
  ASSERT_C_OK(GiveBack(0));
}

TEST_F(GiveBackTest, WhatAStepWillTakeIsRefused) {
  Attach(1);
  Backward(0, 2);
  EXPECT_C_ERROR(GiveBack(0), kFailedPrecondition, "the running step has gradients");
  ExpectGradient(0, 2);
  ASSERT_C_OK(shardd_abandon_backward(ranks_[0].job()));  // what was closed stays
  EXPECT_C_ERROR(GiveBack(0), kFailedPrecondition, "the running step has gradients");
  Step(0);
  ASSERT_C_OK(shardd_enter_full_params(ranks_[0].job(), 0));
  EXPECT_C_ERROR(GiveBack(0), kFailedPrecondition, "full parameters are entered");
  ASSERT_C_OK(shardd_leave_full_params(ranks_[0].job()));
  ASSERT_C_OK(GiveBack(0));
  EXPECT_C_OK(shardd_give_back_gradient(ranks_[0].job(), ranks_[0].Param("frozen")));
}

}  // namespace
}  // namespace shardd::testing_client
