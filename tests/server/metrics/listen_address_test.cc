#include "server/metrics/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST(MetricsAddressTest, TheLoopbackIsTaken) {
  for (const char* text : {"127.0.0.1:9464", "localhost:9464"}) {
    const absl::StatusOr<MetricsAddress> address = ParseMetricsAddress("--listen", text, /*insecure=*/false);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->host, "127.0.0.1");
    EXPECT_EQ(address->port, 9464);
  }
  EXPECT_EQ(ParseMetricsAddress("--listen", "127.0.0.1:0", false)->port, 0);
}

TEST(MetricsAddressTest, OtherAddressesAreForWhoSaysSo) {
  for (const char* text : {"0.0.0.0:9464", "10.0.0.1:9464"}) {
    const absl::Status refused = ParseMetricsAddress("--metrics_listen", text, false).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("--metrics_insecure"));
    EXPECT_TRUE(ParseMetricsAddress("--metrics_listen", text, true).ok());
  }
}

TEST(MetricsAddressTest, WhatIsNotServedIsRefusedByName) {
  const std::pair<const char*, const char*> refused[] = {{"unix:/run/shardd/metrics.sock", "Unix socket"},
                                                         {"/run/metrics.sock", "Unix socket"},
                                                         {"[::1]:9464", "IPv6"},
                                                         {"::1:9464", "IPv6"},
                                                         {"https://127.0.0.1:9464", "TLS"}};
  for (const auto& [text, why] : refused) {
    const absl::Status status = ParseMetricsAddress("--listen", text, true).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
}

// civetweb would take more than one address, ports that redirect, and ports with TLS.
TEST(MetricsAddressTest, WhatIsNoAddressIsRefused) {
  for (const char* text : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:9464s", "127.0.0.1:9464,0.0.0.0:80",
                           "127.0.0.1:65536", "127.0.0.1:-1", "host:9464", "127.1:9464", "+9464"}) {
    EXPECT_EQ(ParseMetricsAddress("--listen", text, true).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace shardd
