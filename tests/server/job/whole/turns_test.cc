// How long a job may keep the loop: commands of its rings for a turn, ranks one after the other.

#include "gmock/gmock.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

class TurnsTest : public JobCoreTest {
 protected:
  // So many commands in the rank's ring.
  void Fill(int rank, uint64_t count) {
    OnLoop([&] {
      const SessionLayout layout = MakeSessionLayout(*plan_);
      const SessionMemoryView view(job_->sessions()[rank].get()->memory()->memory->data(), layout.ring_offset_bytes,
                                   layout.masks_offset_bytes);
      for (uint64_t i = 0; i < count; ++i) {
        CommandRecord record = {};
        record.opcode = i % 2 == 0 ? Opcode::kUnshard : Opcode::kReshard;
        record.arg0 = v1::PHASE_FORWARD;
        record.sequence = i;
        view.record(i) = record;
      }
      view.page().submitted.store(TimelineValue(job_->committed().epoch(), count));
    });
  }
  std::vector<uint64_t> PollUntilTime(absl::Time until) {
    std::vector<uint64_t> executed;
    OnLoop([&] {
      const uint64_t before[] = {job_->sessions()[0].get()->commands, job_->sessions()[1].get()->commands};
      job_->PollRings(until);
      for (int rank = 0; rank < kRanks; ++rank)
        executed.push_back(job_->sessions()[rank].get()->commands - before[rank]);
    });
    return executed;
  }
};

TEST_F(TurnsTest, TurnsEndWithACommandAndTheNextRankFollows) {
  Fill(0, 10);
  Fill(1, 4);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(PollUntilTime(absl::InfinitePast()), ElementsAre(1, 0));
    EXPECT_THAT(PollUntilTime(absl::InfinitePast()), ElementsAre(0, 1));
  }
  EXPECT_THAT(PollUntilTime(absl::InfiniteFuture()), ElementsAre(7, 1));
}

TEST_F(TurnsTest, ABatchOfTheStreamResumesWhereItsTurnEnded) {
  v1::CommandBatch batch;
  for (int i = 0; i < 6; ++i) {
    v1::Command& command = *batch.add_commands();
    if (i % 2 == 0) {
      command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    } else {
      command.mutable_reshard()->set_group(0);
    }
  }
  OnLoop([&] {
    Session* const session = job_->sessions()[0].get();
    EXPECT_EQ(job_->commands().ExecuteFromStream(session, batch, 0, absl::InfinitePast()), 1);
    EXPECT_EQ(job_->commands().ExecuteFromStream(session, batch, 1, absl::InfinitePast()), 2);
    EXPECT_EQ(job_->commands().ExecuteFromStream(session, batch, 2), 6);
  });
}

}  // namespace
}  // namespace shardd
