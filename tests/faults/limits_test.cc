// Quotas, and a machine that is full.

#include <unistd.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/own_mounts.h"

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
               absl::StrCat("want at most ", quota_bytes, "); raise --max_bytes_per_uid"));
  EXPECT_EQ(DaemonFootprint().state_files, before.state_files);
  ExpectJobIntact();
}

// The job fits, and a writeback of its parameters would not: that is said when it opens, not when it writes back.
TEST_F(BadInput, AJobThatCouldNotWriteBackIsRefusedWhenItOpens) {
  StartDaemonWithJob();
  const auto limits = GetMemoryLimits(state_dir());
  ASSERT_TRUE(limits.ok()) << limits.status();
  v1::JobSpec spec = SpecOf({{"name", "large"}, {"world", "1"}});
  // Two bytes of plan for one of shards, which it may have to keep once more: 0.8 of what is free, and 1.2.
  spec.mutable_config()->set_trainers_never_write(false);
  spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  for (v1::Module& module : *spec.mutable_tree()->mutable_modules()) {
    for (v1::Parameter& parameter : *module.mutable_parameters()) parameter.set_requires_grad(false);
  }
  const int64_t shards_bytes = static_cast<int64_t>(0.4 * static_cast<double>(limits->memory_free_bytes)) / 64 * 64;
  SetShape(spec, {shards_bytes / 4});
  const auto plan = PlanShards(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_LT(plan->memory.TotalBytes(1), limits->memory_free_bytes);
  const e2e::Footprint before = DaemonFootprint();
  const absl::Status status = RawClient(socket()).Open(spec).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"large\": reserve memory: too little is left");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted,
               absl::StrCat(plan->memory.shards_bytes, " bytes for the undo of a writeback"));
  EXPECT_EQ(DaemonFootprint().state_files, before.state_files);
  ExpectJobIntact();
}

// A full state directory ---------------------------------------------------------------------------------------------

class FullStateDir : public BadInput {
 protected:
  // As large as containers give it.
  static constexpr int64_t kShmBytes = 64 * kMiB;

  void StartDaemonWithJobOnSmallTmpfs() {
    tmpfs_.emplace(File("small"), kShmBytes);
    ASSERT_TRUE(tmpfs_->mounted());
    StartDaemonWithJob({"--state_dir=" + File("small")});
  }
  // What is missing and what to do about it, in the words of those who run containers.
  static void ExpectRemedy(const absl::Status& status) {
    for (const char* text : {"mount a larger tmpfs there or choose another state directory", "64 MiB",
                             "docker --shm-size", "emptyDir with medium: Memory"}) {
      ExpectStatus(status, absl::StatusCode::kResourceExhausted, text);
    }
  }
  // The job goes on, and when there is room again others do too.
  void ExpectJobTrainsThenOthersToo(const std::function<void()>& make_room) {
    const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
    ExpectAllOk(reports);
    EXPECT_EQ(reports[0].Note("attached"), "attached 5");
    make_room();
    ExpectServesOthers();
    ExpectSame(reports, {Report(other_, 0)});
  }

 private:
  std::optional<SmallTmpfs> tmpfs_;
};

TEST_F(FullStateDir, RefusesTheJobThatDoesNotFitAndSaysWhatToDo) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_NO_FATAL_FAILURE(StartDaemonWithJobOnSmallTmpfs());
  const int64_t free_bytes = FreeBytes(File("small"));
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}, {"world", "1"}});
  SetShape(large, {kShmBytes / 4});  // fp32: as much as there is, and optimizer state beside it
  const absl::Status status = client.Open(large).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"large\"");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, absl::StrCat("got ", free_bytes, " bytes free, want "));
  ExpectRemedy(status);
  EXPECT_EQ(FreeBytes(File("small")), free_bytes);
  ExpectJobIntact();
}

TEST_F(FullStateDir, RefusesTheJobsForWhichNothingIsLeft) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_NO_FATAL_FAILURE(StartDaemonWithJobOnSmallTmpfs());
  RawClient client(socket());
  std::vector<uint64_t> fillers;
  absl::Status last;
  for (int i = 0; i < 60 && last.ok(); ++i) {  // below the quota of jobs
    const auto filler = client.Open(SpecOf({{"name", absl::StrCat("filler", i)}}));
    last = filler.status();
    if (filler.ok()) fillers.push_back(filler->job_id());
  }
  EXPECT_GT(fillers.size(), 3u);
  ExpectRemedy(last);
  ExpectJobTrainsThenOthersToo([&] {
    for (const uint64_t filler : fillers) EXPECT_TRUE(client.Close(filler).ok());
  });
}

// All that was planned fits, to the byte; the journal is the last and takes a page more, and what was made before it
// goes again.
TEST_F(FullStateDir, WithoutSpaceForTheJournalRefusesTheJob) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_NO_FATAL_FAILURE(StartDaemonWithJobOnSmallTmpfs());
  const v1::JobSpec spec = SpecOf({{"name", "nearly"}, {"world", "1"}});
  const auto plan = PlanShards(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const MemoryPlan& memory = plan->memory;
  const int64_t left_bytes =
      RoundUpToPage(memory.shards_bytes) + RoundUpToPage(memory.optimizer_bytes) + RoundUpToPage(memory.journal_bytes);
  ASSERT_TRUE(FillTo(File("small"), left_bytes));
  const e2e::Footprint before = DaemonFootprint();
  const absl::Status status = RawClient(socket()).Open(spec).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"nearly\": journal: allocate ");
  ExpectRemedy(status);
  EXPECT_EQ(FreeBytes(File("small")), left_bytes);
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  ExpectJobTrainsThenOthersToo([&] { unlink(File("small/filling").c_str()); });
}

}  // namespace
}  // namespace shardd::faults
