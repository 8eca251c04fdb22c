// Jobs whose optimizer runs in the trainers, so that passes read copies, through the C ABI and a real daemon on CPUs:
// stores at any time.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "absl/time/clock.h"
#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/client/job/passes.h"

namespace shardd::testing_client {
namespace {

constexpr int kWorld = 2;

v1::JobSpec CopiesSpec(const std::string& name) {
  v1::JobSpec spec = SmallSpec(name, kWorld);
  StepInTrainers(&spec);
  spec.mutable_config()->set_keep_every(1);
  return spec;
}

// What a pass reads of the first element of the root's first parameter.
float Read(Rank& rank) {
  const int param = rank.GroupInfo(0).params[0];
  rank.Unshard(0, SHARDD_FORWARD);
  const float value = rank.First(param);
  EXPECT_C_OK(shardd_reshard(rank.job(), 0));
  return value;
}

TEST(PassCopies, StoresNeedNoPermissionAndCountFromTheNextPass) {
  FilledWorld world(CopiesSpec("stores"));
  world.Each([](int index, Rank& rank) {
    const int param = rank.GroupInfo(0).params[0];
    EXPECT_EQ(rank.Info().pass_copies, 1);
    if (index == 0) *StoredShard(rank, param) = 2;  // before the first pass
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    EXPECT_EQ(Read(rank), 2);
    ASSERT_C_OK(shardd_stop_reading(rank.job()));
    ASSERT_C_OK(shardd_hand_in_edits(rank.job()));
    if (index == 0) {
      *StoredShard(rank, param) = 3;
      *static_cast<float*>(shardd_optimizer_state_data(rank.job(), param, 0)) = 5;
    }
    ASSERT_C_OK(shardd_resume_reading(rank.job()));
    EXPECT_EQ(Read(rank), 2) << "in the same pass";
    EXPECT_EQ(shardd_inside_pass(rank.job()), 1);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 1, "state", 5));
    EXPECT_EQ(Read(rank), 3);
    EXPECT_EQ(rank.Info().committed_step, 1);
    EXPECT_EQ(rank.Info().version, 3u);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

TEST(PassCopies, LeavingFullParametersWaitsUntilTheLastHasReadThem) {
  FilledWorld world(CopiesSpec("full"));
  std::atomic<bool> read = false;
  world.Each([&](int index, Rank& rank) {
    const int param = rank.GroupInfo(0).params[0];
    ASSERT_C_OK(shardd_enter_full_params(rank.job(), 0));
    if (index == 1) {
      absl::SleepFor(absl::Milliseconds(200));
      EXPECT_EQ(*static_cast<const float*>(shardd_full_parameter_data(rank.job(), param)), 1);
      read = true;
    }
    ASSERT_C_OK(shardd_leave_full_params(rank.job()));
    EXPECT_TRUE(read.load());
    if (index == 0) *StoredShard(rank, param) = 8;
  });
}

TEST(PassCopies, StoresAfterAnotherRankIsLostSpoilNothing) {
  const v1::JobSpec spec = CopiesSpec("survivor");
  FilledWorld world(spec);
  Rank& survivor = world.ranks[0];
  const int param = survivor.GroupInfo(0).params[0];
  *StoredShard(survivor, param) = 2;
  world.Each([](int, Rank& rank) { ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0)); });
  ASSERT_C_OK(shardd_detach(world.ranks[1].Release(), 0));
  absl::SleepFor(absl::Milliseconds(100));
  *StoredShard(survivor, param) = 9;
  ForEachRank(kWorld, [&](int index) {
    if (index == 0) {
      absl::SleepFor(absl::Milliseconds(100));
      *StoredShard(survivor, param) = 10;
      EXPECT_C_ERROR(shardd_leave_pass(survivor.job()), kAborted, "detached");
      ASSERT_C_OK(shardd_reattach(survivor.job()));
    } else {
      ASSERT_C_OK(world.ranks[1].Attach(world.daemon.address(), spec, 1));
      EXPECT_EQ(*StoredShard(world.ranks[1], param), 2);
    }
  });
  world.Each([](int, Rank& rank) {
    ASSERT_C_OK(shardd_enter_pass(rank.job(), 0, nullptr, 0));
    EXPECT_EQ(Read(rank), 2);
    ASSERT_C_OK(shardd_leave_pass(rank.job()));
  });
}

}  // namespace
}  // namespace shardd::testing_client
