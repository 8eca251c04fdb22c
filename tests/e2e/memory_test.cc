// Memory is planned: what daemon and trainers really have, at the end and at their peak, is what the plan says, and a
// stated constant for each process that does not grow with the model.

#include <iostream>

#include "absl/strings/str_cat.h"
#include "common/plan/plan.h"
#include "google/protobuf/util/json_util.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/resident.h"
#include "tests/testing/sanitizers.h"

namespace shardd::e2e {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPageBytes = 4096;
// Slabs and files are whole pages; the plan counts what lies in them. One page for each purpose, the journal's header.
constexpr int64_t kRoundingBytes = 8 * kPageBytes;
// What a process has of its own, whatever the model. Measured at the peak: the daemon 15 MiB, 2 of them anonymous
// (gRPC's threads and buffers, malloc), the rest its binary; a trainer 23 MiB, 3 of them anonymous, the rest
// libshardd.so and this test's own binary.
constexpr int64_t kAnonymousBytes = 4 * kMiB;
constexpr int64_t kDaemonBytes = 19 * kMiB;
constexpr int64_t kTrainerBytes = 25 * kMiB;
// So that one parameter group too many, anywhere and at any moment, is more than there is room for in these.
constexpr int64_t kBlockNumel = int64_t{4} << 20;

struct Case {
  std::string name;
  Args args;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

int64_t RoundUpToPage(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

MemoryPlan PlanOf(const Args& args) {
  v1::JobSpec spec;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(SpecJson(args), &spec).ok());
  const absl::StatusOr<ShardPlan> plan = PlanShards(spec);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? plan->memory : MemoryPlan();
}

class Memory : public Cluster, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    if (testing::kSanitized) GTEST_SKIP() << "a sanitizer takes memory of its own for every byte that it watches";
  }
  v1::Memory GetMemory() {
    v1::JobRef job;
    job.set_job("job");
    grpc::ClientContext context;
    v1::Memory memory;
    EXPECT_TRUE(jobs().GetMemory(&context, job, &memory).ok());
    return memory;
  }
  // Its two ranks have trained and are still attached.
  void ExpectResidentAsPlanned(const MemoryPlan& plan) {
    const Resident daemon = ReadResident(daemon_pid());
    std::vector<Resident> trainers;
    for (const v1::Rank& rank : Ranks()) trainers.push_back(ReadResident(static_cast<pid_t>(rank.pid())));
    ASSERT_EQ(trainers.size(), 2u);
    const int64_t total = plan.TotalBytes(2);
    std::cout << "plan " << total << " bytes\n  daemon: " << daemon << "\n";
    for (const Resident& trainer : trainers) std::cout << "  trainer: " << trainer << "\n";

    int64_t pss = daemon.pss_bytes();
    int64_t shared = daemon.shared_pss_bytes;
    for (const Resident& trainer : trainers) {
      pss += trainer.pss_bytes();
      shared += trainer.shared_pss_bytes;
    }
    EXPECT_NEAR(static_cast<double>(shared), static_cast<double>(total), kRoundingBytes);
    EXPECT_LE(pss - total, kDaemonBytes + 2 * kTrainerBytes);

    EXPECT_NEAR(static_cast<double>(daemon.shared_bytes), static_cast<double>(total), kRoundingBytes)
        << "the daemon maps everything";
    EXPECT_LE(daemon.anonymous_bytes, kAnonymousBytes);
    EXPECT_LE(daemon.peak_of_its_own_bytes(), kDaemonBytes);
    for (const Resident& trainer : trainers) {
      EXPECT_LE(trainer.shared_bytes, total - plan.journal_bytes - plan.session_bytes + kRoundingBytes)
          << "nothing that is the other rank's";
      EXPECT_LE(trainer.anonymous_bytes, kAnonymousBytes);
      EXPECT_LE(trainer.peak_of_its_own_bytes(), kTrainerBytes);
    }
  }
};

TEST_P(Memory, OfDaemonAndTrainersIsWhatThePlanSays) {
  const Args args = GetParam().args.With(
      {{"model", "blocks"}, {"blocks", "2"}, {"numel", absl::StrCat(kBlockNumel - 3)}, {"steps", "8"}});
  const MemoryPlan plan = PlanOf(args);
  ASSERT_GT(plan.TotalBytes(2), 60 * kMiB);
  StartDaemon();
  v1::Memory memory;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] {
    memory = GetMemory();
    ExpectResidentAsPlanned(plan);
  });
  ExpectAllOk(reports);
  for (const TrainerReport& report : reports) {
    ASSERT_EQ(report.losses.size(), 8u);
    EXPECT_LT(report.losses.back(), report.losses.front() / 2);  // it has trained
  }
  int64_t planned = 0;
  for (const v1::Purpose& purpose : memory.purposes()) {
    EXPECT_EQ(purpose.allocated_bytes(), RoundUpToPage(purpose.planned_bytes())) << purpose.purpose();
    planned += purpose.planned_bytes();
  }
  EXPECT_EQ(planned, plan.TotalBytes(2));
  EXPECT_EQ(memory.planned_bytes(), plan.TotalBytes(2));
}

INSTANTIATE_TEST_SUITE_P(Modes, Memory,
                         ::testing::Values(Case{"ZeroCopy", {}}, Case{"Pooled", {{"unshard_mode", "POOLED"}}},
                                           Case{"CastCopyInBf16", {{"param_dtype", "bf16"}}},
                                           Case{"PooledInBf16", {{"unshard_mode", "POOLED"}, {"param_dtype", "bf16"}}},
                                           Case{"NoShard", {{"strategy", "NO_SHARD"}}},
                                           Case{"CopyToGoBackToOfTrainersThatWrite", {{"trainers_write", "1"}}},
                                           Case{"CopiesThatPassesRead",
                                                {{"trainers_write", "1"}, {"pass_copies", "1"}}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd::e2e
