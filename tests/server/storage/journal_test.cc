#include "server/storage/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/versions/versions.h"

namespace shardd {
namespace {

class JournalTest : public ::testing::Test {
 protected:
  static v1::DecidedStepRecord Record(int64_t step, const std::string& state) {
    v1::DecidedStepRecord record;
    record.set_epoch(3);
    record.set_step(step);
    record.add_groups()->set_lr(0.5);
    record.set_clip_factor(0.25);
    record.add_trainer_states(state);
    return record;
  }
  // The descriptor of the one journal that there is.
  static int Descriptor() {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string file = std::filesystem::read_symlink(entry.path(), gone);
      if (file.find("memfd:shardd-journal") != std::string::npos) return std::stoi(entry.path().filename());
    }
    return -1;
  }
  static void Corrupt(int64_t offset) {
    char byte = 0;
    ASSERT_EQ(pread(Descriptor(), &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(pwrite(Descriptor(), &byte, 1, offset), 1);
  }
};

TEST_F(JournalTest, TheLastTwoDecidedStepsCanBeReadBack) {
  auto journal = *Journal::Create(4096);
  for (int step = 1; step <= 3; ++step) {
    ASSERT_TRUE(journal->WriteDecided(Record(step, "state " + std::to_string(step))).ok());
  }
  ASSERT_TRUE(journal->WriteHeader({3, 2, 7}).ok());
  const Journal::Header header = *journal->ReadHeader();
  EXPECT_EQ(header.epoch, 3);
  EXPECT_EQ(header.committed_step, 2);
  EXPECT_EQ(header.version, 7);
  EXPECT_EQ(journal->ReadDecided(3)->trainer_states(0), "state 3");
  EXPECT_EQ(journal->ReadDecided(2)->groups(0).lr(), 0.5);
  EXPECT_EQ(journal->ReadDecided(1).status().code(), absl::StatusCode::kNotFound) << "its place was taken by step 3";
}

// It stays there for the shardd that reads it, whose checksum may be another one.
TEST_F(JournalTest, AFormatOfALaterVersionIsRefusedByName) {
  auto journal = *Journal::Create(4096);
  ASSERT_TRUE(journal->WriteHeader({3, 2, 7}).ok());
  const uint32_t later = static_cast<uint32_t>(kJournalFormats.newest) + 1;
  ASSERT_EQ(pwrite(journal->fd(), &later, sizeof(later), 4), 4);
  const absl::Status refused = Journal::TakeUp(UniqueFd(dup(journal->fd())), 4096).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), absl::StrCat("journal: this version of shardd does not read its format (got ", later,
                                            ", want ", kJournalFormats.Text(), "); start a newer one"));
  uint32_t kept = 0;
  ASSERT_EQ(pread(journal->fd(), &kept, sizeof(kept), 4), 4);
  EXPECT_EQ(kept, later);
}

TEST_F(JournalTest, ATornRecordIsIgnoredAndTheOtherKept) {
  auto journal = *Journal::Create(4096);
  ASSERT_TRUE(journal->WriteDecided(Record(1, "one")).ok());
  ASSERT_TRUE(journal->WriteDecided(Record(2, "two")).ok());
  Corrupt(64 + 8 + 3);  // within step 2's payload
  EXPECT_EQ(journal->ReadDecided(2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(journal->ReadDecided(1)->trainer_states(0), "one");
}

TEST_F(JournalTest, NothingDecidedIsReadBackOnceItIsForgotten) {
  auto journal = *Journal::Create(4096);
  for (int step = 1; step <= 3; ++step) ASSERT_TRUE(journal->WriteDecided(Record(step, "state")).ok());
  journal->ForgetDecided();
  for (int step = 1; step <= 3; ++step) EXPECT_FALSE(journal->ReadDecided(step).ok()) << step;
  ASSERT_TRUE(journal->WriteDecided(Record(3, "another")).ok());
  EXPECT_EQ(journal->ReadDecided(3)->trainer_states(0), "another");
}

TEST_F(JournalTest, ADamagedHeaderIsDataLoss) {
  auto journal = *Journal::Create(4096);
  ASSERT_TRUE(journal->WriteHeader({1, 5, 6}).ok());
  Corrupt(17);
  EXPECT_EQ(journal->ReadHeader().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(JournalTest, ATooLargeRecordIsRefusedBeforeAnythingIsWritten) {
  auto journal = *Journal::Create(128);
  ASSERT_TRUE(journal->WriteDecided(Record(2, "fits")).ok());
  EXPECT_EQ(journal->WriteDecided(Record(4, std::string(200, 'x'))).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(journal->ReadDecided(2)->trainer_states(0), "fits");
}

TEST_F(JournalTest, SpaceIsTakenAtTheOpenAndCannotChange) {
  auto journal = *Journal::Create(1 << 20);
  struct stat object {};
  ASSERT_EQ(fstat(Descriptor(), &object), 0);
  EXPECT_GE(object.st_blocks * 512, 64 + 2 * (1 << 20));
  EXPECT_EQ(ftruncate(Descriptor(), 0), -1);
  EXPECT_EQ(errno, EPERM);
}

}  // namespace
}  // namespace shardd
