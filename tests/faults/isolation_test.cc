// What a large job makes the daemon do, and where: nobody else waits for it.

#include <signal.h>
#include <sys/ptrace.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/files.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class Isolation : public BadInput {
 protected:
  // What the daemon's threads of this name have run.
  int64_t ThreadNs(const std::string& name) {
    int64_t total_ns = 0;
    for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_pid(), "/task"))) {
      if (testing::ReadWholeFile(task.path() / "comm") == name + "\n") {
        total_ns += std::atoll(testing::ReadWholeFile(task.path() / "schedstat").c_str());
      }
    }
    return total_ns;
  }
  static constexpr int kMost = 200;  // MiB of a large job's parameter
  static v1::JobSpec Large(const std::string& name) {
    v1::JobSpec spec = SpecOf({{"name", name}, {"world", "1"}, {"optimizer", "sgd"}});
    SetShape(spec, {kMost * kMiB / 4});
    return spec;
  }
  // `body` makes the copier run, and the loop for no longer than `commands_ns`, with a margin: what it copied itself
  // would show beside what the copier did.
  void ExpectCopierRuns(const std::string& what, int64_t commands_ns, const std::function<void()>& body) {
    SCOPED_TRACE(what);
    constexpr int64_t kLeastCopierNs = 5'000'000;
    const int64_t copier_begin_ns = ThreadNs("copier");
    const int64_t loop_ns = LoopNs(body);
    EXPECT_TRUE(testing::PollUntil([&] { return ThreadNs("copier") - copier_begin_ns > kLeastCopierNs; }));
    EXPECT_LT(loop_ns, 4 * commands_ns + (ThreadNs("copier") - copier_begin_ns) / 2);
  }
  int64_t LoopNs(const std::function<void()>& body) {
    const int64_t begin_ns = ThreadNs("core");
    body();
    return ThreadNs("core") - begin_ns;
  }
  // `count` times `bytes` of a parameter, by the ring, a MiB apart.
  static void Write(RawClient& client, int count, int64_t bytes = kMiB) {
    for (int i = 0; i < count; ++i) {
      client.Send(Record(Opcode::kWriteParameters, 0, i * kMiB / 4, bytes / 4, client.layout().payload_offset_bytes));
      ASSERT_TRUE(client.Consumed());
    }
  }
};

// The session of a large job is populated for as long as its gradient slots are large. Ranks of other jobs come and go
// meanwhile.
TEST_F(Isolation, AnAttachThatTakesLongHoldsUpNoOtherJobs) {
  StartDaemon();
  v1::JobSpec large = SpecOf({{"name", "large"}, {"world", "1"}, {"optimizer", "sgd"}});
  SetShape(large, {96 * kMiB});
  RawClient neighbour(socket());
  const absl::StatusOr<v1::OpenJobResponse> opened = neighbour.Open(large);
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::atomic<bool> begun = false;
  std::atomic<bool> ended = false;
  std::thread attaching([&] {
    begun = true;
    const absl::StatusOr<v1::AttachRankResponse> attached = neighbour.Attach(opened->job_id(), 0);
    EXPECT_TRUE(attached.ok()) << attached.status();
    ended = true;
  });
  ASSERT_TRUE(testing::PollUntil([&] { return begun.load(); }));
  int served = 0;
  RawClient other(socket());
  for (int i = 0; i < 100 && !ended; ++i) {
    const absl::StatusOr<v1::OpenJobResponse> job = other.Open(SpecOf({{"name", absl::StrCat(i)}, {"world", "1"}}));
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_TRUE(other.Attach(job->job_id(), 0).ok());
    EXPECT_TRUE(other.Close(job->job_id()).ok());
    served += ended ? 0 : 1;
  }
  attaching.join();
  EXPECT_GE(served, 3);
}

// The holder is killed, and its last store has to be behind it: the daemon waits for its end. Here a debugger holds it
// at its exit, as a driver or a file system that hangs does.
TEST_F(Isolation, ReplacingAProcessThatWillNotDieDelaysNobodyElse) {
  StartDaemon();
  const e2e::Args args = {{"world", "1"}, {"pause", "before_step@2"}};
  testing::Child holder = StartRank(0, args);
  AwaitPause(args, "before_step", 0);
  // Threads are traced one by one; the first one's end is the process's.
  if (ptrace(PTRACE_SEIZE, holder.pid(), nullptr, PTRACE_O_TRACEEXIT) != 0) {
    GTEST_SKIP() << "this user may not trace: " << std::strerror(errno);
  }
  const uint64_t job_id = Job().job_id();
  std::atomic<bool> ended = false;
  absl::Duration replaced_in;
  std::thread replacing([&] {
    const absl::Time begin = absl::Now();
    absl::Status attached = absl::AbortedError("not asked");
    while (absl::IsAborted(attached)) attached = RawClient(socket()).Attach(job_id, 0, /*replace=*/true).status();
    EXPECT_TRUE(attached.ok()) << attached;
    replaced_in = absl::Now() - begin;
    ended = true;
  });
  ASSERT_TRUE(testing::PollUntil([&] { return HasEvent("job", "lost", "it was replaced"); }));
  int served = 0;
  absl::Duration longest;
  RawClient other(socket());
  for (int i = 0; i < 100 && !ended; ++i) {
    const absl::Time begin = absl::Now();
    const absl::StatusOr<v1::OpenJobResponse> job = other.Open(SpecOf({{"name", absl::StrCat(i)}, {"world", "1"}}));
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_TRUE(other.Attach(job->job_id(), 0).ok());
    EXPECT_TRUE(other.Close(job->job_id()).ok());
    longest = std::max(longest, absl::Now() - begin);
    served += ended ? 0 : 1;
  }
  replacing.join();
  EXPECT_GE(replaced_in, absl::Seconds(1)) << "nothing was waited for";
  EXPECT_GE(served, 10);
  EXPECT_LT(longest, absl::Seconds(1));
  ptrace(PTRACE_DETACH, holder.pid(), nullptr, nullptr);
  EXPECT_EQ(holder.Wait(), 1000 + SIGKILL);
}

TEST_F(Isolation, ValuesAreWrittenAndTakenBackOffTheLoop) {
  StartDaemon();
  RawClient client(socket());
  ASSERT_TRUE(client.Enter(Large("written"), 0).ok());
  const int64_t commands_ns = LoopNs([&] { Write(client, kMost, /*bytes=*/4); });
  ExpectCopierRuns("initial values", commands_ns, [&] { Write(client, kMost); });
  client.Send(Record(Opcode::kCommitParameters));
  ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("written", "parameters", "version 1"); }));
  client.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
  ASSERT_TRUE(client.Consumed());
  ExpectCopierRuns("writeback", commands_ns, [&] { Write(client, kMost); });
  ExpectCopierRuns("taken back", commands_ns / kMost, [&] {
    client.Send(Record(Opcode::kStep));  // not inside of full parameters: the epoch ends
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("written", "abort", ""); }));
  });
}

// Of an epoch that wrote initial values and committed none.
TEST_F(Isolation, ValuesThatWereGivenUpAreClearedOffTheLoop) {
  StartDaemon();
  int64_t commands_ns = 0;
  {
    RawClient first(socket());
    ASSERT_TRUE(first.Enter(Large("cleared"), 0).ok());
    commands_ns = LoopNs([&] { Write(first, kMost, /*bytes=*/4); });
    Write(first, kMost);
  }
  ASSERT_TRUE(testing::PollUntil([this] { return Job("cleared").attached_ranks() == 0; }));
  RawClient second(socket());
  ASSERT_TRUE(second.Enter(Large("cleared"), 0).ok());
  ExpectCopierRuns("cleared", commands_ns / kMost, [&] {
    second.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("cleared", "parameters", "version 1"); }));
  });
}

}  // namespace
}  // namespace shardd::faults
