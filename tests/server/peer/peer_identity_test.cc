#include "server/peer/peer_identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

bool Fits(const std::string& name, const std::string& address) {
  return CheckIdentity({.tls = true, .names = {"another.host", name}}, 1, address).ok();
}

TEST(PeerIdentityTest, ANameIsTheHostOfTheAddress) {
  EXPECT_TRUE(Fits("node-1", "node-1:7100"));
  EXPECT_TRUE(Fits("Node-1.Example.org", "node-1.example.org.:7100"));
  EXPECT_TRUE(Fits("10.0.0.1", "10.0.0.1:7100"));
  EXPECT_TRUE(Fits("fd00:0:0:0:0:0:0:1", "[fd00::1]:7100"));
  EXPECT_TRUE(Fits("*.example.org", "node-1.example.org:7100"));
}

TEST(PeerIdentityTest, NothingElseIs) {
  EXPECT_FALSE(Fits("node-2", "node-1:7100"));
  EXPECT_FALSE(Fits("node-1", "node-1.example.org:7100"));
  EXPECT_FALSE(Fits("", "node-1:7100"));
  EXPECT_FALSE(Fits("10.0.0.2", "10.0.0.1:7100"));
  EXPECT_FALSE(Fits("*.0.0.1", "10.0.0.1:7100"));
  EXPECT_FALSE(Fits("*.example.org", "example.org:7100"));
  EXPECT_FALSE(Fits("*.example.org", "a.node-1.example.org:7100"));
  EXPECT_FALSE(Fits("*.org", "example.org:7100"));
  EXPECT_FALSE(Fits("*", "node-1:7100"));
}

TEST(PeerIdentityTest, ARefusalNamesBoth) {
  const absl::Status refused = CheckIdentity({.tls = true, .names = {"node-7", "10.0.0.7"}}, 1, "[fd00::1]:7100");
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("node 1"), HasSubstr("node-7"), HasSubstr("fd00::1")));
}

TEST(PeerIdentityTest, WithoutTlsNothingIsChecked) { EXPECT_TRUE(CheckIdentity({}, 1, "node-1:7100").ok()); }

}  // namespace
}  // namespace shardd
