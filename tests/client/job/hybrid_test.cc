// Hybrid jobs through the C ABI and a real daemon: which rank holds and writes what, and trainers that clip or step
// their own shards where several replicas hold the same.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 4;

// Two shard groups, {0, 2} and {1, 3}: ranks 0 and 1 hold the same, 2 and 3 as well.
v1::JobSpec HybridSpec(const std::string& name, bool copies) {
  v1::JobSpec spec = SmallSpec(name, kWorld);
  v1::JobConfig& config = *spec.mutable_config();
  config.set_strategy(v1::STRATEGY_HYBRID_SHARD);
  config.set_layout(v1::LAYOUT_DIM0);
  for (const auto& [first, second] : {std::pair{0, 2}, {1, 3}}) {
    v1::ShardGroup* group = config.add_shard_groups();
    group->add_ranks(first);
    group->add_ranks(second);
  }
  config.set_replica_copies(copies);
  return spec;
}

v1::JobSpec TrainersSpec(const std::string& name, bool copies) {
  v1::JobSpec spec = HybridSpec(name, copies);
  StepInTrainers(&spec);
  return spec;
}

// What processes do that begin anew: the running step, and a writeback that is not committed, are dropped.
void AttachAnew(World& world, const v1::JobSpec& spec) {
  for (Rank& rank : world.ranks) EXPECT_C_OK(shardd_detach(rank.Release(), 0));
  for (int i = 0; i < kWorld; ++i) {
    EXPECT_C_OK(world.ranks[static_cast<size_t>(i)].Attach(world.daemon.address(), spec, i));
  }
}

const float* Stored(const Rank& rank, int param) {
  return static_cast<const float*>(shardd_stored_parameter_data(rank.job(), param));
}

// The rank's shard of every parameter, and what of the trainers' first state belongs to it.
void ExpectOwn(const Rank& rank, float want, float want_state) {
  for (int p = 0; p < rank.Info().param_count; ++p) {
    const shardd_shard_range range = RangeOf(rank, p);
    const auto* state = static_cast<const float*>(shardd_optimizer_state_data(rank.job(), p, 0));
    for (int64_t i = range.first; i < range.first + range.numel; ++i) {
      ASSERT_EQ(Stored(rank, p)[i], want) << rank.ParamInfo(p).fqn << " of rank " << rank.Info().rank;
      if (state != nullptr) {
        ASSERT_EQ(state[i], want_state) << rank.ParamInfo(p).fqn << " of rank " << rank.Info().rank;
      }
    }
  }
}

// All write `value` into what is theirs to write, and -value into its state, as a step of their optimizer. Leaves them
// outside of the pass that follows.
void StepTo(Rank& rank, float value) {
  ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
  for (int p = 0; p < rank.Info().param_count; ++p) {
    const shardd_shard_range range = RangeOf(rank, p);
    std::fill_n(const_cast<float*>(Stored(rank, p)) + range.write_first, range.write_numel, value);
    if (auto* state = static_cast<float*>(shardd_optimizer_state_data(rank.job(), p, 0)); state != nullptr) {
      std::fill_n(state + range.write_first, range.write_numel, -value);
    }
  }
  ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, nullptr, 0));
  ASSERT_C_OK(shardd_leave_pass(rank.job()));
}

// Gradients of all parameters are `gradient`, and replace what was there.
void Backward(Rank& rank, float gradient) {
  ASSERT_NO_FATAL_FAILURE(SubmitAll(rank, gradient, Gradients::kReplaced, SHARDD_FORWARD));
  ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
}

// Every element of every trained parameter, as the rank reads it.
void ExpectAll(Rank& rank, float want) {
  for (int group = 0; group < rank.Info().group_count; ++group) {
    rank.Unshard(group, SHARDD_FORWARD);
    const shardd_group_info info = rank.GroupInfo(group);
    for (int i = 0; i < info.param_count; ++i) {
      const shardd_param_info param = rank.ParamInfo(info.params[i]);
      if (param.requires_grad == 0) continue;
      const auto* data = static_cast<const float*>(shardd_parameter_data(rank.job(), info.params[i]));
      EXPECT_EQ(std::count(data, data + param.numel, want), param.numel)
          << param.fqn << ": got " << data[0] << ", want " << want << " on rank " << rank.Info().rank;
    }
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
  }
}

TEST(Hybrid, RanksFindTheirShardsByTheirPlaceInTheGroup) {
  World world(HybridSpec("places", false));
  for (int index = 0; index < kWorld; ++index) {
    const Rank& rank = world.ranks[static_cast<size_t>(index)];
    shardd_shard_info info = {};
    info.struct_size = sizeof(info);
    ASSERT_C_OK(shardd_get_shard_info(rank.job(), &info));
    EXPECT_EQ(info.shard_world_size, 2);
    EXPECT_EQ(info.replicas, 2);
    EXPECT_EQ(info.shard_index, index / 2);
    EXPECT_EQ(info.replica_index, index % 2);
    const shardd_shard_range range = RangeOf(rank, rank.Param("a.weight"));  // 33 rows of 17: 17 and 16 rows
    EXPECT_EQ(range.first, index < 2 ? 0 : 17 * 17);
    EXPECT_EQ(range.numel, (index < 2 ? 17 : 16) * 17);
    EXPECT_EQ(range.gradient_first, range.first);
    EXPECT_EQ(range.optimizer_numel, range.numel);
    EXPECT_EQ(range.write_numel, index % 2 == 0 ? range.numel : 0) << "replica 0 writes for both";
    EXPECT_EQ(RangeOf(rank, rank.Param("frozen")).optimizer_numel, 0);
    EXPECT_EQ(rank.GroupInfo(rank.Group("a")).post_forward_shard_size, 2);
  }
  EXPECT_C_ERROR(shardd_get_shard_range(world.ranks[0].job(), 99, nullptr), kInvalidArgument, "got 99");
}

class HybridClip : public ::testing::TestWithParam<bool> {};

// Every rank halves what it may change of the gradient, as clipping does. Done twice to the same bytes it would be a
// quarter.
TEST_P(HybridClip, ScalesEveryGradientOnce) {
  World world(HybridSpec("clip", /*copies=*/GetParam()));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    Backward(rank, static_cast<float>(index));  // mean: 1.5
    ASSERT_C_OK(shardd_wait_gradients(rank.job()));
    for (int p = 0; p < rank.Info().param_count; ++p) {
      auto* gradient = static_cast<float*>(shardd_gradient_shard_data(rank.job(), p));
      const shardd_shard_range range = RangeOf(rank, p);
      EXPECT_EQ(range.gradient_write_numel, GetParam() || index % 2 == 0 ? range.gradient_numel : 0);
      for (int64_t i = range.gradient_write_first; i < range.gradient_write_first + range.gradient_write_numel; ++i) {
        EXPECT_EQ(gradient[i], 1.5f);
        gradient[i] *= 0.5f;
      }
    }
    const shardd_hyperparameters sgd = Sgd(1);
    ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
    ExpectAll(rank, 0.25f);
  });
}

INSTANTIATE_TEST_SUITE_P(Storage, HybridClip, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "PerReplica" : "Once"; });

// Ranks 1 and 3 are replica 1: they write into its copy and say so, the others have nothing.
TEST(Hybrid, GradientsThatOnlyTheSecondReplicaGivesAreWhatCounts) {
  World world(HybridSpec("given", /*copies=*/true));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    for (float want : {0.0f, -2.0f}) {  // in the second step the first one's gradients are still there
      ASSERT_C_OK(shardd_wait_gradients(rank.job()));
      for (int p = 0; index % 2 == 1 && p < rank.Info().param_count; ++p) {
        auto* gradient = static_cast<float*>(shardd_gradient_shard_data(rank.job(), p));
        if (gradient == nullptr) continue;
        const shardd_shard_range range = RangeOf(rank, p);
        std::fill_n(gradient + range.gradient_write_first, range.gradient_write_numel, want < 0 ? 2.0f : 1.0f);
        ASSERT_C_OK(shardd_set_gradient_presence(rank.job(), p, 1));
      }
      const shardd_hyperparameters sgd = Sgd(1);
      ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
      ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
      ExpectAll(rank, want);
    }
  });
}

class HybridTrainers : public ::testing::TestWithParam<bool> {};

// SGD with momentum 0.5 in the trainers: each steps what it may write, in place, next to what others hold.
TEST_P(HybridTrainers, StepEveryRowOnce) {
  World world(TrainersSpec("trainers", GetParam()));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    float want = 1, momentum = 0;
    for (int step = 0; step < 5; ++step) {
      ASSERT_C_OK(shardd_enter_pass(rank.job(), step > 0, nullptr, 0));
      ExpectAll(rank, want);
      Backward(rank, static_cast<float>(index + step));
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      ASSERT_C_OK(shardd_wait_gradients(rank.job()));
      ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
      for (int p = 0; p < rank.Info().param_count; ++p) {
        const auto* gradient = static_cast<const float*>(shardd_gradient_shard_data(rank.job(), p));
        auto* state = static_cast<float*>(shardd_optimizer_state_data(rank.job(), p, 0));
        auto* shard = static_cast<float*>(const_cast<void*>(shardd_stored_parameter_data(rank.job(), p)));
        const shardd_shard_range range = RangeOf(rank, p);
        for (int64_t i = range.write_first; gradient != nullptr && i < range.write_first + range.write_numel; ++i) {
          state[i] = 0.5f * state[i] + gradient[i];
          shard[i] -= 0.25f * state[i];
        }
      }
      momentum = 0.5f * momentum + (static_cast<float>(step) + 1.5f);
      want -= 0.25f * momentum;
    }
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, nullptr, 0));
    ExpectAll(rank, want);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

INSTANTIATE_TEST_SUITE_P(Storage, HybridTrainers, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "PerReplica" : "Once"; });

// Halving is no edit that may be done twice; then a step of the daemon's optimizer, which all replicas see.
TEST(Hybrid, EditsCountOnceAndTheDaemonsStepReachesEveryCopy) {
  v1::JobSpec spec = HybridSpec("edits", /*copies=*/true);
  spec.mutable_config()->set_trainers_never_write(false);
  World world(spec);
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    float want = 1;
    for (int step = 0; step < 3; ++step) {
      ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
      Backward(rank, static_cast<float>(index));  // mean: 1.5
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
      for (int p = 0; p < rank.Info().param_count; ++p) {
        auto* shard = static_cast<float*>(const_cast<void*>(shardd_stored_parameter_data(rank.job(), p)));
        const shardd_shard_range range = RangeOf(rank, p);
        EXPECT_EQ(range.write_numel, range.numel);
        for (int64_t i = range.first; i < range.first + range.numel; ++i) shard[i] *= 0.5f;
      }
      const shardd_hyperparameters sgd = Sgd(0.5);
      ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
      ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
      want = want / 2 - 0.75f;
      const int param = rank.Param("a.weight");
      const shardd_shard_range range = RangeOf(rank, param);
      EXPECT_EQ(static_cast<const float*>(shardd_stored_parameter_data(rank.job(), param))[range.first], want);
    }
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    ExpectAll(rank, want);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

// A writeback reaches every replica's copy.
TEST(Hybrid, WritebackReachesEveryCopy) {
  World world(TrainersSpec("writeback", /*copies=*/true));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 1));
    const int param = rank.Param("b.bias");
    if (index == 3) {
      const std::vector<float> values(33, 7);
      ASSERT_C_OK(shardd_write_parameter(rank.job(), param, values.data(), 0, 33));
    }
    ASSERT_C_OK(shardd_commit_parameters(rank.job()));
    EXPECT_EQ(*static_cast<const float*>(shardd_stored_parameter_data(rank.job(), param)), 7);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  });
}

// The other replicas were to write the same and did not.
TEST(Hybrid, CopiesAndFullParametersAreWhatTheFirstReplicaWrote) {
  World world(TrainersSpec("diverge", /*copies=*/true));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    StepTo(rank, index % 2 == 0 ? 2 : 3);
    for (int p = 0; p < rank.Info().param_count; ++p) {
      const shardd_shard_range range = RangeOf(rank, p);
      for (int64_t i = range.first; i < range.first + range.numel; ++i) ASSERT_EQ(Stored(rank, p)[i], 2);
    }
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 0));
    const int param = rank.Param("a.weight");
    const auto* full = static_cast<const float*>(shardd_full_parameter_data(rank.job(), param));
    EXPECT_EQ(std::count(full, full + 33 * 17, 2.0f), 33 * 17);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  });
}

TEST(Hybrid, GradientsAreReadFromOneReplicaAndWrittenToAll) {
  World world(HybridSpec("gradients", /*copies=*/true));
  world.Each([](int index, Rank& rank) {
    rank.WriteAll(1);
    Backward(rank, static_cast<float>(index));  // mean: 1.5
    ASSERT_C_OK(shardd_wait_gradients(rank.job()));
    const int kept = rank.Param("a.weight"), written = rank.Param("b.bias");
    auto* own = static_cast<float*>(shardd_gradient_shard_data(rank.job(), kept));
    const shardd_shard_range range = RangeOf(rank, kept);
    if (index % 2 == 1) std::fill_n(own + range.gradient_first, range.gradient_numel, 9.0f);
    shardd_full_params_options options = {};
    options.struct_size = sizeof(options);
    options.group = -1;
    options.recurse = options.writeback = options.with_grads = 1;
    ASSERT_C_OK(shardd_enter_full_params_with(rank.job(), &options));
    const auto* full = static_cast<const float*>(shardd_full_gradient_data(rank.job(), kept));
    EXPECT_EQ(std::count(full, full + 33 * 17, 1.5f), 33 * 17) << "rank " << index;
    if (index == 2) {
      const std::vector<float> values(33, 7);
      ASSERT_C_OK(shardd_write_gradient(rank.job(), written, values.data(), 0, 33));
    }
    ASSERT_C_OK(shardd_commit_parameters(rank.job()));
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    const shardd_shard_range of_written = RangeOf(rank, written);
    EXPECT_EQ(static_cast<float*>(shardd_gradient_shard_data(rank.job(), written))[of_written.gradient_first], 7);
    EXPECT_EQ(own[range.gradient_first], index % 2 == 1 ? 9 : 1.5f) << "what nobody wrote back stays each one's";
  });
}

TEST(Hybrid, AWritebackThatIsNotCommittedReachesNoCopy) {
  const v1::JobSpec spec = TrainersSpec("undone", /*copies=*/true);
  World world(spec);
  const int param = world.ranks[0].Param("b.bias");
  world.Each([param](int index, Rank& rank) {
    rank.WriteAll(1);
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 1));
    if (index == 3) {
      const std::vector<float> values(33, 7);
      ASSERT_C_OK(shardd_write_parameter(rank.job(), param, values.data(), 0, 33));
    }
    const auto* full = static_cast<const volatile float*>(shardd_full_parameter_data(rank.job(), param));
    EXPECT_TRUE(Eventually([full] { return full[32] == 7; })) << "the daemon has written it";
  });
  AttachAnew(world, spec);
  for (const Rank& rank : world.ranks) ExpectOwn(rank, 1, 0);
}

TEST(Hybrid, InitialValuesOfAnEndedEpochAreInNoCopy) {
  const v1::JobSpec spec = TrainersSpec("initial", /*copies=*/true);
  World world(spec);
  const int param = world.ranks[0].Param("b.bias");
  const std::vector<float> values(33, 9);
  ASSERT_C_OK(shardd_write_parameter(world.ranks[3].job(), param, values.data(), 0, 33));
  const volatile float* stored = Stored(world.ranks[0], param);
  ASSERT_TRUE(Eventually([stored] { return stored[32] == 9; }));
  AttachAnew(world, spec);
  world.Each([param](int, Rank& rank) {
    const int other = rank.Param("a.bias");
    const std::vector<float> ones(33, 1);
    ASSERT_C_OK(shardd_write_parameter(rank.job(), other, ones.data(), 0, 33));
    ASSERT_C_OK(shardd_commit_parameters(rank.job()));
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    const shardd_shard_range range = RangeOf(rank, param);
    for (int64_t i = range.first; i < range.first + range.numel; ++i) {
      EXPECT_EQ(Stored(rank, param)[i], 0);
      EXPECT_EQ(Stored(rank, other)[i], 1);
    }
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

TEST(Hybrid, WhoTakesTheSecondReplicasPlaceSeesTheCommittedStep) {
  v1::JobSpec spec = TrainersSpec("replaced", /*copies=*/true);
  spec.mutable_config()->set_keep_every(1);  // else an older one: each epoch that ends goes back to the snapshot
  World world(spec);
  world.Each([](int, Rank& rank) {
    rank.WriteAll(1);
    StepTo(rank, 2);
  });
  AttachAnew(world, spec);
  for (const Rank& rank : world.ranks) {
    EXPECT_EQ(rank.Info().committed_step, 1);
    ExpectOwn(rank, 2, -2);
  }
}

}  // namespace
}  // namespace shardd::testing_client
