#include "server/job/step/committed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/storage/journal.h"
#include "server/storage/take_up_log.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

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

  const TakeUpLog& KeepIn(std::unique_ptr<TakeUpLog> log) {
    const TakeUpLog& kept = *log;
    committed_->KeepIn(std::move(log));
    return kept;
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

TEST_F(CommittedTest, WhatIsGoingBackIsNeverTakenUpByOthers) {
  using Counts = TakeUpLog::Counts;
  const TakeUpLog& left = KeepIn(*TakeUpLog::Create({.place_bytes = 4096, .ranks = 2}));
  committed_->CommitVersion();
  EXPECT_EQ(left.Read()->counts, Counts::kShards);
  committed_->CountSnapshot(0, {"a", "b"});  // ranks hand in
  EXPECT_EQ(left.Read()->counts, Counts::kSnapshot);
  committed_->EndEpoch();
  committed_->GoBack(0, {"a", "b"});
  EXPECT_EQ(left.Read()->counts, Counts::kSnapshot) << "the shards are not back yet";
  committed_->CommitVersion();
  EXPECT_EQ(left.Read()->counts, Counts::kShards);
  EXPECT_EQ(left.Read()->header.epoch, committed_->epoch());
}

// A step that is decided completes in its epoch, whoever does it.
TEST_F(CommittedTest, AClosedJobIsLeftUntouchedUnlessItsCustodyEnds) {
  const TakeUpLog& left = KeepIn(*TakeUpLog::Create({.place_bytes = 4096, .ranks = 2}));
  committed_->CommitVersion();
  const uint64_t epoch = committed_->epoch();
  committed_->EndLastEpoch();
  EXPECT_EQ(committed_->epoch(), epoch + 1);
  EXPECT_EQ(left.Read()->header.epoch, epoch);
  committed_->CommitVersion();  // of work that was under way
  EXPECT_EQ(left.Read()->header.version, 1u);
  EXPECT_FALSE(committed_->custody_ended());
  committed_->EndCustody();
  EXPECT_EQ(left.Read()->header.version, 0u) << "there is nothing to take up";
  EXPECT_TRUE(committed_->custody_ended());
}

TEST_F(CommittedTest, WhatAnotherDaemonHasLeftIsNotLostMeanwhile) {
  auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 2});
  const TakeUpLog& left = *log;
  v1::CommittedRecord facts;
  ASSERT_TRUE(log->Commit(facts, {3, 7, 9}).ok());
  committed_->KeepIn(std::move(log));
  EXPECT_EQ(left.Read()->header.version, 9u) << "a daemon that is killed here leaves it as it was";
  CommittedFacts taken;
  taken.epoch = 4;
  taken.version = 9;
  taken.step = 7;
  taken.step_counts = {7, 7};
  taken.trainer_states = {"a", "b"};
  taken.in_snapshot = true;
  committed_->TakeOver(taken);
  EXPECT_EQ(left.Read()->counts, TakeUpLog::Counts::kSnapshot);
  EXPECT_EQ(left.Read()->header.epoch, 4u);
}

TEST_F(CommittedTest, AVersionSaysInWhichAttemptItWasMade) {
  const TakeUpLog& left = KeepIn(*TakeUpLog::Create({.place_bytes = 4096, .ranks = 2}));
  committed_->AgreesOnValues(60);
  EXPECT_EQ(committed_->generation(), 0u) << "it is not committed yet";
  committed_->CommitValues();
  EXPECT_EQ(committed_->generation(), 60u);
  EXPECT_EQ(left.Read()->facts.generation(), 60u);
  v1::DecidedStepRecord record;
  record.set_step(1);
  record.set_generation(70);
  ASSERT_TRUE(committed_->Decide(record).ok());
  EXPECT_EQ(committed_->next_generation(), 70u);
  committed_->CommitStep({true, true}, {"a", "b"});
  EXPECT_EQ(committed_->generation(), 70u);
  committed_->CommitTrainerStates();
  EXPECT_EQ(left.Read()->facts.generation(), 70u);
  EXPECT_TRUE(journal_->ReadDecided(1).ok());
  left.update(1).Begin(/*step=*/1);
  committed_->Lose();
  EXPECT_FALSE(left.update(1).is_of(1)) << "of such a step nothing is made here";
  EXPECT_EQ(committed_->generation(), 0u);
  EXPECT_FALSE(journal_->ReadDecided(1).ok()) << "a step of that number may come that was decided in another attempt";
  committed_->Restore(7, 9, {7, 6}, {"c", "d"}, /*generation=*/80);
  EXPECT_EQ(left.Read()->facts.generation(), 80u);
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
  facts.generation = 50;
  committed_->TakeOver(facts);
  EXPECT_EQ(committed_->step_counts()[1], 1);
  EXPECT_EQ(committed_->generation(), 50u);
  ExpectHeaderSaysTheSame();
}

// Writes down what it hears.
class Hearer final : public JobPart {
 public:
  Hearer(std::string name, std::vector<std::string>* heard) : name_(std::move(name)), heard_(heard) {}
  void StepCommitted() override { heard_->push_back(name_ + " step"); }
  void ValuesCommitted() override { heard_->push_back(name_ + " values"); }
  void VersionCommitted() override { heard_->push_back(name_ + " version"); }
  void Forget(int rank) override { heard_->push_back(absl::StrCat(name_, " forgets ", rank)); }
  void EndEpoch() override { heard_->push_back(name_ + " epoch"); }
  absl::Status CheckMayBegin(const std::string& what) override {
    return may_begin ? absl::OkStatus() : absl::AbortedError(what + name_);
  }
  bool may_begin = true;

 private:
  const std::string name_;
  std::vector<std::string>* const heard_;
};

TEST_F(CommittedTest, PartsHearOfEachMomentInTheirOrder) {
  std::vector<std::string> heard;
  Hearer a("a", &heard);
  Hearer b("b", &heard);
  JobParts parts({&a, &b});
  committed_->Tell(&parts);
  committed_->CommitValues();
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre("a values", "b values", "a version", "b version"));
  committed_->CommitStep({true, true}, {"", ""});
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre("a step", "b step", "a version", "b version"));
  committed_->CommitVersion();
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre("a version", "b version"));
  committed_->EndEpoch();
  EXPECT_THAT(heard, ElementsAre()) << "sessions are still there";
  parts.EndEpoch();
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre("a epoch", "b epoch"));
  parts.Forget(1);
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre("a forgets 1", "b forgets 1"));
}

TEST_F(CommittedTest, NoSessionBeginsBeforeAllPartsMay) {
  std::vector<std::string> heard;
  Hearer a("a", &heard);
  Hearer b("b", &heard);
  JobParts parts({&a, &b});
  EXPECT_TRUE(parts.CheckMayBegin("attach: ").ok());
  b.may_begin = false;
  EXPECT_EQ(parts.CheckMayBegin("attach: ").message(), "attach: b");
}

}  // namespace
}  // namespace shardd
