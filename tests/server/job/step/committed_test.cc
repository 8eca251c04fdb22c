#include "server/job/step/committed.h"

#include <gtest/gtest.h>

#include <utility>

namespace shardd {
namespace {

class CommittedTest : public ::testing::Test {
 protected:
  CommittedTest() {
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(/*place_bytes=*/4096);
    EXPECT_TRUE(journal.ok()) << journal.status();
    journal_ = journal->get();
    committed_ = std::make_unique<Committed>("job", /*params=*/2, /*ranks=*/2, *std::move(journal));
  }
  void ExpectHeaderSaysTheSame() {
    const absl::StatusOr<Journal::Header> header = journal_->ReadHeader();
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->epoch, committed_->epoch());
    EXPECT_EQ(header->version, committed_->version());
    EXPECT_EQ(header->committed_step, committed_->step());
  }

  Journal* journal_ = nullptr;
  std::unique_ptr<Committed> committed_;
};

TEST_F(CommittedTest, AStepIsAVersionToo) {
  committed_->CommitVersion();
  committed_->CommitStep({true, false}, {"a", "b"});
  EXPECT_EQ(committed_->version(), 2u);
  EXPECT_EQ(committed_->step(), 1);
  EXPECT_EQ(committed_->step_counts(), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(committed_->trainer_states()[1], "b");
  ExpectHeaderSaysTheSame();
}

TEST_F(CommittedTest, SharedCountsNeverChange) {
  committed_->CommitStep({true, false}, {"a", "b"});
  const auto shared = committed_->ShareStepCounts();
  committed_->CommitStep({true, true}, {"a", "b"});
  committed_->SetStepCount(0, 7);
  EXPECT_EQ(*shared, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(committed_->step_counts(), (std::vector<int64_t>{7, 1}));
}

TEST_F(CommittedTest, TheHeaderFollowsEveryChange) {
  committed_->EndEpoch();
  ExpectHeaderSaysTheSame();
  committed_->CommitVersion();
  ExpectHeaderSaysTheSame();
  committed_->CommitStep({true, true}, {"a", "b"});
  committed_->GoBack(0, {"", ""});
  EXPECT_EQ(committed_->version(), 2u) << "the shards are not back yet";
  ExpectHeaderSaysTheSame();
  committed_->Restore(7, 9, {7, 6}, {"c", "d"});
  EXPECT_EQ(committed_->step(), 7);
  ExpectHeaderSaysTheSame();
  committed_->Lose();
  EXPECT_EQ(committed_->version(), 0u);
  EXPECT_EQ(committed_->epoch(), 2u) << "an epoch is never lost";
  ExpectHeaderSaysTheSame();
}

TEST_F(CommittedTest, WhatWasLostIsKnownUntilItIsBack) {
  committed_->Lose();
  EXPECT_FALSE(committed_->had_parameters()) << "there was nothing";
  committed_->CommitVersion();
  committed_->Lose();
  committed_->Lose();
  EXPECT_TRUE(committed_->had_parameters());
  committed_->Restore(1, 2, {1, 1}, {"a", "b"});
  EXPECT_FALSE(committed_->had_parameters());
}

TEST_F(CommittedTest, ASuccessorBeginsWhereTheOtherWas) {
  CommittedFacts facts;
  facts.epoch = 4;
  facts.version = 3;
  facts.step = 2;
  facts.step_counts = {2, 1};
  facts.trainer_states = {"a", "b"};
  committed_->TakeOver(facts);
  EXPECT_EQ(committed_->step_counts()[1], 1);
  ExpectHeaderSaysTheSame();
}

}  // namespace
}  // namespace shardd
