// Quotas, and a machine that is full.

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/shm/fd_channel.h"
#include "common/shm/slab.h"
#include "common/status/grpc_status.h"
#include "tests/e2e/resident.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/faults/own_mounts.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

using e2e::TrainerReport;

constexpr int64_t kMiB = int64_t{1} << 20;

// Quotas -------------------------------------------------------------------------------------------------------------

TEST_F(BadInput, TheQuotaOfJobsIsKept) {
  StartDaemonWithJob({"--max_jobs_per_uid=2"});
  RawClient client(socket());
  const auto second = client.Open(SpecOf({{"name", "second"}}));
  ASSERT_TRUE(second.ok()) << second.status();
  ExpectStatus(client.Open(SpecOf({{"name", "third"}})).status(), absl::StatusCode::kResourceExhausted,
               "(got 3, want at most 2); close one or raise --max_jobs_per_uid");
  EXPECT_TRUE(client.Open(SpecOf({{"name", "second"}})).ok());  // joining is not opening
  EXPECT_TRUE(Job("third").name().empty());
  ASSERT_TRUE(client.Close(second->job_id()).ok());
  ExpectJobIntact();  // and the place that was given back is another's
}

// To the byte: two jobs of the same size are allowed, and fit.
TEST_F(BadInput, TheQuotaOfBytesIsKept) {
  const auto plan = PlanShards(SpecOf(job_));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t quota_bytes = 2 * plan->memory.TotalBytes(1);
  StartDaemonWithJob({absl::StrCat("--max_bytes_per_uid=", quota_bytes)});
  const e2e::Footprint before = DaemonFootprint();
  RawClient client(socket());
  v1::JobSpec larger = SpecOf({{"name", "larger"}, {"world", "1"}});
  AddParameters(larger, 1 << 14);
  const absl::Status status = client.Open(larger).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "quota of uid");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted,
               absl::StrCat("want at most ", quota_bytes, "); close a job, or raise --max_bytes_per_uid"));
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  ExpectJobIntact();
}

TEST_F(BadInput, AUserHasHalfOfTheMemoryByDefault) {
  StartDaemonWithJob();
  const auto limits = GetMemoryLimits();
  ASSERT_TRUE(limits.ok()) << limits.status();
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}, {"world", "1"}});
  AddParameters(large, 1);
  // Three quarters, without a gradient: other tests take and give memory while this one runs.
  large.mutable_tree()->mutable_modules(0)->mutable_parameters()->rbegin()->add_shape(
      limits->free_bytes / 4 * 3 / static_cast<int64_t>(sizeof(float)));
  ExpectStatus(client.Open(large).status(), absl::StatusCode::kResourceExhausted, "quota of uid");
  ExpectJobIntact();
}

// The job fits, and a writeback of its parameters would not: that is said when it opens, not when it writes back.
TEST_F(BadInput, AJobThatCouldNotWriteBackDoesNotOpen) {
  StartDaemonWithJob({"--max_bytes_per_uid=0"});
  const auto limits = GetMemoryLimits();
  ASSERT_TRUE(limits.ok()) << limits.status();
  v1::JobSpec spec = SpecOf({{"name", "large"}, {"world", "1"}});
  // Two bytes of plan for one of shards, which it may have to keep once more: 0.8 of what is free, and 1.2.
  spec.mutable_config()->set_trainers_never_write(false);
  spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  for (v1::Module& module : *spec.mutable_tree()->mutable_modules()) {
    for (v1::Parameter& parameter : *module.mutable_parameters()) parameter.set_requires_grad(false);
  }
  const int64_t shards_bytes = static_cast<int64_t>(0.4 * static_cast<double>(limits->free_bytes)) / 64 * 64;
  SetShape(spec, {shards_bytes / 4});
  const auto plan = PlanShards(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_LT(plan->memory.TotalBytes(1), limits->free_bytes);
  const e2e::Footprint before = DaemonFootprint();
  const absl::Status status = RawClient(socket()).Open(spec).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"large\": reserve memory: too little is left");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted,
               absl::StrCat(plan->memory.shards_bytes, " bytes for the undo of a writeback"));
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  ExpectJobIntact();
}

// A plan's heap grows with its parameters, whoever opens the job.
TEST_F(BadInput, ClosingGivesBackTheHeapOfALargeJob) {
  if (testing::kSanitized) GTEST_SKIP() << "a sanitizer keeps what is freed";
  StartDaemonWithJob();
  const auto heap_bytes = [this] { return e2e::ReadResident(daemon_pid()).anonymous_bytes; };
  v1::JobSpec spec = SpecOf({{"name", "large"}, {"world", "1"}});
  AddParameters(spec, 1 << 17);
  const int64_t before_bytes = heap_bytes();
  const auto opened = RawClient(socket()).Open(spec);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const int64_t taken_bytes = heap_bytes() - before_bytes;
  EXPECT_GT(taken_bytes, 32 * kMiB);
  ASSERT_TRUE(RawClient(socket()).Close(opened->job_id()).ok());
  int64_t kept_bytes = 0;
  EXPECT_TRUE(testing::PollUntil([&] { return (kept_bytes = heap_bytes() - before_bytes) < taken_bytes / 4; }))
      << kept_bytes << " of " << taken_bytes;
  ExpectJobIntact();
}

// Open files ---------------------------------------------------------------------------------------------------------

// Nearly as many as the daemon may have: what comes then is refused by name, and what is there is served from the
// reserve: a job trains on, and its ranks may leave.
TEST_F(BadInput, OutOfDescriptorsTheDaemonSaysSoAndServesOn) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    rlimit limit = {192, 192};
    ASSERT_EQ(prlimit(daemon_pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
    std::vector<std::unique_ptr<RawClient>> others;
    absl::Status refused;
    for (int i = 0; i < 200 && refused.ok(); ++i) {
      others.push_back(std::make_unique<RawClient>(socket()));
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit));
      v1::Daemon daemon;
      refused = FromGrpcStatus(others.back()->jobs().GetDaemon(&context, {}, &daemon));
    }
    ExpectStatus(refused, absl::StatusCode::kResourceExhausted,
                 "connect: the daemon has too many files open (its limit is 192");
    ExpectStatus(refused, absl::StatusCode::kResourceExhausted, "raise the limit (ulimit -n");
    // On connections that there are, the few descriptors being taken that the refused one has let go of.
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 4; ++i) silent.push_back(ConnectTo(socket()));
    absl::Status second;
    EXPECT_TRUE(testing::PollUntil([&] {
      second = others.front()->Open(SpecOf({{"name", "second"}})).status();
      return !second.ok();
    }));
    ExpectStatus(second, absl::StatusCode::kResourceExhausted, "open job: the daemon has too many files open");
    EXPECT_TRUE(
        FetchSessionFds(socket(), client.session().session_id(), client.session().token(), testing::kLimit).ok());
    client.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    EXPECT_TRUE(client.Consumed());
  }
  ExpectJobIntact();
}

// A full machine
// -----------------------------------------------------------------------------------------------------

class FullMachine : public BadInput {
 protected:
  static constexpr int64_t kFreeKib = 64 << 10;
  const MemoryOfTheMachine memory_{File("meminfo")};
};

TEST_F(FullMachine, RefusesWhatDoesNotFitAndSaysWhatToDo) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  memory_.Say(int64_t{16} << 20);
  StartDaemonWithJob();
  memory_.Say(kFreeKib);
  const e2e::Footprint before = DaemonFootprint();
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}, {"world", "1"}});
  SetShape(large, {kFreeKib * 1024 / 4});  // fp32: as much as there is, and optimizer state beside it
  const absl::Status status = client.Open(large).status();
  for (const std::string& part :
       {std::string("open job \"large\": reserve memory: too little is left by MemAvailable"),
        absl::StrCat("got ", kFreeKib * 1024, " bytes free, want "), std::string("use a smaller job")}) {
    ExpectStatus(status, absl::StatusCode::kResourceExhausted, part);
  }
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  // What is there goes on, and where there is room again others do too.
  const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 5");
  memory_.Say(int64_t{16} << 20);
  ExpectServesOthers();
  ExpectSame(reports, {Report(other_, 0)});
}

// Nothing that a job has is a file: the 64 MiB of /dev/shm that containers have by default do not matter.
TEST_F(FullMachine, ServesJobsLargerThanTheFileSystemsOfAContainer) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  // Over the tests' own folders of before, which this process sees no more.
  ASSERT_EQ(mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m,mode=1777"), 0);
  ASSERT_EQ(mkdir(File("").c_str(), 0700), 0);
  StartDaemonWithJob();
  const v1::JobSpec spec = [&] {
    v1::JobSpec larger = SpecOf({{"name", "larger"}, {"world", "1"}});
    SetShape(larger, {8 * kMiB / 4});
    return larger;
  }();
  const auto opened = RawClient(socket()).Open(spec);
  EXPECT_TRUE(opened.ok()) << opened.status();
  ExpectJobIntact();
  umount2("/dev/shm", MNT_DETACH);  // so that what lies under it is removed
}

}  // namespace
}  // namespace shardd::faults
