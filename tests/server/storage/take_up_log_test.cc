#include "server/storage/take_up_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/versions/versions.h"
#include "server/storage/record_place.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/job/held_memory.h"

namespace shardd {
namespace {

constexpr int64_t kPlaceBytes = 4096;
constexpr TakeUpLog::Sizes kSizes = {kPlaceBytes, /*ranks=*/2, /*promises=*/true};

class TakeUpLogTest : public ::testing::Test {
 protected:
  // What the next daemon reads.
  absl::StatusOr<TakeUpLog::Left> Next() const {
    auto next = TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
    return next.ok() ? (*next)->Read() : next.status();
  }
  static v1::CommittedRecord Facts(int64_t count, const std::string& state) {
    v1::CommittedRecord facts;
    facts.add_step_counts(count);
    facts.add_trainer_states(state);
    return facts;
  }
  void Flip(int64_t offset) const {
    char byte = 0;
    ASSERT_EQ(pread(log_->fd(), &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(pwrite(log_->fd(), &byte, 1, offset), 1);
  }
  // What the newest record says of counts, which an older daemon refuses where it does not know it.
  uint32_t NewestCounts() const {
    uint32_t of_each[2] = {};
    uint64_t sequences[2] = {};
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(pread(log_->fd(), &of_each[i], sizeof(uint32_t), 64 * i + 48), 4);
      EXPECT_EQ(pread(log_->fd(), &sequences[i], sizeof(uint64_t), 64 * i + 8), 8);
    }
    return of_each[sequences[1] > sequences[0] ? 1 : 0];
  }
  const std::unique_ptr<TakeUpLog> log_ = *TakeUpLog::Create(kSizes);
};

TEST_F(TakeUpLogTest, NothingIsCommittedAtFirst) { EXPECT_EQ(Next()->header.version, 0u); }

TEST_F(TakeUpLogTest, AFormatOfALaterVersionIsRefusedByName) {
  ASSERT_TRUE(log_->Commit(Facts(3, "a"), {1, 2, 5}).ok());
  const uint32_t later = static_cast<uint32_t>(kTakeUpFormats.newest) + 1;
  ASSERT_EQ(pwrite(log_->fd(), &later, sizeof(later), 4), 4);  // of either header
  const absl::Status refused = Next().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), absl::StrCat("take-up log: this version of shardd does not read its format (got ", later,
                                            ", want ", kTakeUpFormats.Text(), "); start a newer one"));
}

TEST_F(TakeUpLogTest, TheLastCommitIsReadByAnotherDaemon) {
  ASSERT_TRUE(log_->Commit(Facts(3, "a"), {1, 2, 5}).ok());
  log_->CommitStep({1, 3, 6});
  EXPECT_TRUE(Next()->facts_in_journal);
  EXPECT_EQ(Next()->header.step, 3);
  ASSERT_TRUE(log_->Commit(Facts(4, "b"), {2, 3, 7}).ok());
  log_->SetVersion(9, 7);
  const TakeUpLog::Left left = *Next();
  EXPECT_EQ(left.header.epoch, 9u);
  EXPECT_EQ(left.header.version, 7u);
  EXPECT_FALSE(left.facts_in_journal);
  EXPECT_EQ(left.facts.trainer_states(0), "b");
  EXPECT_EQ(left.facts.step_counts(0), 4);
}

TEST_F(TakeUpLogTest, ATornHeaderLeavesTheOneBefore) {
  ASSERT_TRUE(log_->Commit(Facts(1, "first"), {1, 1, 1}).ok());   // sequence 2, at 0
  ASSERT_TRUE(log_->Commit(Facts(2, "second"), {1, 2, 2}).ok());  // sequence 3, at 64
  Flip(64 + 24);
  EXPECT_EQ(Next()->header.step, 1);
  EXPECT_EQ(Next()->facts.trainer_states(0), "first") << "the second has another place";
  Flip(24);
  EXPECT_EQ(Next().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(TakeUpLogTest, TheNextDaemonsHeaderIsNewerThanEarlierOnes) {
  for (int64_t step = 1; step < 6; ++step) log_->CommitStep({1, step, static_cast<uint64_t>(step)});
  auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
  ASSERT_TRUE(next->Commit(Facts(6, "next"), {2, 6, 6}).ok());
  EXPECT_EQ(Next()->header.step, 6);
  EXPECT_EQ(Next()->facts.trainer_states(0), "next");
}

TEST_F(TakeUpLogTest, TouchedLastsUntilTheNextCommit) {
  ASSERT_TRUE(log_->Commit(Facts(1, ""), {1, 1, 1}).ok());
  EXPECT_FALSE(Next()->touched);
  log_->Touch();
  log_->SetVersion(2, 1);
  EXPECT_TRUE(Next()->touched);
  log_->CommitStep({2, 2, 2});
  EXPECT_FALSE(Next()->touched);
}

TEST_F(TakeUpLogTest, ASnapshotCountsUntilShardsAreCommitted) {
  using Counts = TakeUpLog::Counts;
  ASSERT_TRUE(log_->Commit(Facts(1, "first"), {1, 1, 1}).ok());
  ASSERT_TRUE(log_->Commit(Facts(1, "taken"), {1, 4, 4}, Counts::kSnapshotBeingTaken).ok());
  EXPECT_EQ(Next()->counts, Counts::kSnapshotBeingTaken);
  log_->SetVersion(1, 5);
  log_->SnapshotTaken();
  log_->SetVersion(2, 9);
  const TakeUpLog::Left left = *Next();
  EXPECT_EQ(left.counts, Counts::kSnapshot);
  EXPECT_EQ(left.header.step, 4) << "the snapshot's";
  EXPECT_EQ(left.header.version, 9u);
  EXPECT_EQ(left.facts.trainer_states(0), "taken");
  log_->CommitStep({2, 5, 10});
  EXPECT_EQ(Next()->counts, Counts::kShards);
}

TEST_F(TakeUpLogTest, WhatIsBehindThePassIsSaidUntilTheSnapshotIsTaken) {
  using Counts = TakeUpLog::Counts;
  ASSERT_TRUE(log_->Commit(Facts(1, "taken"), {1, 4, 4}, Counts::kSnapshotBeingTaken).ok());
  EXPECT_FALSE(Next()->behind_pass);
  log_->SnapshotIsBehind();
  log_->SetVersion(1, 5);
  EXPECT_TRUE(Next()->behind_pass);
  log_->SnapshotTaken();
  EXPECT_FALSE(Next()->behind_pass);
  log_->SnapshotIsBehind();
  ASSERT_TRUE(log_->Commit(Facts(1, "next"), {1, 5, 6}, Counts::kSnapshotBeingTaken).ok());
  EXPECT_FALSE(Next()->behind_pass) << "all of the next is to be copied";
}

TEST_F(TakeUpLogTest, ASnapshotSaysWhetherItsShardsAreWhatPassesRead) {
  using Counts = TakeUpLog::Counts;
  ASSERT_TRUE(log_->Commit(Facts(1, "taken"), {1, 4, 4}, Counts::kSnapshotBeingTaken).ok());
  log_->SnapshotIsBehind();
  log_->SnapshotTaken(/*shards_in_copies=*/true);
  log_->SetVersion(2, 5);
  EXPECT_TRUE(Next()->shards_in_copies);
  EXPECT_EQ(Next()->counts, Counts::kSnapshot);
  log_->SnapshotTaken();
  EXPECT_FALSE(Next()->shards_in_copies);
  log_->SnapshotTaken(/*shards_in_copies=*/true);
  ASSERT_TRUE(log_->Commit(Facts(1, "next"), {1, 5, 6}, Counts::kSnapshotBeingTaken).ok());
  EXPECT_FALSE(Next()->shards_in_copies) << "passes are about to read something else";
}

// Between that and anything else that it writes it may die, too.
TEST_F(TakeUpLogTest, ADaemonThatGoesBackToASnapshotInCopiesLeavesItThere) {
  using Counts = TakeUpLog::Counts;
  ASSERT_TRUE(log_->Commit(Facts(1, "taken"), {1, 4, 4}, Counts::kSnapshotBeingTaken).ok());
  log_->SnapshotTaken(/*shards_in_copies=*/true);
  auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
  ASSERT_TRUE(next->Commit(Facts(1, "taken"), {2, 4, 4}, Counts::kSnapshot).ok());
  EXPECT_TRUE(Next()->shards_in_copies);
  next->CommitStep({2, 5, 5});
  EXPECT_FALSE(Next()->shards_in_copies) << "shards count";
}

// An older daemon would go back to shards that the snapshot does not have. It reads the logs of all other jobs.
TEST_F(TakeUpLogTest, FormatSaysWhetherASnapshotMayBeInCopies) {
  SpecBuilder builder;
  builder.config().set_trainers_never_write(false);
  builder.Param(0, "w", {8});
  EXPECT_EQ(TakeUpLog::FormatFor(builder.Plan(), {}), TakeUpLog::kOwnShards);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  builder.config().mutable_optimizer()->set_trainer_states(1);
  HeldMemory on_gpu;
  EXPECT_EQ(TakeUpLog::FormatFor(builder.Plan(), {}), TakeUpLog::kInCopies);
  EXPECT_EQ(TakeUpLog::FormatFor(builder.Plan(), {.memory = &on_gpu, .users = {}}), TakeUpLog::kOwnShards);
  builder.config().set_keep_every(2);
  EXPECT_EQ(TakeUpLog::FormatFor(builder.Plan(), {}), TakeUpLog::kOwnShards);
}

TEST_F(TakeUpLogTest, ItKeepsItsFormat) {
  for (const int format : {TakeUpLog::kOwnShards, TakeUpLog::kInCopies}) {
    const std::unique_ptr<TakeUpLog> log = *TakeUpLog::Create(kSizes, format);
    log->CommitStep({1, 1, 1});
    auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
    next->CommitStep({1, 2, 2});
    next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
    EXPECT_EQ(next->format(), format);
    EXPECT_EQ(next->Read()->header.step, 2);
  }
}

// Whoever has written that into a log of format 1 knew of it: no shards have to be stored where there is no memory for
// them.
TEST_F(TakeUpLogTest, OneThatSaysInCopiesMaySayItAgain) {
  for (const bool said : {false, true}) {
    const std::unique_ptr<TakeUpLog> log = *TakeUpLog::Create(kSizes, TakeUpLog::kOwnShards);
    ASSERT_TRUE(log->Commit(Facts(1, "taken"), {1, 4, 4}, TakeUpLog::Counts::kSnapshotBeingTaken).ok());
    EXPECT_FALSE(log->may_say_in_copies());
    log->SnapshotTaken(/*shards_in_copies=*/said);
    const auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
    EXPECT_EQ(next->may_say_in_copies(), said);
  }
}

TEST_F(TakeUpLogTest, CountsOfALaterVersionAreRefusedByName) {
  ASSERT_TRUE(log_->Commit(Facts(1, "taken"), {1, 4, 4}, TakeUpLog::Counts::kSnapshot).ok());  // sequence 2, at 0
  char header[56];
  ASSERT_EQ(pread(log_->fd(), header, sizeof(header), 0), 56);
  const uint32_t later = 33;
  std::memcpy(header + 48, &later, sizeof(later));
  const uint32_t crc = RecordCrc(header, 52);
  std::memcpy(header + 52, &crc, sizeof(crc));
  ASSERT_EQ(pwrite(log_->fd(), header, sizeof(header), 0), 56);
  const absl::Status refused = Next().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(),
            "take-up log: this version of shardd does not know what counts there (got 33, want at "
            "most 31); start a newer one");
}

// A daemon that takes back nothing where parameters are cut over nodes knows counts of 0 to 3.
TEST_F(TakeUpLogTest, ADaemonThatTakesNothingBackRefusesWhatIsBeingWritten) {
  const auto older_reads = [this] { return NewestCounts() <= 3; };
  using Counts = TakeUpLog::Counts;
  ASSERT_TRUE(log_->Commit(Facts(1, "first"), {1, 4, 4}, Counts::kSnapshot).ok());
  EXPECT_TRUE(older_reads());
  log_->SetWriting(true);
  EXPECT_FALSE(older_reads());
  log_->SetVersion(2, 4);
  EXPECT_FALSE(older_reads()) << "it is to be taken back yet";
  auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
  EXPECT_EQ(next->Read()->counts, Counts::kSnapshot);
  EXPECT_EQ(next->Read()->facts.trainer_states(0), "first");
  next->SetVersion(3, 4);
  EXPECT_FALSE(older_reads());
  next->SetWriting(false);
  EXPECT_TRUE(older_reads());
  EXPECT_EQ(Next()->counts, Counts::kSnapshot);
}

TEST_F(TakeUpLogTest, APromiseLastsUntilItsStepOrGenerationEnds) {
  v1::PromisedStepRecord promise;
  promise.set_generation(11);
  promise.set_step(2);
  ASSERT_TRUE(log_->Commit(Facts(1, ""), {1, 1, 1}).ok());
  EXPECT_FALSE(Next()->promised.has_value());
  ASSERT_TRUE(log_->Promise(promise).ok());
  log_->Touch();
  EXPECT_EQ(Next()->promised->generation(), 11u);
  log_->SetVersion(2, 1);
  EXPECT_FALSE(Next()->promised.has_value());
  ASSERT_TRUE(log_->Promise(promise).ok());
  log_->CommitStep({2, 2, 2});
  EXPECT_FALSE(Next()->promised.has_value());
  ASSERT_TRUE(log_->Promise(promise).ok());
  EXPECT_EQ(Next().status().code(), absl::StatusCode::kDataLoss) << "it is of another step";
}

// It would put back what the parts have changed, and commit the rest of the step.
TEST_F(TakeUpLogTest, AnOlderDaemonRefusesAStepThatIsPromisedBehindParts) {
  v1::PromisedStepRecord promise;
  promise.set_step(2);
  ASSERT_TRUE(log_->Commit(Facts(1, ""), {1, 1, 1}).ok());
  const auto older_reads = [this] { return NewestCounts() <= 7; };
  ASSERT_TRUE(log_->Promise(promise).ok());
  EXPECT_TRUE(older_reads());
  promise.set_parts(1);
  ASSERT_TRUE(log_->Promise(promise).ok());
  EXPECT_FALSE(older_reads());
  EXPECT_EQ(Next()->promised->parts(), 1);
  EXPECT_EQ(Next()->counts, TakeUpLog::Counts::kShards);
  log_->SetVersion(2, 1);
  EXPECT_TRUE(older_reads()) << "the promise has ended";
}

TEST_F(TakeUpLogTest, PromisedValuesAreOfTheNextVersionAlone) {
  v1::PromisedValuesRecord promise;
  promise.set_generation(7);
  promise.set_version(Next()->header.version + 1);
  promise.add_step_counts(3);
  ASSERT_TRUE(log_->PromiseValues(promise).ok());
  ASSERT_TRUE(Next().ok());
  EXPECT_FALSE(Next()->promised.has_value());
  EXPECT_EQ(Next()->promised_values->step_counts(0), 3);
  log_->SetVersion(/*epoch=*/5, Next()->header.version);
  EXPECT_FALSE(Next()->promised_values.has_value()) << "its epoch has ended";
  promise.set_version(Next()->header.version + 2);
  ASSERT_TRUE(log_->PromiseValues(promise).ok());
  EXPECT_TRUE(absl::IsDataLoss(Next().status())) << "of no version that could follow";
}

TEST_F(TakeUpLogTest, WhoeverTakesUpMayKeepThePromiseThroughOneCommit) {
  v1::PromisedStepRecord promise;
  promise.set_step(2);
  ASSERT_TRUE(log_->Commit(Facts(1, ""), {1, 1, 1}).ok());
  ASSERT_TRUE(log_->Promise(promise).ok());
  auto next = *TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), kSizes);
  next->KeepPromise();
  ASSERT_TRUE(next->Commit(Facts(1, ""), {2, 1, 1}).ok());
  EXPECT_TRUE(Next()->promised.has_value());
  ASSERT_TRUE(next->Commit(Facts(1, ""), {2, 1, 1}).ok());
  EXPECT_FALSE(Next()->promised.has_value());
}

TEST_F(TakeUpLogTest, TheNextDaemonKnowsTheRanksProcesses) {
  EXPECT_FALSE(log_->process(0).has_value());
  log_->SetProcess(0, {17, 1000, 4711});
  log_->SetProcess(1, {0, 1000, 4711});  // of another PID namespace
  const auto next = TakeUpLog::TakeUp(UniqueFd(dup(log_->fd())), kSizes);
  ASSERT_TRUE(next.ok()) << next.status();
  ASSERT_TRUE((*next)->process(0).has_value());
  EXPECT_EQ((*next)->process(0)->pid, 17);
  EXPECT_EQ((*next)->process(0)->start_ticks, 4711u);
  ASSERT_TRUE((*next)->process(1).has_value()) << "somebody may write";
  EXPECT_EQ((*next)->process(1)->pid, 0);
  log_->ForgetProcess(0, /*finished=*/false);
  EXPECT_FALSE((*next)->process(0).has_value() || (*next)->finished(0));
  log_->ForgetProcess(0, /*finished=*/true);
  EXPECT_TRUE(!(*next)->process(0).has_value() && (*next)->finished(0));
  log_->SetProcess(0, {18, 1000, 4712});
  EXPECT_FALSE((*next)->finished(0)) << "it has come again";
  EXPECT_FALSE(log_->finished(100000));
  EXPECT_TRUE(log_->process(100000).has_value()) << "nobody knows of so many";
}

TEST_F(TakeUpLogTest, RanksThatHaveFinishedStaySo) {
  ASSERT_TRUE(log_->Commit(Facts(1, ""), {1, 1, 1}).ok());
  EXPECT_FALSE(Next()->finished);
  log_->Finish();
  log_->SetVersion(2, 1);
  EXPECT_TRUE(Next()->finished);
  log_->End();
  EXPECT_FALSE(Next()->finished);
}

TEST_F(TakeUpLogTest, MemoryOfAnotherSizeIsRefused) {
  TakeUpLog::Sizes other = kSizes;
  other.place_bytes *= 2;
  EXPECT_EQ(TakeUpLog::TakeUp(UniqueFd(fcntl(log_->fd(), F_DUPFD_CLOEXEC, 0)), other).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(TakeUpLog::TakeUp(UniqueFd(), kSizes).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace shardd
