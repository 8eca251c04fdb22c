// A daemon that takes up a job whose update takes long, and lacks something for it, or is called by many.

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/faults/own_mounts.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

using testing::PollUntil;

constexpr int64_t kExtent = testing::kSanitized ? 512 : 1024;

// Of one matrix, which Muon updates for seconds.
v1::JobSpec LargeSpec() {
  SpecBuilder builder(/*world_size=*/1);
  builder.spec().set_name("large");
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_MUON);
  builder.Param(0, "weight", {kExtent, kExtent});
  return builder.spec();
}

class TakeUpUnderStress : public e2e::KeptCluster {
 protected:
  void StartInTheMidst() {
    StartCustodian();
    StartKept();
    DieInTheMidst();
  }
  // The daemon dies in the large job's first step, and the next one completes it.
  void DieInTheMidst() {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(LargeSpec(), 0).ok());
    job_id_ = Job("large").job_id();
    client.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(PollUntil([this] { return HasEvent("large", "parameters", "version 1"); }));
    SendOnStream(client, [](v1::Command& command) { command.mutable_set_gradient_presence()->set_present(true); });
    ASSERT_TRUE(PollUntil([this] { return Ranks("large")[0].commands() >= 2; }));
    v1::Step step = GoodStep();
    step.mutable_groups(0)->set_ns_steps(6);
    SendStep(client, step);
    ASSERT_TRUE(PollUntil([this] { return Job("large").state() == v1::JOB_STATE_COMMITTING; }));
    KillDaemon();
    StartKept();
    ASSERT_EQ(Job("large").state(), v1::JOB_STATE_TAKING_UP) << testing::ReadWholeFile(DaemonLog());
    ASSERT_EQ(Job("large").committed_step(), 1) << "which it is completed as";
  }
  bool IsTakenUp() {
    return PollUntil([this] { return Job("large").state() == v1::JOB_STATE_WAITING; }, 10 * testing::kLimit);
  }
  int64_t Status(const std::string& field) const {
    std::ifstream status(absl::StrCat("/proc/", daemon_pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      if (absl::StartsWith(line, field)) return std::atoll(line.c_str() + field.size() + 1);
    }
    return -1;
  }
  int OpenFiles() const {
    const std::filesystem::directory_iterator files(absl::StrCat("/proc/", daemon_pid(), "/fd"));
    return static_cast<int>(std::distance(begin(files), end(files)));
  }

  uint64_t job_id_ = 0;
};

TEST_F(TakeUpUnderStress, AJobThatLacksDescriptorsIsTakenUpLater) {
  ASSERT_NO_FATAL_FAILURE(StartInTheMidst());
  rlimit before{};
  ASSERT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit none = {3, before.rlim_max};  // what is open is served, and no other is opened
  ASSERT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  const auto said = [this](const std::string& text) {
    return absl::StrContains(testing::ReadWholeFile(DaemonLog()), text);
  };
  ASSERT_TRUE(PollUntil([&] { return said("tried again for") || said("is not taken up"); }, 3 * testing::kLimit))
      << testing::ReadWholeFile(DaemonLog());
  EXPECT_TRUE(said("oo many open files")) << testing::ReadWholeFile(DaemonLog());
  EXPECT_FALSE(said("is not taken up"));
  ASSERT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  ASSERT_TRUE(IsTakenUp()) << testing::ReadWholeFile(DaemonLog());
  EXPECT_EQ(Job("large").committed_step(), 1);
}

// What it does not have yet it gets when it answers again.
TEST_F(TakeUpUnderStress, ACustodianThatDoesNotAnswerRefusesNoJob) {
  ASSERT_NO_FATAL_FAILURE(StartInTheMidst());
  ASSERT_EQ(kill(custodian_->pid(), SIGSTOP), 0);
  const auto said = [this](const std::string& text) {
    return absl::StrContains(testing::ReadWholeFile(DaemonLog()), text);
  };
  const auto ended = [&] { return said("large is taken up at") || said("is not taken up"); };
  (void)PollUntil(ended, absl::Seconds(15));  // some answers do not come within 5 s
  ASSERT_EQ(kill(custodian_->pid(), SIGCONT), 0);
  ASSERT_TRUE(PollUntil(ended, 3 * testing::kLimit));
  EXPECT_FALSE(said("is not taken up")) << testing::ReadWholeFile(DaemonLog());
  ASSERT_TRUE(IsTakenUp());
  KillDaemon();
  StartKept();
  EXPECT_EQ(Job("large").committed_step(), 1);
}

// Whatever the limit, a daemon ends and says why, or it has all jobs; and none is lost for the one behind it.
TEST_F(TakeUpUnderStress, WithTooFewDescriptorsNothingIsLost) {
  StartCustodian();
  StartKept();
  constexpr int kJobs = 6;
  for (int job = 0; job < kJobs; ++job) {
    ExpectAllOk(RunRanks({{"name", absl::StrCat("job-", job)},
                          {"steps", absl::StrCat(job + 1)},
                          {"finish", "0"},
                          {"world", "1"},
                          {"wait_step", "1"},
                          {"grace_ms", "900000"}}));
  }
  KillDaemon();
  const std::string limited = File("limited");
  int ended = 0, listened = 0;
  for (int files = 24; files <= 240; files += 6) {
    std::ofstream(limited) << "#!/bin/sh\nulimit -n " << files << "\nexec " << testing::ProgramPath("shardd")
                           << " \"$@\"\n";
    ASSERT_EQ(chmod(limited.c_str(), 0700), 0);
    testing::DaemonProcess daemon(File("").substr(0, File("").size() - 1), devices_, {"--custodian=unix:" + Custody()},
                                  {}, limited);
    if (daemon.listened()) {
      ++listened;
      daemon.process().Kill(SIGKILL);
      daemon.process().Wait();
    } else {
      EXPECT_EQ(daemon.process().Wait(), 1) << files;
      ++ended;
    }
    unlink(daemon.socket_path().c_str());
  }
  EXPECT_GT(ended, 0);
  EXPECT_GT(listened, 0);
  const std::string log = testing::ReadWholeFile(DaemonLog());
  EXPECT_TRUE(absl::StrContains(log, "oo many open files")) << log;
  EXPECT_FALSE(absl::StrContains(log, "is not taken up")) << log;
  StartKept();
  for (int job = 0; job < kJobs; ++job) EXPECT_EQ(Job(absl::StrCat("job-", job)).committed_step(), job + 1);
}

// Nothing of a job is in a file, but sockets and logs are.
TEST_F(TakeUpUnderStress, OnAFullDiskNothingIsLost) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_EQ(mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m,mode=1777"), 0);
  ASSERT_EQ(mkdir(File("").c_str(), 0700), 0);
  StartCustodian();
  StartKept();
  ExpectAllOk(RunRanks({{"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}, {"world", "1"}}));
  KillDaemon();
  for (const char* name : {"shardd.sock", "shardd.sock.lock"}) unlink(File(name).c_str());
  {
    std::ofstream filler(File("filler"), std::ios::binary);
    const std::string block(4096, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) continue;
  }
  const std::string folder = File("").substr(0, File("").size() - 1);
  testing::DaemonProcess full(folder, devices_, {"--custodian=unix:" + Custody()});
  EXPECT_FALSE(full.listened());
  EXPECT_EQ(full.process().Wait(), 1);
  unlink(File("filler").c_str());
  StartKept();
  EXPECT_EQ(Committed(), 5);
  ExpectAllOk(RunRanks({{"steps", "8"}, {"world", "1"}}));
  umount2("/dev/shm", MNT_DETACH);  // so that what lies under it is removed
}

// Nobody else waits for it, and what it will have is its user's and the machine's already.
TEST_F(TakeUpUnderStress, NewJobsOpenBesideItWithinTheQuota) {
  flags_ = {"--max_jobs_per_uid=2"};
  ASSERT_NO_FATAL_FAILURE(StartInTheMidst());
  RawClient client(socket());
  const auto second = client.Open(SpecOf({{"name", "second"}}));
  const absl::Status third = client.Open(SpecOf({{"name", "third"}})).status();
  ASSERT_EQ(Job("large").state(), v1::JOB_STATE_TAKING_UP) << "the update was too fast";
  ASSERT_TRUE(second.ok()) << second.status();
  ExpectStatus(third, absl::StatusCode::kResourceExhausted, "(got 3, want at most 2)");
  ASSERT_TRUE(IsTakenUp());
  ExpectStatus(client.Open(SpecOf({{"name", "third"}})).status(), absl::StatusCode::kResourceExhausted,
               "(got 3, want at most 2)");
  ASSERT_TRUE(client.Close(second->job_id()).ok());
  EXPECT_TRUE(client.Open(SpecOf({{"name", "third"}})).ok()) << "it was counted once";
}

TEST_F(TakeUpUnderStress, MetricsHaveTheJob) {
  ASSERT_NO_FATAL_FAILURE(StartInTheMidst());
  v1::GetMetricsResponse metrics;
  RawClient client(socket());
  ASSERT_TRUE(client.Ask(&v1::JobsService::Stub::GetMetrics, v1::GetMetricsRequest(), &metrics).ok());
  EXPECT_EQ(DaemonStatus().jobs(), 1);
  ASSERT_EQ(Job("large").state(), v1::JOB_STATE_TAKING_UP) << "the update was too fast";
  ASSERT_EQ(metrics.jobs_size(), 1);
  EXPECT_EQ(metrics.jobs(0).name(), "large");
  EXPECT_EQ(metrics.jobs(0).state(), v1::JOB_STATE_TAKING_UP);
  EXPECT_EQ(metrics.jobs(0).committed_step(), 1);
  EXPECT_EQ(metrics.jobs(0).time().since_commit_ns(), -1);
  ASSERT_EQ(metrics.jobs(0).ranks_size(), 1);
  EXPECT_EQ(metrics.jobs(0).ranks(0).state(), v1::RANK_STATE_ABSENT);
  ASSERT_EQ(metrics.daemon().quotas_size(), 1);
  EXPECT_EQ(metrics.daemon().quotas(0).jobs(), 1);
  ASSERT_TRUE(IsTakenUp());
  ASSERT_TRUE(client.Ask(&v1::JobsService::Stub::GetMetrics, v1::GetMetricsRequest(), &metrics).ok());
  EXPECT_EQ(metrics.jobs_size(), 1);
}

// A job of the daemon before, whose ranks train beside it.
TEST_F(TakeUpUnderStress, AFloodOfCallsForTheJobDelaysNobody) {
  constexpr int kCallers = 100, kCalls = 2000;
  StartCustodian();
  StartKept();
  const e2e::Args other = Training(1'000'000).With({{"name", "bystander"}, {"world", "1"}});
  testing::Child rank = StartRank(0, other);
  ASSERT_TRUE(PollUntil([this] { return Job("bystander").committed_step() > 5; }));
  ASSERT_NO_FATAL_FAILURE(DieInTheMidst());
  const auto step = [this] { return Job("bystander").committed_step(); };
  const int64_t first = step();
  ASSERT_TRUE(PollUntil([&] { return step() > first + 5; }));
  const int64_t before_kib = Status("VmRSS:");
  const int files = OpenFiles();
  std::atomic<bool> ends = false;
  std::atomic<int> told = 0, others = 0;
  std::vector<std::thread> flood;
  for (int i = 0; i < kCallers; ++i) {
    flood.emplace_back([&, i] {
      RawClient client(socket());
      while (!ends) {
        const absl::Status status = i % 2 == 0 ? client.Open(LargeSpec()).status() : client.Attach(job_id_, 0).status();
        (absl::IsAborted(status) ? told : others) += 1;
      }
    });
  }
  absl::Duration longest;
  absl::Time last = absl::Now();
  const absl::Time start = last;
  int64_t most_kib = 0;
  int most_files = 0;
  const int64_t begin = step();
  for (int64_t at = begin; told < kCalls && absl::Now() - start < testing::kLimit;) {
    most_kib = std::max(most_kib, Status("VmRSS:"));
    most_files = std::max(most_files, OpenFiles());
    const int64_t now = step();
    longest = std::max(longest, absl::Now() - last);
    if (now > at) last = absl::Now();
    at = now;
  }
  const int64_t steps = step() - begin;
  const absl::Duration took = absl::Now() - start;
  const bool beside = Job("large").state() == v1::JOB_STATE_TAKING_UP;
  ends = true;
  for (std::thread& thread : flood) thread.join();
  std::printf(
      "%d told, %d not; %ld KiB before, %ld at most; %d files before, %d at most; %ld steps in %s, %s at most\n",
      told.load(), others.load(), before_kib, most_kib, files, most_files, steps, absl::FormatDuration(took).c_str(),
      absl::FormatDuration(longest).c_str());
  EXPECT_GE(told, kCalls);
  if (beside) {
    EXPECT_EQ(others, 0);
  }
  EXPECT_GT(steps, 0);
  EXPECT_LT(longest, absl::Seconds(2)) << "as seen through calls that wait among the others";
  EXPECT_LT(most_kib - before_kib, (testing::kSanitized ? 512 : 64) << 10);
  EXPECT_LE(most_files - files, kCallers * 5);
  EXPECT_TRUE(PollUntil([&] { return OpenFiles() <= files + 8; }));
  ASSERT_TRUE(IsTakenUp());
  RawClient client(socket());
  EXPECT_TRUE(client.Attach(job_id_, 0).ok()) << "what is under way of the uid was given back";
}

}  // namespace
}  // namespace shardd::faults
