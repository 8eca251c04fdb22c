#include "common/wire/message_bounds.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/peer.pb.h"
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

// With `count` empty elements in each repeated submessage, and as many fields that no version of it knows.
void ExpectFitsIntoItsEstimate(const google::protobuf::Message& prototype, int count) {
  const google::protobuf::Descriptor& type = *prototype.GetDescriptor();
  const std::unique_ptr<google::protobuf::Message> filled(prototype.New());
  for (int i = 0; i < type.field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = type.field(i);
    if (field->type() != google::protobuf::FieldDescriptor::TYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      filled->GetReflection()->MutableMessage(filled.get(), field);
    } else if (!field->is_map()) {
      for (int n = 0; n < count; ++n) filled->GetReflection()->AddMessage(filled.get(), field);
    }
  }
  const std::string known = filled->SerializeAsString();
  for (const size_t length : {0, 15, 16, 18, 31, 100}) {
    const std::string bytes =
        known +
        Repeat(absl::StrCat("\xa2\x06", std::string(1, static_cast<char>(length)), std::string(length, 'x')), count);
    const absl::StatusOr<int64_t> estimate =
        EstimateDecodedBytes("message", bytes, type, {1 << 20, 4 << 20, UnknownFields::kCounted});
    ASSERT_TRUE(estimate.ok()) << type.full_name() << ": " << estimate.status();
    ASSERT_TRUE(filled->ParseFromString(bytes)) << type.full_name();
    EXPECT_LE(filled->SpaceUsedLong(), static_cast<size_t>(*estimate))
        << type.full_name() << " with " << count << " of everything, strings of " << length << " bytes";
  }
}

TEST(MessageBounds, NoTypeTakesMoreThanItsEstimate) {
  int types = 0;
  for (const google::protobuf::FileDescriptor* file :
       {v1::Step::descriptor()->file(), v1::OpenJobRequest::descriptor()->file(), v1::Job::descriptor()->file(),
        v1::JobSpec::descriptor()->file(), v1::PeerMessage::descriptor()->file()}) {
    std::vector<const google::protobuf::Descriptor*> left;
    for (int i = 0; i < file->message_type_count(); ++i) left.push_back(file->message_type(i));
    while (!left.empty()) {
      const google::protobuf::Descriptor* type = left.back();
      left.pop_back();
      if (type->map_key() != nullptr) continue;
      for (int i = 0; i < type->nested_type_count(); ++i) left.push_back(type->nested_type(i));
      const google::protobuf::Message* prototype =
          google::protobuf::MessageFactory::generated_factory()->GetPrototype(type);
      for (int count = 0; count <= 33; ++count) ExpectFitsIntoItsEstimate(*prototype, count);
      ++types;
    }
  }
  EXPECT_GT(types, 100);
}

TEST(MessageBounds, MoreBytesThanAllowedAreNotLookedAt) {
  EXPECT_EQ(Look(std::string(kNarrow.wire_bytes + 1, '\xff')).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace shardd
