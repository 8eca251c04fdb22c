#include "server/job/command_intake.h"

#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The numbers that it was told.
class KeptWords final : public SessionStream {
 public:
  void Send(v1::SessionEvent event) override { last.MergeFrom(event.words()); }
  void Finish(absl::Status) override {}
  v1::SessionEvent::Words last;
};

class CommandIntakeTest : public FactsTest {
 protected:
  CommandIntakeTest() {
    Attach(0);
    Attach(1);
  }
  // So many commands in the rank's ring.
  void Fill(int rank, uint64_t count) {
    const SessionLayout& layout = sessions_[rank]->layout();
    const SessionMemoryView view(sessions_[rank]->memory()->memory->data(), layout.ring_offset_bytes,
                                 layout.masks_offset_bytes);
    for (uint64_t i = 0; i < count; ++i) {
      CommandRecord record = {};
      record.opcode = Opcode::kCommitParameters;
      record.sequence = i;
      view.record(i) = record;
    }
    view.page().submitted.store(TimelineValue(/*epoch=*/1, count));
  }
  static v1::CommandBatch Batch(int count) {
    v1::CommandBatch batch;
    for (int i = 0; i < count; ++i) batch.add_commands()->mutable_commit_parameters();
    return batch;
  }
  bool Poll(absl::Time until = absl::InfiniteFuture()) { return intake_.PollRings(until, /*found=*/false); }

  std::vector<int> executed_;  // whose commands
  std::function<absl::Status(Session*)> execute_ = [](Session*) { return absl::OkStatus(); };
  CommandIntake intake_{&sessions_, &committed_, &job_, [this](Session* session, const RankCommand&) {
                          executed_.push_back(session->rank());
                          return execute_(session);
                        }};
};

TEST_F(CommandIntakeTest, RingsAreEmptiedRankByRank) {
  EXPECT_FALSE(Poll());
  Fill(0, 2);
  Fill(1, 1);
  EXPECT_TRUE(Poll());
  EXPECT_THAT(executed_, ElementsAre(0, 0, 1));
  EXPECT_FALSE(Poll());
}

TEST_F(CommandIntakeTest, AnEndedTurnGoesOnWithTheNextRank) {
  Fill(0, 2);
  Fill(1, 2);
  for (int turn = 0; turn < 4; ++turn) EXPECT_TRUE(Poll(absl::InfinitePast()));
  EXPECT_THAT(executed_, ElementsAre(0, 1, 0, 1));
}

TEST_F(CommandIntakeTest, AnErrorEndsTheEpochAndNothingElseRuns) {
  Fill(0, 2);
  Fill(1, 1);
  execute_ = [](Session*) { return absl::FailedPreconditionError("must not"); };
  job_.when_failed = [this] { committed_.EndEpoch(); };
  EXPECT_TRUE(Poll());
  EXPECT_EQ(job_.failure().message(), "must not");
  EXPECT_THAT(executed_, ElementsAre(0));
  EXPECT_FALSE(sessions_[0]->broken);
}

TEST_F(CommandIntakeTest, ASessionAwaitingTheEpochsEndExecutesNothing) {
  Fill(0, 2);
  Fill(1, 1);
  execute_ = [](Session* session) {
    return session->rank() == 0 ? absl::FailedPreconditionError("must not") : absl::OkStatus();
  };
  EXPECT_TRUE(Poll());
  EXPECT_THAT(executed_, ElementsAre(0, 1));
  EXPECT_TRUE(sessions_[0]->broken);
  EXPECT_EQ(intake_.ExecuteFromStream(sessions_[0].get(), Batch(2)), 2) << "nothing is left to execute";
  EXPECT_FALSE(Poll());
}

TEST_F(CommandIntakeTest, AHeldSessionGoesOnWhenReleased) {
  execute_ = [](Session* session) {
    session->held = true;
    return absl::OkStatus();
  };
  EXPECT_EQ(intake_.ExecuteFromStream(sessions_[0].get(), Batch(3)), 1);
  EXPECT_FALSE(sessions_[0]->consumes_when_released);
  Fill(1, 2);
  EXPECT_TRUE(Poll());
  EXPECT_TRUE(sessions_[1]->consumes_when_released);
  EXPECT_FALSE(Poll());
  EXPECT_THAT(executed_, ElementsAre(0, 1));
}

TEST_F(CommandIntakeTest, OnlyATellingSessionsStreamIsCountedAsConsumed) {
  const auto stream = std::make_shared<KeptWords>();
  sessions_[0]->stream = stream;
  Fill(0, 2);
  loop_.RunAndWait([&] {  // where what is told is sent
    EXPECT_TRUE(sessions_[0]->TellWords(&loop_, /*version=*/1).ok());
    EXPECT_FALSE(Poll()) << "its ring is not read";
    EXPECT_EQ(intake_.ExecuteFromStream(sessions_[0].get(), Batch(3)), 3);
    EXPECT_EQ(intake_.ExecuteFromStream(sessions_[1].get(), Batch(3)), 3);
  });
  loop_.RunAndWait([] {});
  EXPECT_EQ(stream->last.consumed(), 3u);
  EXPECT_EQ(sessions_[1]->memory()->daemon_page->At<DaemonPage>(0)->consumed, TimelineValue(1, 0));
}

TEST_F(CommandIntakeTest, ATellingSessionsHeldCommandIsConsumedWhenReleased) {
  const auto stream = std::make_shared<KeptWords>();
  sessions_[0]->stream = stream;
  execute_ = [](Session* session) {
    session->held = true;
    return absl::OkStatus();
  };
  loop_.RunAndWait([&] {
    EXPECT_TRUE(sessions_[0]->TellWords(&loop_, /*version=*/1).ok());
    EXPECT_EQ(intake_.ExecuteFromStream(sessions_[0].get(), Batch(2)), 1);
  });
  EXPECT_TRUE(sessions_[0]->consumes_when_released);
  loop_.RunAndWait([] {});
  EXPECT_EQ(stream->last.consumed(), 0u);
}

TEST_F(CommandIntakeTest, ASessionThatEndsWithItsCommandExecutesNoOther) {
  Fill(0, 2);
  std::unique_ptr<Session> gone;
  execute_ = [&](Session* session) {
    gone = sessions_.Take(session->rank());
    return absl::OkStatus();
  };
  EXPECT_TRUE(Poll());
  EXPECT_THAT(executed_, ElementsAre(0));
  EXPECT_EQ(intake_.ExecuteFromStream(sessions_[1].get(), Batch(2)), 2);
  EXPECT_THAT(executed_, ElementsAre(0, 1));
}

TEST_F(CommandIntakeTest, WhatDoesNotDecodeIsAnError) {
  v1::CommandBatch batch;
  batch.add_commands();
  EXPECT_EQ(intake_.ExecuteFromStream(sessions_[0].get(), batch), 1);
  EXPECT_EQ(job_.failed.size(), 1u);
  EXPECT_THAT(executed_, IsEmpty());
}

}  // namespace
}  // namespace shardd
