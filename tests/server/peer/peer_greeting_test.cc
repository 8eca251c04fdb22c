#include "server/peer/peer_greeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "common/versions/versions.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

PeerJoin NodeOf(int node, const std::string& key) {
  PeerJoin join;
  join.job = "job";
  join.uid = 7;
  join.node = node;
  join.addresses = {"a:1", "b:1", "c:1"};
  join.link_key = key;
  return join;
}

constexpr char kToken[] = "sixteen bytes...";

struct Wrong {
  const char* name;
  std::function<void(v1::PeerHello&)> change;
  absl::StatusCode code;
  const char* text;
};

class PeerGreetingTest : public ::testing::TestWithParam<Wrong> {
 protected:
  const PeerJoin own_ = NodeOf(1, "");
  const PeerJoin other_ = NodeOf(2, "");
};

TEST_P(PeerGreetingTest, AMismatchedHelloIsRefusedWithItsReason) {
  v1::PeerHello hello = PeerGreeting(&other_).Hello(kToken, 1);
  const PeerGreeting greeting(&own_);
  ASSERT_TRUE(greeting.Check(hello).ok());
  GetParam().change(hello);
  const absl::Status status = greeting.Check(hello);
  EXPECT_EQ(status.code(), GetParam().code);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(Hellos, PeerGreetingTest,
                         ::testing::Values(Wrong{"Version",
                                                 [](auto& hello) {
                                                   hello.set_protocol_version(kProtocolVersions.newest + 1);
                                                   hello.set_newest_protocol_version(kProtocolVersions.newest + 2);
                                                 },
                                                 absl::StatusCode::kUnimplemented, "; upgrade the daemon that refuses"},
                                           Wrong{"OlderVersion",
                                                 [](auto& hello) {
                                                   hello.set_protocol_version(kProtocolVersions.oldest - 1);
                                                   hello.clear_newest_protocol_version();
                                                 },
                                                 absl::StatusCode::kUnimplemented, "; upgrade node 2's daemon"},
                                           Wrong{"Job", [](auto& hello) { hello.set_job("another"); },
                                                 absl::StatusCode::kFailedPrecondition, "another job"},
                                           Wrong{"User", [](auto& hello) { hello.set_uid(8); },
                                                 absl::StatusCode::kPermissionDenied, "got uid 8, want 7"},
                                           Wrong{"NodeBelowZero", [](auto& hello) { hello.set_node(-1); },
                                                 absl::StatusCode::kFailedPrecondition, "got node -1 of 3"},
                                           Wrong{"NodeBeyondTheLast", [](auto& hello) { hello.set_node(3); },
                                                 absl::StatusCode::kFailedPrecondition, "got node 3 of 3"},
                                           Wrong{"NodeItself", [](auto& hello) { hello.set_node(1); },
                                                 absl::StatusCode::kFailedPrecondition, "got node 1 of 3"}),
                         [](const auto& info) { return info.param.name; });

// Whoever knows `protocol_version` alone wants its own there.
TEST(PeerGreetingVersionTest, AHelloCanBeReadFromBeforeThereWereRanges) {
  const PeerJoin join = NodeOf(2, "");
  v1::PeerHello hello = PeerGreeting(&join).Hello(kToken, 1);
  EXPECT_EQ(hello.protocol_version(), kUnsaidProtocolVersion);
  hello.clear_newest_protocol_version();
  EXPECT_EQ(*PeerGreeting::CommonProtocol(hello), kUnsaidProtocolVersion);
}

TEST(PeerGreetingVersionTest, TheNewestThatBothSpeakIsSpoken) {
  v1::PeerHello hello;
  hello.set_protocol_version(kProtocolVersions.newest - 3);
  hello.set_newest_protocol_version(kProtocolVersions.newest + 3);
  EXPECT_EQ(*PeerGreeting::CommonProtocol(hello), kProtocolVersions.newest);
}

// What node 1, with `own`, says to a hello of node 2, with `other`.
absl::Status SecretOf(const std::string& own, const std::string& other, const std::string& token) {
  const PeerJoin one = NodeOf(1, own);
  const PeerJoin two = NodeOf(2, other);
  return PeerGreeting(&one).CheckSecret(PeerGreeting(&two).Hello(token, 1), kToken);
}

TEST(PeerGreetingSecretTest, BothHaveItOrNone) {
  const std::string key(32, 'k');
  EXPECT_TRUE(SecretOf("", "", kToken).ok());
  EXPECT_TRUE(SecretOf(key, key, kToken).ok());
  EXPECT_THAT(std::string(SecretOf(key, "", kToken).message()), HasSubstr("without a secret and node 1 with one"));
  EXPECT_THAT(std::string(SecretOf("", key, kToken).message()), HasSubstr("with a secret and node 1 without one"));
  EXPECT_THAT(std::string(SecretOf(key, std::string(32, 'x'), kToken).message()), HasSubstr("with another one"));
}

TEST(PeerGreetingSecretTest, AProofIsOfOneLink) {
  const std::string key(32, 'k');
  EXPECT_TRUE(absl::IsPermissionDenied(SecretOf(key, key, "another token...")));
}

}  // namespace
}  // namespace shardd
