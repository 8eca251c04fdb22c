#include "client/c/attachment/step_ledger.h"

#include <gtest/gtest.h>

#include "client/c/host/interrupt.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"
#include "client/c/session/word_waits.h"

namespace shardd {
namespace {

constexpr uint64_t kEpoch = 3;

class StepLedgerTest : public ::testing::Test {
 protected:
  StepLedgerTest() {
    v1::AttachRankResponse attach;
    attach.set_version(7);
    attach.set_committed_step(5);
    attach.set_trainer_state("five");
    ledger_.Reset(attach);
    Publish(7, 0);
  }
  void Publish(uint64_t version, uint64_t passes) {
    page_.version.store(TimelineValue(kEpoch, version));
    page_.passes.store(TimelineValue(kEpoch, passes));
  }
  void Retire() { ledger_.Retire(waits_, page_); }

  // Never mapped nor opened: waits that are over look at the word alone.
  SessionMemory memory_{kEpoch, 0};
  SessionLife life_{kEpoch, 0, Interrupt::Never(), memory_};
  WordWaits waits_{life_, memory_, absl::Seconds(1)};
  DaemonPage page_ = {};
  StepLedger ledger_;
};

TEST_F(StepLedgerTest, BeginsAtWhatTheAttachBrought) {
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 5);
  EXPECT_EQ(ledger_.expected_version(), 7u);
  EXPECT_EQ(ledger_.running_step(), 6);
  EXPECT_EQ(ledger_.trainer_state(), "five");
}

TEST_F(StepLedgerTest, StepsAreCommittedWithTheirVersions) {
  EXPECT_EQ(ledger_.StepSent("six"), 6);
  EXPECT_EQ(ledger_.StepSent("seven"), 7);
  EXPECT_EQ(ledger_.expected_version(), 9u);
  EXPECT_EQ(ledger_.running_step(), 8);
  Publish(8, 0);
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 6);
  EXPECT_EQ(ledger_.trainer_state(), "six");
  EXPECT_EQ(ledger_.running_step(), 8);
  Publish(9, 0);
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 7);
  EXPECT_EQ(ledger_.trainer_state(), "seven");
}

TEST_F(StepLedgerTest, APassCommitsItsStepWhenItHasBegun) {
  ledger_.PassSent(/*stepped=*/true, "six");
  EXPECT_TRUE(ledger_.entering_pass());
  ledger_.PassEntered();
  EXPECT_FALSE(ledger_.entering_pass());
  Retire();
  EXPECT_TRUE(ledger_.pass_begins());
  EXPECT_EQ(ledger_.committed_step(), 5);
  EXPECT_EQ(ledger_.running_step(), 7);
  Publish(8, 1);
  Retire();
  EXPECT_FALSE(ledger_.pass_begins());
  EXPECT_EQ(ledger_.committed_step(), 6);
  EXPECT_EQ(ledger_.expected_version(), 8u);
  EXPECT_TRUE(ledger_.stream_awaits_expected());
  EXPECT_EQ(ledger_.trainer_state(), "six");
}

TEST_F(StepLedgerTest, APassWithoutAStepKeepsTheTrainerState) {
  ledger_.PassSent(/*stepped=*/false, "");
  ledger_.PassEntered();
  Publish(8, 1);
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 5);
  EXPECT_EQ(ledger_.trainer_state(), "five");
}

TEST_F(StepLedgerTest, WordsOfALaterEpochCommitNothing) {
  ledger_.StepSent("six");
  page_.version.store(TimelineValue(kEpoch + 1, 8));
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 5);
}

TEST_F(StepLedgerTest, AnAbortVoidsWhatWasSent) {
  ledger_.StepSent("six");
  ledger_.PassSent(/*stepped=*/true, "seven");
  ledger_.PassEntered();
  v1::SessionEvent::Aborted aborted;
  aborted.set_committed_step(4);
  aborted.set_trainer_state("four");
  ledger_.Abort(aborted);
  Publish(9, 1);
  Retire();
  EXPECT_EQ(ledger_.committed_step(), 4);
  EXPECT_EQ(ledger_.trainer_state(), "four");
}

}  // namespace
}  // namespace shardd
