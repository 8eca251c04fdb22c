// What a large job makes the daemon do, and where: nobody else waits for it.

#include <atomic>
#include <filesystem>
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
  // `count` MiB of a parameter, by the ring.
  static void Write(RawClient& client, int count) {
    for (int i = 0; i < count; ++i) {
      client.Send(Record(Opcode::kWriteParameters, 0, i * kMiB / 4, kMiB / 4, client.layout().payload_offset_bytes));
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

TEST_F(Isolation, ValuesAreWrittenAndTakenBackOffTheLoop) {
  constexpr int kMost = 200;
  constexpr int64_t kLeastNs = 5'000'000;
  StartDaemon();
  RawClient client(socket());
  v1::JobSpec spec = SpecOf({{"name", "written"}, {"world", "1"}, {"optimizer", "sgd"}});
  SetShape(spec, {kMost * kMiB / 4});
  ASSERT_TRUE(client.Enter(spec, 0).ok());
  ASSERT_NO_FATAL_FAILURE(Write(client, kMost));
  EXPECT_GT(ThreadNs("copier"), kLeastNs) << "initial values";
  client.Send(Record(Opcode::kCommitParameters));
  ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("written", "parameters", "version 1"); }));
  client.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
  ASSERT_TRUE(client.Consumed());
  int64_t before_ns = ThreadNs("copier");
  ASSERT_NO_FATAL_FAILURE(Write(client, kMost));
  EXPECT_GT(ThreadNs("copier") - before_ns, kLeastNs) << "writeback";
  before_ns = ThreadNs("copier");
  client.Send(Record(Opcode::kStep));  // not inside of full parameters: the epoch ends
  ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("written", "abort", ""); }));
  EXPECT_TRUE(testing::PollUntil([&] { return ThreadNs("copier") - before_ns > kLeastNs; })) << "taken back";
}

}  // namespace
}  // namespace shardd::faults
