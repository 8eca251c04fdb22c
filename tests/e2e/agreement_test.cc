// What ranks must agree on, and what happens where one does not: all are told who differs in what, nothing is
// committed, and the job goes on from where it was.

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"

namespace shardd::e2e {
namespace {

using testing::Child;

class Agreement : public Cluster {
 protected:
  // Rank 1 does something otherwise once, when `committed` steps are committed. Both ranks attach again afterwards, and
  // all ends as if nothing had been.
  void ExpectRefusedAndIntact(const Args& shared, const Args& odd, int64_t committed,
                              const std::vector<std::string>& parts) {
    StartDaemon();
    const Args args = shared.With({{"steps", "8"}, {"recover", "1"}});
    v1::Job job;
    const std::vector<TrainerReport> reports = RunRanks(args, {{1, odd}}, [&] { job = Job(); });
    for (const TrainerReport& report : reports) {
      const std::string note = report.Note("aborted");
      EXPECT_TRUE(absl::StartsWith(note, absl::StrCat("aborted ", committed, " "))) << note;
      for (const std::string& part : parts) {
        EXPECT_TRUE(absl::StrContains(note, part)) << part << " in: " << note;
      }
    }
    EXPECT_EQ(job.counters().aborts(), 1u);
    EXPECT_EQ(job.committed_step(), 8);
    ExpectParity(args, reports);
  }
};

TEST_F(Agreement, AnotherLearningRateIsRefusedWithBothValuesAndRank) {
  ExpectRefusedAndIntact({}, {{"odd_lr", "0.02@3"}}, 3,
                         {"hyperparameters of rank 1 differ from rank 0's", "optimizer group 0", "got {lr: 0.02 ",
                          "want {lr: 0.01 ", "rank=1", "step=4"});
}

TEST_F(Agreement, AnotherLearningRateOfOneOptimizerGroupNamesTheGroup) {
  ExpectRefusedAndIntact({{"two_groups", "1"}}, {{"odd_lr", "0.02@5"}}, 5,
                         {"hyperparameters of rank 1", "optimizer group 1", "got {lr: 0.02 ", "want {lr: 0.005 "});
}

TEST_F(Agreement, AnotherMaximumNormIsRefusedWithBothValuesAndRank) {
  ExpectRefusedAndIntact({{"max_norm", "0.1"}}, {{"odd_max_norm", "0.5@0"}}, 0,
                         {"hyperparameters of rank 1 differ from rank 0's", "max_grad_norm (got 0.5, want 0.1)"});
}

TEST_F(Agreement, AnotherNormTypeIsRefusedWithBothValuesAndRank) {
  ExpectRefusedAndIntact({{"max_norm", "0.1"}}, {{"odd_norm_type", "3@2"}}, 2,
                         {"hyperparameters of rank 1 differ from rank 0's", "norm_type (got 3, want 2)"});
}

TEST_F(Agreement, AnotherWritebackIsRefusedWithBothValuesAndRanks) {
  ExpectRefusedAndIntact({}, {{"odd_writeback", "1@8"}}, 8,
                         {"EnterFullParams", "writeback differs between ranks", "1 on rank 1", "0 on rank 0"});
}

// Which modules are fully sharded may be said by marks on the modules or by a policy: groups and order are the same.
class Forms : public Cluster, public ::testing::WithParamInterface<const char*> {
 protected:
  Args ArgsOf(const std::string& model) const {
    const Args args = {{"steps", "6"}, {"strict_order", "1"}};
    return model == "small"
               ? args
               : args.With(
                     {{"model", "blocks"}, {"nested", "1"}, {"blocks", "3"}, {"numel", "501"}, {"name", "blocks"}});
  }
};

// One rank describes the job in one form and one in the other, and the daemon holds their requests against each other.
TEST_P(Forms, ManualMarksAndPoliciesGiveTheSameUnshardOrder) {
  StartDaemon();
  const Args args = ArgsOf(GetParam());
  const std::string name = args.Text("name", "job");
  v1::Job job;
  std::vector<v1::Group> mixed;
  ExpectAllOk(RunRanks(args, {{1, {{"manual_marks", "1"}}}}, [&] {
    job = Job(name);
    mixed = Groups(name);
  }));
  EXPECT_EQ(job.committed_step(), 6);
  EXPECT_EQ(job.counters().departures(), 0u);
  EXPECT_EQ(job.counters().aborts(), 0u);
  EXPECT_EQ(job.counters().unshards(), job.counters().reshards());

  std::vector<v1::Group> marked;
  ExpectAllOk(RunRanks(args.With({{"manual_marks", "1"}}), {}, [&] { marked = Groups(name); }));
  ASSERT_EQ(marked.size(), mixed.size());
  for (size_t g = 0; g < mixed.size(); ++g) {
    EXPECT_EQ(marked[g].SerializeAsString(), mixed[g].SerializeAsString()) << mixed[g].name();
  }
}

class Refused : public Cluster {
 protected:
  // Rank 0 has attached and waits when rank 1 describes another model.
  void RefuseRankOne(const Args& args) {
    StartDaemon();
    Child waits = StartRank(0, args);
    ASSERT_TRUE(testing::PollUntil([&] { return Job().attached_ranks() == 1; }));
    Child other = StartRank(1, args.With({{"layout", "DIM0"}}));
    EXPECT_EQ(other.Wait(), 0);
    EXPECT_EQ(waits.Wait(), 0);
  }
};

TEST_F(Refused, WaitingRanksAreToldAtOnceWhichRankAndWhy) {
  const Args args = {{"steps", "4"}, {"recover", "1"}};
  RefuseRankOne(args);
  EXPECT_EQ(Report(args, 1).code, static_cast<int>(Code::kFailedPrecondition));
  const TrainerReport told = Report(args, 0);
  EXPECT_EQ(told.code, static_cast<int>(Code::kFailedPrecondition)) << told.message;
  for (const char* part : {"rank 1 was refused", "layout"}) {
    EXPECT_TRUE(absl::StrContains(told.message, part)) << part << " in: " << told.message;
  }
  EXPECT_LT(told.ended_ms - Report(args, 1).ended_ms, 5000);
  EXPECT_TRUE(HasEvent("job", "refused", "layout"));
}

TEST_F(Refused, ProcessesThatAreStartedLaterAreNotToldOfIt) {
  RefuseRankOne({{"steps", "4"}});
  ExpectAllOk(RunRanks({{"steps", "4"}}));
}

INSTANTIATE_TEST_SUITE_P(Models, Forms, ::testing::Values("small", "nested"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shardd::e2e
