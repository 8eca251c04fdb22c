// Ranks of one job that wait for each other in different calls are told so at once.

#include "absl/time/clock.h"
#include "tests/server/job/passes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

SpecBuilder PassesJob() {
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_trainers_never_write(false);
  builder.Param(0, "w", {64});
  return builder;
}

class UnlikeCallsTest : public PassesTest {
 protected:
  UnlikeCallsTest() : PassesTest(PassesJob()) {}
  void Enter(int rank) {
    v1::Command command;
    command.mutable_enter_pass();
    Send(rank, command);
  }
  void EnterAll() {
    for (int rank = 0; rank < kRanks; ++rank) Enter(rank);
    ASSERT_TRUE(Until([&] { return job_->view().IsMidStep(); }));
  }
  void FullParams(int rank) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    Send(rank, command);
  }
  bool Granted() {
    return testing::PollUntil([&] { return streams_[1]->Count(v1::SessionEvent::kFullParams) == 1; }, kPatience);
  }
  void ExpectTold(const std::string& got, const std::string& other) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_TRUE(Until([&] { return job_->sessions()[rank].get() == nullptr; })) << rank;
      EXPECT_THAT(streams_[rank]->Aborted().message(),
                  AllOf(HasSubstr("EnterFullParams: ranks wait for each other in different calls"), HasSubstr(got),
                        HasSubstr(other)))
          << rank;
    }
  }
  void ExpectWaits() {
    absl::SleepFor(absl::Milliseconds(20));
    for (int rank = 0; rank < kRanks; ++rank) {
      OnLoop([&] { EXPECT_NE(job_->sessions()[rank].get(), nullptr) << streams_[rank]->Aborted().message(); });
    }
  }
};

TEST_F(UnlikeCallsTest, FullParametersBesideAPassAreRefusedAtOnce) {
  FullParams(0);
  ExpectWaits();
  Enter(1);
  ExpectTold("got EnterFullParams on rank 0", "EnterPass on rank 1");
}

TEST_F(UnlikeCallsTest, FullParametersBesideAStepAreRefusedAtOnce) {
  EnterAll();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  Step(1);
  Leave(0);
  ExpectWaits();
  FullParams(0);
  ExpectTold("got EnterFullParams on rank 0", "Step on rank 1");
}

// It goes on in the pass whose step the other has sent.
TEST_F(UnlikeCallsTest, ARankThatIsReadmittedMayYetCome) {
  EnterAll();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  Step(0);
  FullParams(0);
  Leave(1);
  Enter(1);
  ExpectWaits();
  Step(1);
  FullParams(1);
  EXPECT_TRUE(Granted());
}

TEST_F(UnlikeCallsTest, WhatFollowsAStepOfAllWaitsForItsCommit) {
  EnterAll();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  for (const auto& device : devices_) device->Hold();
  for (int rank = 0; rank < kRanks; ++rank) Step(rank);
  FullParams(0);
  Enter(1);
  ExpectWaits();
  Release();
  ExpectTold("got EnterFullParams on rank 0", "EnterPass on rank 1");
  EXPECT_EQ(committed(), 1);
}

TEST_F(UnlikeCallsTest, ARankInsideAPassMayYetCome) {
  EnterAll();
  Leave(0);
  FullParams(0);
  ExpectWaits();
  Leave(1);
  FullParams(1);
  EXPECT_TRUE(Granted());
}

TEST_F(UnlikeCallsTest, AllMayStepAndThenEnterFullParameters) {
  EnterAll();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  for (int rank = 0; rank < kRanks; ++rank) {
    Step(rank);
    FullParams(rank);
  }
  EXPECT_TRUE(Granted());
  EXPECT_EQ(committed(), 1);
}

}  // namespace
}  // namespace shardd
