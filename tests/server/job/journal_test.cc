#include "server/job/journal.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace shardd {
namespace {

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() : path_(::testing::TempDir() + "/journal-" + std::to_string(getpid())) { std::remove(path_.c_str()); }
  ~JournalTest() override { std::remove(path_.c_str()); }
  static v1::DecidedStepRecord Record(int64_t step, const std::string& state) {
    v1::DecidedStepRecord record;
    record.set_epoch(3);
    record.set_step(step);
    record.add_groups()->set_lr(0.5);
    record.set_clip_factor(0.25);
    record.add_trainer_states(state);
    return record;
  }
  void Corrupt(int64_t offset) {
    const int fd = open(path_.c_str(), O_RDWR);
    char byte = 0;
    ASSERT_EQ(pread(fd, &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(pwrite(fd, &byte, 1, offset), 1);
    close(fd);
  }
  const std::string path_;
};

TEST_F(JournalTest, TheLastTwoDecidedStepsCanBeReadBack) {
  auto journal = *Journal::Create(path_, 4096);
  for (int step = 1; step <= 3; ++step) {
    ASSERT_TRUE(journal->WriteDecided(Record(step, "state " + std::to_string(step))).ok());
  }
  ASSERT_TRUE(journal->WriteHeader({3, 2, 7}).ok());
  journal.reset();
  auto again = *Journal::Open(path_, 4096);
  const Journal::Header header = *again->ReadHeader();
  EXPECT_EQ(header.epoch, 3);
  EXPECT_EQ(header.committed_step, 2);
  EXPECT_EQ(header.version, 7);
  EXPECT_EQ(again->ReadDecided(3)->trainer_states(0), "state 3");
  EXPECT_EQ(again->ReadDecided(2)->groups(0).lr(), 0.5);
  EXPECT_EQ(again->ReadDecided(1).status().code(), absl::StatusCode::kNotFound) << "its place was taken by step 3";
}

TEST_F(JournalTest, ATornRecordIsNoRecordAndLeavesTheOtherOne) {
  auto journal = *Journal::Create(path_, 4096);
  ASSERT_TRUE(journal->WriteDecided(Record(1, "one")).ok());
  ASSERT_TRUE(journal->WriteDecided(Record(2, "two")).ok());
  Corrupt(64 + 8 + 3);  // within step 2's payload
  EXPECT_EQ(journal->ReadDecided(2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(journal->ReadDecided(1)->trainer_states(0), "one");
}

TEST_F(JournalTest, ADamagedHeaderIsDataLoss) {
  auto journal = *Journal::Create(path_, 4096);
  ASSERT_TRUE(journal->WriteHeader({1, 5, 6}).ok());
  Corrupt(17);
  EXPECT_EQ(journal->ReadHeader().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Journal::Open(path_, 4096).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(JournalTest, ARecordLargerThanItsPlaceIsRefusedBeforeAnythingIsWritten) {
  auto journal = *Journal::Create(path_, 128);
  ASSERT_TRUE(journal->WriteDecided(Record(2, "fits")).ok());
  EXPECT_EQ(journal->WriteDecided(Record(4, std::string(200, 'x'))).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(journal->ReadDecided(2)->trainer_states(0), "fits");
}

TEST_F(JournalTest, SpaceIsTakenWhenTheJobOpens) {
  auto journal = *Journal::Create(path_, 1 << 20);
  EXPECT_EQ(std::filesystem::file_size(path_), 64u + 2 * (1 << 20));
}

TEST_F(JournalTest, AnExistingFileIsNotTakenOver) {
  auto journal = *Journal::Create(path_, 128);
  EXPECT_FALSE(Journal::Create(path_, 128).ok());
}

}  // namespace
}  // namespace shardd
