#include "server/metrics/viewer.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/shm/unique_fd.h"
#include "server/metrics/http/socket_table.h"
#include "tests/testing/http_get.h"
#include "tests/testing/run_as_uid.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// Lines of /proc/self/net/tcp. Port 5000 is 1388, 9464 is 24F8.
constexpr char kHead[] =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
std::string Line(const std::string& local, const std::string& remote, const std::string& state, int uid,
                 const std::string& inode = "777") {
  return absl::StrCat("   0: ", local, " ", remote, " ", state, " 00000000:00000000 00:00000000 00000000  ", uid,
                      "        0 ", inode, " 1 0000000000000000 20 4 30 10 -1\n");
}
constexpr char kClient[] = "0100007F:1388", kServer[] = "0100007F:24F8";
std::optional<uint32_t> Owner(const std::string& tcp, const std::string& tcp6 = "") {
  return OwnerOfSocket(absl::StrCat(kHead, tcp), tcp6, "127.0.0.1", 5000, 9464);
}

TEST(OwnerOfSocketTest, TheClientsEndOfTheConnectionSaysWhoseItIs) {
  EXPECT_EQ(Owner(Line(kServer, kClient, "01", 0) + Line(kClient, kServer, "01", 1000)), 1000u);
  EXPECT_EQ(Owner("", Line("0000000000000000FFFF00000100007F:1388", "0000000000000000FFFF00000100007F:24F8", "01", 7)),
            7u);
}

TEST(OwnerOfSocketTest, WhoIsNotThereIsNobody) {
  EXPECT_EQ(Owner(""), std::nullopt);
  EXPECT_EQ(Owner(Line(kServer, kClient, "01", 0)), std::nullopt) << "the server's own end";
  EXPECT_EQ(Owner(Line("0100007F:1389", kServer, "01", 1000)), std::nullopt) << "another port";
  EXPECT_EQ(Owner(Line(kClient, "0100007F:24F9", "01", 1000)), std::nullopt) << "of another server";
  EXPECT_EQ(OwnerOfSocket(kHead, "", "10.0.0.7", 5000, 9464), std::nullopt);
  EXPECT_EQ(OwnerOfSocket(kHead, "", "::1", 5000, 9464), std::nullopt);
}

// A connection of this process, by IPv4 and by a socket of IPv6.
TEST(SocketTableTest, TheKernelSaysWhatItsTableSays) {
  const UniqueFd listening(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in server{};
  server.sin_family = AF_INET;
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(server);
  ASSERT_EQ(bind(listening.get(), reinterpret_cast<const sockaddr*>(&server), size), 0);
  ASSERT_EQ(listen(listening.get(), 4), 0);
  ASSERT_EQ(getsockname(listening.get(), reinterpret_cast<sockaddr*>(&server), &size), 0);
  sockaddr_in6 mapped{};
  mapped.sin6_family = AF_INET6;
  mapped.sin6_port = server.sin_port;
  ASSERT_EQ(inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr), 1);
  for (const bool v6 : {false, true}) {
    SCOPED_TRACE(v6);
    const UniqueFd client(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!client.valid()) continue;  // without IPv6
    ASSERT_EQ(v6 ? connect(client.get(), reinterpret_cast<const sockaddr*>(&mapped), sizeof(mapped))
                 : connect(client.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server)),
              0);
    sockaddr_in6 own{};
    size = sizeof(own);
    ASSERT_EQ(getsockname(client.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    const int from = ntohs(own.sin6_port), to = ntohs(server.sin_port);  // at one place in both families
    for (const SocketTables& tables : {ConnectionsBetween(from, to), ReadConnectionsBetween(from, to)}) {
      EXPECT_EQ(OwnerOfSocket(tables.tcp, tables.tcp6, "127.0.0.1", from, to), getuid());
      EXPECT_EQ(OwnerOfSocket(tables.tcp, tables.tcp6, "127.0.0.2", from, to), std::nullopt);
    }
    EXPECT_EQ(ConnectionsBetween(from, to + 1).tcp, "");
  }
}

// The kernel says uid 0 of a socket that its process has closed.
TEST(OwnerOfSocketTest, AClosedSocketIsNotTakenForRoots) {
  for (const char* state : {"04", "05", "06", "08"}) {
    EXPECT_EQ(Owner(Line(kClient, kServer, state, 0)), std::nullopt) << state;
  }
  EXPECT_EQ(Owner(Line(kClient, kServer, "01", 0, "0")), std::nullopt);
}

// From one address and port, one connection to 127.0.0.1 and one to 127.0.0.2, where both are served.
TEST(OwnerOfSocketTest, ConnectionsOfDifferentUsersThatLookAlikeAreNobodys) {
  EXPECT_EQ(Owner(Line(kClient, kServer, "01", 1000) + Line(kClient, "0200007F:24F8", "01", 0)), std::nullopt);
  EXPECT_EQ(Owner(Line(kClient, "0200007F:24F8", "01", 0),
                  Line("0000000000000000FFFF00000100007F:1388", "0000000000000000FFFF00000100007F:24F8", "01", 1000)),
            std::nullopt);
}

HttpRequest From(const std::string& address, const std::string& host) {
  HttpRequest request;
  request.client_address = address;
  request.client_port = 1;  // nobody connects from there
  request.server_port = 9464;
  request.host = host;
  return request;
}

TEST(ViewerTest, StrangersSeeNoJobUnlessTheOperatorSaysSo) {
  const Viewer own = ViewerOf(From("10.0.0.7", "10.0.0.1:9464"), PagePolicy::kOwn, PageReach::kOthers);
  EXPECT_FALSE(own.sees_all || own.uid.has_value());
  EXPECT_FALSE(own.Sees(1000, false));
  EXPECT_THAT(own.why, HasSubstr("--status_page=all"));
  EXPECT_TRUE(ViewerOf(From("10.0.0.7", "node7:9464"), PagePolicy::kAll, PageReach::kOthers).Sees(1000, true));
}

// A Front's connections are this process's own, which sees all jobs.
TEST(ViewerTest, NobodyIsKnownBehindAFront) {
  HttpServer::Handlers handlers;
  handlers["/who"] = [](const HttpRequest& request) {
    const Viewer viewer = ViewerOf(request, PagePolicy::kOwn, PageReach::kFront);
    return HttpResponse{200, "text/plain", viewer.sees_all || viewer.uid.has_value() ? "known" : "nobody"};
  };
  auto server = HttpServer::Start({"", "127.0.0.1", 0}, handlers);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(testing::HttpGet((*server)->port(), "/who").body, "nobody");
  EXPECT_TRUE(ViewerOf(From("127.0.0.1", "node7:9464"), PagePolicy::kAll, PageReach::kFront).sees_all);
}

// evil.example leads to 127.0.0.1: its script is of the page's own origin, for the browser.
TEST(ViewerTest, AnotherSitesNameSeesNothing) {
  for (const PagePolicy policy : {PagePolicy::kOwn, PagePolicy::kAll}) {
    for (const char* host : {"evil.example:9464", "", "localhost.evil.example", "127.0.0.1.evil.example"}) {
      const Viewer viewer = ViewerOf(From("127.0.0.1", host), policy, PageReach::kLoopback);
      EXPECT_FALSE(viewer.sees_all || viewer.uid.has_value()) << host;
    }
  }
  EXPECT_TRUE(ViewerOf(From("127.0.0.1", "localhost:9464"), PagePolicy::kAll, PageReach::kLoopback).sees_all);
}

TEST(ViewerTest, AUserSeesOwnJobsWithoutASecret) {
  const Viewer user = {false, 1000, ""};
  EXPECT_TRUE(user.Sees(1000, false));
  EXPECT_FALSE(user.Sees(1000, true));
  EXPECT_FALSE(user.Sees(1001, false));
  EXPECT_TRUE((Viewer{true, 0, ""}.Sees(1001, true)));
}

TEST(PagePolicyTest, WhatIsNoChoiceIsRefused) {
  EXPECT_EQ(*ParsePagePolicy("--status_page", "own"), PagePolicy::kOwn);
  EXPECT_EQ(*ParsePagePolicy("--status_page", "all"), PagePolicy::kAll);
  EXPECT_EQ(*ParsePagePolicy("--status_page", "off"), PagePolicy::kOff);
  EXPECT_THAT(std::string(ParsePagePolicy("--status_page", "").status().message()), HasSubstr("want own, all or off"));
}

// A server of this process, as a browser of another user reaches it.
TEST(ViewerTest, TheKernelSaysWhoConnects) {
  HttpServer::Handlers handlers;
  handlers["/who"] = [](const HttpRequest& request) {
    const Viewer viewer = ViewerOf(request, PagePolicy::kOwn, PageReach::kLoopback);
    const std::string uid = viewer.uid.has_value() ? absl::StrCat(*viewer.uid) : "nobody";
    return HttpResponse{200, "text/plain", absl::StrCat(uid, viewer.sees_all ? " all" : "")};
  };
  auto server = HttpServer::Start({"", "127.0.0.1", 0}, handlers);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(testing::HttpGet((*server)->port(), "/who").body, absl::StrCat(geteuid(), " all"));
  if (geteuid() != 0) GTEST_SKIP() << "only root can connect as another user";
  testing::RunAsUid(1234, [&] { EXPECT_EQ(testing::HttpGet((*server)->port(), "/who").body, "1234"); });
}

}  // namespace
}  // namespace shardd
