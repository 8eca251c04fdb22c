// Values: what is written, trained and read back, over ranks, modes and ties.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/c/shardd.h"
#include "client/cpp/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

// One forward and backward over all groups with gradients of `value` everywhere.
void Pass(Rank& rank, float value) {
  ASSERT_NO_FATAL_FAILURE(Forward(rank));
  ASSERT_NO_FATAL_FAILURE(SubmitAll(rank, value, Gradients::kAdded));
}

void Train(const v1::JobSpec& spec) {
  World world(spec);
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    for (int step = 1; step <= 3; ++step) {
      Pass(rank, index == 0 ? 1.0f : 3.0f);
      ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
      const shardd_hyperparameters group = Sgd(0.125);
      const std::string state = "rank " + std::to_string(index) + " step " + std::to_string(step);
      ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 0, state.data(), state.size()));
    }
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    ASSERT_C_OK(shardd_wait_step(rank.job(), &result));
    EXPECT_EQ(result.committed_step, 3);
    EXPECT_EQ(result.clip_factor, 1);
    EXPECT_EQ(rank.Info().committed_step, 3);
    size_t size = 0;
    const void* state = shardd_trainer_state(rank.job(), &size);
    EXPECT_EQ(std::string(static_cast<const char*>(state), size), "rank " + std::to_string(index) + " step 3");
    const int group = rank.Group("b");
    rank.Unshard(group, SHARDD_FORWARD);
    // The mean gradient is 2; every value here is exact in binary.
    EXPECT_EQ(rank.First(rank.Param("b.weight")), 1 - 3 * 0.125f * 2);
    EXPECT_EQ(rank.First(rank.Param("b.bias")), 1 - 3 * 0.125f * 2);
  });
}

TEST(Training, TwoRanksStepWithTheMeanOfTheirGradients) { Train(SmallSpec("job", 2)); }

TEST(Training, ThePooledModeGivesTheSame) {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.mutable_config()->set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  spec.mutable_config()->set_forward_prefetch(true);
  Train(spec);
}

TEST(Training, LowerPrecisionReadsTheCastCopy) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_config()->mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  World world(spec);
  Rank& rank = world.ranks[0];
  rank.WriteAll(1.5);
  rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
  const int weight = rank.Param("a.weight");
  EXPECT_EQ(rank.ParamInfo(weight).unsharded_dtype, SHARDD_BFLOAT16);
  EXPECT_EQ(static_cast<const uint16_t*>(shardd_parameter_data(rank.job(), weight))[100], 0x3fc0);
}

TEST(Training, AccumulationAddsUpOverBackwards) {
  World world(SmallSpec("job", 2));
  world.Each([](int, Rank& rank) {
    rank.WriteAll(1);
    for (int micro = 0; micro < 4; ++micro) {
      Pass(rank, 0.25f);
      ASSERT_C_OK(shardd_backward_done(rank.job(), micro == 3));
    }
    const shardd_hyperparameters group = Sgd(0.5);
    ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 0, nullptr, 0));
    rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
    EXPECT_EQ(rank.First(rank.Param("a.weight")), 0.5f);
  });
}

TEST(Training, ClippingReportsTheNormAndTheFactor) {
  World world(SmallSpec("job", 2));
  world.Each([](int, Rank& rank) {
    rank.WriteAll(1);
    Pass(rank, 2);
    ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
    const shardd_hyperparameters group = Sgd(0.5);
    ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 1.0, nullptr, 0));
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    ASSERT_C_OK(shardd_wait_step(rank.job(), &result));
    const double norm = 2 * std::sqrt(15 + 2 * (33 * 17 + 33));
    EXPECT_NEAR(result.grad_norm, norm, 1e-4);
    EXPECT_NEAR(result.clip_factor, 1 / norm, 1e-5);
  });
}

TEST(Training, AParameterAbsentOnAllRanksKeepsItsValue) {
  World world(SmallSpec("job", 2));
  world.Each([](int, Rank& rank) {
    rank.WriteAll(1);
    const int group = rank.Group("a");
    rank.Unshard(group, SHARDD_FORWARD);
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
    ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
    FillGradients(rank, group, 1000);
    const int weight = rank.Param("a.weight");
    std::fill_n(static_cast<float*>(shardd_gradient_data(rank.job(), weight)), 33 * 17, 1.0f);
    const uint8_t present = static_cast<uint8_t>(1 << rank.ParamInfo(weight).index_in_group);
    ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, &present, nullptr));
    ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
    const shardd_hyperparameters sgd = Sgd(0.5);
    ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
    rank.Unshard(group, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(weight), 0.5f);
    EXPECT_EQ(rank.First(rank.Param("a.bias")), 1);
  });
}

TEST(Training, ParametersLargerThanTheStagingAreaArriveWhole) {
  v1::JobSpec spec = SmallSpec("job", 1);
  v1::Parameter* weight = spec.mutable_tree()->mutable_modules(1)->mutable_parameters(0);
  weight->set_shape(0, 1000);
  weight->set_shape(1, 1003);  // 4 MB: several chunks
  World world(spec);
  Rank& rank = world.ranks[0];
  std::vector<float> values(1000 * 1003);
  std::iota(values.begin(), values.end(), 1.0f);
  rank.WriteAll(0);
  ASSERT_C_OK(shardd_enter_full_params(rank.job(), 1));
  ASSERT_C_OK(shardd_write_parameter(rank.job(), rank.Param("a.weight"), values.data(), 0,
                                     static_cast<int64_t>(values.size())));
  ASSERT_C_OK(shardd_commit_parameters(rank.job()));
  ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
  const float* got = static_cast<const float*>(shardd_parameter_data(rank.job(), rank.Param("a.weight")));
  EXPECT_TRUE(std::equal(values.begin(), values.end(), got));
}

TEST(Training, ManySmallWritesShareTheStagingArea) {
  World world(SmallSpec("job", 1));
  Rank& rank = world.ranks[0];
  std::vector<float> values(33 * 17);
  std::iota(values.begin(), values.end(), 1.0f);
  const int weight = rank.Param("b.weight");
  for (int round = 0; round < 20; ++round) {
    for (int64_t i = 0; i < 33 * 17; ++i) {
      ASSERT_C_OK(shardd_write_parameter(rank.job(), weight, &values[static_cast<size_t>(i)], i, 1));
    }
  }
  ASSERT_C_OK(shardd_commit_parameters(rank.job()));
  rank.Unshard(rank.Group("b"), SHARDD_FORWARD);
  EXPECT_TRUE(
      std::equal(values.begin(), values.end(), static_cast<const float*>(shardd_parameter_data(rank.job(), weight))));
}

TEST(Training, TiedParametersAreUnshardedWithEveryGroupThatUsesThem) {
  for (const v1::UnshardMode mode : {v1::UNSHARD_MODE_ZERO_COPY, v1::UNSHARD_MODE_POOLED}) {
    v1::JobSpec spec = SmallSpec("job", 1);
    spec.mutable_config()->set_unshard_mode(mode);
    // b.weight is a.weight.
    for (const int module : {1, 2}) {
      spec.mutable_tree()->mutable_modules(module)->mutable_parameters(0)->set_storage_id(77);
    }
    World world(spec);
    Rank& rank = world.ranks[0];
    const int a = rank.Group("a");
    const int b = rank.Group("b");
    const int weight = rank.Param("b.weight");
    EXPECT_EQ(weight, rank.Param("a.weight"));
    const shardd_group_info info = rank.GroupInfo(b);
    ASSERT_EQ(info.also_unshard_count, 1);
    EXPECT_EQ(info.also_unshards[0], a);
    const shardd_param_info param = rank.ParamInfo(weight);
    ASSERT_EQ(param.alias_count, 1);
    EXPECT_STREQ(param.aliases[0], "b.weight");
    rank.WriteAll(3);
    rank.Unshard(b, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(weight), 3);
    rank.Unshard(a, SHARDD_FORWARD);
    ASSERT_C_OK(shardd_reshard(rank.job(), a));
    EXPECT_EQ(rank.First(weight), 3);  // b still needs it
    ASSERT_C_OK(shardd_reshard(rank.job(), b));
    EXPECT_EQ(shardd_parameter_data(rank.job(), weight), nullptr);
  }
}

TEST(Training, ParameterNamesHoldEveryNameOfATiedParameter) {
  v1::JobSpec spec = SmallSpec("job", 1);
  for (const int module : {1, 2}) {
    spec.mutable_tree()->mutable_modules(module)->mutable_parameters(0)->set_storage_id(77);
  }
  Daemon daemon(1);
  Job::Options options;
  options.spec_json = ToJson(spec);
  options.rank = 0;
  options.address = daemon.address();
  std::unique_ptr<Job> job;
  const Status status = Job::Attach(options, &job);
  ASSERT_TRUE(status.ok()) << status.message();
  const int32_t shared = job->FindParameter("a.weight");
  const std::vector<std::pair<std::string, int32_t>> want = {{"head", job->FindParameter("head")},
                                                             {"frozen", job->FindParameter("frozen")},
                                                             {"a.weight", shared},
                                                             {"b.weight", shared},
                                                             {"a.bias", job->FindParameter("a.bias")},
                                                             {"b.bias", job->FindParameter("b.bias")}};
  EXPECT_EQ(job->ParameterNames(), want);
}

// A body that throws, as torch code does, must not leave the other ranks waiting for this one to leave.
TEST(Training, ABodyThatThrowsLeavesTheFullParameters) {
  Daemon daemon(1);
  Job::Options options;
  options.spec_json = ToJson(SmallSpec("job", 1));
  options.rank = 0;
  options.address = daemon.address();
  std::unique_ptr<Job> job;
  Status status = Job::Attach(options, &job);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(job->CommitParameters().ok());
  EXPECT_THROW((void)job->UnshardParams(false, [] { throw std::runtime_error("no memory"); }), std::runtime_error);
  status = job->group(0).Unshard(SHARDD_FORWARD);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Training, ADelayedRankHoldsNobodyUpBeforeTheCommit) {
  World world(SmallSpec("job", 2));
  std::atomic<bool> first_has_stepped{false};
  world.Each([&](int index, Rank& rank) {
    rank.WriteAll(1);
    if (index == 1) {
      // Rank 0's whole step is sent before this rank begins: it reads version 1 all the same.
      EXPECT_TRUE(Eventually([&] { return first_has_stepped.load(); }));
    }
    const int group = rank.Group("a");
    rank.Unshard(group, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(rank.Param("a.weight")), 1);
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
    FillGradients(rank, group, 1);
    ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, nullptr, nullptr));
    ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
    const shardd_hyperparameters sgd = Sgd(0.5);
    ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
    first_has_stepped = true;
    rank.Unshard(group, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(rank.Param("a.weight")), 0.5f);
  });
}

// Gradients of a loss times 8; one rank's overflows in the second step.
TEST(Training, GradientsAreUnscaledAndAnInfiniteOneSkipsTheUpdate) {
  World world(SmallSpec("scaled", 2));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    const shardd_hyperparameters group = Sgd(0.125);
    LossScaler scaler(8, 2, 0.5, 2);
    for (int step = 1; step <= 4; ++step) {
      const bool overflows = step == 2;
      Pass(rank, overflows && index == 1 ? INFINITY : static_cast<float>(2 * scaler.scale()));
      ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
      shardd_step_options options = {};
      options.struct_size = sizeof(options);
      options.groups = &group;
      options.group_count = 1;
      options.loss_scale = scaler.scale();
      ASSERT_C_OK(shardd_step_with(rank.job(), &options));
      shardd_step_result result = {};
      result.struct_size = sizeof(result);
      ASSERT_C_OK(shardd_wait_step(rank.job(), &result));
      EXPECT_EQ(result.committed_step, step) << "a skipped step counts";
      EXPECT_EQ(result.skipped, overflows ? 1 : 0);
      EXPECT_EQ(std::isfinite(result.grad_norm), !overflows);
      scaler.Update(result.skipped != 0);
      EXPECT_EQ(scaler.scale(), step == 1 ? 8 : step == 4 ? 8 : 4) << "step " << step;
    }
    const int b = rank.Group("b");
    rank.Unshard(b, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(rank.GroupInfo(b).params[0]), 1 - 3 * 0.125f * 2) << "three updates by a gradient of 2";
    ASSERT_C_OK(shardd_reshard(rank.job(), b));
    shardd_step_options options = {};
    options.struct_size = sizeof(options);
    options.groups = &group;
    options.group_count = 1;
    options.loss_scale = -1;
    EXPECT_C_ERROR(shardd_step_with(rank.job(), &options), kInvalidArgument, "loss_scale");
  });
}

}  // namespace
}  // namespace shardd::testing_client
