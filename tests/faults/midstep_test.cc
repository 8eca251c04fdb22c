// Sessions that leave, or go wrong, in the middle of a step: what was begun is dropped, what was decided is committed.

#include <string>

#include "absl/time/clock.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

namespace shardd::faults {
namespace {

using testing::PollUntil;

class MidStep : public BadInput {
 protected:
  // One forward and backward of one group, as far as `last`.
  void Begin(RawClient& client, Opcode last) {
    const CommandRecord records[] = {Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD),
                                     Record(Opcode::kSubmitGradients, 1), Record(Opcode::kReshard, 1),
                                     Record(Opcode::kBackwardDone, 0, 0)};
    for (const CommandRecord& record : records) {
      client.Send(record);
      if (record.opcode == last) break;
    }
    ASSERT_TRUE(client.Consumed());
  }

  void DetachAndAwaitTheAnswer(RawClient& client) {
    v1::SessionRequest request;
    request.mutable_detach()->set_finished(false);
    ASSERT_TRUE(client.stream().Write(request));
    v1::SessionEvent event;
    do {
      event = client.stream().Read();
    } while (event.has_committed() || event.has_waiting());
    EXPECT_TRUE(event.has_detached()) << event.ShortDebugString();
  }
};

class DetachAfter : public MidStep, public ::testing::WithParamInterface<Opcode> {};

INSTANTIATE_TEST_SUITE_P(Commands, DetachAfter,
                         ::testing::Values(Opcode::kUnshard, Opcode::kSubmitGradients, Opcode::kReshard,
                                           Opcode::kBackwardDone),
                         [](const auto& info) {
                           switch (info.param) {
                             case Opcode::kUnshard:
                               return "Unshard";
                             case Opcode::kSubmitGradients:
                               return "SubmitGradients";
                             case Opcode::kReshard:
                               return "Reshard";
                             default:
                               return "BackwardDone";
                           }
                         });

TEST_P(DetachAfter, DropsWhatWasBegun) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    ASSERT_NO_FATAL_FAILURE(Begin(client, GetParam()));
    DetachAndAwaitTheAnswer(client);
  }
  ExpectJobIntact();
}

TEST_F(MidStep, DetachAfterStepWaitsForTheCommit) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    ASSERT_NO_FATAL_FAILURE(Begin(client, Opcode::kBackwardDone));
    SendStep(client, GoodStep());
    DetachAndAwaitTheAnswer(client);
  }
  EXPECT_EQ(Job().committed_step(), 6);
  EXPECT_EQ(Job().attached_ranks(), 0);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_WAITING);
  ExpectServesOthers();
}

// A job large enough that its update takes a while, in which the rank then does what it must not. (Where the machine
// lets the update end first, what follows is just as true.)
class DuringCommit : public MidStep {
 protected:
  static constexpr int64_t kNumel = 8 << 20;

  void SetUp() override { StartDaemon(); }

  void EnterLargeJob(RawClient& client) {
    v1::JobSpec spec = SpecOf({{"name", "large"}, {"world", "1"}, {"grace_ms", "60000"}});
    SetShape(spec, {kNumel});
    ASSERT_TRUE(client.Enter(spec, 0).ok());
    client.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(PollUntil([this] { return HasEvent("large", "parameters", "version 1"); }));
    client.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    client.Send(Record(Opcode::kSubmitGradients, 0));
    client.Send(Record(Opcode::kReshard, 0));
    client.Send(Record(Opcode::kBackwardDone, 0, 0));
    // Step is then decided at once.
    ASSERT_TRUE(
        PollUntil([&] { return client.daemon_page().reduced.load() >= TimelineValue(client.session().epoch(), 1); }));
  }
  // Until the daemon has taken Step, and so begun to update: no sleep, the update is short.
  void SendStepAndAwaitItsDecision(RawClient& client) {
    SendStep(client, GoodStep());
    const absl::Time end = absl::Now() + testing::kLimit;
    while (!client.HasConsumed() && absl::Now() < end) {
    }
    ASSERT_TRUE(client.HasConsumed());
  }
  // The step is there, then the session has ended with what it did.
  void ExpectCommittedThenRefused(RawClient& client, absl::StatusCode code, const std::string& text) {
    v1::SessionEvent event = client.stream().Read();
    EXPECT_TRUE(event.has_committed()) << event.ShortDebugString();
    EXPECT_EQ(event.committed().step(), 1);
    ExpectStatus(client.stream().End(), code, text);
    EXPECT_EQ(Job("large").committed_step(), 1);
    EXPECT_EQ(Job("large").attached_ranks(), 0);
    ExpectServesOthers();
  }
};

TEST_F(DuringCommit, AHostileSubmittedWordEndsTheSessionAfterTheCommit) {
  RawClient client(socket());
  ASSERT_NO_FATAL_FAILURE(EnterLargeJob(client));
  ASSERT_NO_FATAL_FAILURE(SendStepAndAwaitItsDecision(client));
  client.Announce(TimelineValue(client.session().epoch(), uint64_t{1} << 39));
  ExpectCommittedThenRefused(client, absl::StatusCode::kInvalidArgument, "out of range");
}

TEST_F(DuringCommit, AWriteOfParametersEndsTheSessionAfterTheCommit) {
  RawClient client(socket());
  ASSERT_NO_FATAL_FAILURE(EnterLargeJob(client));
  ASSERT_NO_FATAL_FAILURE(SendStepAndAwaitItsDecision(client));
  client.Send(Record(Opcode::kWriteParameters, 0, 0, 1));
  ExpectCommittedThenRefused(client, absl::StatusCode::kFailedPrecondition, "before version 1");
}

TEST_F(DuringCommit, TheEndOfTheStreamWaitsForTheCommit) {
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterLargeJob(client));
    ASSERT_NO_FATAL_FAILURE(SendStepAndAwaitItsDecision(client));
  }
  ASSERT_TRUE(PollUntil([this] { return Job("large").attached_ranks() == 0; }));
  EXPECT_EQ(Job("large").committed_step(), 1);
  ExpectServesOthers();
}

}  // namespace
}  // namespace shardd::faults
