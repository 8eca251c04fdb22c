#ifndef SHARDD_TESTS_SERVER_JOB_COMMITS_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_COMMITS_FIXTURE_H_

// The components of a job of two ranks that make versions, without the job. Devices keep what they are told to do until
// the test ends it; nobody else does what may happen next.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "server/job/full_params/summons.h"
#include "server/job/job_events.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/trace/job_trace.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/pass_commits.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/value_writes.h"
#include "server/loop/core_loop.h"
#include "server/observe/events.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/journal.h"
#include "server/tenant/tenant.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/job/fake_job.h"
#include "tests/server/job/writes/kept_work.h"

namespace shardd {

class CommitsFixture : public ::testing::Test {
 protected:
  explicit CommitsFixture(bool pass_copies = false, bool several = false)
      : plan_(Plan(pass_copies, several)), memory_(NewMemory(*plan_)) {
    committed_.Tell(&parts_);
    committed_.CommitVersion();
    for (int rank = 0; rank < 2; ++rank) {
      auto session = Session::Create(plan_, /*id=*/static_cast<uint64_t>(rank) + 1, rank, /*epoch=*/1);
      EXPECT_TRUE(session.ok()) << session.status();
      loop_.RunAndWait([&] { sessions_.Add(*std::move(session)); });
    }
  }
  ~CommitsFixture() override {
    End();
    memory_worker_.Stop();
    loop_.Stop();
  }

  // `several`: optimizers, of which the second has nothing.
  static std::shared_ptr<const ShardPlan> Plan(bool pass_copies, bool several) {
    SpecBuilder builder(/*world_size=*/2);
    for (int group = 0; several && group < 2; ++group) {
      v1::OptimizerConfig::Group& added = *builder.config().mutable_optimizer()->add_groups();
      added.set_kind(v1::OPTIMIZER_KIND_SGD);
      if (group == 0) added.add_fqns("w");
    }
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.config().set_trainers_never_write(false);
    builder.config().set_pass_copies(pass_copies);
    builder.Param(0, "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  static std::unique_ptr<JobMemory> NewMemory(const ShardPlan& plan) {
    absl::StatusOr<std::unique_ptr<JobMemory>> memory = JobMemory::Create(plan, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }
  static std::unique_ptr<Journal> NewJournal() {
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(/*place_bytes=*/4096);
    EXPECT_TRUE(journal.ok()) << journal.status();
    return *std::move(journal);
  }

  static v1::Step OneGroup() {
    v1::Step step;
    step.add_groups()->set_lr(0.5);
    return step;
  }
  absl::Status Step(int rank, v1::Step step = OneGroup()) {
    RankCommand command;
    command.opcode = Opcode::kStep;
    command.step = std::make_unique<v1::Step>(std::move(step));
    return commits_.Step(sessions_[rank].get(), std::move(command));
  }
  absl::Status Enter(int rank, bool stepped = false, std::string state = "") {
    RankCommand command;
    command.opcode = Opcode::kEnterPass;
    command.flags = stepped ? kStepped : 0;
    command.trainer_state = std::move(state);
    return pass_commits_.Enter(rank, std::move(command));
  }
  // Ends what devices have been told to do so far, and lets the loop and the memory worker hear of it.
  void End(const absl::Status& status = absl::OkStatus()) {
    memory_worker_.RunAndWait([] {});
    loop_.RunAndWait([] {});
    device_.EndAll(status);
    loop_.RunAndWait([] {});
  }

  const std::shared_ptr<const ShardPlan> plan_;
  const std::unique_ptr<JobMemory> memory_;
  KeptWork device_;
  const std::vector<Device*> by_rank_{&device_, &device_};
  const OptimizerDevices devices_{by_rank_, 2};
  FakeJob job_;
  v1::JobSpec spec_;
  v1::Counters counters_;
  EventLog log_;
  CoreLoop loop_;
  CoreLoop memory_worker_;
  Committed committed_{"job", 1, 2, NewJournal()};
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  JobWork work_{&loop_, &job_};
  JobTrace trace_{{"job", plan_, &by_rank_, &sessions_, &committed_, /*memory=*/nullptr, nullptr},
                  /*measured=*/nullptr,
                  &work_};
  Sessions sessions_{2, &loop_};
  PollTimer timer_{&loop_};
  GivenBack given_back_{&sessions_, &timer_, &memory_worker_};
  Commits commits_{{plan_.get(), memory_.get(), &sessions_, &summons_, &extensions_, &devices_},
                   {&committed_, &gradients_, &writes_, &unsharding_, &given_back_, &snapshots_, &values_, &work_,
                    &trace_, &counters_, &job_}};
  Gradients gradients_{
      plan_,
      {{&committed_, &sessions_, &commits_.steps(), &writes_, memory_.get(), &by_rank_},
       &commits_.decision(),
       &extensions_},
      {{/*collective=*/nullptr, &given_back_, &timer_, &work_, &trace_, &counters_, &memory_worker_, &job_}, &events_}};
  ValueWrites values_{{plan_.get(), &commits_.decision(), &summons_, &extensions_, &sessions_},
                      {memory_.get(), &committed_, &gradients_.presence(), &commits_, &events_, &work_, &job_},
                      /*copier=*/nullptr,
                      WorkOwner{}};
  Summons summons_{
      {&spec_, plan_.get(), /*over_nodes=*/false, &committed_, &commits_.decision(), &sessions_, &gradients_.pairing(),
       &writes_, &extensions_, &leavers_, &values_.undo()},
      {&by_rank_, &given_back_, &work_, &events_, [] { return DeviceOps(2); }, [] { return absl::OkStatus(); }, &job_}};
  SnapshotKeeper snapshots_{{plan_.get(), &commits_.steps(), &commits_.decision(), &sessions_, &writes_, &devices_},
                            {memory_.get(), &committed_, &work_, &events_, &memory_worker_, &job_},
                            getuid()};
  TrainerWrites writes_{{plan_.get(), &committed_, &sessions_, &commits_.steps(), &gradients_.pairing(),
                         &summons_.full_params(), &extensions_, &snapshots_.snapshot()},
                        &counters_};
  Leavers leavers_{2,
                   {&committed_, &sessions_, &commits_.steps(), &gradients_.pairing(), &writes_.passes(),
                    &writes_.hand_ins(), &summons_.full_params(), &values_.commit()}};
  Extensions extensions_{2,
                         {&committed_, &commits_.decision(), &leavers_, &commits_.steps(), &gradients_.pairing(),
                          &writes_.passes(), &writes_.hand_ins(), &summons_.full_params()}};
  Unsharding unsharding_{plan_,
                         {&committed_, &commits_.decision(), &commits_.steps(), &writes_, &sessions_, memory_.get()},
                         {/*collective=*/nullptr, &given_back_, &work_, &events_, &counters_, &job_}};
  PassCommits pass_commits_{{plan_.get(), memory_.get(), &writes_, &committed_, &commits_, &snapshots_, &unsharding_,
                             &summons_, &given_back_, &work_}};
  JobParts parts_{{&commits_, &gradients_, &snapshots_, &values_, &writes_, &leavers_, &summons_, &unsharding_}};
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_COMMITS_FIXTURE_H_
