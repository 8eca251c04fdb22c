// A daemon that dies, and one that stops, each in a process of its own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "tests/server/peer/peer_fixture.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;

// A daemon of node `node` of two; the other one's address is in <dir>/other once it is known, its own port in
// <dir>/port.
int RunOther(const std::string& dir, int node) {
  PeerNetwork::Options options = Loopback();
  options.keepalive_ms = 1000;
  absl::StatusOr<std::unique_ptr<PeerNetwork>> network = PeerNetwork::Create(options);
  if (!network.ok()) {
    return 1;
  }
  std::ofstream(dir + "/port.new") << (*network)->port() << std::flush;
  if (rename((dir + "/port.new").c_str(), (dir + "/port").c_str()) != 0 ||
      !PollUntil([&] { return !ReadWholeFile(dir + "/other").empty(); })) {
    return 2;
  }
  Recorder recorder(2);
  std::vector<std::string> addresses(2);
  addresses[node] = absl::StrCat("127.0.0.1:", (*network)->port());
  addresses[1 - node] = absl::StrCat("127.0.0.1:", ReadWholeFile(dir + "/other"));
  auto links = (*network)->Join({.job = "llm", .uid = 1, .node = node, .addresses = addresses, .spec = "s"}, &recorder);
  if (!links.ok() || !recorder.WaitUp(1 - node)) {
    return 3;
  }
  for (int i = 0;; ++i) {
    (*links)->Send(1 - node, Step(i));
    usleep(10'000);
  }
}

class PeerProcessTest : public ::testing::TestWithParam<int> {
 protected:
  // gRPC does not survive a fork: in a process that has not used it, the other daemon's is forked first.
  static void Start(int other, int signal_number, absl::Duration soon) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
          const TempDir dir;
          const Child child([&] { return RunOther(dir.path(), other); });
          PeerNetwork::Options options = Loopback();
          options.keepalive_ms = 1000;
          auto network = *PeerNetwork::Create(options);
          dir.Write("other.new", absl::StrCat(network->port()));
          rename(dir.File("other.new").c_str(), dir.File("other").c_str());
          if (!PollUntil([&] { return !ReadWholeFile(dir.File("port")).empty(); })) {
            _exit(10);
          }
          std::vector<std::string> addresses(2);
          addresses[other] = absl::StrCat("127.0.0.1:", ReadWholeFile(dir.File("port")));
          addresses[1 - other] = absl::StrCat("127.0.0.1:", network->port());
          Recorder recorder(2);
          auto links = *network->Join({.job = "llm", .uid = 1, .node = 1 - other, .addresses = addresses, .spec = "s"},
                                      &recorder);
          if (!recorder.WaitUp(other) || !recorder.WaitMessages(other, 10)) {
            _exit(11);
          }
          const absl::Time begin = absl::Now();
          child.Kill(signal_number);
          if (!recorder.Await(other, [](const Recorder::Node& seen) { return !seen.up; })) {
            _exit(12);
          }
          const absl::Duration took = absl::Now() - begin;
          fprintf(stderr, "took %s: %s\n", absl::FormatDuration(took).c_str(),
                  recorder.node(other).downs.back().ToString().c_str());
          child.Kill(SIGKILL);
          links.reset();
          _exit(took < soon && recorder.broken().empty() ? 0 : 13);
        },
        ::testing::ExitedWithCode(0), "took .*UNAVAILABLE");
  }
};

INSTANTIATE_TEST_SUITE_P(Other, PeerProcessTest, ::testing::Values(0, 1));

TEST_P(PeerProcessTest, KilledNodeIsLostAtOnce) { Start(GetParam(), SIGKILL, absl::Milliseconds(900)); }

// No byte and no end comes of it: only pings that are not answered tell.
TEST_P(PeerProcessTest, StoppedNodeIsLostWithTheKeepalive) { Start(GetParam(), SIGSTOP, absl::Seconds(6)); }

}  // namespace
}  // namespace shardd::testing
