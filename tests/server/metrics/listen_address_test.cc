#include "server/metrics/http/listen_address.h"

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

TEST(MetricsAddressTest, AUnixSocketOrTlsNeedsNobodyToSaySo) {
  const absl::StatusOr<MetricsAddress> local = ParseMetricsAddress("--listen", "unix:/run/metrics.sock", false);
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_EQ(local->path, "/run/metrics.sock");
  EXPECT_TRUE(local->is_local());
  const absl::StatusOr<MetricsAddress> far = ParseMetricsAddress("--listen", "0.0.0.0:9464", false, /*tls=*/true);
  ASSERT_TRUE(far.ok()) << far.status();
  EXPECT_FALSE(far->is_local());
}

TEST(MetricsAddressTest, WhatIsNotServedIsRefusedByName) {
  for (const char* text : {"[::1]:9464", "::1:9464"}) {
    const absl::Status status = ParseMetricsAddress("--listen", text, true).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("IPv6"));
  }
}

TEST(MetricsAddressTest, CertificateAndKeyBelongTogether) {
  EXPECT_TRUE(CheckTlsFiles({}).ok());
  EXPECT_TRUE(CheckTlsFiles({"c", "k", ""}).ok());
  EXPECT_TRUE(CheckTlsFiles({"c", "k", "a"}).ok());
  for (const TlsFiles& files : {TlsFiles{"c", "", ""}, TlsFiles{"", "k", ""}, TlsFiles{"", "", "a"}}) {
    EXPECT_EQ(CheckTlsFiles(files).code(), absl::StatusCode::kInvalidArgument);
  }
}

// civetweb would take more than one address, ports that redirect, and ports with TLS.
TEST(MetricsAddressTest, WhatIsNoAddressIsRefused) {
  for (const char* text : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:9464s", "127.0.0.1:9464,0.0.0.0:80",
                           "127.0.0.1:65536", "127.0.0.1:-1", "host:9464", "127.1:9464", "+9464",
                           "unix:", "unix:relative", "/run/metrics.sock", "https://127.0.0.1:9464"}) {
    EXPECT_EQ(ParseMetricsAddress("--listen", text, true).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace shardd
