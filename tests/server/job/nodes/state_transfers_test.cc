#include "server/job/nodes/state_transfers.h"

#include "common/plan/node_part.h"
#include "server/device/device.h"
#include "server/device/devices.h"
#include "server/job/full_params/full_params.h"
#include "server/job/job_events.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/write_undo.h"
#include "server/observe/events.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/nodes/over_nodes_fixture.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

constexpr uint64_t kTransfer = 7;
constexpr float kSent = 0.5;

class StateTransfersTest : public OverNodesTest {
 protected:
  explicit StateTransfersTest(int row = 0)
      : OverNodesTest(/*cut=*/row > 0, row), memory_(*JobMemory::Create(*plan_, "job")), made_(*MakeDevices("cpu:1")) {
    committed_.SetTrainerState(0, "of rank 0");
  }
  ~StateTransfersTest() override {
    loop_.RunAndWait([this] {
      states_.Stop();
      member_.Stop();
    });
    events_->SetState(nullptr);
    Drain();
    made_.devices[0]->Shutdown();
  }
  void Begin() { OverNodesTest::Begin(Listeners()); }
  NodeListeners Listeners() { return {this, this, &states_, this}; }
  // Node 0 has been sent a state that it lacks.
  void AskForState() {
    v1::PeerMessage message;
    message.mutable_fetch()->set_transfer(kTransfer);
    Hear(message);
    Drain();
  }
  // Node 0 has a step that this node has not.
  void BeginBehind() {
    loop_.RunAndWait([&] {
      member_.Start(Listeners());
      member_.OnUp(0);
    });
    Hear(BeginMessage(/*step=*/3));
    Drain();
  }
  uint64_t Asked() {
    const auto asked = Sent(v1::PeerMessage::kFetch);
    return asked.empty() ? 0 : asked.back().fetch().transfer();
  }
  void HearState(uint64_t transfer, uint64_t generation = 0) {
    v1::PeerMessage message;
    message.mutable_rank_state()->set_transfer(transfer);
    message.mutable_rank_state()->set_trainer_state("of node 0");
    Hear(message);
    message.mutable_state()->set_transfer(transfer);
    message.mutable_state()->set_step(3);
    message.mutable_state()->set_version(4);
    message.mutable_state()->set_version_generation(generation);
    for (int param = 0; param < params_; ++param) message.mutable_state()->add_step_counts(3);
    Hear(message);
  }
  void HearSlabs(uint64_t transfer) {
    for (const auto& [name, bytes] : {std::pair(v1::SLAB_SHARDS, plan_->memory.shards_bytes),
                                      std::pair(v1::SLAB_OPTIMIZER, plan_->memory.optimizer_bytes)}) {
      if (bytes == 0) continue;
      const std::vector<float> elements(static_cast<size_t>(bytes) / sizeof(float), kSent);
      v1::PeerData header;
      header.set_sequence(transfer);
      header.set_slab(name);
      header.set_numel(bytes / static_cast<int64_t>(sizeof(float)));
      events_->OnData(0, header, {reinterpret_cast<const char*>(elements.data()), static_cast<size_t>(bytes)});
    }
    Drain();
  }
  bool MayRestore() {
    bool may = false;
    loop_.RunAndWait([&] { may = states_.MayRestore(); });
    return may;
  }

  const std::unique_ptr<JobMemory> memory_;
  Devices made_;
  const OptimizerDevices devices_{{made_.devices[0].get()}, 1};
  EventLog log_;
  JobEvents job_events_{"job", Tenant{}, &committed_, &log_};
  FullParams full_params_{1};
  WriteUndo undo_;
  int begun_ = 0;
  int restored_ = 0;
  std::vector<absl::AnyInvocable<void()>> writes_;  // what is to run behind them
  StateTransfers states_{
      {plan_.get(), memory_.get(), &decision_, &steps_, &full_params_, &undo_},
      {&member_, &links_, events_.get(), &worker_, &committed_, &work_, &devices_, &job_events_, &job_},
      {[this] { ++begun_; }, [this] { ++restored_; },
       [this](absl::AnyInvocable<void()> then) { writes_.push_back(std::move(then)); }}};
};

TEST_F(StateTransfersTest, WhoAsksIsSentWhatIsCommitted) {
  committed_.AgreesOnValues(60);
  committed_.CommitValues();
  Begin();
  AskForState();
  const auto ranks = Sent(v1::PeerMessage::kRankState);
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_EQ(ranks[0].rank_state().trainer_state(), "of rank 0");
  const auto sent = Sent(v1::PeerMessage::kState);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].state().transfer(), kTransfer);
  EXPECT_EQ(sent[0].state().version(), 2u);
  EXPECT_EQ(sent[0].state().version_generation(), 60u);
  EXPECT_EQ(sent[0].state().step_counts_size(), params_);
}

TEST_F(StateTransfersTest, AStepNotYetVisibleIsSentAfterItsUpdate) {
  Begin();
  v1::Step step;
  step.add_groups()->set_lr(0.5);
  step.set_trainer_state("of the step");
  steps_.Ask(0, step, /*signal=*/0);
  decision_.BeginMeasuring();
  decision_.Measured(0, step);
  decision_.Fix(step, std::vector<bool>(static_cast<size_t>(params_), true), committed_.step_counts());
  decision_.BeginUpdate();
  AskForState();
  EXPECT_TRUE(Sent(v1::PeerMessage::kState).empty());
  EXPECT_FALSE(states_.MaySend());
  decision_.Applied();
  ASSERT_TRUE(states_.MaySend());
  loop_.RunAndWait([&] { states_.SendWaited(); });
  EXPECT_FALSE(states_.MaySend());
  const auto sent = Sent(v1::PeerMessage::kState);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].state().step(), 1);
  EXPECT_EQ(sent[0].state().version(), 2u);
  EXPECT_EQ(sent[0].state().step_counts(0), 1);
  EXPECT_EQ(Sent(v1::PeerMessage::kRankState)[0].rank_state().trainer_state(), "of the step");
}

TEST_F(StateTransfersTest, WhatRanksAreWritingIsTakenBackAndNotSent) {
  Begin();
  full_params_.Ask(0, {.writeback = true}, /*signal=*/0);
  full_params_.Grant(std::vector<bool>(static_cast<size_t>(params_), true));
  undo_.WillSave(1);
  AskForState();
  EXPECT_TRUE(absl::IsAborted(job_.failure())) << job_.failure();
  EXPECT_FALSE(states_.MaySend());
  full_params_.EndEpoch();
  std::vector<int64_t> counts;
  EXPECT_TRUE(undo_.BeginUndo(&counts).has_value());
  EXPECT_FALSE(states_.MaySend());
  EXPECT_TRUE(Sent(v1::PeerMessage::kState).empty());
  undo_.EndUndo();
  EXPECT_TRUE(states_.MaySend());
}

// Old bytes of a step that is decided and made are kept until all nodes hold it; it is not lost for that.
TEST_F(StateTransfersTest, AMadeStepIsSentThoughItsOldBytesAreKept) {
  Begin();
  undo_.WillSave(1);
  v1::Step step;
  step.add_groups()->set_lr(0.5);
  decision_.BeginMeasuring();
  decision_.Measured(0, step);
  decision_.Fix(step, std::vector<bool>(static_cast<size_t>(params_), true), committed_.step_counts());
  decision_.BeginUpdate();
  decision_.Applied();
  AskForState();
  EXPECT_TRUE(job_.failure().ok()) << job_.failure();
  const auto sent = Sent(v1::PeerMessage::kState);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].state().step(), 1);
}

TEST_F(StateTransfersTest, WhoseLinkIsLostWaitsForNoState) {
  Begin();
  decision_.BeginCommit();
  AskForState();
  loop_.RunAndWait([&] { states_.NodeStopSending(0); });
  decision_.End();
  EXPECT_FALSE(states_.MaySend());
}

TEST_F(StateTransfersTest, AStateIsAskedForBehindWhatIsStillWritten) {
  BeginBehind();
  EXPECT_EQ(begun_, 1);
  EXPECT_EQ(committed_.version(), 0u) << "slabs are torn from here on";
  EXPECT_EQ(Asked(), 0u);
  ASSERT_EQ(writes_.size(), 1u);
  writes_[0]();
  Drain();
  EXPECT_NE(Asked(), 0u);
}

TEST_F(StateTransfersTest, ItIsRestoredWhenAllOfItHasCome) {
  BeginBehind();
  writes_[0]();
  Drain();
  HearState(Asked(), /*generation=*/60);
  EXPECT_FALSE(MayRestore());
  const int advanced = job_.advanced;
  HearSlabs(Asked());
  ASSERT_TRUE(MayRestore());
  EXPECT_GT(job_.advanced, advanced) << "nobody looks whether it may be restored";
  loop_.RunAndWait([&] { states_.Restore(); });
  EXPECT_FALSE(MayRestore()) << "it is under way";
  ASSERT_TRUE(testing::PollUntil(
      [&] {
        int restored = 0;
        loop_.RunAndWait([&] { restored = restored_; });
        return restored == 1;
      },
      absl::Seconds(60)));
  EXPECT_EQ(committed_.step(), 3);
  EXPECT_EQ(committed_.version(), 4u);
  EXPECT_EQ(committed_.generation(), 60u);
  EXPECT_EQ(committed_.trainer_states()[0], "of node 0");
  EXPECT_EQ(Sent(v1::PeerMessage::kFetched).size(), 1u);
  EXPECT_FALSE(member_.fetching());
  float first = 0;
  ASSERT_TRUE(memory_->shards()->Read(0, reinterpret_cast<char*>(&first), sizeof first).ok());
  EXPECT_EQ(first, kSent);
}

TEST_F(StateTransfersTest, BytesOfAnotherTransferCompleteNothing) {
  BeginBehind();
  writes_[0]();
  Drain();
  HearState(Asked());
  HearSlabs(Asked() + 1);
  EXPECT_FALSE(MayRestore());
}

TEST_F(StateTransfersTest, AStateThatMismatchesThePlanClosesTheJob) {
  BeginBehind();
  writes_[0]();
  Drain();
  v1::PeerMessage message;
  message.mutable_state()->set_transfer(Asked());
  Hear(message);
  ASSERT_EQ(job_.closed.size(), 1u);
  EXPECT_THAT(job_.closed[0], ::testing::HasSubstr("it does not fit the plan"));
}

TEST_F(StateTransfersTest, ANodeThatMakesAVersionIsNotSentAnother) {
  decision_.BeginCommit();
  loop_.RunAndWait([&] { states_.NodeBeginFetch(/*from=*/0, kTransfer); });
  ASSERT_EQ(job_.closed.size(), 1u);
  EXPECT_THAT(job_.closed[0], ::testing::HasSubstr("another step"));
  EXPECT_EQ(begun_, 0);
}

// Two rows of two: node 3 has what this node, 1, holds.
class StateTransfersOfRows : public StateTransfersTest {
 protected:
  StateTransfersOfRows() : StateTransfersTest(/*row=*/2) {}
};

// Nothing but pieces comes behind the state's first message, for as long as its size takes.
TEST_F(StateTransfersOfRows, EachPieceRestartsTheSendersClock) {
  loop_.RunAndWait([&] {
    member_.Start(Listeners());
    for (const int node : {0, 2, 3}) member_.OnUp(node);
  });
  Hear(BeginMessage(/*step=*/3));
  Drain();
  ASSERT_EQ(writes_.size(), 1u);
  writes_[0]();
  Drain();
  const absl::Time asked_before = MonotonicNow();
  int64_t bytes = 0;
  for (const ByteRange& range : HeldRanges(*plan_, HeldSlab::kShards, kSlabAlignmentBytes)) {
    bytes += range.end - range.first;
  }
  v1::PeerData header;
  header.set_sequence(Asked());
  header.set_slab(v1::SLAB_SHARDS);
  header.set_numel(bytes / static_cast<int64_t>(sizeof(float)));
  events_->OnData(3, header, std::string(static_cast<size_t>(bytes / 2), 'x'));
  loop_.RunAndWait([&] {
    states_.CheckPieces();
    member_.CheckSilence(asked_before + absl::Milliseconds(plan_->config.grace_ms()), absl::Hours(100));
    EXPECT_TRUE(member_.fetching());
  });
}

// All begin anew, and write initial values where it would come.
TEST_F(StateTransfersTest, AFetchThatIsGivenUpWritesNothingMore) {
  BeginBehind();
  writes_[0]();
  Drain();
  HearState(Asked());
  loop_.RunAndWait([&] { states_.NodeEndFetch(); });
  HearSlabs(Asked());
  EXPECT_FALSE(MayRestore());
  float first = -1;
  ASSERT_TRUE(memory_->shards()->Read(0, reinterpret_cast<char*>(&first), sizeof first).ok());
  EXPECT_EQ(first, 0);
  v1::PeerMessage late;
  late.mutable_rank_state()->set_transfer(Asked());
  Hear(late);
  EXPECT_TRUE(job_.closed.empty());
}

TEST_F(StateTransfersTest, NothingIsRestoredOnceTheJobHasEnded) {
  BeginBehind();
  writes_[0]();
  Drain();
  HearState(Asked());
  loop_.RunAndWait([&] { states_.Stop(); });
  HearSlabs(Asked());
  EXPECT_FALSE(MayRestore());
  EXPECT_TRUE(job_.closed.empty());
}

}  // namespace
}  // namespace shardd
