#include "server/session/session.h"

#include <gtest/gtest.h>

#include "common/shm/session_view.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

constexpr uint64_t kEpoch = 3;

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() {
    SpecBuilder builder(1);
    builder.Param(0, "w", {8});
    auto session = Session::Create(std::make_shared<const ShardPlan>(builder.Plan()), /*id=*/1, /*rank=*/0, kEpoch);
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    const SessionLayout& layout = session_->layout();
    client_ =
        SessionMemoryView(session_->memory()->memory->data(), layout.ring_offset_bytes, layout.masks_offset_bytes);
  }
  void Submit(Opcode opcode, int group = 0) {
    CommandRecord record = {};
    record.sequence = submitted_;
    record.opcode = opcode;
    record.group = group;
    client_.record(submitted_) = record;
    client_.page().submitted = TimelineValue(kEpoch, ++submitted_);
  }
  DaemonPage& page() { return *session_->memory()->daemon_page->At<DaemonPage>(0); }

  std::unique_ptr<Session> session_;
  SessionMemoryView client_;
  uint64_t submitted_ = 0;
};

TEST_F(SessionTest, CommandsComeInOrderAndOnce) {
  EXPECT_FALSE(session_->HasCommands());
  Submit(Opcode::kUnshard);
  Submit(Opcode::kBackwardDone);
  EXPECT_EQ(session_->NextFromRing()->opcode, Opcode::kUnshard);
  session_->PublishConsumed();
  EXPECT_EQ(page().consumed, TimelineValue(kEpoch, 1));
  EXPECT_EQ(session_->NextFromRing()->opcode, Opcode::kBackwardDone);
  session_->PublishConsumed();
  EXPECT_TRUE(absl::IsNotFound(session_->NextFromRing().status()));
}

TEST_F(SessionTest, NothingIsReadWhileItIsHeld) {
  Submit(Opcode::kUnshard);
  session_->held = true;
  EXPECT_FALSE(session_->HasCommands());
  EXPECT_TRUE(absl::IsNotFound(session_->NextFromRing().status()));
  session_->held = false;
  EXPECT_TRUE(session_->NextFromRing().ok());
}

TEST_F(SessionTest, RecordsOfAnotherEpochAreNone) {
  Submit(Opcode::kUnshard);
  client_.page().submitted = TimelineValue(kEpoch + 1, 1);
  EXPECT_FALSE(session_->HasCommands());
}

TEST_F(SessionTest, WhatTheClientWritesIsChecked) {
  Submit(Opcode::kUnshard, /*group=*/7);
  EXPECT_TRUE(absl::IsInvalidArgument(session_->NextFromRing().status()));
  client_.page().submitted = TimelineValue(kEpoch, kRingRecords + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(session_->NextFromRing().status()));
}

TEST_F(SessionTest, BackwardsAreReducedOnlyOnceTheRankClosedThem) {
  session_->words().CountBackward();
  session_->words().PublishReduced(5);
  EXPECT_EQ(page().reduced, TimelineValue(kEpoch, 1));
  session_->words().EndStepBackwards();
  session_->words().CountBackward();
  session_->words().PublishReduced(1);
  EXPECT_EQ(page().reduced, TimelineValue(kEpoch, 2));
}

TEST_F(SessionTest, WhatOthersGaveIsCountedAsBackwardsAre) {
  SessionWords& words = session_->words();
  words.CountBackward();
  words.CountBackward();
  words.PublishOthersGave(1);
  EXPECT_EQ(page().others_gave, TimelineValue(kEpoch, 2));
  words.PublishOthersGave(0);
  EXPECT_EQ(page().others_gave, TimelineValue(kEpoch, 2)) << "it only grows";
  words.EndStepBackwards();
  words.PublishOthersGave(0);
  EXPECT_EQ(page().others_gave, TimelineValue(kEpoch, 3));
  EXPECT_EQ(words.BackwardOfStep(2), 0);
  EXPECT_EQ(words.BackwardOfStep(3), 1);
  EXPECT_LT(words.BackwardOfStep(1), 0) << "of an earlier step";
}

TEST_F(SessionTest, ALaterEpochLetsEveryWaiterGo) {
  session_->words().PublishVersion(4);
  EXPECT_EQ(page().version, TimelineValue(kEpoch, 4));
  session_->Poison(kEpoch + 1);
  for (const TimelineWord* word :
       {&page().epoch, &page().version, &page().consumed, &page().reduced, &page().hand_ins}) {
    EXPECT_EQ(TimelineEpoch(*word), kEpoch + 1);
  }
}

TEST_F(SessionTest, ATraceThatClaimsTooMuchIsReadNoMore) {
  std::vector<TraceRecord> records;
  client_.page().trace_written = 2;
  EXPECT_TRUE(session_->trace().Take(1, &records));
  EXPECT_EQ(records.size(), 1u);
  EXPECT_EQ(page().trace_taken, 1u);
  EXPECT_EQ(session_->trace().Drop(), 1u);
  client_.page().trace_written = 2 + kTraceRecords + 1;
  EXPECT_FALSE(session_->trace().Take(1, &records));
  session_->trace().SetTracing(true);
  EXPECT_EQ(page().tracing, 0u);
}

}  // namespace
}  // namespace shardd
