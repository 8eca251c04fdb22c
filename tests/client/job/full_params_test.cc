// Full parameters in every combination that has a meaning, through the C ABI and a real daemon.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

shardd_full_params_options Options() {
  shardd_full_params_options options = {};
  options.struct_size = sizeof(options);
  options.group = -1;
  options.recurse = 1;
  return options;
}

const float* Value(Rank& rank, const char* fqn) {
  return static_cast<const float*>(shardd_full_parameter_data(rank.job(), rank.Param(fqn)));
}
const float* Gradient(Rank& rank, const char* fqn) {
  return static_cast<const float*>(shardd_full_gradient_data(rank.job(), rank.Param(fqn)));
}

void Backward(Rank& rank, float value, const char* only = nullptr) {
  for (int group = rank.Info().group_count - 1; group >= 0; --group) {
    if (only != nullptr && group != rank.Group(only)) {
      continue;
    }
    rank.Unshard(group, SHARDD_BACKWARD);
    ASSERT_NO_FATAL_FAILURE(SubmitGradients(rank, group, value, Gradients::kAdded));
  }
  ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
}

void Write(Rank& rank, const char* fqn, float value) {
  const int param = rank.Param(fqn);
  const std::vector<float> values(static_cast<size_t>(rank.ParamInfo(param).numel), value);
  ASSERT_C_OK(shardd_write_parameter(rank.job(), param, values.data(), 0, static_cast<int64_t>(values.size())));
}

TEST(FullParams, OnlyRecurseAddsTheParametersBeneathAModule) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    shardd_full_params_options options = Options();
    options.group = rank.Group("a");
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    EXPECT_NE(Value(rank, "a.weight"), nullptr);
    EXPECT_EQ(Value(rank, "b.weight"), nullptr);
    EXPECT_EQ(Value(rank, "head"), nullptr);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_EQ(Value(rank, "a.weight"), nullptr);

    options.group = rank.Group("(root)");
    options.recurse = 0;
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    EXPECT_EQ(Value(rank, "a.weight"), nullptr);
    EXPECT_NE(Value(rank, "head"), nullptr);
    EXPECT_NE(Value(rank, "frozen"), nullptr);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  });
}

TEST(FullParams, OnRankZeroOnlyTheOthersAreGivenNothing) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    for (const int offload : {0, 1}) {
      shardd_full_params_options options = Options();
      options.rank0_only = 1;
      options.offload_to_cpu = offload;
      ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
      EXPECT_EQ(Value(rank, "a.weight") != nullptr, index == 0);
      ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    }
  });
}

TEST(FullParams, WhatRankZeroAloneWritesIsEverybodysAfterTheCommit) {
  for (const bool bf16 : {false, true}) {
    v1::JobSpec spec = SmallSpec("job", kWorld);
    if (bf16) {
      spec.mutable_config()->mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    }
    FilledWorld world(spec);
    world.Each([&](int index, Rank& rank) {
      shardd_full_params_options options = Options();
      options.rank0_only = 1;
      options.writeback = 1;
      ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
      if (index == 0) {
        Write(rank, "a.weight", 5);
      } else {
        const float one = 1;
        EXPECT_C_ERROR(shardd_write_parameter(rank.job(), rank.Param("a.weight"), &one, 0, 1), kFailedPrecondition,
                       "rank 0 alone writes (rank0_only");
      }
      ASSERT_C_OK(shardd_commit_parameters(rank.job()));
      ASSERT_C_OK(shardd_leave_full_params(rank.job()));
      const int param = rank.Param("a.weight");
      const auto* stored = static_cast<const float*>(shardd_stored_parameter_data(rank.job(), param));
      EXPECT_EQ(stored[0], 5);
      EXPECT_EQ(stored[rank.ParamInfo(param).numel - 1], 5) << "the other rank's shard too";
      rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
      const void* unsharded = shardd_parameter_data(rank.job(), param);
      EXPECT_EQ(bf16 ? static_cast<const uint16_t*>(unsharded)[0] : static_cast<const float*>(unsharded)[0],
                bf16 ? 0x40a0 : 5);
      ASSERT_C_OK(shardd_reshard(rank.job(), rank.Group("a")));
      EXPECT_EQ(rank.Info().version, 2u);
    });
  }
}

TEST(FullParams, AModulesWritebackHarmlesslyRefusesOtherParametersByName) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    shardd_full_params_options options = Options();
    options.group = rank.Group("a");
    options.writeback = 1;
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    const float one = 1;
    EXPECT_C_ERROR(shardd_write_parameter(rank.job(), rank.Param("b.bias"), &one, 0, 1), kFailedPrecondition,
                   "\"b.bias\": not among the parameters of group \"a\"");
    Write(rank, "a.bias", 3);
    ASSERT_C_OK(shardd_commit_parameters(rank.job()));
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_EQ(rank.Info().epoch, 1u);
  });
}

TEST(FullParams, FullGradientsAreTheReducedOnesOrNullWithoutAny) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    Backward(rank, index == 0 ? 2 : 4, "a");
    Backward(rank, index == 0 ? 2 : 4, "a");
    shardd_full_params_options options = Options();
    options.with_grads = 1;
    options.offload_to_cpu = 1;
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    ASSERT_NE(Gradient(rank, "a.weight"), nullptr);
    EXPECT_EQ(Gradient(rank, "a.weight")[0], 6);
    EXPECT_EQ(Gradient(rank, "a.weight")[33 * 17 - 1], 6);
    EXPECT_EQ(Gradient(rank, "b.weight"), nullptr);
    EXPECT_EQ(Gradient(rank, "frozen"), nullptr);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_EQ(Gradient(rank, "a.weight"), nullptr);
  });
}

TEST(FullParams, GradientsThatAreWrittenAreThoseOfTheStep) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    Backward(rank, 2, "a");
    shardd_full_params_options options = Options();
    options.with_grads = 1;
    options.writeback = 1;
    options.rank0_only = 1;
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    if (index == 0) {
      const std::vector<float> tens(33, 10.0f);
      ASSERT_C_OK(shardd_write_gradient(rank.job(), rank.Param("a.bias"), tens.data(), 0, 33));
      ASSERT_C_OK(shardd_write_gradient(rank.job(), rank.Param("b.bias"), tens.data(), 30, 3));  // was absent
      EXPECT_C_ERROR(shardd_write_gradient(rank.job(), rank.Param("frozen"), tens.data(), 0, 1), kFailedPrecondition,
                     "the parameter is frozen");
      EXPECT_C_ERROR(shardd_write_gradient(rank.job(), rank.Param("b.bias"), tens.data(), 30, 4), kInvalidArgument,
                     "range is outside of it");
    }
    ASSERT_C_OK(shardd_commit_parameters(rank.job()));
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    const shardd_hyperparameters group = Sgd(1);
    ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 0, nullptr, 0));
    ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
    const auto stored = [&](const char* fqn, int at) {
      return static_cast<const float*>(shardd_stored_parameter_data(rank.job(), rank.Param(fqn)))[at];
    };
    EXPECT_EQ(stored("a.weight", 0), -1);
    EXPECT_EQ(stored("a.bias", 32), 1 - 10);
    EXPECT_EQ(stored("b.bias", 29), 1) << "zero where nobody wrote";
    EXPECT_EQ(stored("b.bias", 30), 1 - 10);
    EXPECT_EQ(stored("b.weight", 0), 1);
  });
}

TEST(FullParams, MeaninglessCallsAreHarmlesslyRefusedByName) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    shardd_full_params_options options = Options();
    options.recurse = 0;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kInvalidArgument, "recurse 0 names no module");
    options = Options();
    options.group = 77;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kInvalidArgument, "77");
    options = Options();
    options.struct_size = 8;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kInvalidArgument, "struct_size");
    options = Options();
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kFailedPrecondition, "LeaveFullParams");
    EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_FORWARD), kFailedPrecondition, "LeaveFullParams");
    const float one = 1;
    EXPECT_C_ERROR(shardd_write_gradient(rank.job(), rank.Param("a.bias"), &one, 0, 1), kFailedPrecondition,
                   "with_grads");
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    rank.Unshard(0, SHARDD_FORWARD);
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kFailedPrecondition, "still unsharded");
    ASSERT_C_OK(shardd_reshard(rank.job(), 0));
    EXPECT_EQ(rank.Info().epoch, 1u);
  });
}

TEST(FullParams, GradientsOfAJobThatTrainsNothingAreRefused) {
  v1::JobSpec spec = SmallSpec("job", kWorld);
  for (v1::Module& module : *spec.mutable_tree()->mutable_modules()) {
    for (v1::Parameter& parameter : *module.mutable_parameters()) {
      parameter.set_requires_grad(false);
    }
  }
  FilledWorld world(spec);
  world.Each([](int, Rank& rank) {
    shardd_full_params_options options = Options();
    options.with_grads = 1;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kFailedPrecondition,
                   "with_grads: no parameter of the job is trained");
  });
}

TEST(FullParams, RanksThatAskForDifferentThingsAreTold) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    shardd_full_params_options options = Options();
    options.rank0_only = index;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kAborted, "rank0_only differs between ranks");
  });
}

TEST(FullParams, GradientsWhereRanksHaveClosedDifferentBackwardsAreRefused) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    if (index == 0) {
      Backward(rank, 1);
    }
    shardd_full_params_options options = Options();
    options.with_grads = 1;
    EXPECT_C_ERROR(shardd_enter_full_params_with(rank.job(), &options), kAborted,
                   "ranks have closed different numbers of backwards");
  });
}

}  // namespace
}  // namespace shardd::testing_client
