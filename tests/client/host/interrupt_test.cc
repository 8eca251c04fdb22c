// Waits that the host ends: a real signal in a waiting process, and what is left of the call afterwards.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/c/daemon/connect.h"
#include "client/c/shardd.h"
#include "common/process/daemon_address.h"
#include "tests/client/client_fixture.h"
#include "tests/testing/programs.h"
#include "tests/testing/set_clock.h"

namespace shardd::testing_client {
namespace {

constexpr int kCancelled = 1;

// A process that waits for `what` (programs.cc).
class Waiter {
 public:
  Waiter(const std::string& what, const std::string& address, int world, std::vector<std::string> environment = {})
      : what_(what), child_(Spawn(address, world, std::move(environment))) {}
  void AwaitAttached() {
    EXPECT_TRUE(Eventually([this] { return Said("attached\n"); })) << output();
  }
  void Go() { dir_.Write("go", ""); }
  // Sends SIGINT once it sleeps in its wait; its last line. Without an interrupt it would wait for minutes.
  std::string Interrupt() {
    EXPECT_TRUE(Eventually([this] { return Said("waiting\n"); })) << output();
    EXPECT_TRUE(Eventually([this] { return State() == 'S'; })) << output();
    child_.Kill(SIGINT);
    EXPECT_EQ(child_.Wait(), 0) << output();
    const std::string all = output();
    return all.substr(all.rfind("waiting\n") + 8);
  }
  std::string output() const { return ReadWholeFile(dir_.File("output")); }

 private:
  Child Spawn(const std::string& address, int world, std::vector<std::string> environment) {
    environment.insert(environment.end(),
                       {"TEST_WAIT=" + what_, "TEST_GO=" + dir_.File("go"), "TEST_ADDRESS=" + address, "TEST_RANK=0",
                        absl::StrCat("TEST_WORLD=", world)});
    return SpawnProgram("wait_until_interrupted", environment, dir_.File("output"));
  }
  bool Said(const char* line) const { return absl::StrContains(output(), line); }
  char State() const {
    const std::string stat = ReadWholeFile(absl::StrCat("/proc/", child_.pid(), "/stat"));
    const size_t end = stat.rfind(") ");
    return end == std::string::npos ? '?' : stat[end + 2];
  }

  const std::string what_;
  TempDir dir_;
  Child child_;
};

// A signal stops the threads one after the other, and until then they answer.
void Stop(const Child& process) {
  process.Kill(SIGSTOP);
  EXPECT_TRUE(Eventually([&] {
    for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", process.pid(), "/task"))) {
      const std::string stat = ReadWholeFile(task.path().string() + "/stat");
      if (const size_t end = stat.rfind(") "); end != std::string::npos && stat[end + 2] != 'T') return false;
    }
    return true;
  }));
}

void ExpectCancelled(const std::string& line, const std::string& call) {
  EXPECT_TRUE(absl::StartsWith(line, absl::StrCat("code ", kCancelled, " "))) << line;
  EXPECT_TRUE(absl::StrContains(line, absl::StrCat(call, ": interrupted"))) << line;
}

TEST(Interrupt, ASignalEndsAWaitForTheOtherRanks) {
  Daemon daemon;
  Waiter waiter("commit", daemon.address(), 2);  // rank 1 never comes
  waiter.Go();
  ExpectCancelled(waiter.Interrupt(), "commit_parameters");
}

TEST(Interrupt, ASignalEndsAWaitForTheCommit) {
  for (const std::string what : {"step", "unshard"}) {
    Daemon daemon;
    Rank other;
    ASSERT_C_OK(other.Attach(daemon.address(), SmallSpec("programs", 2), 1));
    Waiter waiter(what, daemon.address(), 2);
    ASSERT_C_OK(shardd_commit_parameters(other.job()));  // and no step
    waiter.AwaitAttached();
    waiter.Go();
    ExpectCancelled(waiter.Interrupt(), "wait_" + what);
  }
}

TEST(Interrupt, ASignalEndsCallsToAnUnresponsiveDaemon) {
  for (const std::string what : {"attach", "describe_job", "detach"}) {
    Daemon daemon;
    if (what == "attach") {
      Stop(daemon.process());
    }
    Waiter waiter(what, daemon.address(), 1);
    if (what != "attach") {
      waiter.AwaitAttached();
      Stop(daemon.process());
    }
    waiter.Go();
    ExpectCancelled(waiter.Interrupt(), what);
    daemon.process().Kill(SIGCONT);
  }
}

TEST(Interrupt, ASignalEndsTheWaitForADaemonsSuccessor) {
  Daemon daemon;
  Waiter waiter("reattach", daemon.address(), 2);
  waiter.AwaitAttached();
  daemon.process().Kill();
  waiter.Go();
  ExpectCancelled(waiter.Interrupt(), "reattach");
}

// What was lost in between is said to the next daemon, and there may be none. A host that was asked takes its answer as
// said, so that no other status may hide it.
TEST(Interrupt, ASignalEndsAFinishThatAwaitsADaemonsSuccessor) {
  TempDir dir;
  const std::string custody = dir.File("custody.sock");
  Child custodian = testing::Spawn({testing::ProgramPath("shardd-custodian"), "--listen=unix:" + custody},
                                   {.log = dir.File("custodian.log")});
  ASSERT_TRUE(Eventually([&] { return access(custody.c_str(), F_OK) == 0; }));
  testing::DaemonProcess daemon(dir.path(), "cpu:2", {"--custodian=unix:" + custody});
  ASSERT_TRUE(daemon.listened()) << ReadWholeFile(daemon.log());
  Waiter waiter("detach", daemon.address(), 1);
  waiter.AwaitAttached();
  daemon.process().Kill();
  waiter.Go();
  ExpectCancelled(waiter.Interrupt(), "reattach");
}

// A sleeper of absl's until a moment of a clock that is set back would hear of no signal for an hour.
TEST(Interrupt, ASignalEndsAWaitWhoseClockIsSet) {
  SHARDD_NEEDS_SET_CLOCK();
  for (const char* direction : {"back", "forward"}) {
    for (const std::string what : {"attach", "commit", "detach", "reattach"}) {
      SCOPED_TRACE(absl::StrCat(what, " ", direction));
      Daemon daemon;
      if (what == "attach") Stop(daemon.process());
      Waiter waiter(what, daemon.address(), 2, testing::SetClockEnvironment(direction));
      if (what != "attach") waiter.AwaitAttached();
      if (what == "detach") Stop(daemon.process());
      if (what == "reattach") daemon.process().Kill();
      waiter.Go();
      ExpectCancelled(waiter.Interrupt(), what == "commit" ? "commit_parameters" : what);
      daemon.process().Kill(SIGCONT);
    }
  }
}

TEST(Interrupt, ASignalEndsADaemonThatIsBeingStarted) {
  if (ConnectUnix(kSystemSocket).ok()) {
    GTEST_SKIP() << "a daemon listens on " << kSystemSocket;
  }
  TempDir dir;
  dir.Write("mute", "#!/bin/sh\necho $$ >" + dir.File("pid") + "\nexec sleep 1000\n");
  ASSERT_EQ(chmod(dir.File("mute").c_str(), 0700), 0);
  Waiter waiter("attach", "", 1,
                {"XDG_RUNTIME_DIR=" + dir.path(), "SHARDD_DAEMON=" + dir.File("mute"), "SHARDD_ADDRESS="});
  ASSERT_TRUE(Eventually([&] { return absl::StrContains(ReadWholeFile(dir.File("pid")), "\n"); })) << waiter.output();
  const pid_t mute = atoi(ReadWholeFile(dir.File("pid")).c_str());
  ExpectCancelled(waiter.Interrupt(), "start daemon");
  EXPECT_TRUE(Eventually([&] { return kill(mute, 0) != 0; })) << "the daemon that was being started is left behind";
}

// What a host asks: an answer, and how often it was asked.
struct Host {
  std::atomic<int> answer{0};
  std::atomic<int> asked{0};
  static int Interrupted(void* context) {
    auto* host = static_cast<Host*>(context);
    ++host->asked;
    return host->answer;
  }
};

TEST(Interrupt, TheSameCallGoesOnWaitingAfterwards) {
  Daemon daemon;
  Rank ranks[2];
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_C_OK(ranks[rank].Attach(daemon.address(), SmallSpec("job", 2), rank));
  }
  Host host;
  host.answer = 1;
  ASSERT_C_OK(shardd_set_interrupt(ranks[0].job(), &Host::Interrupted, &host));
  for (int i = 0; i < 3; ++i) {
    EXPECT_C_ERROR(shardd_commit_parameters(ranks[0].job()), kCancelled, "commit_parameters: interrupted (rank=0)");
  }
  EXPECT_EQ(host.asked, 3);
  host.answer = 0;
  std::thread late([&] {
    // Not before rank 0 waits again.
    EXPECT_TRUE(Eventually([&] { return host.asked > 4; }));
    EXPECT_C_OK(shardd_commit_parameters(ranks[1].job()));
  });
  EXPECT_C_OK(shardd_commit_parameters(ranks[0].job()));
  late.join();
  EXPECT_EQ(ranks[0].Info().version, 1u);
}

TEST(Interrupt, AJobsCallbackOverridesThatOfTheProcessUntilUnset) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 2), 0, absl::Seconds(1)));
  Host process;
  Host own;
  process.answer = 1;
  ASSERT_C_OK(shardd_set_interrupt(nullptr, &Host::Interrupted, &process));
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kCancelled, "interrupted");
  EXPECT_EQ(process.asked, 1);
  ASSERT_C_OK(shardd_set_interrupt(rank.job(), &Host::Interrupted, &own));
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kDeadlineExceeded, "every rank has to commit");
  EXPECT_EQ(process.asked, 1);
  EXPECT_GE(own.asked, 2);  // in a second
  const int asked = own.asked;
  ASSERT_C_OK(shardd_set_interrupt(rank.job(), nullptr, nullptr));
  ASSERT_C_OK(shardd_set_interrupt(nullptr, nullptr, nullptr));
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kDeadlineExceeded, "every rank has to commit");
  EXPECT_EQ(process.asked, 1);
  EXPECT_EQ(own.asked, asked);
}

// A command that finds the ring full has done nothing yet when it is interrupted.
TEST(Interrupt, ACommandThatWaitedForSpaceCanBeMadeAgain) {
  for (const bool odd : {false, true}) {
    Daemon daemon;
    Rank rank;
    ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
    rank.WriteAll(1);
    Host host;
    host.answer = 1;
    ASSERT_C_OK(shardd_set_interrupt(rank.job(), &Host::Interrupted, &host));
    Stop(daemon.process());
    if (odd) {  // so that, as a rule, it is full at an unshard once and at a reshard once
      ASSERT_C_OK(shardd_unshard(rank.job(), 1, SHARDD_FORWARD));
    }
    Result unshard(nullptr);
    Result reshard(nullptr);
    for (int i = 0; i < 10'000; ++i) {
      unshard = shardd_unshard(rank.job(), 0, SHARDD_FORWARD);
      if (!unshard.ok()) {
        break;
      }
      ASSERT_C_OK(shardd_wait_unshard(rank.job(), 0));
      reshard = shardd_reshard(rank.job(), 0);
      if (!reshard.ok()) {
        break;
      }
    }
    const bool full_at_reshard = unshard.ok();
    EXPECT_EQ(full_at_reshard ? reshard.code() : unshard.code(), kCancelled) << unshard << reshard;
    daemon.process().Kill(SIGCONT);
    host.answer = 0;
    // Client and daemon count alike: the call is made again, and a whole step works.
    if (full_at_reshard) {
      ASSERT_C_OK(shardd_reshard(rank.job(), 0));
    } else {
      rank.Unshard(0, SHARDD_FORWARD);
      ASSERT_C_OK(shardd_reshard(rank.job(), 0));
    }
    if (odd) {
      ASSERT_C_OK(shardd_wait_unshard(rank.job(), 1));
      ASSERT_C_OK(shardd_reshard(rank.job(), 1));
    }
    ASSERT_C_OK(shardd_backward_done(rank.job(), 1));
    const shardd_hyperparameters sgd = Sgd(0.5);
    ASSERT_C_OK(shardd_step(rank.job(), &sgd, 1, 0, nullptr, 0));
    EXPECT_C_OK(shardd_wait_step(rank.job(), nullptr));
  }
}

}  // namespace
}  // namespace shardd::testing_client
