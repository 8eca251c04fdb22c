#include "server/job/full_params/full_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code);
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

class FullParamsTest : public ::testing::Test {
 protected:
  // Groups 0 (the root) and 1, "a"; parameters 0, "w", and 1, "a.w".
  FullParamsTest() {
    SpecBuilder builder;
    builder.Param(0, "w", {8});
    builder.Param(builder.AddSharded(0, "a"), "w", {8});
    plan_ = builder.Plan();
  }
  void AskAll(const FullParamsRequest& request) {
    for (int rank = 0; rank < 2; ++rank) full_params_.Ask(rank, request, /*signal=*/0);
  }
  ShardPlan plan_;
  FullParams full_params_{2};
};

TEST_F(FullParamsTest, RanksAreInsideFromGrantToLeave) {
  full_params_.Ask(0, {}, /*signal=*/7);
  EXPECT_TRUE(full_params_.asked(0));
  EXPECT_FALSE(full_params_.asked(1));
  EXPECT_EQ(full_params_.entry_signal(0), 7u);
  full_params_.Ask(1, {}, 8);
  EXPECT_FALSE(full_params_.AnyInside());
  full_params_.Grant({true, true});
  EXPECT_TRUE(full_params_.granted());
  EXPECT_TRUE(full_params_.inside(0) && full_params_.inside(1));
  EXPECT_FALSE(full_params_.Leave(1, /*signal=*/9));
  EXPECT_EQ(full_params_.leave_signal(1), 9u);
  EXPECT_TRUE(full_params_.granted());
  EXPECT_TRUE(full_params_.Leave(0, 0)) << "the last one";
  EXPECT_FALSE(full_params_.granted());
  EXPECT_FALSE(full_params_.AnyAsked());
}

TEST_F(FullParamsTest, RequestsAreEqualOnAllRanksThatWait) {
  full_params_.Ask(0, {.writeback = true}, 0);
  EXPECT_TRUE(full_params_.CheckEqual(1, {.writeback = true}).ok());
  ExpectRefused(full_params_.CheckEqual(1, {}), absl::StatusCode::kFailedPrecondition,
                "writeback differs between ranks (got 0 on rank 1, 1 on rank 0)");
  ExpectRefused(full_params_.CheckEqual(1, {.writeback = true, .of_edits = true}),
                absl::StatusCode::kFailedPrecondition, "of_edits differs between ranks (got 1 on rank 1, 0 on rank 0)");
  full_params_.Ask(1, {.writeback = true}, 0);
  full_params_.Grant({true, true});
  full_params_.Leave(1, 0);
  EXPECT_TRUE(full_params_.CheckEqual(1, {.group = 1}).ok()) << "a rank that is inside asked for the time before";
}

TEST_F(FullParamsTest, EditsAreWrittenBackWhereNobodyHandsThemIn) {
  const FullParamsRequest edits{.writeback = true, .of_edits = true};
  ExpectRefused(CheckFullParams(plan_, edits, /*over_nodes=*/false), absl::StatusCode::kFailedPrecondition, "of_edits");
  ShardPlan over_nodes = plan_;
  over_nodes.config.mutable_nodes()->add_addresses("host0:7000");
  over_nodes.config.mutable_nodes()->add_addresses("host1:7000");
  over_nodes.config.set_trainers_never_write(false);
  EXPECT_TRUE(CheckFullParams(over_nodes, edits, /*over_nodes=*/true).ok());
  for (const FullParamsRequest& other :
       {FullParamsRequest{.of_edits = true}, FullParamsRequest{.writeback = true, .rank0_only = true, .of_edits = true},
        FullParamsRequest{.writeback = true, .group = 0, .of_edits = true}}) {
    ExpectRefused(CheckFullParams(over_nodes, other, true), absl::StatusCode::kFailedPrecondition, "of_edits");
  }
}

TEST_F(FullParamsTest, WritesAreOwedUntilTheirCommit) {
  AskAll({.writeback = true});
  EXPECT_TRUE(full_params_.AnyWrites());
  full_params_.Grant({true, true});
  full_params_.WritesCommitted();
  EXPECT_FALSE(full_params_.AnyWrites());
  EXPECT_TRUE(full_params_.inside(0));
}

TEST_F(FullParamsTest, ARefusedEntryMayBeAskedForAgain) {
  AskAll({.writeback = true});
  full_params_.Refuse();
  EXPECT_FALSE(full_params_.AnyAsked() || full_params_.AnyWrites());
  EXPECT_TRUE(full_params_.CheckEqual(0, {}).ok());
}

TEST_F(FullParamsTest, OnlyWhatWasEnteredMayBeWritten) {
  AskAll({.writeback = true, .rank0_only = true, .group = 1});
  full_params_.Grant({false, true});
  EXPECT_TRUE(full_params_.CheckMayWrite(plan_, 0, 1).ok());
  ExpectRefused(full_params_.CheckMayWrite(plan_, 0, 0), absl::StatusCode::kFailedPrecondition, "group \"a\"");
  ExpectRefused(full_params_.CheckMayWrite(plan_, 1, 1), absl::StatusCode::kFailedPrecondition, "rank0_only");
}

TEST_F(FullParamsTest, AnEndedEpochForgetsAll) {
  AskAll({});
  full_params_.AwaitDevices(true);
  full_params_.Grant({true, true});
  full_params_.EndEpoch();
  EXPECT_FALSE(full_params_.granted() || full_params_.awaits_devices() || full_params_.AnyAsked() ||
               full_params_.AnyInside());
}

TEST_F(FullParamsTest, WhatAPlanDoesNotServeIsRefused) {
  EXPECT_TRUE(CheckFullParams(plan_, {.group = 1}, /*over_nodes=*/false).ok());
  ExpectRefused(CheckFullParams(plan_, {.group = 2}, false), absl::StatusCode::kInvalidArgument,
                "(got 2, want -1 to 1)");
  ExpectRefused(CheckFullParams(plan_, {.recurse = false}, false), absl::StatusCode::kInvalidArgument,
                "recurse false names no module");
  ExpectRefused(CheckFullParams(plan_, {.writeback = true, .with_grads = true}, /*over_nodes=*/true),
                absl::StatusCode::kUnimplemented, "several nodes");
}

}  // namespace
}  // namespace shardd
