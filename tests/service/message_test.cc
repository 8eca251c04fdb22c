#include "server/service/message.h"

#include <initializer_list>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {
namespace {

constexpr MessageLimits kRoomy = {64 << 20, 1 << 30};

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<int64_t> EstimateOf(const std::string& text, const MessageLimits& limits = kRoomy) {
  return EstimateDecodedBytes("open job", Bytes(text), *v1::OpenJobRequest::descriptor(), limits);
}

v1::OpenJobRequest RequestWithParameters(int count) {
  v1::OpenJobRequest request;
  v1::Module& module = *request.mutable_spec()->mutable_tree()->add_modules();
  module.set_class_name("Block");
  for (int i = 0; i < count; ++i) {
    v1::Parameter& parameter = *module.add_parameters();
    parameter.set_name(absl::StrCat("a_name_that_does_not_fit_into_a_string_object_", i));
    parameter.add_shape(1 << 20);
    parameter.add_shape(3);
    parameter.set_dtype(v1::DTYPE_FLOAT32);
    parameter.set_requires_grad(true);
  }
  return request;
}

// A field on the wire.
std::string Field(int number, int wire_type, const std::string& bytes) {
  return std::string(1, static_cast<char>(number << 3 | wire_type)) + bytes;
}

std::string Repeat(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

// A request whose first module consists of these bytes.
std::string WithModule(const std::string& module) {
  std::string text = module;
  for (const int number : std::initializer_list<int>{v1::ModuleTree::kModulesFieldNumber, v1::JobSpec::kTreeFieldNumber,
                                                     v1::OpenJobRequest::kSpecFieldNumber}) {
    std::string length;
    for (size_t left = text.size(); left > 0; left >>= 7) {
      length += static_cast<char>((left & 127) | (left > 127 ? 128 : 0));
    }
    text = Field(number, 2, length + text);
  }
  return text;
}

struct Shape {
  const char* name;
  std::string text;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }

constexpr int kMany = 100'000;

class MessageShapeTest : public ::testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(
    Shapes, MessageShapeTest,
    ::testing::Values(Shape{"Empty", ""}, Shape{"OneParameter", RequestWithParameters(1).SerializeAsString()},
                      Shape{"ManyParameters", RequestWithParameters(10'000).SerializeAsString()},
                      Shape{"EmptyParameters",
                            WithModule(Repeat(Field(v1::Module::kParametersFieldNumber, 2, std::string(1, 0)), kMany))},
                      Shape{"PackedNumbers", WithModule(Field(v1::Module::kParametersFieldNumber, 2,
                                                              std::string("\x81\x01\x12\x7f") + std::string(127, 1)))},
                      Shape{"NumbersOneByOne", WithModule(Field(v1::Module::kParametersFieldNumber, 2,
                                                                "\x02" + Field(2, 0, std::string(1, 1))))},
                      Shape{"UnknownNumbers", Repeat(Field(15, 0, std::string(1, 1)), kMany)},
                      Shape{"UnknownTexts", Repeat(Field(15, 2, std::string(1, 0)), kMany)},
                      Shape{"KnownNumbersOnAnotherWireType", Repeat(Field(1, 2, std::string(1, 0)), kMany)},
                      Shape{"KnownMessagesOnAnotherWireType", Repeat(Field(2, 0, std::string(1, 1)), kMany)}),
    [](const auto& info) { return info.param.name; });

TEST_P(MessageShapeTest, TakesNoMoreThanTheEstimate) {
  const auto estimate = EstimateOf(GetParam().text);
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  v1::OpenJobRequest decoded;
  ASSERT_TRUE(Decode("open job", Bytes(GetParam().text), &decoded).ok());
  EXPECT_GE(decoded.SerializeAsString().size(), GetParam().text.size()) << "nothing is dropped";
  EXPECT_LE(static_cast<int64_t>(decoded.SpaceUsedLong()), *estimate);
}

TEST_P(MessageShapeTest, IsRefusedWhereTheEstimateIsAboveTheLimit) {
  const auto estimate = EstimateOf(GetParam().text);
  ASSERT_TRUE(estimate.ok());
  const int64_t of_fields = *estimate - *EstimateOf("");
  EXPECT_TRUE(EstimateOf(GetParam().text, {64 << 20, of_fields}).ok());
  if (of_fields > 0) {
    const absl::Status status = EstimateOf(GetParam().text, {64 << 20, of_fields - 1}).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "open job: message has too many elements")) << status;
  }
}

// An ordinary one is not refused for an estimate that is far off.
TEST(MessageTest, AModelsEstimateIsWithinThreeTimesItsMemory) {
  const v1::OpenJobRequest request = RequestWithParameters(10'000);
  EXPECT_LE(*EstimateOf(request.SerializeAsString()), 3 * static_cast<int64_t>(request.SpaceUsedLong()));
}

TEST(MessageTest, WhatIsTooLongOnTheWireIsRefused) {
  const absl::Status status = EstimateOf(std::string(101, 'x'), {100, 1 << 20}).status();
  EXPECT_EQ(status, absl::ResourceExhaustedError("open job: message is too large (got 101 bytes, want at most 100)"));
}

TEST(MessageTest, WhatIsNoMessageIsMalformed) {
  const std::string texts[] = {"\x0a",
                               "\x0a\x05"
                               "abc",
                               "\x0b\x0c",
                               "\x12\xff\xff\xff\xff\x0f",
                               std::string("\x00", 1),
                               "\x08\xff",
                               RequestWithParameters(3).SerializeAsString().substr(0, 40)};
  for (const std::string& text : texts) {
    EXPECT_TRUE(absl::IsInvalidArgument(EstimateOf(text).status())) << EstimateOf(text).status();
  }
}

TEST(MessageTest, WhatIsEncodedIsDecodedAgain) {
  const v1::OpenJobRequest request = RequestWithParameters(7);
  v1::OpenJobRequest decoded;
  ASSERT_TRUE(DecodeWithin("open job", Encode(request).value(), kRoomy, &decoded).ok());
  EXPECT_EQ(decoded.SerializeAsString(), request.SerializeAsString());
  ASSERT_TRUE(DecodeWithin("open job", grpc::ByteBuffer(), kRoomy, &decoded).ok()) << "a call without a body";
  EXPECT_EQ(decoded.ByteSizeLong(), 0u);
}

TEST(DecodedMemoryTest, IsTheUsersUntilTheHoldGoes) {
  const auto memory = std::make_shared<DecodedMemory>(100);
  DecodedMemory::Hold first = memory->Take(1, 60);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(memory->Take(1, 41), nullptr);
  EXPECT_NE(memory->Take(1, 40), nullptr);  // and goes at once
  EXPECT_NE(memory->Take(2, 100), nullptr) << "each user has its own";
  const DecodedMemory::Hold copy = first;
  first.reset();
  EXPECT_EQ(memory->Take(1, 41), nullptr) << "a copy still holds it";
}

TEST(DecodedMemoryTest, IsGivenBack) {
  const auto memory = std::make_shared<DecodedMemory>(100);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(memory->Take(1, 100), nullptr);
  }
  EXPECT_EQ(memory->Take(1, 101), nullptr) << "more than there is, also where nothing is taken";
}

TEST(DecodedMemoryTest, HoldsMayOutliveTheirOwner) {
  auto memory = std::make_shared<DecodedMemory>(100);
  DecodedMemory::Hold hold = memory->Take(1, 100);
  memory.reset();
  hold.reset();
}

}  // namespace
}  // namespace shardd
