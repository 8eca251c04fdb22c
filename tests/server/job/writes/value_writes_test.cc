#include "server/job/writes/value_writes.h"

#include <gtest/gtest.h>

#include <cstring>

#include "server/job/work/optimizer_devices.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "tests/server/job/summons_fixture.h"

namespace shardd {
namespace {

constexpr int kParam = 0;
constexpr int kNumel = 8;
constexpr int64_t kBytes = kNumel * sizeof(float);

// Values of so few bytes are written at once.
class ValueWritesTest : public SummonsFactsTest {
 protected:
  ValueWritesTest() : fresh_("job", static_cast<int>(plan_->params.size()), 2, NewJournal()) {
    auto memory = JobMemory::Create(*plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    Attach(0);
    Attach(1);
    values_ =
        std::make_unique<ValueWrites>(ValueWrites::Facts{plan_.get(), &decision_, &summons_, &extensions_, &sessions_},
                                      ValueWrites::Services{memory_.get(), &fresh_, &pairing_.presence(),
                                                            /*commits=*/nullptr, &events_, &work_, &job_},
                                      /*copier=*/nullptr, WorkOwner{});
  }
  absl::Status Write(int rank, float value) {
    Session* const session = sessions_[rank].get();
    const int64_t at = session->layout().payload_offset_bytes;
    char* const staging = const_cast<char*>(session->Staging(at, kBytes));
    EXPECT_NE(staging, nullptr);
    for (int i = 0; i < kNumel; ++i) {
      std::memcpy(staging + sizeof value * i, &value, sizeof value);
    }
    RankCommand command;
    command.opcode = Opcode::kWriteParameters;
    command.group = kParam;
    command.arg1 = kNumel;
    command.arg2 = at;
    return values_->Write(session, command);
  }
  float First() {
    const SlabPart part = WholePart(*plan_, *memory_, kParam, 0);
    float value = -1;
    EXPECT_TRUE(part.slab->Read(part.offset_bytes, reinterpret_cast<char*>(&value), sizeof value).ok());
    return value;
  }

  Committed fresh_;  // of a job without parameters
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<ValueWrites> values_;
};

TEST_F(ValueWritesTest, InitialValuesAreWrittenUntilTheRankAsksToCommit) {
  ASSERT_TRUE(Write(0, 3).ok());
  EXPECT_EQ(First(), 3);
  EXPECT_TRUE(values_->any_initial());
  ASSERT_TRUE(values_->AskForCommit(0).ok());
  EXPECT_TRUE(values_->commit().asked(0));
  ExpectRefused(Write(0, 4), "the rank has already sent CommitParameters");
  ExpectRefused(values_->AskForCommit(0), "CommitParameters: the rank has already sent it");
  EXPECT_EQ(First(), 3);
}

TEST_F(ValueWritesTest, AfterTheFirstVersionOnlyAWritebackWrites) {
  fresh_.CommitVersion();
  ExpectRefused(Write(0, 3), "parameters may be written before version 1 and between EnterFullParams(writeback)");
  ExpectRefused(values_->AskForCommit(0), "legal before version 1");
}

TEST_F(ValueWritesTest, WhatAnEndedEpochWroteIsStale) {
  ASSERT_TRUE(Write(0, 3).ok());
  EXPECT_TRUE(values_->StaleParts().empty());
  values_->EndEpoch();
  fresh_.EndEpoch();
  EXPECT_EQ(values_->StaleParts().size(), 1u);
}

TEST_F(ValueWritesTest, NobodyCommitsWithoutARankThatHasFinished) {
  leavers_.Left(1, /*finished=*/true);
  ExpectRefused(values_->AskForCommit(0), "rank 1 has finished");
}

}  // namespace
}  // namespace shardd
