#include "client/c/session/word_waits.h"

#include <gtest/gtest.h>

#include "client/c/host/interrupt.h"
#include "client/c/session/session_life.h"
#include "client/c/session/session_memory.h"

namespace shardd {
namespace {

constexpr uint64_t kEpoch = 3;

class WordWaitsTest : public ::testing::Test {
 protected:
  void Publish(uint64_t reducing, uint64_t reduced, uint64_t epoch = kEpoch) {
    page_.reducing.store(TimelineValue(epoch, reducing));
    page_.reduced.store(TimelineValue(epoch, reduced));
  }

  // Never mapped nor opened: only words are looked at.
  SessionMemory memory_{kEpoch, 0};
  SessionLife life_{kEpoch, 0, Interrupt::Never(), memory_};
  WordWaits waits_{life_, memory_, absl::Seconds(1)};
  DaemonPage page_ = {};
};

TEST_F(WordWaitsTest, WhatIsReducedNobodyDelays) {
  Publish(/*reducing=*/4, /*reduced=*/2);
  EXPECT_EQ(waits_.Reducing(page_), 4u);
  Publish(/*reducing=*/1, /*reduced=*/2);  // woken between the two stores
  EXPECT_EQ(waits_.Reducing(page_), 2u);
}

TEST_F(WordWaitsTest, WordsOfAnotherEpochSayNothing) {
  Publish(/*reducing=*/4, /*reduced=*/2, kEpoch + 1);
  EXPECT_EQ(waits_.Reducing(page_), 0u);
}

}  // namespace
}  // namespace shardd
