// What a trainer does when its user code fails in a forward or backward, and what it says of its gradients between
// backward and step: through the C ABI and a real daemon.

#include <gtest/gtest.h>

#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

void Submit(Rank& rank, int group, float value) {
  rank.Unshard(group, SHARDD_BACKWARD);
  ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
  FillGradients(rank, group, value);
  ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, nullptr, nullptr));
}

void Backward(Rank& rank, float value) {
  for (int group = rank.Info().group_count - 1; group >= 0; --group) {
    Submit(rank, group, value);
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
  }
  ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
}

void Step(Rank& rank, double lr = 1) {
  const shardd_hyperparameters group = Sgd(lr);
  ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 0, nullptr, 0));
  ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
}

float Stored(Rank& rank, const char* fqn, bool last = false) {
  const int param = rank.Param(fqn);
  const auto* data = static_cast<const float*>(shardd_stored_parameter_data(rank.job(), param));
  return data[last ? rank.ParamInfo(param).numel - 1 : 0];
}

TEST(Recovery, GivenUpBackwardIsDoneAgainWithoutAttachingAnew) {
  for (const bool pooled : {false, true}) {
    v1::JobSpec spec = SmallSpec("job", kWorld);
    if (pooled) {
      spec.mutable_config()->set_unshard_mode(v1::UNSHARD_MODE_POOLED);
      for (const char* name : {"c", "d", "e", "f", "g", "h"}) {  // more groups than a rank may hold
        *spec.mutable_tree()->add_modules() = spec.tree().modules(1);
        spec.mutable_tree()->mutable_modules()->rbegin()->set_name(name);
      }
    }
    FilledWorld world(spec);
    world.Each([pooled](int index, Rank& rank) {
      if (index == 0) {
        for (const char* name : {"c", "d", "e", "f", "g", "h"}) {
          if (pooled) {
            rank.Unshard(rank.Group("(root)"), SHARDD_FORWARD);
            rank.Unshard(rank.Group(name), SHARDD_FORWARD);
            ASSERT_C_OK(shardd_abandon_backward(rank.job()));
          }
        }
        rank.Unshard(rank.Group("(root)"), SHARDD_FORWARD);
        rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
        Submit(rank, rank.Group("b"), 100);  // and fails, with three groups held
        ASSERT_C_OK(shardd_abandon_backward(rank.job()));
        EXPECT_EQ(shardd_parameter_data(rank.job(), rank.Param("a.weight")), nullptr) << "resharded";
      }
      Backward(rank, index == 0 ? 2 : 4);
      Step(rank);
      EXPECT_EQ(Stored(rank, "a.weight"), 1 - 3);
      EXPECT_EQ(rank.Info().epoch, 1u);
    });
  }
}

TEST(Recovery, GivenUpForwardNeedsNoReshardBeforeStep) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    if (index == 0) {
      rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
      const shardd_hyperparameters group = Sgd(1);
      EXPECT_C_ERROR(shardd_step(rank.job(), &group, 1, 0, nullptr, 0), kFailedPrecondition, "reshard it first");
      ASSERT_C_OK(shardd_abandon_backward(rank.job()));
    } else {
      Backward(rank, 4);
    }
    Step(rank);  // rank 0 has skipped the batch
    EXPECT_EQ(Stored(rank, "a.weight"), 1 - 2);
  });
}

TEST(Recovery, WithNothingOpenItChangesNothing) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    ASSERT_C_OK(shardd_abandon_backward(rank.job()));
    Backward(rank, 2);
    ASSERT_C_OK(shardd_abandon_backward(rank.job()));
    Step(rank);
    ASSERT_C_OK(shardd_abandon_backward(rank.job()));
    EXPECT_EQ(Stored(rank, "b.bias"), 1 - 2);
  });
}

TEST(Recovery, InsideFullParametersIsRefusedAndCostsNothing) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 0));
    EXPECT_C_ERROR(shardd_abandon_backward(rank.job()), kFailedPrecondition, "shardd_leave_full_params first");
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_EQ(rank.Info().epoch, 1u);
  });
}

TEST(GradientPresence, DroppedGradientIsNoUpdateAndGivenOneIs) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int index, Rank& rank) {
    Backward(rank, 2);
    ASSERT_C_OK(shardd_wait_gradients(rank.job()));
    ASSERT_C_OK(shardd_set_gradient_presence(rank.job(), rank.Param("a.weight"), 0));
    Step(rank);
    EXPECT_EQ(Stored(rank, "a.weight"), 1);
    EXPECT_EQ(Stored(rank, "b.weight"), -1);

    const int param = rank.Param("b.bias");  // FLAT: behind the weight, in rank 1's half
    if (index == 1) {
      std::fill_n(static_cast<float*>(shardd_gradient_shard_data(rank.job(), param)), rank.ParamInfo(param).numel,
                  5.0f);
    }
    ASSERT_C_OK(shardd_set_gradient_presence(rank.job(), param, 1));
    Step(rank);
    EXPECT_EQ(Stored(rank, "b.bias", /*last=*/true), -1 - 5);
    EXPECT_EQ(Stored(rank, "b.weight"), -1) << "no gradient in this step";
  });
}

TEST(GradientPresence, InvalidPresenceIsHarmlesslyRefusedByName) {
  FilledWorld world(SmallSpec("job", kWorld));
  world.Each([](int, Rank& rank) {
    EXPECT_C_ERROR(shardd_set_gradient_presence(rank.job(), rank.Param("frozen"), 1), kFailedPrecondition,
                   "\"frozen\": the parameter is frozen");
    EXPECT_C_ERROR(shardd_set_gradient_presence(rank.job(), 77, 1), kInvalidArgument, "77");
    const int group = rank.Group("b");
    Submit(rank, group, 1);
    EXPECT_C_ERROR(shardd_set_gradient_presence(rank.job(), rank.Param("b.bias"), 0), kFailedPrecondition,
                   "call shardd_backward_done first");
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
    ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
    Step(rank);
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 0));
    EXPECT_C_ERROR(shardd_set_gradient_presence(rank.job(), rank.Param("b.bias"), 0), kFailedPrecondition,
                   "call shardd_leave_full_params first");
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_EQ(rank.Info().epoch, 1u);
  });
}

}  // namespace
}  // namespace shardd::testing_client
