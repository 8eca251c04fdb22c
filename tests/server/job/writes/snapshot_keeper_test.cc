#include "server/job/writes/snapshot_keeper.h"

#include <unistd.h>

#include "absl/synchronization/notification.h"
#include "server/job/job_events.h"
#include "server/job/work/optimizer_devices.h"
#include "server/observe/events.h"
#include "server/session/session_stream.h"
#include "server/storage/job_memory.h"
#include "server/storage/take_up_log.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/facts_fixture.h"
#include "tests/server/job/writes/kept_work.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kWhat[] = "attach: ";

class SnapshotKeeperTest : public FactsTest {
 protected:
  explicit SnapshotKeeperTest(bool pass_copies = false) : SnapshotKeeperTest(Plan(pass_copies)) {}
  explicit SnapshotKeeperTest(std::shared_ptr<const ShardPlan> plan) : job_plan_(std::move(plan)) {
    absl::StatusOr<std::unique_ptr<JobMemory>> memory = JobMemory::Create(*job_plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    keeper_ = std::make_unique<SnapshotKeeper>(
        SnapshotKeeper::Facts{job_plan_.get(), &steps_, &decision_, &sessions_, &job_writes_, &devices_},
        SnapshotKeeper::Services{memory_.get(), &committed_, &work_, &events_, &memory_worker_, &job_}, getuid());
  }
  ~SnapshotKeeperTest() override {
    End();
    memory_worker_.Stop();
    loop_.Stop();
  }

  // Runs what was posted so far, to the memory worker and back.
  void Drain() {
    memory_worker_.RunAndWait([] {});
    loop_.RunAndWait([] {});
  }
  void End(const absl::Status& status = absl::OkStatus()) {
    device_.EndAll(status);
    Drain();
  }
  void Take() {
    keeper_->Take();
    Drain();
    End();
  }
  void HandIn(int rank) {
    ASSERT_TRUE(job_writes_.AskToHandIn(rank).ok());
    job_writes_.LetHandIn();
  }
  // Until go_.
  void HoldMemoryWorker() {
    memory_worker_.Post([this] { go_.WaitForNotification(); });
  }
  const Snapshot& snapshot() const { return keeper_->snapshot(); }

  const std::shared_ptr<const ShardPlan> job_plan_;
  std::unique_ptr<JobMemory> memory_;
  KeptWork device_;
  const OptimizerDevices devices_{{&device_, &device_}, 2};
  absl::Notification go_;
  CoreLoop memory_worker_;
  EventLog log_;
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  TrainerWrites job_writes_{
      {job_plan_.get(), &committed_, &sessions_, &steps_, &pairing_, &full_params_, &extensions_, &snapshot_},
      &counters_};
  std::unique_ptr<SnapshotKeeper> keeper_;
};

TEST_F(SnapshotKeeperTest, MakesASlabWithTheFirstSnapshot) {
  EXPECT_EQ(memory_->kept(), nullptr);
  keeper_->Take();
  Drain();
  EXPECT_NE(memory_->kept(), nullptr);
  EXPECT_THAT(device_.labels(), ElementsAre("keep step 0", "keep step 0"));
  EXPECT_TRUE(snapshot().taking());
  End();
  EXPECT_TRUE(snapshot().whole());
}

TEST_F(SnapshotKeeperTest, AnEpochsEndDropsTheSnapshotBeingTaken) {
  HoldMemoryWorker();
  keeper_->Take();
  committed_.EndEpoch();
  keeper_->EndEpoch();
  go_.Notify();
  Drain();
  EXPECT_THAT(device_.labels(), IsEmpty()) << "the slab came too late";
  EXPECT_FALSE(snapshot().taking());
  Take();
  EXPECT_TRUE(snapshot().whole()) << "the next epoch takes its own";
}

// The slab that the next epoch makes would take its place, under the devices that copy into it.
TEST_F(SnapshotKeeperTest, ASlabOfAnEndedEpochIsNotUsed) {
  HoldMemoryWorker();
  keeper_->Take();
  committed_.EndEpoch();
  keeper_->EndEpoch();
  bool used = true;
  memory_worker_.Post([&] { loop_.RunAndWait([&] { used = memory_->kept() != nullptr; }); });
  keeper_->Take();
  go_.Notify();
  Drain();
  EXPECT_FALSE(used);
  EXPECT_THAT(device_.labels(), ElementsAre("keep step 0", "keep step 0"));
  End();
  EXPECT_TRUE(snapshot().whole());
}

TEST_F(SnapshotKeeperTest, ASnapshotThatCannotBeTakenEndsTheEpoch) {
  keeper_->Take();
  Drain();
  End(absl::InternalError("broken"));
  EXPECT_EQ(job_.failure().message(), "HandIn: take the snapshot: broken");
  EXPECT_FALSE(snapshot().taking());
}

TEST_F(SnapshotKeeperTest, StaysWhereItIsUnlessARankCouldHandIn) {
  keeper_->GoBackIfStored();
  EXPECT_FALSE(snapshot().going_back());
  EXPECT_FALSE(keeper_->awaits_writers());
}

TEST_F(SnapshotKeeperTest, GoesBackWhenFormerWritersHaveAttachedAgain) {
  Attach(0);
  Attach(1);
  sessions_[0]->peer.pid = getpid();
  Take();
  HandIn(0);
  keeper_->GoBackIfStored();
  EXPECT_FALSE(keeper_->MayCopyBack());
  EXPECT_THAT(keeper_->AwaitedWriters(), HasSubstr("rank 0")) << "rank 1 has stored nothing";
  EXPECT_THAT(keeper_->CheckWriters(kWhat, "").message(), HasSubstr("the process of rank 0"));

  EXPECT_EQ(keeper_->Attaching(0, getpid(), UniqueFd(), /*replace=*/false), "");
  EXPECT_TRUE(keeper_->MayCopyBack());
  const uint64_t version = committed_.version();
  keeper_->CopyBack();
  EXPECT_TRUE(keeper_->CheckWriters(kWhat, "").ok());
  EXPECT_THAT(keeper_->CheckMayBegin(kWhat).message(), HasSubstr("go back to the snapshot of step 0; attach again"));
  EXPECT_THAT(device_.labels(), ElementsAre("go back to step 0", "go back to step 0"));
  End();
  EXPECT_THAT(device_.labels(), ElementsAre("cast step 0", "cast step 0"));
  End();
  EXPECT_EQ(committed_.version(), version + 1);
  EXPECT_TRUE(keeper_->CheckMayBegin(kWhat).ok());
}

TEST_F(SnapshotKeeperTest, CommitsAtOnceWhereStoresAreHandedIn) {
  bool committed = false;
  keeper_->TakeThen(/*due=*/true, /*stepped=*/false, [&] { committed = true; });
  EXPECT_TRUE(committed);
  keeper_->VersionCommitted();
  EXPECT_FALSE(snapshot().whole());
}

class SnapshotKeeperWithCopiesTest : public SnapshotKeeperTest {
 protected:
  SnapshotKeeperWithCopiesTest() : SnapshotKeeperTest(/*pass_copies=*/true) {}
};

TEST_F(SnapshotKeeperWithCopiesTest, NobodyAttachesBeforeThereIsASnapshot) {
  EXPECT_THAT(keeper_->CheckMayBegin(kWhat).message(), HasSubstr("is being taken; attach again"));
  EXPECT_THAT(keeper_->CheckMayBegin(kWhat).message(), HasSubstr("is being taken; attach again"));
  EXPECT_EQ(device_.labels().size(), 2u) << "it is taken once, by two devices";
  End();
  EXPECT_TRUE(keeper_->CheckMayBegin(kWhat).ok());
}

TEST_F(SnapshotKeeperWithCopiesTest, TakesASnapshotThatIsDueBeforeTheCommit) {
  bool committed = false;
  keeper_->TakeThen(/*due=*/true, /*stepped=*/false, [&] { committed = true; });
  EXPECT_FALSE(committed);
  End();
  EXPECT_TRUE(committed);
  EXPECT_FALSE(snapshot().whole()) << "what it is of is not committed yet";
  keeper_->VersionCommitted();
  EXPECT_TRUE(snapshot().whole());
}

TEST_F(SnapshotKeeperWithCopiesTest, AnotherDaemonGoesOnWithTheSnapshot) {
  using Counts = TakeUpLog::Counts;
  auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 2});
  const TakeUpLog& left = *log;
  committed_.KeepIn(std::move(log));
  steps_.AskInTrainer(0, "zero");
  steps_.AskInTrainer(1, "one");
  const int64_t step = committed_.step();
  keeper_->TakeThen(/*due=*/true, /*stepped=*/true, [&] { committed_.CommitStep({}, steps_.TakeTrainerStates()); });
  EXPECT_EQ(left.Read()->counts, Counts::kSnapshotBeingTaken);
  EXPECT_EQ(left.Read()->header.step, step + 1) << "the shards are this step's already";
  EXPECT_THAT(left.Read()->facts.trainer_states(), ElementsAre("zero", "one"));
  End();
  keeper_->VersionCommitted();
  EXPECT_EQ(left.Read()->counts, Counts::kSnapshot);
  EXPECT_EQ(left.Read()->header.version, committed_.version());
  committed_.CommitStep({}, {"later", "later"});
  EXPECT_EQ(left.Read()->header.version, committed_.version());
  EXPECT_EQ(left.Read()->header.step, step + 1) << "the snapshot's";
  EXPECT_THAT(left.Read()->facts.trainer_states(), ElementsAre("zero", "one"));
}

TEST_F(SnapshotKeeperWithCopiesTest, ASnapshotThatFailsWithACommitClosesTheJob) {
  keeper_->TakeThen(/*due=*/true, /*stepped=*/false, [] { FAIL() << "nothing to go back to"; });
  End(absl::InternalError("broken"));
  EXPECT_EQ(job_.why_closed(), "take the snapshot: broken");
}

// An optimizer in the trainers, with one state, who wait for snapshots before they store into it.
class SnapshotBehindPassTest : public SnapshotKeeperTest {
 protected:
  explicit SnapshotBehindPassTest(int format = TakeUpLog::kInCopies) : SnapshotKeeperTest(PlanOfTrainers()) {
    auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 2}, format);
    left_ = log.get();
    committed_.KeepIn(std::move(log));
  }
  static std::shared_ptr<const ShardPlan> PlanOfTrainers() {
    SpecBuilder builder(2);
    builder.config().set_trainers_never_write(false);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
    builder.config().mutable_optimizer()->set_trainer_states(1);
    builder.Param(0, "w", {8});
    return std::make_shared<const ShardPlan>(builder.Plan());
  }
  // All enter with a step, and `asking` of them ask. The commit is made when what comes before it is copied.
  void EnterWithStep(int asking = 2, bool due = true) {
    for (int rank = 0; rank < 2; ++rank) {
      std::string state;
      ASSERT_TRUE(job_writes_.EnterPass(rank, /*stepped=*/true, /*signal=*/0, &state).ok());
      if (rank < asking) job_writes_.AsksToStore(rank);
      steps_.AskInTrainer(rank, absl::StrCat("of ", rank));
    }
    keeper_->BeginVersion(/*stepped=*/true);
    keeper_->TakeThen(due, /*stepped=*/true, [this] {
      committed_.CommitStep({}, steps_.TakeTrainerStates());
      keeper_->VersionCommitted();
    });
    step_ = committed_.step();
    End();
  }
  TakeUpLog* left_ = nullptr;
  int64_t step_ = 0;  // before the one with which all enter
};

TEST_F(SnapshotBehindPassTest, RanksGoOnWhileTheirStateIsCopied) {
  EnterWithStep();
  EXPECT_EQ(committed_.step(), step_ + 1);
  EXPECT_THAT(device_.labels(), ElementsAre("keep step 0", "keep step 0"));
  EXPECT_EQ(device_.ops(), 2u) << "each device the state: the rest is what passes read";
  EXPECT_TRUE(snapshot().behind());
  EXPECT_FALSE(snapshot().whole());
  End();
  EXPECT_TRUE(snapshot().whole());
  EXPECT_EQ(snapshot().step(), step_ + 1);
  EXPECT_THAT(snapshot().trainer_states(), ElementsAre("of 0", "of 1"));
}

TEST_F(SnapshotBehindPassTest, RanksWaitWhereOneOfThemDoesNotAsk) {
  EnterWithStep(/*asking=*/1);
  EXPECT_EQ(committed_.step(), step_ + 1);
  EXPECT_THAT(device_.labels(), IsEmpty());
  EXPECT_TRUE(snapshot().whole());
}

class NoStream final : public SessionStream {
 public:
  void Send(v1::SessionEvent /*event*/) override {}
  void Finish(absl::Status /*status*/) override {}
};

TEST_F(SnapshotBehindPassTest, RanksWaitWhereTheWordsOfOneAreTold) {
  Attach(0);
  loop_.RunAndWait([&] {
    sessions_[0]->stream = std::make_shared<NoStream>();
    EXPECT_TRUE(sessions_[0]->TellWords(&loop_, /*version=*/1).ok());
  });
  EnterWithStep();
  EXPECT_FALSE(snapshot().behind()) << "events do not say when it is whole";
  EXPECT_TRUE(snapshot().whole());
}

TEST_F(SnapshotBehindPassTest, RanksWaitWhereTheEpochIsToEnd) {
  keeper_->TakeWithEach();
  EnterWithStep();
  EXPECT_FALSE(snapshot().behind());
  EXPECT_TRUE(snapshot().whole());
}

TEST_F(SnapshotBehindPassTest, ADeathGoesBackToTheStepWhenItsSnapshotIsWhole) {
  EnterWithStep();
  keeper_->GoBackIfStored();
  EXPECT_EQ(committed_.step(), step_ + 1) << "nothing that was committed is lost";
  EXPECT_FALSE(keeper_->MayCopyBack()) << "half a snapshot is none";
  EXPECT_FALSE(keeper_->CheckMayBegin(kWhat).ok());
  End();
  EXPECT_TRUE(keeper_->MayCopyBack());
  keeper_->CopyBack();
  EXPECT_THAT(device_.labels(), ElementsAre("go back to step 1", "go back to step 1"));
  EXPECT_EQ(device_.ops(), 4u) << "shards of what passes read, and the state";
}

TEST_F(SnapshotBehindPassTest, ANewSessionWaitsUntilItIsWhole) {
  EnterWithStep();
  EXPECT_THAT(keeper_->CheckMayBegin(kWhat).message(), HasSubstr("is being taken; attach again"));
  EXPECT_EQ(device_.labels().size(), 2u) << "no other is begun";
  End();
  EXPECT_TRUE(keeper_->CheckMayBegin(kWhat).ok());
}

TEST_F(SnapshotBehindPassTest, AnotherDaemonCompletesWhatIsBehindThePass) {
  using Counts = TakeUpLog::Counts;
  EnterWithStep();
  EXPECT_EQ(left_->Read()->counts, Counts::kSnapshotBeingTaken);
  EXPECT_TRUE(left_->Read()->behind_pass);
  EXPECT_EQ(left_->Read()->header.step, step_ + 1);
  EXPECT_THAT(left_->Read()->facts.trainer_states(), ElementsAre("of 0", "of 1"));
  End();
  EXPECT_EQ(left_->Read()->counts, Counts::kSnapshot);
  EXPECT_FALSE(left_->Read()->behind_pass);
}

TEST_F(SnapshotBehindPassTest, ItsShardsAreWhatPassesRead) {
  EnterWithStep();
  EXPECT_FALSE(left_->Read()->shards_in_copies) << "none is whole";
  End();
  EXPECT_TRUE(snapshot().in_copies());
  EXPECT_TRUE(left_->Read()->shards_in_copies);
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshot);
}

TEST_F(SnapshotBehindPassTest, WhatPassesReadIsMadeAnewBehindTheNextOnesBegin) {
  EnterWithStep();
  End();
  ASSERT_TRUE(snapshot().in_copies());
  keeper_->BeginVersion(/*stepped=*/false);  // its devices write over what passes read
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshotBeingTaken);
  EXPECT_FALSE(left_->Read()->shards_in_copies);
  EXPECT_FALSE(left_->Read()->behind_pass) << "shards are what counts";
  keeper_->TakeThen(/*due=*/false, /*stepped=*/false, [this] { keeper_->VersionCommitted(); });
  EXPECT_FALSE(snapshot().exists());
  End();
  End();
  EXPECT_TRUE(snapshot().whole()) << "it is taken, due or not";
  EXPECT_TRUE(left_->Read()->shards_in_copies);
}

TEST_F(SnapshotBehindPassTest, OneOfFastPassesHasShardsOfItsOwn) {
  for (int pass = 0; pass < 4; ++pass) {
    ASSERT_EQ(snapshot().in_copies(), pass > 0);
    EnterWithStep(/*asking=*/2, /*due=*/pass == 0);
    EXPECT_EQ(device_.ops(), pass < 3 ? 2u : 4u) << "of what passes read too, at last";
    End();
    for (int rank = 0; rank < 2; ++rank) (void)job_writes_.Forget(rank);
  }
  EXPECT_FALSE(left_->Read()->shards_in_copies);
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshot);
  keeper_->BeginVersion(/*stepped=*/false);
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshot) << "the next pass leaves it";
}

class SnapshotOfOlderDaemonTest : public SnapshotBehindPassTest {
 protected:
  SnapshotOfOlderDaemonTest() : SnapshotBehindPassTest(TakeUpLog::kOwnShards) {}
};

// It may have to go on with the job again, and looks for shards beside the states.
TEST_F(SnapshotOfOlderDaemonTest, ItHasShardsOfItsOwn) {
  EnterWithStep();
  End();
  EXPECT_FALSE(snapshot().in_copies());
  EXPECT_FALSE(left_->Read()->shards_in_copies);
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshot);
}

TEST_F(SnapshotOfOlderDaemonTest, TheFirstHasShardsOfItsOwn) {
  EXPECT_FALSE(keeper_->CheckMayBegin(kWhat).ok());
  End();
  EXPECT_TRUE(snapshot().whole());
  EXPECT_FALSE(left_->Read()->shards_in_copies);
}

TEST_F(SnapshotBehindPassTest, OneThatADaemonLeftInCopiesStaysThere) {
  keeper_->TakeUp({}, {.shards_in_copies = true});
  EXPECT_TRUE(left_->Read()->shards_in_copies);
  ASSERT_TRUE(keeper_->MayCopyBack());
  keeper_->CopyBack();
  EXPECT_EQ(device_.ops(), 4u) << "shards of what passes read, and the state";
  End();
  End();
  EXPECT_TRUE(left_->Read()->shards_in_copies);
  keeper_->BeginVersion(/*stepped=*/false);
  EXPECT_EQ(left_->Read()->counts, TakeUpLog::Counts::kSnapshotBeingTaken);
}

// A job that has taken another's place: no pass has made copies of what it has.
TEST_F(SnapshotBehindPassTest, TheFirstMakesTheCopiesToo) {
  EXPECT_FALSE(keeper_->CheckMayBegin(kWhat).ok());
  EXPECT_THAT(device_.labels(), ElementsAre("copy step 0", "copy step 0", "keep step 0", "keep step 0"));
  EXPECT_EQ(device_.ops(), 4u);
  EXPECT_FALSE(snapshot().whole());
  End();
  EXPECT_TRUE(snapshot().whole());
  EXPECT_TRUE(left_->Read()->shards_in_copies);
}

TEST_F(SnapshotBehindPassTest, OneThatFailsClosesTheJob) {
  EnterWithStep();
  End(absl::InternalError("broken"));
  EXPECT_EQ(job_.why_closed(), "take the snapshot: broken");
}

TEST_F(SnapshotKeeperWithCopiesTest, EveryEpochThatEndsGoesBack) {
  EXPECT_FALSE(keeper_->CheckMayBegin(kWhat).ok());
  End();
  keeper_->GoBackIfStored();
  EXPECT_TRUE(keeper_->MayCopyBack()) << "nobody has a session";
  keeper_->CopyBack();
  End();
  EXPECT_EQ(device_.ops(), 0u) << "a pass makes its copies";
  End();
  EXPECT_FALSE(snapshot().going_back());
}

}  // namespace
}  // namespace shardd
