// Options, and mutual TLS with certificates made here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "server/peer/link_certificate.h"
#include "tests/server/peer/peer_fixture.h"
#include "tests/testing/files.h"

namespace shardd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(PeerOptionsTest, WithoutTlsOnlyThisHostMayReachIt) {
  for (const char* listen : {"0.0.0.0:0", "[::]:0", "10.1.2.3:4711", "127.0.0.1.example.org:0", "node-0:4711"}) {
    PeerNetwork::Options options;
    options.listen = listen;
    const absl::Status status = PeerNetwork::Create(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << listen << ": " << status;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("--peer_listen"), HasSubstr("--peer_cert")));
  }
  PeerNetwork::Options open;
  open.listen = "0.0.0.0:0";
  open.insecure = true;
  absl::StatusOr<std::unique_ptr<PeerNetwork>> network = PeerNetwork::Create(open);
  ASSERT_TRUE(network.ok()) << network.status();
  EXPECT_THAT((*network)->Describe(), HasSubstr("without TLS"));
}

TEST(PeerOptionsTest, WithPeerInsecureDaemonsMeetWithoutTheRelay) {
  PeerNetwork::Options options = Loopback();
  options.insecure = true;
  Nodes nodes(2, options);
  nodes.JoinAll();
  const std::string piece(1 << 20, 'g');
  v1::PeerData header;
  header.set_numel(1 << 18);
  nodes.links[0]->SendData(1, header, piece, [](absl::Status) {});
  ASSERT_TRUE(nodes.at(1).Await(0, [](const Recorder::Node& seen) { return seen.data_bytes == 1 << 20; }));
  // No thread of a relay was started.
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    EXPECT_NE(name, "shardd-relay");
  }
}

TEST(PeerOptionsTest, AddressIsOne) {
  for (const char* listen : {"", "host", ":4711", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "unix:/run/x:1",
                             "dns:///localhost:1", "::1:4711", "a b:1"}) {
    PeerNetwork::Options options;
    options.listen = listen;
    options.insecure = true;
    EXPECT_TRUE(absl::IsInvalidArgument(PeerNetwork::Create(options).status())) << listen;
  }
}

TEST(PeerOptionsTest, PortThatIsTakenIsAnError) {
  auto first = *PeerNetwork::Create(Loopback());
  PeerNetwork::Options options;
  options.listen = absl::StrCat("127.0.0.1:", first->port());
  const absl::Status status = PeerNetwork::Create(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr(options.listen));
}

TEST(PeerOptionsTest, CertificatesAreAllOrNone) {
  PeerNetwork::Options options = Loopback();
  options.certificate = "/nowhere/node.pem";
  absl::Status status = PeerNetwork::Create(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("give the missing --peer_key"));
  options.key = options.ca = options.certificate;
  status = PeerNetwork::Create(options).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(status.message(), AllOf(HasSubstr("--peer_cert"), HasSubstr("/nowhere/node.pem")));
  const TempDir dir;
  dir.Write("x.pem", "no certificate");
  options.certificate = options.key = options.ca = dir.File("x.pem");
  EXPECT_TRUE(absl::IsInvalidArgument(PeerNetwork::Create(options).status()));
}

// Authorities and certificates for 127.0.0.1, by openssl.
class PeerTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (system("openssl version > /dev/null 2>&1") != 0) {
      GTEST_SKIP() << "the openssl command is not here to make certificates with";
    }
    MakeAuthority("ours");
    MakeAuthority("theirs");
    MakeCertificate("ours", "node", "IP:127.0.0.1");
    MakeCertificate("theirs", "stranger", "IP:127.0.0.1");
    MakeCertificate("ours", "elsewhere", "DNS:node-7");
  }
  void Run(const std::string& command) {
    ASSERT_EQ(system(absl::StrCat("cd ", dir_.path(), " && (", command, ") > log 2>&1").c_str()), 0)
        << ReadWholeFile(dir_.File("log"));
  }
  void MakeAuthority(const std::string& name) {
    Run(absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=",
                     name, " -keyout ", name, ".key -out ", name, ".pem"));
  }
  void MakeCertificate(const std::string& authority, const std::string& name, const std::string& host,
                       const std::string& days = "2") {
    Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name,
                     " -keyout ", name, ".key -out ", name, ".csr && echo subjectAltName=", host, " > ", name,
                     ".ext && openssl x509 -req -days ", days, " -in ", name, ".csr -CA ", authority, ".pem -CAkey ",
                     authority, ".key -CAcreateserial -extfile ", name, ".ext -out ", name, ".pem"));
  }
  // What `name` has, as files of the name `as`.
  void Put(const std::string& name, const std::string& as) {
    for (const char* kind : {".key", ".pem"}) {
      Run(absl::StrCat("cp ", name, kind, " new && mv new ", as, kind));
    }
  }
  PeerNetwork::Options With(const std::string& name, const std::string& ca) const {
    PeerNetwork::Options options = Loopback();
    options.certificate = dir_.File(name + ".pem");
    options.key = dir_.File(name + ".key");
    options.ca = dir_.File(ca + ".pem");
    return options;
  }
  // What node 1 with `other` is told of node 0, which has a certificate of ours.
  absl::Status Meet(const PeerNetwork::Options& node_0, const PeerNetwork::Options& other) {
    Nodes nodes(2, node_0);
    absl::StatusOr<std::unique_ptr<PeerNetwork>> network = PeerNetwork::Create(other);
    EXPECT_TRUE(network.ok()) << network.status();
    nodes.networks[1] = *std::move(network);
    nodes.Join(0);
    nodes.Join(1);
    EXPECT_TRUE(nodes.at(1).Await(0, [](const Recorder::Node& seen) { return seen.up || !seen.downs.empty(); }));
    const Recorder::Node seen = nodes.at(1).node(0);
    EXPECT_EQ(nodes.at(0).node(1).hellos, seen.up ? 1 : 0);
    return seen.up ? absl::OkStatus() : seen.downs[0];
  }

  const TempDir dir_;
};

TEST_F(PeerTlsTest, DaemonsOfOneAuthorityMeet) {
  Nodes nodes(3, With("node", "ours"));
  EXPECT_THAT(nodes.networks[0]->Describe(), HasSubstr("mutual TLS"));
  nodes.JoinAll();
  nodes.links[2]->Send(1, Step(1));
  ASSERT_TRUE(nodes.at(1).WaitMessages(2, 1));
  std::string piece(1 << 20, 'g');
  v1::PeerData header;
  header.set_numel(1 << 18);
  nodes.links[0]->SendData(2, header, piece, [](absl::Status) {});
  ASSERT_TRUE(nodes.at(2).Await(0, [](const Recorder::Node& seen) { return seen.data_bytes == 1 << 20; }));
}

TEST_F(PeerTlsTest, StrangersAreNotHeard) {
  EXPECT_TRUE(Meet(With("node", "ours"), With("node", "ours")).ok());
  EXPECT_TRUE(absl::IsUnavailable(Meet(With("node", "ours"), With("stranger", "theirs")))) << "another authority";
  EXPECT_TRUE(absl::IsUnavailable(Meet(With("node", "ours"), With("stranger", "ours")))) << "only its certificate";
  EXPECT_TRUE(absl::IsUnavailable(Meet(With("stranger", "ours"), With("node", "ours")))) << "the other way round";
  EXPECT_TRUE(absl::IsUnavailable(Meet(With("node", "ours"), Loopback()))) << "without TLS";
  EXPECT_TRUE(absl::IsUnavailable(Meet(Loopback(), With("node", "ours")))) << "node 0 without TLS";
  EXPECT_TRUE(absl::IsUnavailable(Meet(With("elsewhere", "ours"), With("node", "ours")))) << "of another host";
}

TEST_F(PeerTlsTest, WhoCallsMustBeItsNodesHostInTheJob) {
  const absl::Status refused = Meet(With("node", "ours"), With("elsewhere", "ours"));
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("got \"node-7\", want \"127.0.0.1\""), HasSubstr("node 1")));
}

TEST_F(PeerTlsTest, ACertificateThatTakesAnothersPlaceServesWithoutARestart) {
  for (const int renewed : {0, 1}) {
    Put("elsewhere", "renewed");
    PeerNetwork::Options options = With("renewed", "ours");
    options.certificate_interval = absl::Seconds(1);
    Nodes nodes(2, With("node", "ours"));
    nodes.Replace(renewed, options);
    nodes.Join(0);
    nodes.Join(1);
    ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
    Put("node", "renewed");
    EXPECT_TRUE(nodes.at(1).WaitUp(0)) << "node " << renewed;
    EXPECT_TRUE(nodes.at(0).WaitUp(1)) << "node " << renewed;
  }
}

// By its own daemon with its time. gRPC tells whoever called only that it is not valid, and nothing to who was called.
TEST_F(PeerTlsTest, AnExpiredCertificateIsNamedOnBothSides) {
  for (const int expired : {0, 1}) {
    MakeCertificate("ours", "old", "IP:127.0.0.1", "-1");
    Nodes nodes(2, With("node", "ours"));
    nodes.Replace(expired, With("old", "ours"));
    nodes.Join(0);
    nodes.Join(1);
    ASSERT_TRUE(nodes.at(expired).WaitDowns(1 - expired, 1));
    EXPECT_THAT(nodes.at(expired).node(1 - expired).downs[0].message(),
                AllOf(HasSubstr("old.pem"), HasSubstr("has expired (notAfter 20")));
    ASSERT_TRUE(nodes.at(1 - expired).WaitDowns(expired, 1));
    EXPECT_THAT(
        std::string(nodes.at(1 - expired).node(expired).downs[0].message()),
        AllOf(HasSubstr(absl::StrCat("link to node ", expired, " (", nodes.addresses[expired], ")")),
              HasSubstr(expired == 0 ? "certificate verify failed; the certificate of node 0 has expired, or is "
                                       "of another authority"
                                     : "it has not called yet: "),
              HasSubstr(expired == 0 ? "an expired one is named in that daemon's log"
                                     : "one of the two certificates is not accepted (expired?)")));
  }
}

TEST_F(PeerTlsTest, WhenACertificateExpiresIsKnownBefore) {
  MakeCertificate("ours", "soon", "IP:127.0.0.1", "3");
  const absl::Duration left = CertificateExpiry(dir_.File("soon.pem")) - absl::Now();
  EXPECT_TRUE(left > absl::Hours(71) && left <= absl::Hours(72)) << left;
  EXPECT_EQ(CertificateExpiry(dir_.File("none.pem")), absl::InfiniteFuture());
}

TEST_F(PeerTlsTest, KeyOfAnotherCertificateIsAnError) {
  PeerNetwork::Options options = With("node", "ours");
  options.key = dir_.File("stranger.key");
  EXPECT_TRUE(absl::IsUnavailable(PeerNetwork::Create(options).status())) << PeerNetwork::Create(options).status();
}

}  // namespace
}  // namespace shardd::testing
