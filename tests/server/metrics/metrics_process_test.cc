#include "server/metrics/metrics_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/loop/core_loop.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using testing::PollUntil;

class MetricsProcessTest : public ::testing::Test {
 protected:
  // A program that says its number and arguments, and stays until it is ended.
  MetricsProcessTest() {
    std::ofstream(program()) << "#!/bin/sh\necho $$ \"$@\" >> " << said() << "\nexec sleep 60\n";
    chmod(program().c_str(), 0700);
  }
  std::string program() const { return folder_.File("shardd-metrics"); }
  std::string said() const { return folder_.File("said"); }
  std::string Line(int number) const {
    std::ifstream file(said());
    std::string line;
    for (int at = 0; at <= number; ++at) {
      if (!std::getline(file, line)) return "";
    }
    return line;
  }
  bool HasStarted(int number) {
    return PollUntil([&] { return !Line(number).empty(); });
  }
  static pid_t PidOf(const std::string& line) { return std::stoi(line); }

  testing::TempDir folder_;
};

TEST_F(MetricsProcessTest, OthersReachItByTheDaemonsCertificate) {
  const TlsFiles tls = {"/c.pem", "/k.pem", "/ca.pem"};
  auto far = MetricsProcess::Create({"/run/s.sock", "0.0.0.0:9464", false, "", program(), tls});
  ASSERT_TRUE(far.ok()) << far.status();
  (*far)->Review(MonotonicNow());
  ASSERT_TRUE(HasStarted(0));
  EXPECT_THAT(Line(0), HasSubstr("--tls_cert=/c.pem --tls_key=/k.pem --tls_ca=/ca.pem"));
  (*far)->Terminate();
  auto near = MetricsProcess::Create({"/run/s.sock", "127.0.0.1:9464", false, "", program(), tls});
  ASSERT_TRUE(near.ok()) << near.status();
  (*near)->Review(MonotonicNow());
  ASSERT_TRUE(HasStarted(1));
  EXPECT_THAT(Line(1), ::testing::Not(HasSubstr("--tls_cert")));
  (*near)->Terminate();
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "0.0.0.0:9464", false, "", program(), {"/c.pem", "/k.pem", ""}})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument)
      << "everybody would have a certificate for it";
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "0.0.0.0:9464", false, "", program()}).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST_F(MetricsProcessTest, StartsWithTheDaemonsSocketAndEndsWithIt) {
  auto metrics = MetricsProcess::Create({"/run/s.sock", "127.0.0.1:9464", false, "", program()});
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(Line(0), "") << "the daemon does not serve yet";
  (*metrics)->Review(MonotonicNow());
  ASSERT_TRUE(HasStarted(0));
  EXPECT_THAT(Line(0),
              HasSubstr(absl::StrCat("--socket=unix:/run/s.sock --listen=127.0.0.1:9464 --ends_with=", getpid())));
  (*metrics)->Terminate();
  EXPECT_TRUE(PollUntil([&] { return kill(PidOf(Line(0)), 0) != 0; }));
}

TEST_F(MetricsProcessTest, WhereItEndsItIsStartedAgainAfterAPause) {
  auto metrics = MetricsProcess::Create({"/run/s.sock", "0.0.0.0:9464", true, "all", program()});
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  const absl::Time now = MonotonicNow();
  (*metrics)->Review(now);
  ASSERT_TRUE(HasStarted(0));
  EXPECT_THAT(Line(0), HasSubstr("--metrics_insecure --status_page=all"));
  kill(PidOf(Line(0)), SIGKILL);
  ASSERT_TRUE(PollUntil([&] { return kill(PidOf(Line(0)), 0) != 0; }));
  (*metrics)->Review(now);
  (*metrics)->Review(now + MetricsProcess::kPause / 2);
  EXPECT_EQ(Line(1), "");
  (*metrics)->Review(now + MetricsProcess::kPause);
  ASSERT_TRUE(HasStarted(1));
  (*metrics)->Review(now + 3 * MetricsProcess::kPause);
  EXPECT_EQ(Line(2), "") << "it is there";
  (*metrics)->Terminate();
}

TEST_F(MetricsProcessTest, WhatCannotBeServedIsRefusedBeforeTheDaemonServes) {
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "", false, "", "/nonexistent"})->get(), nullptr);
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "127.0.0.1:1", false, "", "/nonexistent"}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "[::1]:9464", false, "", program()}).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(MetricsProcess::Create({"/run/s.sock", "127.0.0.1:1", false, "everybody", program()}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardd
