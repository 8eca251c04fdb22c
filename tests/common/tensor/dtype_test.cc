#include "common/tensor/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST(DTypeTest, DtypesHaveASizeAndANameThatParsesBack) {
  for (int value = v1::DType_MIN; value <= v1::DType_MAX; ++value) {
    const DType dtype = static_cast<DType>(value);
    if (!v1::DType_IsValid(value) || dtype == v1::DTYPE_UNSPECIFIED) continue;
    EXPECT_GT(DTypeSizeBytes(dtype), 0) << v1::DType_Name(dtype);
    const absl::StatusOr<DType> parsed = ParseDType(DTypeName(dtype));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, dtype);
  }
}

TEST(DTypeTest, UnspecifiedAndUnknownHaveNoSize) {
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_UNSPECIFIED), 0);
  EXPECT_EQ(DTypeSizeBytes(static_cast<DType>(99)), 0);
  EXPECT_EQ(DTypeName(v1::DTYPE_UNSPECIFIED), "unspecified");
  EXPECT_EQ(DTypeName(static_cast<DType>(99)), "unspecified");
}

TEST(DTypeTest, SizesAreThoseOfPyTorch) {
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_FLOAT32), 4);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_BFLOAT16), 2);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_FLOAT16), 2);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_FLOAT64), 8);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_INT64), 8);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_INT16), 2);
  EXPECT_EQ(DTypeSizeBytes(v1::DTYPE_BOOL), 1);
}

TEST(DTypeTest, Float64IsFloatingPointButNotTrainable) {
  EXPECT_TRUE(IsFloatingPoint(v1::DTYPE_FLOAT64));
  EXPECT_FALSE(IsTrainable(v1::DTYPE_FLOAT64));
  for (DType dtype : {v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    EXPECT_TRUE(IsFloatingPoint(dtype));
    EXPECT_TRUE(IsTrainable(dtype));
  }
  EXPECT_FALSE(IsFloatingPoint(v1::DTYPE_INT32));
  EXPECT_FALSE(IsFloatingPoint(v1::DTYPE_UNSPECIFIED));
}

TEST(DTypeTest, ParseRefusesOtherNamesAndSaysWhichThereAre) {
  for (const char* name : {"", "unspecified", "Float32", "float8", "torch.float32"}) {
    const absl::Status status = ParseDType(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bfloat16"));
  }
}

}  // namespace
}  // namespace shardd
