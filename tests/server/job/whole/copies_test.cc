// Values that a copier brings to the slabs: who waits for it, who does not, and what is put back.

#include <unistd.h>

#include <cstring>

#include "gmock/gmock.h"
#include "tests/server/job/held_copier.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

class ValuesOffLoopTest : public JobCoreTest {
 protected:
  static constexpr int64_t kNumel = 1 << 15;
  static SpecBuilder Large() {
    SpecBuilder builder(kRanks);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "w", {kNumel});
    return builder;
  }
  ValuesOffLoopTest() : JobCoreTest(Large()), before_(value()) {}
  void EnterWithWriteback() {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  }
  // All of it: more than is copied at once.
  void Write(int rank, float value) {
    v1::Command command;
    OnLoop([&] {
      Session* const session = job_->sessions()[rank].get();
      const int64_t staging = session->layout().payload_offset_bytes;
      std::fill_n(session->memory()->memory->At<float>(staging), kNumel, value);
      command.mutable_write_parameters()->set_numel(kNumel);
      command.mutable_write_parameters()->set_staging_offset_bytes(staging);
    });
    Send(rank, command);
  }
  // Commands of the batch that were executed.
  int SendCommit(int rank) {
    v1::CommandBatch batch;
    batch.add_commands()->mutable_commit_parameters();
    int executed = 0;
    OnLoop([&] { executed = job_->commands().ExecuteFromStream(job_->sessions()[rank].get(), batch); });
    return executed;
  }
  bool Held(int rank) {
    bool held = false;
    OnLoop([&] { held = job_->sessions()[rank].get()->held; });
    return held;
  }

  const float before_;
  HeldCopier held_copier_{&copier_};
};

TEST_F(ValuesOffLoopTest, OnlyARankWhoseValuesAreCopiedIsHeld) {
  EnterWithWriteback();
  held_copier_.Hold();
  Write(0, 7);
  EXPECT_TRUE(Held(0));
  EXPECT_EQ(SendCommit(0), 0) << "its next command waits";
  EXPECT_EQ(value(), before_);
  EXPECT_FALSE(Held(1));
  EXPECT_EQ(SendCommit(1), 1);
  held_copier_.LetGo();
  ASSERT_TRUE(Until([&] { return !job_->sessions()[0].get()->held; }));
  EXPECT_EQ(value(), 7);
  EXPECT_EQ(SendCommit(0), 1);
  EXPECT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  EXPECT_EQ(value(), 7);
}

TEST_F(ValuesOffLoopTest, ADeadRanksValuesAreTakenBackBeforeAnybodyAttaches) {
  EnterWithWriteback();
  Write(0, 7);
  ASSERT_TRUE(Until([&] { return !job_->sessions()[0].get()->held; }));
  held_copier_.Hold();
  Write(1, 8);  // on its way when the rank dies
  OnLoop([&] { job_->SessionLost(1, "killed"); });
  const auto attach = [&] {
    auto session = Session::Create(plan_, ++sessions_made_, 0, epoch());
    if (session.ok()) (*session)->peer.pid = getpid();
    absl::Status status;
    OnLoop([&] { status = job_->AddSession(*std::move(session)); });
    return status;
  };
  const absl::Status refused = attach();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("is being taken back; attach again"));
  EXPECT_EQ(value(), 7);
  held_copier_.LetGo();
  EXPECT_TRUE(testing::PollUntil([&] { return attach().ok(); }, kPatience));
  EXPECT_EQ(value(), before_);
}

TEST_F(ValuesOffLoopTest, ACopyThatWaitsForOthersIsShownAndKept) {
  EnterWithWriteback();
  held_copier_.Hold();
  Write(0, 7);
  EXPECT_TRUE(Held(0));
  v1::ListRanksResponse ranks;
  bool closed_early = false, closed = false;
  OnLoop([&] {
    job_->view().DescribeRanks(&ranks);
    job_->CheckSilence(MonotonicNow() + absl::Seconds(30));
    closed_early = job_->closed();
    job_->CheckSilence(MonotonicNow() + absl::Seconds(61));
    closed = job_->closed();
  });
  EXPECT_THAT(ranks.ranks(0).waiting_for(), ::testing::HasSubstr("values are copied"));
  EXPECT_FALSE(closed_early);
  EXPECT_FALSE(closed) << "it waits for others' copies, and has not begun";
  held_copier_.LetGo();
}

TEST_F(ValuesOffLoopTest, WhatNobodyCommittedIsTakenBackBeforeAnybodyGoesOn) {
  EnterWithWriteback();
  Write(0, 7);
  ASSERT_TRUE(Until([&] { return !job_->sessions()[0].get()->held; }));
  held_copier_.Hold();
  v1::Command leave;
  leave.mutable_leave_full_params();
  Send(0, leave);
  EXPECT_FALSE(Held(0)) << "another is inside still";
  Send(1, leave);
  EXPECT_TRUE(Held(0) && Held(1));
  held_copier_.LetGo();
  ASSERT_TRUE(Until([&] { return !job_->sessions()[0].get()->held && !job_->sessions()[1].get()->held; }));
  EXPECT_EQ(value(), before_);
  EnterWithWriteback();
  Write(0, 9);
  ASSERT_TRUE(Until([&] { return !job_->sessions()[0].get()->held; }));
  EXPECT_EQ(SendCommit(0) + SendCommit(1), 2);
  EXPECT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  EXPECT_EQ(value(), 9);
}

TEST_F(JobCoreTest, WhatHasBeenTakenBackIsNoCopyThatHangs) {
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  command.mutable_write_parameters()->set_numel(1);
  OnLoop([&] {
    command.mutable_write_parameters()->set_staging_offset_bytes(
        job_->sessions()[0].get()->layout().payload_offset_bytes);
  });
  Send(0, command);
  command.mutable_leave_full_params();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  copier_.Drain();
  bool closed = true;
  OnLoop([&] {
    job_->CheckSilence(MonotonicNow() + absl::Minutes(2));
    closed = job_->closed();
  });
  EXPECT_FALSE(closed);
}

}  // namespace
}  // namespace shardd
