#include "client/c/session/told_words.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "client/c/session/session_memory.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

constexpr uint64_t kEpoch = 3;

class ToldWordsTest : public ::testing::Test {
 protected:
  ToldWordsTest() {
    SpecBuilder builder(1);
    builder.Param(0, "w", {8});
    builder.Param(builder.AddSharded(0, "a"), "w", {8});
    plan_ = builder.Plan();
    attach_.set_tells_words(true);
    attach_.set_slots_apart(true);
  }
  ToldWords Make() {
    absl::StatusOr<ToldWords> words = memory_.MakeOwnWords(attach_, plan_, /*protocol_version=*/13, "daemon 1");
    EXPECT_TRUE(words.ok()) << words.status();
    return *std::move(words);
  }
  const DaemonPage& page() const { return memory_.page(); }

  ShardPlan plan_;
  v1::AttachRankResponse attach_;
  SessionMemory memory_{kEpoch, 0};
};

TEST_F(ToldWordsTest, WordsBeginInTheSessionsEpoch) {
  (void)Make();
  EXPECT_EQ(page().magic, DaemonPage::kMagic);
  EXPECT_EQ(page().protocol_version, 13u);
  EXPECT_EQ(page().version, TimelineValue(kEpoch, 0));
  EXPECT_EQ(memory_.daemon_page().group(1).unsharded, TimelineValue(kEpoch, 0));
  EXPECT_EQ(memory_.daemon_page().slot(0).released, TimelineValue(kEpoch, 0));
}

TEST_F(ToldWordsTest, WhatAnEventDoesNotNameStays) {
  const ToldWords words = Make();
  v1::SessionEvent::Words told;
  told.set_version(4);
  told.set_consumed(9);
  (*told.mutable_groups())[1].set_unsharded(2);
  (*told.mutable_groups())[1].set_pool_offset_bytes(64);
  (*told.mutable_slots())[0].set_released(1);
  words.Store(told);
  told.Clear();
  told.set_consumed(10);
  words.Store(told);
  EXPECT_EQ(page().version, TimelineValue(kEpoch, 4));
  EXPECT_EQ(page().consumed, TimelineValue(kEpoch, 10));
  EXPECT_EQ(memory_.daemon_page().group(1).unsharded, TimelineValue(kEpoch, 2));
  EXPECT_EQ(memory_.daemon_page().group(1).pool_offset_bytes, 64);
  EXPECT_EQ(memory_.daemon_page().group(0).unsharded, TimelineValue(kEpoch, 0));
  EXPECT_EQ(memory_.daemon_page().slot(0).released, TimelineValue(kEpoch, 1));
  EXPECT_EQ(memory_.daemon_page().slot(0).issued, TimelineValue(kEpoch, 0));
}

TEST_F(ToldWordsTest, WordsNeverDecreaseNorLeaveThePage) {
  const ToldWords words = Make();
  v1::SessionEvent::Words told;
  told.set_version(4);
  words.Store(told);
  told.set_version(3);
  for (const int index : {-1, 2, 1 << 30}) {
    (*told.mutable_groups())[index].set_unsharded(7);
    (*told.mutable_slots())[index].set_released(7);
  }
  words.Store(told);
  EXPECT_EQ(page().version, TimelineValue(kEpoch, 4));
}

TEST_F(ToldWordsTest, AStoreWakesWhoeverSleepsOnTheWord) {
  const ToldWords words = Make();
  WaitResult result = WaitResult::kTimedOut;
  std::thread waiter([&] {
    result = TimelineWait(page().passes, TimelineValue(kEpoch, 1), memory_.view().page().waiting, absl::Seconds(20));
  });
  while (memory_.view().page().waiting == 0) std::this_thread::yield();
  v1::SessionEvent::Words told;
  told.set_passes(1);
  words.Store(told);
  waiter.join();
  EXPECT_EQ(result, WaitResult::kReached);
}

TEST_F(ToldWordsTest, ALaterEpochLetsEveryWaiterGo) {
  const ToldWords words = Make();
  words.Poison(kEpoch);
  EXPECT_EQ(page().epoch, TimelineValue(kEpoch, 0));
  v1::SessionEvent::Words told;
  told.set_epoch(kEpoch + 1);
  words.Store(told);
  const std::array<const TimelineWord*, 9> all = {&page().epoch,   &page().version,  &page().consumed,
                                                  &page().reduced, &page().reducing, &page().full_params,
                                                  &page().passes,  &page().hand_ins, &page().passes_issued};
  for (const TimelineWord* word : all) EXPECT_EQ(*word, TimelineValue(kEpoch + 1, 0));
  EXPECT_EQ(memory_.daemon_page().group(1).issued, TimelineValue(kEpoch + 1, 0));
  EXPECT_EQ(memory_.daemon_page().slot(0).released, TimelineValue(kEpoch + 1, 0));
}

TEST_F(ToldWordsTest, WhatCannotBeToldIsRefusedWithItsRemedy) {
  const auto refused = [this](const ShardPlan& plan, const std::string& remedy) {
    const absl::StatusOr<ToldWords> words = memory_.MakeOwnWords(attach_, plan, 13, "daemon 1");
    EXPECT_EQ(words.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(words.status().message()), ::testing::HasSubstr(remedy));
  };
  attach_.set_tells_words(false);
  refused(plan_, "upgrade it");
  attach_.set_tells_words(true);
  attach_.set_slots_apart(false);
  refused(plan_, "the gradient slots lie in the session's memory");
  attach_.set_slots_apart(true);
  ShardPlan sums = plan_;
  sums.config.set_trainer_sums(true);
  refused(sums, "trainerSums false");
}

}  // namespace
}  // namespace shardd
