#include "server/job/writes/write_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/shm/ring.h"
#include "server/session/rank_command.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class WriteRequestTest : public ::testing::Test {
 protected:
  enum { kTrained, kFrozen };
  WriteRequestTest() {
    builder_.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
    builder_.Param(0, "trained", {8}, {.dtype = v1::DTYPE_BFLOAT16});
    builder_.Param(0, "frozen", {8}, {.requires_grad = false});
  }
  absl::StatusOr<WriteRequest> Parse(int param, int64_t first, int64_t numel, int state = 0, uint32_t flags = 0,
                                     bool gradients = false) {
    RankCommand command;
    command.group = param;
    command.arg0 = first;
    command.arg1 = numel;
    command.flags = flags | static_cast<uint32_t>(state) << kWrittenStateShift;
    return ParseWrite(builder_.Plan(), command, gradients);
  }
  static void ExpectRefused(const absl::StatusOr<WriteRequest>& request, absl::StatusCode code,
                            const std::string& text) {
    EXPECT_EQ(request.status().code(), code);
    EXPECT_THAT(std::string(request.status().message()), HasSubstr(text));
  }

  SpecBuilder builder_;
};

TEST_F(WriteRequestTest, ValuesHaveTheParametersType) {
  const auto request = Parse(kTrained, 2, 6);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->target, WriteRequest::Target::kPart);
  EXPECT_EQ(request->part, 0);
  EXPECT_EQ(request->first, 2);
  EXPECT_EQ(request->size_bytes(), 12);
}

TEST_F(WriteRequestTest, StatesAndGradientsAreFloats) {
  const auto state = Parse(kTrained, 0, 8, /*state=*/2);
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->part, 2);
  EXPECT_EQ(state->size_bytes(), 32);
  const auto gradient = Parse(kTrained, 0, 8, 0, kOfGradient, /*gradients=*/true);
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  EXPECT_EQ(gradient->target, WriteRequest::Target::kGradient);
  EXPECT_EQ(gradient->size_bytes(), 32);
}

TEST_F(WriteRequestTest, ACountOfUpdatesHasNoElements) {
  const auto request = Parse(kTrained, /*count=*/41, 0, /*state=*/-1);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->target, WriteRequest::Target::kUpdateCount);
  EXPECT_EQ(request->count, 41);
  ExpectRefused(Parse(kTrained, kMaxUpdates + 1, 0, -1), absl::StatusCode::kInvalidArgument, "out of range");
}

TEST_F(WriteRequestTest, ElementsOutOfRangeAreRefused) {
  for (const auto& [first, numel] : {std::pair<int64_t, int64_t>{-1, 1}, {0, -1}, {1, 8}, {9, 0}}) {
    ExpectRefused(Parse(kTrained, first, numel), absl::StatusCode::kInvalidArgument, "want within 8");
  }
}

TEST_F(WriteRequestTest, StatesThatTheJobLacksAreRefused) {
  ExpectRefused(Parse(kTrained, 0, 8, 3), absl::StatusCode::kInvalidArgument, "(got 3, want -1 to 2)");
  ExpectRefused(Parse(kTrained, 0, 8, -2), absl::StatusCode::kInvalidArgument, "(got -2, want -1 to 2)");
  ExpectRefused(Parse(kFrozen, 0, 8, 1), absl::StatusCode::kInvalidArgument, "(got 1, want -1 to 0)");
  ExpectRefused(Parse(kFrozen, 0, 8, -1), absl::StatusCode::kInvalidArgument, "no such optimizer state");
}

TEST_F(WriteRequestTest, GradientsNeedFullParamsWithGradients) {
  ExpectRefused(Parse(kTrained, 0, 8, 0, kOfGradient), absl::StatusCode::kFailedPrecondition, "with_grads");
  ExpectRefused(Parse(kFrozen, 0, 8, 0, kOfGradient, true), absl::StatusCode::kFailedPrecondition,
                "a frozen parameter has no gradient");
  ExpectRefused(Parse(kTrained, 0, 8, 1, kOfGradient, true), absl::StatusCode::kInvalidArgument, "either a gradient");
}

}  // namespace
}  // namespace shardd
