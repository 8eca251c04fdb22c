// Passes that read copies: trainers store at any time, every pass is a version, and an abort goes back to the snapshot.

#include <unistd.h>

#include <algorithm>

#include "gmock/gmock.h"
#include "tests/server/job/passes_fixture.h"
#include "tests/server/job/trainer_process.h"

namespace shardd {
namespace {

SpecBuilder PassCopies(int keep_every, v1::OptimizerKind kind = v1::OPTIMIZER_KIND_TRAINER, int states = 1) {
  SpecBuilder builder(2);
  builder.config().set_trainers_never_write(false);
  builder.config().set_pass_copies(kind != v1::OPTIMIZER_KIND_TRAINER);  // with it there are no others
  builder.config().set_keep_every(keep_every);
  builder.config().mutable_optimizer()->set_kind(kind);
  if (kind == v1::OPTIMIZER_KIND_TRAINER) builder.config().mutable_optimizer()->set_trainer_states(states);
  builder.Param(0, "w", {64});
  return builder;
}

class PassCopiesTest : public PassesTest {
 protected:
  explicit PassCopiesTest(const SpecBuilder& builder = PassCopies(1), bool outlives_daemon = false)
      : PassesTest(builder, /*shared_copier=*/nullptr, /*place=*/{}, /*collective=*/nullptr, outlives_daemon) {}

  void Enter(int rank, bool stepped = false) {
    v1::Command command;
    command.mutable_enter_pass()->set_stepped(stepped);
    if (stepped) command.mutable_enter_pass()->set_trainer_state(absl::StrCat("step ", committed() + 1));
    Send(rank, command);
  }
  void Pass(bool stepped = false) {
    const uint64_t before = Word(0, &DaemonPage::passes);
    for (int rank = 0; rank < kRanks; ++rank) Enter(rank, stepped);
    ASSERT_TRUE(Until(
        [&] { return Word(0, &DaemonPage::passes) == before + 1 && Word(1, &DaemonPage::passes) == before + 1; }));
  }
  void LeaveAll() {
    for (int rank = 0; rank < kRanks; ++rank) Leave(rank);
  }
  virtual void Store(float value) {
    std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, value);
    if (job_->memory().optimizer() != nullptr) std::fill_n(SlabAt<float>(job_->memory().optimizer(), 0), 64, -value);
  }
  float read() { return *SlabAt<float>(job_->memory().parameters(), 0); }
  float state() { return *SlabAt<float>(job_->memory().optimizer(), 0); }
  void Lose(int rank) {
    OnLoop([&] { job_->SessionLost(rank, "its process ended"); });
  }
  bool TryAttach(int rank) {
    auto session = Session::Create(plan_, ++sessions_made_, rank, epoch(), place_);
    if (session.ok()) (*session)->peer.pid = getpid();
    EXPECT_TRUE(session.ok()) << session.status();
    const absl::Status status = AddSession(*std::move(session));
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    return status.ok();
  }
  void AttachAll() {
    bool attached[kRanks] = {};
    ASSERT_TRUE(testing::PollUntil(
        [&] {
          for (int rank = 0; rank < kRanks; ++rank) attached[rank] = attached[rank] || TryAttach(rank);
          return attached[0] && attached[1];
        },
        kPatience));
  }
};

TEST_F(PassCopiesTest, StoresDuringAPassCountFromTheNextOn) {
  Store(5);
  Pass();
  EXPECT_EQ(read(), 5);
  EXPECT_EQ(version(), 2u);
  Store(6);  // between a forward and its backward, say
  EXPECT_EQ(read(), 5);
  LeaveAll();
  EXPECT_EQ(read(), 5);
  Pass(/*stepped=*/true);
  EXPECT_EQ(read(), 6);
  EXPECT_EQ(version(), 3u);
  EXPECT_EQ(committed(), 1);
}

TEST_F(PassCopiesTest, AnOptimizerInTheTrainersHasNoOtherPasses) { EXPECT_TRUE(plan_->config.pass_copies()); }

TEST_F(PassCopiesTest, StepOfAnOptimizerInTheTrainersIsRefused) {
  Train(0);
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 1);
}

TEST_F(PassCopiesTest, RanksLearnOfAPassBeforeItsCopiesAreMade) {
  for (const auto& device : devices_) device->Hold();
  Enter(0);
  EXPECT_EQ(Word(0, &DaemonPage::passes_issued), 0u);
  Enter(1);
  EXPECT_EQ(Word(0, &DaemonPage::passes_issued), 1u);
  EXPECT_EQ(Word(1, &DaemonPage::passes_issued), 1u);
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(0, command);
  EXPECT_EQ(Word(0, &DaemonPage::passes), 0u);
  Release();
  ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::passes) == 1; }));
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 0);
}

class PassesOfRanksThatAsk : public PassCopiesTest {
 protected:
  PassesOfRanksThatAsk() : PassCopiesTest(PassCopies(1)) {}
  // By the ring: commands of a stream do not have the flag.
  void EnterAll() {
    OnLoop([&] {
      const SessionLayout layout = MakeSessionLayout(*plan_);
      for (int rank = 0; rank < kRanks; ++rank) {
        const SessionMemoryView view(job_->sessions()[rank]->memory()->memory->data(), layout.ring_offset_bytes,
                                     layout.masks_offset_bytes);
        CommandRecord record = {};
        record.opcode = Opcode::kEnterPass;
        record.flags = kAsksToStore;
        record.sequence = entered_;
        view.record(entered_) = record;
        view.page().submitted.store(TimelineValue(job_->committed().epoch(), entered_ + 1));
      }
      ++entered_;
      job_->PollRings();
    });
  }
  // What the devices have, each a work at a time, until `done`.
  bool RunUntil(const std::function<bool()>& done) {
    return Until([&] {
      if (done()) return true;
      for (const auto& device : devices_) device->RunFirst();
      return false;
    });
  }
  uint64_t entered_ = 0;
};

// A daemon that dies before it knows that the snapshot is whole leaves that it is to be copied from what passes read.
TEST_F(PassesOfRanksThatAsk, APassIsCopiedBehindTheLastOnesSnapshot) {
  Store(5);
  for (const auto& device : devices_) device->Hold();
  EnterAll();
  ASSERT_TRUE(RunUntil([&] { return Word(0, &DaemonPage::passes) == 1 && Word(1, &DaemonPage::passes) == 1; }));
  EXPECT_EQ(Word(0, &DaemonPage::snapshots_begun), 1u);
  LeaveAll();
  Store(6);
  EnterAll();
  for (const auto& device : devices_) EXPECT_EQ(device->kept(), 1u) << "the snapshot alone";
  ASSERT_TRUE(RunUntil([&] { return Word(0, &DaemonPage::snapshots_whole) == 1; }));
  EXPECT_EQ(read(), 5);
  ASSERT_TRUE(RunUntil([&] { return Word(0, &DaemonPage::passes) == 2; }));
  EXPECT_EQ(read(), 6);
}

// A daemon that dies meanwhile would leave copies of neither version, or the snapshot of the one with those of the
// other.
TEST_F(PassesOfRanksThatAsk, ValuesAreCommittedBehindTheLastPassesSnapshot) {
  Store(5);
  for (const auto& device : devices_) device->Hold();
  EnterAll();
  ASSERT_TRUE(RunUntil([&] { return Word(0, &DaemonPage::passes) == 1 && Word(1, &DaemonPage::passes) == 1; }));
  LeaveAll();
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  *SlabAt<float>(job_->memory().shards(), 0) = 7;  // as ranks do by commands
  const uint64_t before = version();
  command.mutable_commit_parameters();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  for (const auto& device : devices_) EXPECT_EQ(device->kept(), 1u) << "the snapshot alone";
  EXPECT_EQ(read(), 5);
  ASSERT_TRUE(RunUntil([&] { return job_->committed().version() == before + 1; }));
  EXPECT_EQ(Word(0, &DaemonPage::snapshots_whole), 1u);
  EXPECT_EQ(read(), 7);
}

TEST_F(PassesOfRanksThatAsk, ADeathGoesBackToWhatTheLastPassRead) {
  Store(5);
  EnterAll();
  ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::snapshots_whole) == 1; }));
  Store(6);
  Lose(1);
  Store(7);  // the other does not know yet
  EXPECT_EQ(*SlabAt<float>(job_->memory().kept(), 0), 0) << "the snapshot has no shards of its own";
  AttachAll();
  EXPECT_EQ(value(), 5);
  EXPECT_EQ(state(), -5);
}

TEST_F(PassesOfRanksThatAsk, ADeathWhileStatesAreCopiedGoesBackToThatPass) {
  Store(5);
  for (const auto& device : devices_) device->Hold();
  EnterAll();
  ASSERT_TRUE(RunUntil([&] { return Word(0, &DaemonPage::passes) == 1 && Word(1, &DaemonPage::passes) == 1; }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 9.0f);  // into its states it may not store yet
  Lose(1);
  Release();
  AttachAll();
  EXPECT_EQ(value(), 5);
  EXPECT_EQ(state(), -5);
}

TEST_F(PassesOfRanksThatAsk, ADeathWhileCopiesAreMadeGoesBackToTheirPass) {
  Store(5);
  EnterAll();
  ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::snapshots_whole) == 1; }));
  LeaveAll();
  Store(7);
  for (const auto& device : devices_) device->Hold();
  EnterAll();
  Lose(1);
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().epoch() == 2; }));
  AttachAll();
  EXPECT_EQ(value(), 7) << "all had entered it";
  EXPECT_EQ(state(), -7);
}

TEST_F(PassCopiesTest, ARankThatAsksMayStoreWhoeverReads) {
  Pass();
  Leave(0);
  Ask(0);
  EXPECT_EQ(Word(0, &DaemonPage::hand_ins), 1u);
}

TEST_F(PassCopiesTest, ADeathInAPassGoesBackToItsBeginning) {
  Store(5);
  Pass(/*stepped=*/true);
  Store(6);
  Lose(1);
  Store(7);  // the other does not know yet
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(streams_[0]->Aborted().committed_step(), 1);
  EXPECT_EQ(streams_[0]->Aborted().trainer_state(), "step 1");
  AttachAll();
  EXPECT_EQ(value(), 5);
  EXPECT_EQ(state(), -5);
  Pass();
  EXPECT_EQ(read(), 5);
}

TEST_F(PassCopiesTest, NothingIsCopiedBackWhileARankMayStillStore) {
  Store(5);
  Pass();
  Lose(1);
  EXPECT_FALSE(TryAttach(1));
  Store(9);
  EXPECT_FALSE(TryAttach(1)) << "rank 0 may store";
  EXPECT_EQ(value(), 9);
  AttachAll();
  EXPECT_EQ(value(), 5);
}

// It may be stopped, and go on when the others train again.
TEST_F(PassCopiesTest, WhoIsReplacedIsKilledBeforeAnythingIsCopiedBack) {
  TrainerProcess process;
  SetProcess(0, process.pid(), process.Descriptor());
  Store(5);
  Pass();
  Lose(1);
  const auto may_attach = [&](int rank, bool replace) {
    absl::Status status;
    OnLoop([&] { status = job_->CheckMayAttach(rank, getpid(), replace); });
    return status;
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    const absl::Status status = may_attach(rank, /*replace=*/false);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(absl::StrCat("rank 0 (pid ", process.pid(), ")")));
  }
  Store(9);
  EXPECT_EQ(may_attach(1, /*replace=*/true).code(), absl::StatusCode::kAborted) << "rank 0 is not who is replaced";
  EXPECT_TRUE(process.Lives());
  (void)may_attach(0, /*replace=*/true);
  EXPECT_TRUE(process.WasKilled());
  AttachAll();
  EXPECT_EQ(value(), 5);
}

// A daemon in a PID namespace of its own: all processes are 0, and only their descriptors tell them apart.
TEST_F(PassCopiesTest, WithoutPidsAReplacedProcessEndsBeforeValuesGoBack) {
  TrainerProcess process;
  SetProcess(0, /*pid=*/0, process.Descriptor());
  Store(5);
  Pass();
  Lose(1);
  absl::Status refused = absl::UnknownError("rank 0 (pid 0)");
  for (int i = 0; i < 10000 && absl::StrContains(refused.message(), "rank 0 (pid 0)"); ++i) {
    OnLoop([&] { refused = job_->CheckMayAttach(0, /*pid=*/0, /*replace=*/true); });
  }
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr(absl::StrCat("the process of rank 1 (pid ", getpid(), ") lives")));
  EXPECT_FALSE(process.Lives()) << "it could still store";
  EXPECT_TRUE(process.WasKilled());
  AttachAll();
  EXPECT_EQ(value(), 5);
}

TEST_F(PassCopiesTest, ADeathBeforeAnyPassGoesBackToInitialValues) {
  Store(9);
  Lose(0);
  AttachAll();
  EXPECT_EQ(value(), 0);
}

TEST_F(PassCopiesTest, NobodyStoresBeforeTheLastHasLeftFullParameters) {
  v1::Command command;
  command.mutable_enter_full_params();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  ASSERT_EQ(Word(0, &DaemonPage::full_params), 1u);
  command.mutable_leave_full_params();
  Send(0, command);
  Ask(0);
  EXPECT_EQ(Word(0, &DaemonPage::hand_ins), 0u);
  Send(1, command);
  EXPECT_EQ(Word(0, &DaemonPage::hand_ins), 1u);
}

class KeptRarely : public PassCopiesTest {
 protected:
  KeptRarely() : PassCopiesTest(PassCopies(3)) {}
};

TEST_F(KeptRarely, TheCopyIsTakenWithEveryThirdPass) {
  for (int step = 1; step <= 5; ++step) {  // kept with 3
    Store(static_cast<float>(step));
    Pass(/*stepped=*/true);
    LeaveAll();
  }
  Lose(0);
  EXPECT_EQ(committed(), 3);
  AttachAll();
  EXPECT_EQ(value(), 3);
  EXPECT_EQ(state(), -3);
}

// Nothing is stored that passes do not read as it is: there is no other copy.
class KeptAsRead : public PassCopiesTest {
 protected:
  KeptAsRead() : PassCopiesTest(PassCopies(3, v1::OPTIMIZER_KIND_TRAINER, /*states=*/0)) {}
};

TEST_F(KeptAsRead, ADeathGoesBackToWhatTheLastPassRead) {
  EXPECT_EQ(job_->memory().kept(), nullptr);
  for (int step = 1; step <= 4; ++step) {
    Store(static_cast<float>(step));
    Pass(/*stepped=*/true);
    Store(9);
    EXPECT_EQ(read(), step);
    LeaveAll();
  }
  Lose(0);
  EXPECT_EQ(committed(), 4) << "each pass is kept";
  AttachAll();
  EXPECT_EQ(value(), 4);
  Pass();
  EXPECT_EQ(read(), 4);
}

TEST_F(KeptAsRead, ADeathDuringTheCopyingGoesBackToThatPass) {
  Store(5);
  Pass();
  LeaveAll();
  Store(7);
  for (const auto& device : devices_) device->Hold();
  for (int rank = 0; rank < kRanks; ++rank) Enter(rank);
  Lose(1);
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().epoch() == 2; }))
      << "rank 0's session lives until the pass is copied";
  AttachAll();
  EXPECT_EQ(value(), 7) << "all had entered it";
}

TEST_F(KeptAsRead, ADeathBeforeAnyPassGoesBackToInitialValues) {
  Store(9);
  Lose(0);
  AttachAll();
  EXPECT_EQ(value(), 0);
}

// Two replicas with copies of their own of shards and states.
class ReplicasTest : public PassCopiesTest {
 protected:
  static SpecBuilder Replicas() {
    SpecBuilder builder = PassCopies(1);
    builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
    builder.config().set_shard_group_size(1);
    builder.config().set_replica_copies(true);
    return builder;
  }
  ReplicasTest() : PassCopiesTest(Replicas()) {}
  void SetUp() override {
    ASSERT_EQ(plan_->shard_copies, 2);
    ASSERT_EQ(plan_->optimizer_copies, 2);
  }
  float* Shard(int copy) { return SlabAt<float>(job_->memory().shards(), copy * plan_->shards_stride_bytes); }
  float* State(int copy) { return SlabAt<float>(job_->memory().optimizer(), copy * plan_->optimizer_stride_bytes); }
  void StoreIn(int copy, float value) {
    std::fill_n(Shard(copy), 64, value);
    std::fill_n(State(copy), 64, -value);
  }
  void Store(float value) override {
    StoreIn(0, value);
    StoreIn(1, value);
  }
};

TEST_F(ReplicasTest, ADeathRestoresEveryCopyOfShardsAndStates) {
  Store(1);
  Pass(/*stepped=*/true);
  LeaveAll();
  Store(99);
  Lose(1);
  AttachAll();
  EXPECT_EQ(committed(), 1);
  for (int copy = 0; copy < 2; ++copy) {
    for (const int i : {0, 63}) {
      EXPECT_EQ(Shard(copy)[i], 1.0f) << "copy " << copy;
      EXPECT_EQ(State(copy)[i], -1.0f) << "copy " << copy;
    }
  }
}

TEST_F(ReplicasTest, OnlyShardsGoFromTheFirstReplicaToOthers) {
  StoreIn(0, 5);
  StoreIn(1, 6);  // it was to be the same
  Pass();
  EXPECT_EQ(read(), 5);
  for (int copy = 0; copy < 2; ++copy) {
    EXPECT_EQ(Shard(copy)[0], 5.0f) << "copy " << copy;
    EXPECT_EQ(Shard(copy)[63], 5.0f) << "copy " << copy;
  }
  EXPECT_EQ(State(0)[0], -5.0f);
  EXPECT_EQ(State(1)[0], -6.0f);
}

class PassesOutliveDaemon : public PassCopiesTest {
 protected:
  PassesOutliveDaemon() : PassCopiesTest(PassCopies(3), /*outlives_daemon=*/true) {}
};

// Their streams would store into shards of which the next daemon completes the snapshot.
TEST_F(PassesOutliveDaemon, HostsAreNotAheadOfAPassTakingASnapshot) {
  std::string ahead;
  for (uint64_t pass = 1; pass <= 6; ++pass) {
    for (const auto& device : devices_) device->Hold();
    for (int rank = 0; rank < kRanks; ++rank) Enter(rank, /*stepped=*/pass > 1);
    ahead += Word(0, &DaemonPage::passes_issued) == pass ? '+' : '-';
    EXPECT_EQ(Word(0, &DaemonPage::passes), pass - 1);
    Release();
    ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::passes) == pass && Word(1, &DaemonPage::passes) == pass; }));
    EXPECT_EQ(Word(0, &DaemonPage::passes_issued), pass);
    LeaveAll();
  }
  EXPECT_EQ(ahead, "++-++-");
}

class DaemonUpdates : public PassCopiesTest {
 protected:
  DaemonUpdates() : PassCopiesTest(PassCopies(1, v1::OPTIMIZER_KIND_SGD)) {}
};

TEST_F(DaemonUpdates, EachCommitOfTheDaemonsOptimizerTakesASnapshot) {
  Store(4);
  Pass();
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(value(), 3.5f);
  EXPECT_EQ(read(), 4) << "the copy is of a pass";
  Store(9);
  Lose(0);
  EXPECT_EQ(committed(), 1);
  AttachAll();
  EXPECT_EQ(value(), 3.5f);
  Pass();
  EXPECT_EQ(read(), 3.5f);
}

TEST_F(DaemonUpdates, ADeathDuringADecidedStepsCopyCommitsItOnce) {
  Store(4);
  Pass();
  TrainUntilDecided();
  for (const auto& device : devices_) device->RunFirst();  // the update
  ASSERT_TRUE(testing::PollUntil([&] { return devices_[0]->Waiting() && devices_[1]->Waiting(); }, kPatience))
      << "nothing copies the shards for the step";
  Lose(1);
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().epoch() == 2; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(version(), 3u);
  OnLoop([&] { EXPECT_EQ(job_->committed().trainer_states()[0], "state of rank 0"); });
  AttachAll();
  EXPECT_EQ(value(), 3.5f);
}

// What ranks have stored behind the step is the pass's, and nobody has begun anything in it.
TEST_F(DaemonUpdates, EpochsEndingBehindAStepEndBeforeTheNextPass) {
  Store(4);
  Pass();
  OnLoop([&] { EXPECT_TRUE(job_->EndBehindStep(absl::AbortedError("the daemon stops"))); });
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(epoch(), 1u);
  Store(9);
  for (int rank = 0; rank < kRanks; ++rank) Enter(rank);
  ASSERT_TRUE(Until([&] { return job_->sessions().attached() == 0; }));
  EXPECT_EQ(Word(0, &DaemonPage::passes), 0u) << "nobody has a page";
  EXPECT_TRUE(streams_[0]->Aborted().behind_commit());
  EXPECT_EQ(streams_[0]->Aborted().committed_step(), 1);
  AttachAll();
  EXPECT_EQ(value(), 9);
}

// Its GPUs have not done with the step when the host asks for the next pass.
TEST_F(DaemonUpdates, APassEnteredBehindAStepBeginsWithItsVersion) {
  Store(4);
  Pass();
  for (const auto& device : devices_) device->Hold();
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  for (int rank = 0; rank < kRanks; ++rank) Enter(rank);
  EXPECT_EQ(Word(0, &DaemonPage::passes_issued), 2u);
  Release();
  ASSERT_TRUE(Until([&] { return Word(0, &DaemonPage::passes) == 2; }));
  EXPECT_EQ(read(), 3.5f);
}

}  // namespace
}  // namespace shardd
