// Every mistake is an error in the call that made it, and costs the session nothing.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

class Commands : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_C_OK(rank_.Attach(daemon_.address(), SmallSpec("job", 1), 0));
    a_ = rank_.Group("a");
    b_ = rank_.Group("b");
    root_ = rank_.Group("(root)");
    weight_ = rank_.Param("a.weight");
  }
  shardd_job* job() { return rank_.job(); }
  Result Step(double lr = 0.1) {
    const shardd_hyperparameters group = Sgd(lr);
    return shardd_step(job(), &group, 1, 0, nullptr, 0);
  }
  void Forward(int group) {
    rank_.Unshard(group, SHARDD_FORWARD);
    ASSERT_C_OK(shardd_reshard(job(), group));
  }
  // The session still works: a whole step goes through.
  void ExpectHealthy() {
    Forward(a_);
    EXPECT_C_OK(shardd_wait_gradient_slot(job(), a_));
    EXPECT_C_OK(shardd_submit_gradients(job(), a_, nullptr, nullptr));
    EXPECT_C_OK(shardd_backward_done(job(), 1));
    EXPECT_C_OK(Step(0));
    EXPECT_C_OK(shardd_await_step(job()));  // without a stream the host waits
    EXPECT_C_OK(shardd_wait_step(job(), nullptr));
  }

  Daemon daemon_;
  Rank rank_;
  int a_ = -1, b_ = -1, root_ = -1, weight_ = -1;
};

TEST_F(Commands, NothingIsUnshardedBeforeValuesAreGiven) {
  EXPECT_C_ERROR(shardd_unshard(job(), a_, SHARDD_FORWARD), kFailedPrecondition, "no values yet");
  EXPECT_C_ERROR(Step(), kFailedPrecondition, "no values yet");
  EXPECT_C_ERROR(shardd_enter_full_params(job(), 0), kFailedPrecondition, "no values yet");
  rank_.WriteAll(2);
  ExpectHealthy();
}

TEST_F(Commands, ALateCommitSaysWhatToRaiseAndIsWaitedForAgain) {
  Rank ranks[2];
  ForEachRank(2, [&](int rank) {
    ASSERT_C_OK(ranks[rank].Attach(daemon_.address(), SmallSpec("late", 2), rank, absl::Milliseconds(500)));
    ranks[rank].WriteAll(2);
  });
  const shardd_hyperparameters group = Sgd(0.1);
  ASSERT_C_OK(shardd_step(ranks[0].job(), &group, 1, 0, nullptr, 0));
  EXPECT_C_ERROR(shardd_wait_step(ranks[0].job(), nullptr), kDeadlineExceeded,
                 "call shardd_wait_step again to wait longer, or raise timeout_ms (SHARDD_TIMEOUT_MS)");
  ASSERT_C_OK(shardd_step(ranks[1].job(), &group, 1, 0, nullptr, 0));
  EXPECT_C_OK(shardd_wait_step(ranks[0].job(), nullptr));
}

TEST_F(Commands, ParametersCanBeReadOnlyBetweenWaitAndReshard) {
  rank_.WriteAll(2);
  EXPECT_EQ(shardd_parameter_data(job(), weight_), nullptr);
  ASSERT_C_OK(shardd_unshard(job(), a_, SHARDD_FORWARD));
  EXPECT_EQ(shardd_parameter_data(job(), weight_), nullptr);
  ASSERT_C_OK(shardd_wait_unshard(job(), a_));
  EXPECT_EQ(rank_.First(weight_), 2);
  EXPECT_EQ(shardd_parameter_data(job(), rank_.Param("b.weight")), nullptr);
  ASSERT_C_OK(shardd_reshard(job(), a_));
  EXPECT_EQ(shardd_parameter_data(job(), weight_), nullptr);
}

TEST_F(Commands, AGroupUsedTwiceIsHeldUntilTheSecondReshard) {
  rank_.WriteAll(2);
  rank_.Unshard(a_, SHARDD_FORWARD);
  rank_.Unshard(a_, SHARDD_FORWARD);
  ASSERT_C_OK(shardd_reshard(job(), a_));
  EXPECT_EQ(rank_.First(weight_), 2);
  ASSERT_C_OK(shardd_reshard(job(), a_));
  EXPECT_EQ(shardd_parameter_data(job(), weight_), nullptr);
  EXPECT_C_ERROR(shardd_reshard(job(), a_), kFailedPrecondition, "Reshard group \"a\"");
  ExpectHealthy();
}

TEST_F(Commands, IllegalRequestsNameGroupAndStateAndAreNeverSent) {
  rank_.WriteAll(2);
  const uint64_t sent = rank_.Counters().commands;
  EXPECT_C_ERROR(shardd_reshard(job(), b_), kFailedPrecondition, "Reshard group \"b\": not legal in SHARDED/IDLE");
  EXPECT_C_ERROR(shardd_wait_unshard(job(), b_), kFailedPrecondition, "call shardd_unshard first");
  EXPECT_C_ERROR(shardd_submit_gradients(job(), b_, nullptr, nullptr), kFailedPrecondition,
                 "SubmitGradients group \"b\"");
  EXPECT_C_ERROR(shardd_leave_full_params(job()), kFailedPrecondition, "shardd_enter_full_params");
  EXPECT_C_ERROR(shardd_commit_parameters(job()), kFailedPrecondition, "shardd_enter_full_params");
  EXPECT_C_ERROR(shardd_write_parameter(job(), weight_, &sent, 0, 1), kFailedPrecondition, "a.weight");
  EXPECT_C_ERROR(shardd_wait_step(job(), nullptr), kFailedPrecondition, "no step was sent");
  EXPECT_C_ERROR(shardd_await_step(job()), kFailedPrecondition, "no step was sent");
  EXPECT_C_ERROR(shardd_unshard(job(), b_, static_cast<shardd_phase>(3)), kInvalidArgument, "phase");
  EXPECT_EQ(rank_.Counters().commands, sent);
  ExpectHealthy();
}

TEST_F(Commands, AStepNeedsAllGroupsReshardedAndTheBackwardClosed) {
  rank_.WriteAll(2);
  rank_.Unshard(a_, SHARDD_FORWARD);
  EXPECT_C_ERROR(Step(), kFailedPrecondition, "Step group \"a\": the group is still unsharded");
  ASSERT_C_OK(shardd_reshard(job(), a_));
  ASSERT_C_OK(shardd_submit_gradients(job(), a_, nullptr, nullptr));
  EXPECT_C_ERROR(Step(), kFailedPrecondition, "shardd_backward_done");
  ASSERT_C_OK(shardd_backward_done(job(), 1));
  EXPECT_C_ERROR(shardd_backward_done(job(), 1), kFailedPrecondition, "shardd_step");
  ASSERT_C_OK(Step(0));
  ASSERT_C_OK(Step(0));  // waits for the first
  ExpectHealthy();
}

TEST_F(Commands, SlotsThatMayHoldOldGradientsMustBeAwaited) {
  rank_.WriteAll(2);
  Forward(a_);
  ASSERT_C_OK(shardd_submit_gradients(job(), a_, nullptr, nullptr));  // the first use of a fresh slot
  EXPECT_C_ERROR(shardd_submit_gradients(job(), a_, nullptr, nullptr), kFailedPrecondition,
                 "shardd_wait_gradient_slot");
  ASSERT_C_OK(shardd_wait_gradient_slot(job(), a_));
  ASSERT_C_OK(shardd_submit_gradients(job(), a_, nullptr, nullptr));
  ASSERT_C_OK(shardd_backward_done(job(), 1));
  ASSERT_C_OK(Step(0));
  ExpectHealthy();
}

TEST_F(Commands, MasksMustNotNameFrozenOrUnknownParameters) {
  rank_.WriteAll(2);
  Forward(root_);
  const int frozen = rank_.ParamInfo(rank_.Param("frozen")).index_in_group;
  const uint8_t only_frozen = static_cast<uint8_t>(1 << frozen);
  const uint8_t beyond = 1 << 5;
  const uint8_t nothing = 0;
  EXPECT_C_ERROR(shardd_submit_gradients(job(), root_, &only_frozen, nullptr), kInvalidArgument, "\"frozen\"");
  EXPECT_C_ERROR(shardd_submit_gradients(job(), root_, nullptr, &only_frozen), kInvalidArgument, "`fresh`");
  EXPECT_C_ERROR(shardd_submit_gradients(job(), root_, &beyond, nullptr), kInvalidArgument, "bit 5");
  EXPECT_EQ(shardd_gradient_data(job(), rank_.Param("frozen")), nullptr);
  EXPECT_C_OK(shardd_submit_gradients(job(), root_, &nothing, nullptr));
  EXPECT_C_OK(shardd_backward_done(job(), 1));
  EXPECT_C_OK(Step(1));
  ExpectHealthy();
  Forward(root_);
}

TEST_F(Commands, HyperparametersAndStateAreCheckedBeforeTheyAreSent) {
  rank_.WriteAll(2);
  const uint64_t sent = rank_.Counters().commands;
  const shardd_hyperparameters two[2] = {Sgd(0.1), Sgd(0.1)};
  EXPECT_C_ERROR(shardd_step(job(), two, 2, 0, nullptr, 0), kInvalidArgument, "got 2, want 1");
  EXPECT_C_ERROR(Step(-1), kInvalidArgument, "lr is out of range (got -1");
  EXPECT_C_ERROR(shardd_step(job(), two, 1, -2, nullptr, 0), kInvalidArgument, "max_grad_norm");
  shardd_hyperparameters momentum = Sgd(0.1);
  momentum.momentum = 0.9;
  EXPECT_C_ERROR(shardd_step(job(), &momentum, 1, 0, nullptr, 0), kInvalidArgument, "OptimizerConfig.momentum");
  const std::string large((1 << 20) + 1, 'x');
  EXPECT_C_ERROR(shardd_step(job(), two, 1, 0, large.data(), large.size()), kInvalidArgument, "1048577");
  EXPECT_C_ERROR(shardd_step(job(), nullptr, 1, 0, nullptr, 0), kInvalidArgument, "NULL");
  EXPECT_C_ERROR(shardd_step(job(), two, 1, 0, nullptr, 5), kInvalidArgument, "NULL");
  EXPECT_EQ(rank_.Counters().commands, sent);
  // The largest legal one.
  EXPECT_C_OK(shardd_step(job(), two, 1, 0, large.data(), 1 << 20));
  EXPECT_C_OK(shardd_wait_step(job(), nullptr));
  size_t size = 0;
  shardd_trainer_state(job(), &size);
  EXPECT_EQ(size, size_t{1} << 20);
  ExpectHealthy();
}

TEST_F(Commands, ZeroCopyUnshardAndReshardWakeNobody) {
  rank_.WriteAll(2);
  const shardd_counters before = rank_.Counters();
  for (int i = 0; i < 100; ++i) {
    Forward(i % 2 == 0 ? a_ : b_);
  }
  const shardd_counters after = rank_.Counters();
  EXPECT_EQ(after.commands - before.commands, 200u);
  EXPECT_EQ(after.doorbells, before.doorbells);
  EXPECT_EQ(after.waits, before.waits);
}

TEST_F(Commands, MoreCommandsThanTheRingHoldsGoThrough) {
  rank_.WriteAll(2);
  for (int i = 0; i < 5000; ++i) {
    ASSERT_C_OK(shardd_unshard(job(), a_, SHARDD_FORWARD));
    ASSERT_C_OK(shardd_reshard(job(), a_));
  }
  EXPECT_GE(rank_.Counters().commands, 10000u);
  ExpectHealthy();
}

TEST_F(Commands, FullParamsGiveTheStoredValuesAndTakeNewOnes) {
  rank_.WriteAll(2);
  EXPECT_EQ(shardd_full_parameter_data(job(), weight_), nullptr);
  ASSERT_C_OK(shardd_enter_full_params(job(), 1));
  EXPECT_EQ(static_cast<const float*>(shardd_full_parameter_data(job(), weight_))[5], 2);
  EXPECT_C_ERROR(shardd_unshard(job(), a_, SHARDD_FORWARD), kFailedPrecondition, "FULL_PARAMS");
  const float values[3] = {7, 8, 9};
  EXPECT_C_ERROR(shardd_write_parameter(job(), weight_, values, 33 * 17 - 2, 3), kInvalidArgument, "outside");
  EXPECT_C_ERROR(shardd_write_parameter(job(), weight_, nullptr, 0, 3), kInvalidArgument, "NULL");
  ASSERT_C_OK(shardd_write_parameter(job(), weight_, values, 33 * 17 - 3, 3));
  EXPECT_C_ERROR(shardd_leave_full_params(job()), kFailedPrecondition, "shardd_commit_parameters");
  ASSERT_C_OK(shardd_commit_parameters(job()));
  EXPECT_EQ(static_cast<const float*>(shardd_full_parameter_data(job(), weight_))[33 * 17 - 1], 9);
  ASSERT_C_OK(shardd_leave_full_params(job()));
  EXPECT_EQ(shardd_full_parameter_data(job(), weight_), nullptr);
  EXPECT_EQ(rank_.Info().version, 2u);
  ASSERT_C_OK(shardd_enter_full_params(job(), 0));
  EXPECT_C_ERROR(shardd_write_parameter(job(), weight_, values, 0, 3), kFailedPrecondition, "writeback");
  ASSERT_C_OK(shardd_leave_full_params(job()));
  rank_.Unshard(a_, SHARDD_FORWARD);
  EXPECT_EQ(static_cast<const float*>(shardd_parameter_data(job(), weight_))[33 * 17 - 2], 8);
  EXPECT_EQ(static_cast<const float*>(shardd_parameter_data(job(), weight_))[0], 2);
}

}  // namespace
}  // namespace shardd::testing_client
