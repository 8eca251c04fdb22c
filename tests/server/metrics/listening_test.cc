// Where metrics are served besides plain HTTP on the loopback: a Unix socket, and TLS.

#include "server/metrics/http/listening.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "tests/testing/files.h"
#include "tests/testing/http_get.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using testing::PollUntil;

constexpr char kRequest[] = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

HttpServer::Handlers Answering(const std::string& body) {
  HttpServer::Handlers handlers;
  handlers["/metrics"] = [body](const HttpRequest&) { return HttpResponse{200, "text/plain", body}; };
  return handlers;
}

MetricsAddress Loopback() { return *ParseMetricsAddress("--listen", "127.0.0.1:0", false); }

// Not valid: nobody listens there.
UniqueFd DialPath(const std::string& path) {
  UniqueFd dialled(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(dialled.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) dialled.reset();
  return dialled;
}

std::string GetFromPath(const std::string& path) {
  const UniqueFd dialled = DialPath(path);
  if (!dialled.valid()) return "";
  send(dialled.get(), kRequest, sizeof(kRequest) - 1, MSG_NOSIGNAL);
  std::string all;
  char bytes[4096];
  for (ssize_t n = 0; (n = recv(dialled.get(), bytes, sizeof(bytes), 0)) > 0;) all.append(bytes, n);
  return all;
}

TEST(ListeningTest, AUnixSocketServesAndItsPortServesNobodyElse) {
  const testing::TempDir dir;
  MetricsAddress address;
  address.path = dir.File("metrics.sock");
  const std::string large(3 << 20, 'x');
  auto listening = Listening::Start(address, {}, Answering(large));
  ASSERT_TRUE(listening.ok()) << listening.status();
  EXPECT_EQ((*listening)->url(), absl::StrCat("unix:", address.path, ":/metrics"));
  struct stat info = {};
  ASSERT_EQ(stat(address.path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
  for (int i = 0; i < 3; ++i) {
    const std::string answer = GetFromPath(address.path);
    EXPECT_THAT(answer.substr(0, 15), HasSubstr("200")) << answer.substr(0, 200);
    EXPECT_GT(answer.size(), large.size());
  }
  EXPECT_EQ(testing::HttpGet((*listening)->inner_port(), "/metrics").status, 403) << "who is not let to the socket";
  // One that serves is not pushed aside; one that was left behind is.
  EXPECT_EQ(Listening::Start(address, {}, Answering("other")).status().code(), absl::StatusCode::kUnavailable);
  listening->reset();
  ASSERT_EQ(stat(address.path.c_str(), &info), -1);
  {
    const UniqueFd left(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un bound = {};
    bound.sun_family = AF_UNIX;
    std::memcpy(bound.sun_path, address.path.data(), address.path.size());
    ASSERT_EQ(bind(left.get(), reinterpret_cast<const sockaddr*>(&bound), sizeof(bound)), 0);
  }
  auto next = Listening::Start(address, {}, Answering("next"));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_THAT(GetFromPath(address.path), HasSubstr("next"));
}

// The number of a port is nobody's secret, and other addresses of the loopback have it free.
TEST(ListeningTest, AFrontsPortAtAnotherAddressIsAStrangers) {
  const testing::TempDir dir;
  MetricsAddress address;
  address.path = dir.File("metrics.sock");
  auto listening = Listening::Start(address, {}, Answering("answer"));
  ASSERT_TRUE(listening.ok()) << listening.status();
  sockaddr_un at = {};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path, address.path.data(), address.path.size());
  const UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  unsigned port = 0;
  ASSERT_TRUE(testing::PollUntil([&] {
    const std::string inner = absl::StrFormat(" 0100007F:%04X 01 ", (*listening)->inner_port());
    std::ifstream table("/proc/self/net/tcp");
    for (std::string line; std::getline(table, line);) {
      const size_t found = line.find(inner);
      if (found != std::string::npos) port = static_cast<unsigned>(std::stoul(line.substr(found - 4, 4), nullptr, 16));
    }
    return port != 0;
  }));
  const UniqueFd stranger(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in own = {}, inner = {};
  own.sin_family = inner.sin_family = AF_INET;
  own.sin_port = htons(static_cast<uint16_t>(port));
  inner.sin_port = htons(static_cast<uint16_t>((*listening)->inner_port()));
  inet_pton(AF_INET, "127.0.0.2", &own.sin_addr);
  inet_pton(AF_INET, "127.0.0.1", &inner.sin_addr);
  ASSERT_EQ(bind(stranger.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  ASSERT_EQ(connect(stranger.get(), reinterpret_cast<const sockaddr*>(&inner), sizeof(inner)), 0);
  send(stranger.get(), kRequest, sizeof(kRequest) - 1, MSG_NOSIGNAL);
  char bytes[64] = {};
  recv(stranger.get(), bytes, sizeof(bytes) - 1, 0);
  EXPECT_THAT(std::string(bytes), HasSubstr("403"));
}

TEST(ListeningTest, SilentClientsHoldNobodyUp) {
  const testing::TempDir dir;
  MetricsAddress address;
  address.path = dir.File("metrics.sock");
  auto listening = Listening::Start(address, {}, Answering("answer"));
  ASSERT_TRUE(listening.ok()) << listening.status();
  std::vector<UniqueFd> silent;
  sockaddr_un at = {};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path, address.path.data(), address.path.size());
  for (int i = 0; i < Front::kThreads; ++i) {
    silent.emplace_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(silent.back().get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  }
  EXPECT_THAT(GetFromPath(address.path), HasSubstr("answer"));  // they are let go after a few seconds
}

// They read their answer a little at a time, so that they never fall silent; the server behind is done with them at
// once.
TEST(ListeningTest, SlowClientsAreLetGoWhenTheirVisitEnds) {
  const testing::TempDir dir;
  MetricsAddress address;
  address.path = dir.File("metrics.sock");
  FrontLimits limits;
  limits.visit = absl::Seconds(1);
  auto listening = Listening::Start(address, {}, Answering(std::string(3 << 20, 'x')), limits);
  ASSERT_TRUE(listening.ok()) << listening.status();
  std::vector<UniqueFd> slow;
  for (int i = 0; i < Front::kThreads; ++i) {
    slow.push_back(DialPath(address.path));
    ASSERT_TRUE(slow.back().valid());
    ASSERT_EQ(send(slow.back().get(), kRequest, sizeof(kRequest) - 1, MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(kRequest) - 1));
  }
  std::atomic<bool> answered = false;
  std::thread dribble([&] {
    std::vector<char> bytes(16 << 10);  // of three megabytes, in twelve seconds half
    for (int i = 0; i < 120 && !answered; ++i) {
      for (const UniqueFd& each : slow) recv(each.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      absl::SleepFor(absl::Milliseconds(100));
    }
    EXPECT_TRUE(answered) << "while they read";
  });
  const std::string got = GetFromPath(address.path);
  answered = true;
  dribble.join();
  EXPECT_THAT(got.substr(0, 15), HasSubstr("200"));
  EXPECT_GT(got.size(), size_t{3} << 20);
}

// Authorities and certificates for 127.0.0.1, by openssl.
class ListeningTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (system("openssl version > /dev/null 2>&1") != 0) {
      GTEST_SKIP() << "the openssl command is not here to make certificates with";
    }
    signal(SIGPIPE, SIG_IGN);
    for (const std::string name : {"ours", "theirs"}) {
      Run(absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=",
                       name, " -keyout ", name, ".key -out ", name, ".pem"));
    }
    MakeCertificate("ours", "node");
    MakeCertificate("ours", "prometheus");
    MakeCertificate("theirs", "stranger");
  }
  void Run(const std::string& command) {
    ASSERT_EQ(system(absl::StrCat("cd ", dir_.path(), " && (", command, ") > log 2>&1").c_str()), 0)
        << testing::ReadWholeFile(dir_.File("log"));
  }
  void MakeCertificate(const std::string& authority, const std::string& name) {
    Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name,
                     " -keyout new.key -out new.csr && echo subjectAltName=IP:127.0.0.1 > new.ext && openssl x509 -req "
                     "-days 1 -in new.csr -CA ",
                     authority, ".pem -CAkey ", authority,
                     ".key -CAcreateserial -extfile new.ext -out new.pem && mv new.key ", name, ".key && mv new.pem ",
                     name, ".pem"));
  }
  TlsFiles Server() const { return {dir_.File("node.pem"), dir_.File("node.key"), dir_.File("ours.pem")}; }

  // What a client with the certificate `name` (empty: none) is answered; the serial number of the server's goes to
  // `serial`. Empty: it was refused.
  std::string Get(int port, const std::string& name, std::string* serial = nullptr) {
    const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
    SSL_CTX_load_verify_locations(context.get(), dir_.File("ours.pem").c_str(), nullptr);
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
    if (!name.empty()) {
      SSL_CTX_use_certificate_chain_file(context.get(), dir_.File(name + ".pem").c_str());
      SSL_CTX_use_PrivateKey_file(context.get(), dir_.File(name + ".key").c_str(), SSL_FILETYPE_PEM);
    }
    const UniqueFd dialled(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(dialled.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return "";
    const std::unique_ptr<SSL, void (*)(SSL*)> tls(SSL_new(context.get()), SSL_free);
    SSL_set_fd(tls.get(), dialled.get());
    std::string all;
    if (SSL_connect(tls.get()) == 1 && SSL_write(tls.get(), kRequest, sizeof(kRequest) - 1) > 0) {
      char bytes[4096];
      for (int n = 0; (n = SSL_read(tls.get(), bytes, sizeof(bytes))) > 0;) all.append(bytes, static_cast<size_t>(n));
      if (X509* const certificate = SSL_get1_peer_certificate(tls.get()); certificate != nullptr && serial != nullptr) {
        BIGNUM* const number = ASN1_INTEGER_to_BN(X509_get_serialNumber(certificate), nullptr);
        char* const text = BN_bn2hex(number);
        *serial = text;
        OPENSSL_free(text);
        BN_free(number);
        X509_free(certificate);
      }
    }
    ERR_clear_error();
    return all;
  }

  testing::TempDir dir_;
};

TEST_F(ListeningTlsTest, ClientsOfTheAuthorityAreServed) {
  const std::string large(1 << 20, 'x');
  auto listening = Listening::Start(Loopback(), Server(), Answering(large));
  ASSERT_TRUE(listening.ok()) << listening.status();
  const int port = (*listening)->port();
  EXPECT_EQ((*listening)->url(), absl::StrCat("https://127.0.0.1:", port, "/metrics"));
  EXPECT_GT(Get(port, "prometheus").size(), large.size());
  EXPECT_EQ(Get(port, "stranger"), "");
  EXPECT_EQ(Get(port, ""), "");
  EXPECT_EQ(testing::HttpGet(port, "/metrics").status, 0) << "plain HTTP";
  EXPECT_EQ(testing::HttpGet((*listening)->inner_port(), "/metrics").status, 403);
  EXPECT_GT(Get(port, "prometheus").size(), large.size()) << "behind those that were refused";
}

// A record of TLS that never gets complete, a byte at a time.
TEST_F(ListeningTlsTest, ClientsThatGreetForEverHoldNobodyUp) {
  auto listening = Listening::Start(Loopback(), Server(), Answering("answer"));
  ASSERT_TRUE(listening.ok()) << listening.status();
  const int port = (*listening)->port();
  std::vector<UniqueFd> slow;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 0; i < Front::kThreads; ++i) {
    slow.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(slow.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(send(slow.back().get(), "\x16\x03\x01\x10\x00", 5, MSG_NOSIGNAL), 5);
  }
  std::atomic<bool> answered = false;
  std::thread dribble([&] {
    for (int i = 0; i < 150 && !answered; ++i) {
      for (const UniqueFd& each : slow) send(each.get(), "\0", 1, MSG_NOSIGNAL);
      absl::SleepFor(absl::Milliseconds(200));
    }
    EXPECT_TRUE(answered) << "while they greet";
  });
  const std::string got = Get(port, "prometheus");
  answered = true;
  dribble.join();
  EXPECT_THAT(got, HasSubstr("answer"));
}

TEST_F(ListeningTlsTest, WithoutAnAuthorityAllClientsAreServed) {
  TlsFiles files = Server();
  files.ca.clear();
  auto listening = Listening::Start(Loopback(), files, Answering("answer"));
  ASSERT_TRUE(listening.ok()) << listening.status();
  EXPECT_THAT(Get((*listening)->port(), ""), HasSubstr("answer"));
}

TEST_F(ListeningTlsTest, ACertificateThatIsRenewedCountsForTheNextClient) {
  auto listening = Listening::Start(Loopback(), Server(), Answering("answer"));
  ASSERT_TRUE(listening.ok()) << listening.status();
  std::string before;
  std::string after;
  ASSERT_THAT(Get((*listening)->port(), "prometheus", &before), HasSubstr("answer"));
  Run("cp node.pem kept.pem && echo half > node.pem");
  ASSERT_THAT(Get((*listening)->port(), "prometheus", &after), HasSubstr("answer"));
  EXPECT_EQ(before, after) << "one that cannot be used leaves the one before";
  MakeCertificate("ours", "node");
  ASSERT_THAT(Get((*listening)->port(), "prometheus", &after), HasSubstr("answer"));
  EXPECT_NE(before, after);
}

TEST_F(ListeningTlsTest, FilesThatCannotBeUsedAreNamed) {
  const auto Error = [](const TlsFiles& files) {
    const absl::Status status = Listening::Start(Loopback(), files, Answering("answer")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(Error({"/nowhere/node.pem", dir_.File("node.key"), ""}), HasSubstr("/nowhere/node.pem"));
  EXPECT_THAT(Error({dir_.File("node.pem"), dir_.File("prometheus.key"), ""}), HasSubstr("prometheus.key"));
  EXPECT_THAT(Error({dir_.File("node.pem"), dir_.File("node.key"), dir_.File("log")}), HasSubstr("log"));
}

}  // namespace
}  // namespace shardd
