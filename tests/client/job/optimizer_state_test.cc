// State of the daemon's optimizer that is loaded through the C ABI: what the next update makes of it.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

constexpr int64_t kNumel = 15;  // of "head"

v1::JobSpec AdamSpec(const std::string& name) {
  v1::JobSpec spec = SmallSpec(name, 1);
  spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  return spec;
}

// One update of "head" with gradients of `gradient`.
void StepWith(Rank& rank, float gradient) {
  const int param = rank.Param("head");
  const int group = rank.ParamInfo(param).group;
  rank.Unshard(group, SHARDD_BACKWARD);
  ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
  std::fill_n(static_cast<float*>(shardd_gradient_data(rank.job(), param)), kNumel, gradient);
  const uint8_t present = static_cast<uint8_t>(1u << rank.ParamInfo(param).index_in_group);
  ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, &present, nullptr));
  ASSERT_C_OK(shardd_reshard(rank.job(), group));
  ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
  shardd_hyperparameters values = Sgd(0.5);
  values.beta1 = 0.5;
  values.beta2 = 0.5;
  ASSERT_C_OK(shardd_step(rank.job(), &values, 1, 0, nullptr, 0));
  shardd_step_result result = {};
  result.struct_size = sizeof(result);
  ASSERT_C_OK(shardd_wait_step(rank.job(), &result));
}

float State(Rank& rank, int state) {
  return *static_cast<const float*>(shardd_optimizer_state_data(rank.job(), rank.Param("head"), state));
}

std::string Describe(Rank& rank) {
  char* json = nullptr;
  EXPECT_C_OK(shardd_describe_job(rank.job(), &json));
  std::string text = json;
  shardd_string_free(json);
  return text;
}

void Load(Rank& rank, float exp_avg, float exp_avg_sq, int64_t updates) {
  const int param = rank.Param("head");
  const std::vector<float> first(kNumel, exp_avg);
  const std::vector<float> second(kNumel, exp_avg_sq);
  ASSERT_C_OK(shardd_enter_full_params(rank.job(), 1));
  ASSERT_C_OK(shardd_write_optimizer_state(rank.job(), param, 0, first.data(), 0, kNumel));
  ASSERT_C_OK(shardd_write_optimizer_state(rank.job(), param, 1, second.data(), 0, kNumel));
  ASSERT_C_OK(shardd_write_update_count(rank.job(), param, updates));
}

TEST(OptimizerState, TheNextUpdateStartsFromLoadedMomentsAndCount) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), AdamSpec("load"), 0));
  rank.WriteAll(1);
  Load(rank, 2, 4, 3);
  ASSERT_C_OK(shardd_commit_parameters(rank.job()));
  ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  EXPECT_NE(Describe(rank).find("\"update_counts\":[\"3\""), std::string::npos) << Describe(rank);
  StepWith(rank, 2);
  // exp_avg stays 2, exp_avg_sq 4; the bias corrections are those of the fourth update.
  EXPECT_EQ(State(rank, 0), 2);
  EXPECT_EQ(State(rank, 1), 4);
  const double correction = 1 - std::pow(0.5, 4);
  const double want = 1 - 0.5 / correction * 2 / std::sqrt(4 / correction);
  EXPECT_NEAR(*static_cast<const float*>(shardd_stored_parameter_data(rank.job(), rank.Param("head"))), want, 1e-6);
  EXPECT_NE(Describe(rank).find("\"update_counts\":[\"4\""), std::string::npos);
}

TEST(OptimizerState, WritesThatNobodyCommittedAreUndone) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), AdamSpec("undo"), 0));
  rank.WriteAll(1);
  StepWith(rank, 2);
  Load(rank, 9, 9, 7);
  ASSERT_C_OK(shardd_detach(rank.Release(), 0));
  ASSERT_C_OK(rank.Attach(daemon.address(), AdamSpec("undo"), 0));
  EXPECT_EQ(State(rank, 0), 1);  // (1 - beta1) * 2
  EXPECT_EQ(State(rank, 1), 2);  // (1 - beta2) * 2 * 2
  EXPECT_NE(Describe(rank).find("\"update_counts\":[\"1\""), std::string::npos) << Describe(rank);
}

TEST(OptimizerState, WhatIsNotThereIsRefused) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), AdamSpec("refused"), 0));
  const float value = 1;
  EXPECT_C_ERROR(shardd_write_optimizer_state(rank.job(), rank.Param("head"), 2, &value, 0, 1), kInvalidArgument,
                 "no such state (got 2, want less than 2");
  EXPECT_C_ERROR(shardd_write_optimizer_state(rank.job(), rank.Param("frozen"), 0, &value, 0, 1), kInvalidArgument,
                 "want less than 0");
  EXPECT_C_ERROR(shardd_write_update_count(rank.job(), rank.Param("frozen"), 1), kInvalidArgument, "frozen");
  EXPECT_C_ERROR(shardd_write_update_count(rank.job(), rank.Param("head"), -1), kInvalidArgument, "out of range");
  rank.WriteAll(1);
  EXPECT_C_ERROR(shardd_write_optimizer_state(rank.job(), rank.Param("head"), 0, &value, 0, 1), kFailedPrecondition,
                 "cannot be written now");
}

}  // namespace
}  // namespace shardd::testing_client
