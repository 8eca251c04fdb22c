// Memory of the host for the undo of a writeback, of jobs on GPUs: asked for when one begins, so a model that the host
// has no memory for is served, and its writeback refused.

#include "gmock/gmock.h"
#include "tests/server/job/held_memory.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

// Of one parameter, whose shards are so many times what the host has free.
SpecBuilder JobOf(double of_free) {
  const absl::StatusOr<MemoryLimits> limits = GetMemoryLimits();
  EXPECT_TRUE(limits.ok()) << limits.status();
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.Param(0, "w", {static_cast<int64_t>(of_free * static_cast<double>(limits->free_bytes)) / 4});
  return builder;
}

class UndoMemory {  // outlives the job
 protected:
  HeldMemory memory_;
};

class UndoMemoryTest : private UndoMemory, public JobCoreTest {
 protected:
  explicit UndoMemoryTest(double of_free = 1.5)
      : JobCoreTest(JobOf(of_free), /*shared_copier=*/nullptr, SlabPlace{&memory_, {&memory_}}) {}

  void Enter(int rank, bool writeback) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(writeback);
    Send(rank, command);
  }
  void Leave(int rank) {
    v1::Command command;
    command.mutable_leave_full_params();
    Send(rank, command);
  }
  int64_t reserved() {
    int64_t bytes = 0;
    OnLoop([&] { bytes = job_->memory_account().reserved_bytes(); });
    return bytes;
  }
};

TEST_F(UndoMemoryTest, OnlyTheWritebackOfATooLargeModelIsRefused) {
  const int64_t reserved_before = reserved();
  EXPECT_LT(reserved_before, WritebackUndoBytes(*plan_));
  const uint64_t before = epoch();
  for (uint64_t number : {1, 3}) {  // as often as they ask, with what is served in between
    for (int rank = 0; rank < kRanks; ++rank) Enter(rank, /*writeback=*/true);
    for (int rank = 0; rank < kRanks; ++rank) {
      const v1::SessionEvent::FullParams refused = streams_[rank]->FullParams();
      EXPECT_EQ(refused.number(), number);
      EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
      for (const char* part :
           {"too little is left", "for the undo of the writeback", "without writeback it is served"}) {
        EXPECT_THAT(refused.message(), ::testing::HasSubstr(part));
      }
      EXPECT_EQ(Word(rank, &DaemonPage::full_params), number);
    }
    EXPECT_EQ(reserved(), reserved_before);
    for (int rank = 0; rank < kRanks; ++rank) Enter(rank, /*writeback=*/false);
    EXPECT_EQ(Word(0, &DaemonPage::full_params), number + 1);
    for (int rank = 0; rank < kRanks; ++rank) Leave(rank);
  }
  EXPECT_EQ(epoch(), before);
  OnLoop([&] {
    EXPECT_FALSE(job_->closed());
    EXPECT_EQ(job_->committed().version(), 1u);
  });
}

class SmallUndoMemoryTest : public UndoMemoryTest {
 protected:
  SmallUndoMemoryTest() : UndoMemoryTest(1e-4) {}
};

TEST_F(SmallUndoMemoryTest, WritebackMemoryIsPromisedToNobodyElseUntilItsEnd) {
  const int64_t before = reserved();
  Enter(0, /*writeback=*/true);
  EXPECT_EQ(reserved(), before + WritebackUndoBytes(*plan_));
  Enter(1, /*writeback=*/true);
  EXPECT_EQ(reserved(), before + WritebackUndoBytes(*plan_));
  for (int rank = 0; rank < kRanks; ++rank) Leave(rank);
  EXPECT_EQ(reserved(), before);
}

}  // namespace
}  // namespace shardd
