#include "server/daemon/byte_quota.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST(ByteQuotaTest, IsBytesOrAShareOfMemory) {
  EXPECT_EQ(ParseByteQuota("--q", "1000", 64000).value(), 1000);
  EXPECT_EQ(ParseByteQuota("--q", "50%", 64000).value(), 32000);
  EXPECT_EQ(ParseByteQuota("--q", "100%", int64_t{1} << 62).value(), (int64_t{1} << 62) / 100 * 100);
  EXPECT_EQ(ParseByteQuota("--q", "0", 64000).value(), 0);
}

TEST(ByteQuotaTest, WhatIsNoQuotaIsRefusedByName) {
  for (const char* text : {"", "half", "-1", "0%", "101%", "%", "1e9"}) {
    const absl::Status status = ParseByteQuota("--q", text, 64000).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("--q: not a quota (got \"", text, "\"")));
  }
}

}  // namespace
}  // namespace shardd
