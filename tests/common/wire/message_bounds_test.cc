#include "common/wire/message_bounds.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {
namespace {

constexpr MessageLimits kNarrow = {1 << 20, 4 << 20, UnknownFields::kRefused, 20};

absl::Status Look(absl::string_view bytes, const MessageLimits& limits = kNarrow) {
  return EstimateDecodedBytes("step", bytes, *v1::Step::descriptor(), limits).status();
}

std::string Repeat(absl::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) absl::StrAppend(&all, text);
  return all;
}

v1::Step StepOfGroups(int count) {
  v1::Step step;
  for (int i = 0; i < count; ++i) step.add_groups()->set_lr(0.1);
  return step;
}

TEST(MessageBounds, AMessageWithinThemFits) {
  v1::Step step = StepOfGroups(3);
  step.set_trainer_state(std::string(1000, 'x'));
  EXPECT_TRUE(Look(step.SerializeAsString()).ok());
  EXPECT_TRUE(Look("").ok());
}

TEST(MessageBounds, FieldsOfSubmessagesCount) {
  EXPECT_TRUE(Look(StepOfGroups(10).SerializeAsString()).ok());
  const absl::Status status = Look(StepOfGroups(11).SerializeAsString());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "step: message has too many fields")) << status;
}

TEST(MessageBounds, OneFieldAgainAndAgainCountsEachTime) {
  EXPECT_TRUE(Look(Repeat(absl::string_view("\x1a\0", 2), 20)).ok());
  EXPECT_EQ(Look(Repeat(absl::string_view("\x1a\0", 2), 21)).code(), absl::StatusCode::kResourceExhausted);
}

TEST(MessageBounds, UnknownFieldsAreRefusedWhereverTheyAre) {
  for (const absl::string_view bytes :
       {absl::string_view("\xa0\x06\x01", 3), absl::string_view("\x0a\x03\xa0\x06\x01", 5),
        absl::string_view("\xa2\x06\0", 3)}) {
    const absl::Status status = Look(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "unknown field (number 100)")) << status;
  }
  EXPECT_EQ(Look("\x18\x01").code(), absl::StatusCode::kInvalidArgument);  // a known number on another wire type
  EXPECT_TRUE(Look("\xa0\x06\x01", {1 << 20, 4 << 20}).ok());              // where they are counted
}

TEST(MessageBounds, WhatIsCutOffIsMalformed) {
  const std::string whole = StepOfGroups(1).SerializeAsString();
  for (size_t bytes = 1; bytes < whole.size(); ++bytes) {
    EXPECT_EQ(Look(whole.substr(0, bytes)).code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
}

TEST(MessageBounds, MoreBytesThanAllowedAreNotLookedAt) {
  EXPECT_EQ(Look(std::string(kNarrow.wire_bytes + 1, '\xff')).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace shardd
