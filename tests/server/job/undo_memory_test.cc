// Memory of the host for the undo of a writeback, of jobs on GPUs: asked for when one begins, so a model that the host
// has no memory for is served, and its writeback refused.

#include "gmock/gmock.h"
#include "tests/server/job/held_memory.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

// Of one parameter, whose shards are so many times what the host has free.
SpecBuilder JobOf(double of_free) {
  const absl::StatusOr<MemoryLimits> limits = GetMemoryLimits("/dev/shm");
  EXPECT_TRUE(limits.ok()) << limits.status();
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.Param(0, "w", {static_cast<int64_t>(of_free * static_cast<double>(limits->memory_free_bytes)) / 4});
  return builder;
}

class UndoMemory {  // outlives the job
 protected:
  HeldMemory memory_;
};

class UndoMemoryTest : private UndoMemory, public JobCoreTest {
 protected:
  explicit UndoMemoryTest(double of_free = 1.5)
      : JobCoreTest(JobOf(of_free), /*copies_off_loop=*/true, nullptr, SlabPlace{&memory_, {&memory_}}) {}

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
    OnLoop([&] { bytes = job_->reserved_bytes(); });
    return bytes;
  }
};

TEST_F(UndoMemoryTest, AModelLargerThanTheHostIsServedAndItsWritebackIsRefusedByName) {
  EXPECT_LT(reserved(), WritebackUndoBytes(*plan_));
  for (int rank = 0; rank < kRanks; ++rank) Enter(rank, /*writeback=*/false);
  for (int rank = 0; rank < kRanks; ++rank) Leave(rank);
  const uint64_t before = epoch();
  Enter(0, /*writeback=*/true);
  ASSERT_TRUE(Until([&] { return job_->epoch() == before + 1; }));
  const v1::SessionEvent::Aborted aborted = streams_[1]->Aborted();
  for (const char* part : {"EnterFullParams with writeback", "too little is left", "for the undo of the writeback",
                           "without writeback it is served"}) {
    EXPECT_THAT(aborted.DebugString(), ::testing::HasSubstr(part));
  }
  OnLoop([&] {
    EXPECT_FALSE(job_->closed());
    EXPECT_EQ(job_->version(), 1u);
  });
}

class SmallUndoMemoryTest : public UndoMemoryTest {
 protected:
  SmallUndoMemoryTest() : UndoMemoryTest(1e-4) {}
};

TEST_F(SmallUndoMemoryTest, WhatAWritebackAsksForIsPromisedToNobodyElseUntilItEnds) {
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
