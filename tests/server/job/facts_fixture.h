#ifndef SHARDD_TESTS_SERVER_JOB_FACTS_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_FACTS_FIXTURE_H_

// The components of a job of two ranks that say what ranks are in the middle of, without the job: for components that
// read them. A rank has a session where the test attaches it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "server/job/full_params/full_params.h"
#include "server/job/gradients/pairing.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/snapshot.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_commit.h"
#include "server/loop/core_loop.h"
#include "server/session/rank_command.h"
#include "server/session/session.h"
#include "server/storage/journal.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/job/fake_job.h"

namespace shardd {

class FactsTest : public ::testing::Test {
 protected:
  static constexpr int kGroup = 1;  // the block; the root is 0

  FactsTest() { committed_.CommitVersion(); }
  ~FactsTest() override { loop_.Stop(); }

  static std::shared_ptr<const ShardPlan> Plan(bool pass_copies) {
    SpecBuilder builder(/*world_size=*/2);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.config().set_trainers_never_write(false);
    builder.config().set_pass_copies(pass_copies);
    builder.Param(0, "root", {8});
    builder.Param(builder.AddSharded(0, "a"), "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  static std::unique_ptr<Journal> NewJournal() {
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(/*place_bytes=*/4096);
    EXPECT_TRUE(journal.ok()) << journal.status();
    return *std::move(journal);
  }
  static void ExpectRefused(const absl::Status& status, const std::string& fact) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), ::testing::HasSubstr(fact));
  }

  void Attach(int rank) {
    auto session = Session::Create(plan_, /*id=*/static_cast<uint64_t>(rank) + 1, rank, /*epoch=*/1);
    ASSERT_TRUE(session.ok()) << session.status();
    loop_.RunAndWait([&] { sessions_.Add(*std::move(session)); });
  }
  // `done`: the signal behind which the slot may be read.
  void Submit(int rank, int group = kGroup, uint64_t done = 0) {
    RankCommand command;
    command.group = group;
    command.fresh = {true};
    command.done = done;
    absl::StatusOr<Contribution> contribution = pairing_.Check(rank, std::move(command), "SubmitGradients");
    ASSERT_TRUE(contribution.ok()) << contribution.status();
    (void)pairing_.Give(rank, group, *std::move(contribution));
  }
  // The rank's device has come to the signal.
  void Signal(int rank, uint64_t done) {
    auto* const page = reinterpret_cast<ClientPage*>(sessions_[rank]->memory()->memory->data());
    page->done.store(TimelineValue(/*epoch=*/1, done));
  }
  // Without gradients.
  void CloseBackward(int rank) { (void)pairing_.Close(rank, /*done=*/0); }
  absl::Status Enter(int rank, bool stepped = false) {
    std::string state;
    return writes_.EnterPass(rank, stepped, /*signal=*/0, &state);
  }
  // All ranks enter a pass, and are let in.
  void BeginPass() {
    ASSERT_TRUE(Enter(0).ok() && Enter(1).ok());
    writes_.LetInAll();
  }
  void AskForMore(int rank, const std::string& what) {
    auto extension = std::make_shared<Extension>();
    extension->what = what;
    extension->plan.digest = what;
    extensions_.Ask(
        rank, std::move(extension), [this, rank](absl::Status status) { answers_[rank] = std::move(status); },
        [](const std::shared_ptr<const Extension>&, const std::vector<Extensions::Done>&) {});
  }

  const std::shared_ptr<const ShardPlan> plan_ = Plan(/*pass_copies=*/false);
  Committed committed_{"job", 2, 2, NewJournal()};
  CoreLoop loop_;
  FakeJob job_;
  JobWork work_{&loop_, &job_};
  Sessions sessions_{2, &loop_};
  Pairing pairing_{plan_, &committed_};
  FullParams full_params_{2};
  StepDecision decision_;
  Snapshot snapshot_{plan_.get(), /*memory=*/nullptr, /*devices=*/nullptr};
  ValueCommit value_commit_{2};
  AskedSteps steps_{2, &committed_};
  v1::Counters counters_;
  std::map<int, absl::Status> answers_;  // of extensions, by rank
  TrainerWrites writes_{
      {plan_.get(), &committed_, &sessions_, &steps_, &pairing_, &full_params_, &extensions_, &snapshot_}, &counters_};
  Leavers leavers_{2,
                   {&committed_, &sessions_, &steps_, &pairing_, &writes_.passes(), &writes_.hand_ins(), &full_params_,
                    &value_commit_}};
  Extensions extensions_{
      2,
      {&committed_, &decision_, &leavers_, &steps_, &pairing_, &writes_.passes(), &writes_.hand_ins(), &full_params_}};
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_FACTS_FIXTURE_H_
