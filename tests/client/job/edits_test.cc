// Programs that edit their shards in place between passes while the daemon's optimizer updates them, through the C ABI
// and a real daemon: plain stores, of any thread and of the kernel, without a signal.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

v1::JobSpec EditsSpec(const std::string& name, bool pooled = false) {
  v1::JobSpec spec = SmallSpec(name, kWorld);
  spec.mutable_config()->set_trainers_never_write(false);
  if (pooled) {
    spec.mutable_config()->set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  }
  return spec;
}

// All that the rank may write of the parameter.
void Fill(Rank& rank, int param, float value) {
  const shardd_shard_range range = RangeOf(rank, param);
  std::fill_n(StoredShard(rank, param) + range.write_first, range.write_numel, value);
}

void Enter(Rank& rank) { ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0)); }
void Leave(Rank& rank) { ASSERT_C_OK(shardd_leave_pass(rank.job())); }

// Inside a pass: every element that all ranks see of the parameter is `want`.
void ExpectAll(Rank& rank, int param, float want) {
  const int group = rank.ParamInfo(param).group;
  rank.Unshard(group, SHARDD_FORWARD);
  const auto* data = static_cast<const float*>(shardd_parameter_data(rank.job(), param));
  ASSERT_NE(data, nullptr);
  for (int64_t i = 0; i < rank.ParamInfo(param).numel; ++i) ASSERT_EQ(data[i], want) << i;
  ASSERT_C_OK(shardd_reshard(rank.job(), group));
}

// A backward in which every gradient is 1.
void Backward(Rank& rank) {
  ASSERT_NO_FATAL_FAILURE(SubmitAll(rank, 1, Gradients::kReplaced));
  ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
}

class EditsAnywhere : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Unsharding, EditsAnywhere, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Pooled" : "WhereTheyLie"; });

TEST_P(EditsAnywhere, EveryRankSeesAllEditsFromTheNextPassOn) {
  FilledWorld world(EditsSpec("all", GetParam()));
  world.Each([](int, Rank& rank) {
    const int param = rank.Param("a.weight");
    for (int pass = 0; pass < 3; ++pass) {
      Enter(rank);
      ExpectAll(rank, param, static_cast<float>(1 + pass));
      Leave(rank);
      Fill(rank, param, static_cast<float>(2 + pass));
    }
    Enter(rank);
    ExpectAll(rank, param, 4);
    Leave(rank);
  });
}

TEST_P(EditsAnywhere, AreEditedByTheStepThatFollowsThem) {
  FilledWorld world(EditsSpec("step", GetParam()));
  world.Each([](int, Rank& rank) {
    const int param = rank.Param("b.weight");
    float want = 1;
    for (int step = 0; step < 4; ++step) {
      Enter(rank);
      ExpectAll(rank, param, want);
      Backward(rank);
      Leave(rank);
      if (step % 2 == 0) {
        Fill(rank, param, want = static_cast<float>(10 + step));  // between the backward and the step
      }
      const shardd_hyperparameters sgd = Sgd(0.25);
      ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
      ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
      want -= 0.25f;
      EXPECT_EQ(StoredShard(rank, param)[RangeOf(rank, param).write_first], want);
      if (step == 1) {
        Fill(rank, param, want *= 3);  // between the step and the next pass
      }
    }
    EXPECT_EQ(rank.Info().committed_step, 4);
  });
}

TEST(Edits, OneRanksEditsCountAlsoFromThreadsAndSystemCalls) {
  FilledWorld world(EditsSpec("one"));
  const shardd_shard_range second = RangeOf(world.ranks[1], world.ranks[1].Param("a.weight"));
  world.Each([&](int index, Rank& rank) {
    const int param = rank.Param("a.weight");
    Enter(rank);
    Leave(rank);
    if (index == 1) {
      float* const own = StoredShard(rank, param) + second.write_first;
      own[0] = 7;
      std::thread([own] { own[1] = 8; }).join();
      int ends[2];
      ASSERT_EQ(pipe(ends), 0);
      const float nine = 9;
      ASSERT_EQ(write(ends[1], &nine, sizeof(nine)), static_cast<ssize_t>(sizeof(nine)));
      EXPECT_EQ(read(ends[0], own + 2, sizeof(nine)), static_cast<ssize_t>(sizeof(nine)));
      close(ends[0]);
      close(ends[1]);
      const pid_t child = fork();
      if (child == 0) _exit(0);
      own[3] = 10;
      EXPECT_EQ(waitpid(child, nullptr, 0), child);
    }
    Enter(rank);
    rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
    const auto* data = static_cast<const float*>(shardd_parameter_data(rank.job(), param));
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(data[second.write_first + i], i < 4 ? 7.0f + static_cast<float>(i) : 1.0f);
    }
    EXPECT_EQ(data[0], 1);
    ASSERT_C_OK(shardd_reshard(rank.job(), rank.Group("a")));
    Leave(rank);
  });
}

TEST(Edits, InsideAPassReachNobodyAndNameTheParameter) {
  FilledWorld world(EditsSpec("inside"));
  std::atomic<bool> stored = false;
  world.Each([&](int index, Rank& rank) {
    const int param = rank.Param("b.weight");
    Enter(rank);
    if (index == 0) {
      Fill(rank, param, 7);
      stored = true;
      EXPECT_C_ERROR(shardd_leave_pass(rank.job()), kFailedPrecondition,
                     "write parameter \"b.weight\": written inside a pass");
      EXPECT_C_ERROR(shardd_enter_pass(rank.job(), 0, nullptr, 0), kFailedPrecondition, "written inside a pass");
    } else {
      EXPECT_TRUE(Eventually([&] { return stored.load(); }));
      ExpectAll(rank, param, 1);
    }
  });
}

TEST(Edits, AfterAForwardAreNamedByItsBackward) {
  FilledWorld world(EditsSpec("forward"));
  world.Each([](int, Rank& rank) {
    const int param = rank.Param("a.weight");
    Enter(rank);
    ExpectAll(rank, param, 1);
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    Fill(rank, param, 5);
    EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_BACKWARD), kFailedPrecondition,
                   "parameter \"a.weight\" was written after the forward");
    EXPECT_EQ(shardd_inside_pass(rank.job()), 0);
    Enter(rank);
    ExpectAll(rank, param, 5);
    Leave(rank);
  });
}

TEST(Edits, WhileAStepIsUnderWayNameTheParameter) {
  for (const bool waits : {true, false}) {
    FilledWorld world(EditsSpec(waits ? "waits" : "enters"));
    world.Each([&](int, Rank& rank) {
      Enter(rank);
      Backward(rank);
      Leave(rank);
      const shardd_hyperparameters sgd = Sgd(0.25);
      ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
      Fill(rank, rank.Param("a.weight"), 3);
      EXPECT_C_ERROR(waits ? shardd_wait_step(rank.job(), nullptr) : shardd_enter_pass(rank.job(), 0, nullptr, 0),
                     kFailedPrecondition, "written while the daemon's optimizer updates it");
    });
  }
}

TEST(Edits, AreToldOfUntilTheyAreHandedIn) {
  FilledWorld world(EditsSpec("told"));
  world.Each([](int index, Rank& rank) {
    const auto has_edits = [&rank] {
      int32_t has = -1;
      EXPECT_C_OK(shardd_has_edits(rank.job(), &has));
      return has;
    };
    int32_t has = -1;
    Enter(rank);
    EXPECT_C_ERROR(shardd_has_edits(rank.job(), &has), kFailedPrecondition,
                   "has_edits job \"told\": the rank is inside");
    EXPECT_C_ERROR(shardd_has_edits(rank.job(), nullptr), kInvalidArgument, "has_edits");
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    EXPECT_EQ(has_edits(), 0);
    EXPECT_EQ(shardd_inside_pass(rank.job()), 1);
    if (index == 0) Fill(rank, rank.Param("a.weight"), 5);
    EXPECT_EQ(has_edits(), index == 0 ? 1 : 0);
    if (index == 1) Leave(rank);
    ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
    EXPECT_EQ(shardd_inside_pass(rank.job()), 0);
    EXPECT_EQ(has_edits(), 0);
  });
}

TEST(Edits, OfOtherRanksElementsAreDropped) {
  FilledWorld world(EditsSpec("others"));
  const shardd_shard_range first = RangeOf(world.ranks[0], world.ranks[0].Param("a.weight"));
  world.Each([&](int index, Rank& rank) {
    const int param = rank.Param("a.weight");
    Enter(rank);
    Leave(rank);
    if (index == 0) {
      std::fill_n(StoredShard(rank, param), rank.ParamInfo(param).numel, 6.0f);
    }
    Enter(rank);
    rank.Unshard(rank.Group("a"), SHARDD_FORWARD);
    const auto* data = static_cast<const float*>(shardd_parameter_data(rank.job(), param));
    for (int64_t i = 0; i < rank.ParamInfo(param).numel; ++i) {
      const bool own = i >= first.write_first && i < first.write_first + first.write_numel;
      ASSERT_EQ(data[i], own ? 6 : 1) << i;
    }
    ASSERT_C_OK(shardd_reshard(rank.job(), rank.Group("a")));
    Leave(rank);
  });
}

TEST(Edits, OnlyUnseenEditsAreGoneWhenAnEpochEnds) {
  FilledWorld world(EditsSpec("gone"));
  world.Each([](int, Rank& rank) {
    Fill(rank, rank.Param("b.weight"), 4);
    Enter(rank);
    Leave(rank);
  });
  Fill(world.ranks[0], world.ranks[0].Param("b.weight"), 9);
  EXPECT_C_OK(shardd_detach(world.ranks[1].Release(), 0));  // as a death does
  EXPECT_TRUE(Eventually([&] { return Result(shardd_leave_pass(world.ranks[0].job())).code() == kAborted; }));
  Rank again;
  std::thread second([&] { EXPECT_C_OK(again.Attach(world.daemon.address(), EditsSpec("gone"), 1)); });
  EXPECT_C_OK(shardd_reattach(world.ranks[0].job()));
  second.join();
  const auto look = [](Rank& rank) {
    Enter(rank);
    ExpectAll(rank, rank.Param("b.weight"), 4);
    Leave(rank);
  };
  std::thread beside([&] { look(again); });
  look(world.ranks[0]);
  beside.join();
}

TEST(Edits, AreRefusedInFullParametersAndBeforeThem) {
  FilledWorld world(EditsSpec("full"));
  world.Each([](int, Rank& rank) {
    const int param = rank.Param("a.weight");
    Enter(rank);
    Leave(rank);
    Fill(rank, param, 3);
    EXPECT_C_ERROR(shardd_enter_full_params(rank.job(), 0), kFailedPrecondition, "was written since the last pass");
    Enter(rank);
    Leave(rank);
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 0));
    EXPECT_EQ(static_cast<const float*>(shardd_full_parameter_data(rank.job(), param))[0], 3);
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
  });
}

// One that does not know yet that its epoch has ended: where its edits have gone with it, it has not finished.
TEST(Edits, OfARankThatFinishesAreNotLostInSilence) {
  for (const bool after_a_forward : {false, true}) {
    SCOPED_TRACE(after_a_forward);
    FilledWorld world(EditsSpec("edits"));
    if (after_a_forward) {
      world.Each([](int, Rank& rank) { Enter(rank); });
      EXPECT_C_OK(shardd_stop_reading(world.ranks[0].job()));
    }
    Fill(world.ranks[0], 0, 7.0f);
    EXPECT_C_OK(shardd_detach(world.ranks[1].Release(), 0));  // as a death does
    EXPECT_C_ERROR(shardd_detach(world.ranks[0].Release(), 1), kAborted, "detached");
  }
}

}  // namespace
}  // namespace shardd::testing_client
