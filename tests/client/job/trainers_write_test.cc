// Trainers that write their own shards, through the C ABI and a real daemon: an optimizer of their own, and edits that
// one rank hands in while others are between a forward and a backward.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

v1::JobSpec TrainersSpec(const std::string& name) {
  v1::JobSpec spec = SmallSpec(name, kWorld);
  StepInTrainers(&spec);
  return spec;
}

// Without an optimizer in the trainers, what is stored into shards is handed in.
v1::JobSpec EditsSpec(const std::string& name) {
  v1::JobSpec spec = TrainersSpec(name);
  spec.mutable_config()->clear_optimizer();
  return spec;
}

// A forward and a backward; gradients of all parameters are `gradient`.
void Pass(Rank& rank, float gradient) {
  ASSERT_NO_FATAL_FAILURE(Forward(rank));
  ASSERT_NO_FATAL_FAILURE(SubmitAll(rank, gradient, Gradients::kReplaced));
  ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
}

// SGD with momentum 0.5 over this rank's half of every parameter, momentum kept in the daemon.
void OwnStep(Rank& rank, int index, float lr) {
  for (int p = 0; p < rank.Info().param_count; ++p) {
    const int64_t numel = rank.ParamInfo(p).numel;
    auto* gradient = static_cast<float*>(shardd_gradient_shard_data(rank.job(), p));
    auto* momentum = static_cast<float*>(shardd_optimizer_state_data(rank.job(), p, 0));
    if (gradient == nullptr) {
      continue;
    }
    ASSERT_NE(momentum, nullptr);
    for (int64_t i = numel * index / kWorld; i < numel * (index + 1) / kWorld; ++i) {
      momentum[i] = 0.5f * momentum[i] + gradient[i];
      StoredShard(rank, p)[i] -= lr * momentum[i];
    }
  }
}

TEST(TrainersWrite, TrainersOptimizersMatchTheReferenceWhileRanksDriftApart) {
  FilledWorld world(TrainersSpec("drift"));
  static constexpr int kSteps = 12;
  world.Each([](int index, Rank& rank) {
    float want = 1;
    float momentum = 0;
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_C_OK(shardd_enter_pass(rank.job(), step > 0, "state", 5));
      // One rank is late in even steps, the other in odd ones.
      absl::SleepFor(absl::Milliseconds(step % kWorld == index ? 3 : 0));
      rank.Unshard(0, SHARDD_FORWARD);
      EXPECT_EQ(rank.First(rank.GroupInfo(0).params[0]), want) << "step " << step << " rank " << index;
      ASSERT_C_OK(shardd_reshard(rank.job(), 0));
      Pass(rank, static_cast<float>(index + step));
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      ASSERT_C_OK(shardd_wait_gradients(rank.job()));
      OwnStep(rank, index, 0.25f);
      const float mean = static_cast<float>(step) + 0.5f;
      momentum = 0.5f * momentum + mean + 0.0f;
      want -= 0.25f * momentum;
    }
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, nullptr, 0));
    EXPECT_EQ(rank.Info().committed_step, kSteps);
    rank.Unshard(0, SHARDD_FORWARD);
    EXPECT_EQ(rank.First(rank.GroupInfo(0).params[0]), want);
    ASSERT_C_OK(shardd_reshard(rank.job(), 0));
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

TEST(TrainersWrite, StoresOfSeveralThreadsAreInTheNextPass) {
  FilledWorld world(TrainersSpec("threads"));
  world.Each([&](int index, Rank& rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] { StoredShard(rank, 0)[4 * index + t] = static_cast<float>(10 * index + t); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(StoredShard(rank, 0)[i], static_cast<float>(10 * (i / 4) + i % 4));
    }
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

TEST(TrainersWrite, EditsWaitForForwardsThatGetNoBackward) {
  FilledWorld world(EditsSpec("forwards"));
  std::atomic<int> stopped = 0;
  std::atomic<bool> handed_in = false;
  world.Each([&](int index, Rank& rank) {
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    rank.Unshard(0, SHARDD_FORWARD);
    ASSERT_C_OK(shardd_reshard(rank.job(), 0));
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    ++stopped;
    EXPECT_TRUE(Eventually([&] { return stopped == 2; }));
    if (index == 0) {
      *StoredShard(rank, 0) = 7;
      ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
      handed_in = true;
      EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_BACKWARD), kFailedPrecondition, "written after the forward");
    } else {
      EXPECT_FALSE(Eventually([&] { return handed_in.load(); }, absl::Milliseconds(50)));
      EXPECT_EQ(shardd_inside_pass(rank.job()), 1);
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      EXPECT_TRUE(Eventually([&] { return handed_in.load(); }));
    }
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    EXPECT_EQ(*StoredShard(rank, 0), 7);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

TEST(TrainersWrite, ABackwardReadsOnWhileOthersWaitToHandIn) {
  FilledWorld world(EditsSpec("resumed"));
  std::atomic<int> stopped = 0;
  std::atomic<int> left = 0;
  world.Each([&](int index, Rank& rank) {
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    ++stopped;
    EXPECT_TRUE(Eventually([&] { return stopped == 2; }));
    if (index == 0) {
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      *StoredShard(rank, 0) = 7;
      ASSERT_C_OK(shardd_hand_in_edits(rank.job()));  // not before the other has left
      EXPECT_EQ(left, 1);
    } else {
      absl::SleepFor(absl::Milliseconds(50));  // the other waits
      ASSERT_C_OK(shardd_resume_reading(rank.job()));
      rank.Unshard(0, SHARDD_BACKWARD);
      EXPECT_EQ(rank.First(rank.GroupInfo(0).params[0]), 1);
      ASSERT_C_OK(shardd_reshard(rank.job(), 0));
      left = 1;
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
    }
  });
}

TEST(TrainersWrite, AWriterThatAnothersBackwardAwaitsGetsAnError) {
  FilledWorld world(EditsSpec("stuck"));
  std::atomic<bool> resumed = false;
  world.Each([&](int index, Rank& rank) {
    const int group = rank.Group("a");
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    if (index == 0) {
      EXPECT_TRUE(Eventually([&] { return resumed.load(); }));
      ASSERT_C_OK(shardd_leave_pass(rank.job()));
      *StoredShard(rank, 0) = 7;
      EXPECT_C_ERROR(shardd_hand_in_edits(rank.job()), kAborted, "between a forward and its backward");
    } else {
      ASSERT_C_OK(shardd_resume_reading(rank.job()));
      resumed = true;
      rank.Unshard(group, SHARDD_BACKWARD);
      ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
      ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, nullptr, nullptr));
      ASSERT_C_OK(shardd_reshard(rank.job(), group));
      ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
      EXPECT_C_ERROR(shardd_wait_gradients(rank.job()), kAborted, "between a forward and its backward");
    }
  });
}

TEST(TrainersWrite, StateGivenWithoutAStepReplacesTheCommittedState) {
  FilledWorld world(TrainersSpec("state"));
  world.Each([&](int index, Rank& rank) {
    const auto state = [&] {
      size_t size = 0;
      const void* data = shardd_trainer_state(rank.job(), &size);
      return std::string(static_cast<const char*>(data), size);
    };
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, "one", 3));
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
    EXPECT_EQ(state(), "one");
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, index == 0 ? "two" : "", index == 0 ? 3 : 0));
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
    EXPECT_EQ(state(), index == 0 ? "two" : "one");
    EXPECT_EQ(rank.Info().committed_step, 1);
  });
}

TEST(TrainersWrite, LateStoresOfAnUnawareRankReachNoReattachedOne) {
  const v1::JobSpec spec = TrainersSpec("looks-away");
  FilledWorld world(spec);
  Rank& other = world.ranks[1];
  world.Each([](int, Rank& rank) {
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
  ASSERT_C_OK(shardd_detach(other.Release(), 0));
  std::atomic<bool> stop = false;
  volatile float* const shard = StoredShard(world.ranks[0], 0);
  volatile float* const state = static_cast<float*>(shardd_optimizer_state_data(world.ranks[0].job(), 0, 0));
  std::thread stores([&] {
    while (!stop) {
      *shard = 9;
      *state = 9;
    }
  });
  ASSERT_C_OK(other.Attach(world.daemon.address(), spec, 1));
  const volatile float* const seen = StoredShard(other, 0);
  const volatile float* const seen_state = static_cast<float*>(shardd_optimizer_state_data(other.job(), 0, 0));
  EXPECT_FALSE(Eventually([&] { return *seen != 1 || *seen_state != 0; }, absl::Milliseconds(100)));
  stop = true;
  stores.join();
  EXPECT_EQ(*shard, 9) << "its own copy";
  ASSERT_C_OK(shardd_reattach(world.ranks[0].job()));
  EXPECT_EQ(*StoredShard(world.ranks[0], 0), 1);
}

TEST(TrainersWrite, TheLastStoresAreCommittedWhereARankFinishes) {
  FilledWorld world(TrainersSpec("finish"));
  std::atomic<int> written = 0;
  world.Each([&](int index, Rank& rank) {
    *StoredShard(rank, index) = 3;
    ++written;
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, "last", 4));
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
    EXPECT_EQ(rank.Info().committed_step, 1);
  });
  EXPECT_EQ(written, 2);
}

TEST(TrainersWrite, CallsOutOfTurnAreRefusedAndLoseNothing) {
  FilledWorld world(TrainersSpec("turn"));
  world.Each([&](int, Rank& rank) {
    EXPECT_C_ERROR(shardd_leave_pass(rank.job()), kFailedPrecondition, "not inside");
    EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_FORWARD), kFailedPrecondition, "shardd_enter_pass first");
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    EXPECT_C_ERROR(shardd_enter_pass(rank.job(), 0, nullptr, 0), kFailedPrecondition, "inside one");
    EXPECT_C_ERROR(shardd_step(rank.job(), nullptr, 0, 0, nullptr, 0), kFailedPrecondition, "runs in the trainers");
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
  Daemon daemon;
  Rank plain;
  ASSERT_C_OK(plain.Attach(daemon.address(), SmallSpec("plain", 1), 0));
  EXPECT_C_ERROR(shardd_enter_pass(plain.job(), 0, nullptr, 0), kFailedPrecondition, "never write");
}

}  // namespace
}  // namespace shardd::testing_client
