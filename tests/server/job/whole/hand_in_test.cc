// Passes and what ranks hand in between them: who waits for whom, what becomes a version, and what a death leaves.

#include <unistd.h>

#include <algorithm>

#include "tests/server/job/passes_fixture.h"
#include "tests/server/job/trainer_process.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

SpecBuilder TrainersWrite() {
  SpecBuilder builder(2);
  builder.config().set_trainers_never_write(false);
  builder.Param(0, "w", {64});
  return builder;
}

class HandInTest : public PassesTest {
 protected:
  explicit HandInTest(const SpecBuilder& builder = TrainersWrite()) : PassesTest(builder) {}

  void Enter(int rank, bool stepped = false) {
    v1::Command command;
    command.mutable_enter_pass()->set_stepped(stepped);
    command.mutable_enter_pass()->set_trainer_state(absl::StrCat("state ", rank, " of step ", committed() + 1));
    Send(rank, command);
  }
  void UnshardForward(int rank) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(rank, command);
    command.mutable_reshard()->set_group(0);
    Send(rank, command);
  }
  uint64_t Passes(int rank) { return Word(rank, &DaemonPage::passes); }
  uint64_t HandIns(int rank) { return Word(rank, &DaemonPage::hand_ins); }
  // Both ranks write `value` into the parameter, as a step of their own, and enter the next pass.
  void StepTo(float value) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Ask(rank);
    }
    ASSERT_TRUE(
        Until([&] { return job_->sessions()[0].get() != nullptr && HandIns(0) > seen_ && HandIns(1) > seen_; }));
    ++seen_;
    Write(value);
    const uint64_t passes = Passes(0);
    for (int rank = 0; rank < kRanks; ++rank) {
      Enter(rank, /*stepped=*/true);
    }
    ASSERT_TRUE(Until([&] { return Passes(0) == passes + 1 && Passes(1) == passes + 1; }));
    for (int rank = 0; rank < kRanks; ++rank) {
      Leave(rank);
    }
  }
  // As a library of this process asks, which stores no more of what it stored before.
  absl::Status TryToAttach(int rank) {
    auto session = Session::Create(plan_, ++tries_, rank, epoch());
    if (session.ok()) (*session)->peer.pid = getpid();
    absl::Status status = session.status();
    OnLoop([&] { status = job_->AddSession(*std::move(session)); });
    return status;
  }
  void Die(int rank) {
    const uint64_t before = epoch();
    const testing::Child process([] { return 0; });
    SetProcess(rank, process.pid(), DescriptorOf(process.pid()));
    ASSERT_TRUE(Until([&] { return job_->committed().epoch() == before + 1; }));
  }
  void Write(float value) { std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, value); }
  uint64_t seen_ = 0;  // hand-ins of this epoch
  uint64_t tries_ = 1000;
};

TEST_F(HandInTest, PassBeginsForAllWhenTheLastHasEntered) {
  Enter(0);
  EXPECT_EQ(Passes(0), 0u);
  Enter(1);
  EXPECT_EQ(Passes(0), 1u);
  EXPECT_EQ(Passes(1), 1u);
  EXPECT_EQ(version(), 1u) << "nobody wrote";
}

TEST_F(HandInTest, HandingInAwaitsTheLastReaderAndMakesAVersion) {
  Enter(0);
  Enter(1);
  UnshardForward(0);
  Leave(0);
  Ask(0);
  OnLoop([] {});
  EXPECT_EQ(HandIns(0), 0u) << "rank 1 still reads";
  Leave(1);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 1; }));
  Enter(1);
  EXPECT_EQ(Passes(1), 1u) << "rank 0 still writes";
  Write(5);
  Enter(0);
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  ASSERT_TRUE(Until([&] { return Passes(0) == 2 && Passes(1) == 2; }));
  EXPECT_EQ(committed(), 0) << "an edit, no step";
}

// Libraries of before say in a word that their rank is between a forward and its backward.
TEST_F(HandInTest, WordsInAClientsPageEndNoPass) {
  Enter(0);
  Enter(1);
  Leave(0);
  Ask(0);
  for (const uint32_t word : {1u, 2u, 99u, 0xffffffffu}) {
    OnLoop([&] { job_->sessions()[1].get()->memory()->memory->At<ClientPage>(0)->reserved_word = word; });
    UnshardForward(1);
    EXPECT_EQ(HandIns(0), 0u) << word;
  }
  Leave(1);
  EXPECT_TRUE(Until([&] { return HandIns(0) == 1; }));
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 0);
}

TEST_F(HandInTest, UnshardingOutsideAPassFailsSayingWhatToDo) {
  UnshardForward(0);
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 1);
  EXPECT_NE(streams_[0]->Aborted().message().find("EnterPass first"), std::string::npos);
}

TEST_F(HandInTest, RanksThatDisagreeOnTheStepAreNamed) {
  Enter(0, true);
  Enter(1, false);
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kAborted), 1);
  EXPECT_NE(streams_[0]->Aborted().message().find("differ in whether they made an optimizer step"), std::string::npos);
}

TEST_F(HandInTest, ADeathWhileHandingInGoesBackToTheSnapshot) {
  StepTo(1);
  StepTo(2);
  EXPECT_EQ(committed(), 2);
  Ask(0);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 3; }));
  Write(99);  // torn
  Die(0);
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 4; }));
  EXPECT_EQ(committed(), 2);
  EXPECT_EQ(value(), 2.0f);
  EXPECT_EQ(streams_[1]->Aborted().committed_step(), 2);
  EXPECT_EQ(streams_[1]->Aborted().trainer_state(), "state 1 of step 2");
}

TEST_F(HandInTest, AnIdleRanksDeathTakesBackWhatAnotherHandsIn) {
  Ask(0);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 1; }));
  Write(5);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  ASSERT_TRUE(testing::PollUntil([&] { return TryToAttach(0).ok(); }, kPatience)) << "which stores no more";
  EXPECT_EQ(value(), 0) << "what was kept";
  EXPECT_EQ(epoch(), 2u);
  EXPECT_EQ(committed(), 0);
}

TEST_F(HandInTest, DeathAtOtherTimesLosesNothing) {
  StepTo(1);
  Enter(0);
  Enter(1);
  ASSERT_TRUE(Until([&] { return Passes(0) == 2; }));
  const uint64_t before = epoch();
  Die(0);
  EXPECT_EQ(epoch(), before + 1);
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), 1.0f);
}

TEST_F(HandInTest, NobodyAttachesBeforeTheShardsAreBack) {
  StepTo(1);
  Ask(0);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 2; }));
  for (const auto& device : devices_) {
    device->Hold();
  }
  Die(0);
  auto session = Session::Create(plan_, 77, 0, epoch());
  if (session.ok()) (*session)->peer.pid = getpid();
  ASSERT_TRUE(session.ok());
  OnLoop([&] {
    const absl::Status status = job_->AddSession(*std::move(session));
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  });
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 3; }));
  Attach(0);
}

TEST_F(HandInTest, NothingGoesBackWhileAnotherThatHandsInLives) {
  StepTo(1);
  Ask(0);
  Ask(1);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 2 && HandIns(1) == 2; }));
  testing::Child survivor([] { return pause(); });
  SetProcess(0, survivor.pid(), DescriptorOf(survivor.pid()));
  Die(1);
  const absl::Status refused = TryToAttach(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_NE(refused.message().find(absl::StrCat("the process of rank 0 (pid ", survivor.pid(), ") lives")),
            std::string::npos)
      << refused;
  EXPECT_EQ(version(), 2u);
  Write(99);  // it stores on
  survivor.Kill();
  ASSERT_TRUE(testing::PollUntil([&] { return TryToAttach(1).ok(); }, kPatience));
  EXPECT_EQ(version(), 3u);
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), 1.0f);
}

class EditsTest : public HandInTest {
 protected:
  static SpecBuilder Spec() {
    SpecBuilder builder = SgdJob();
    builder.config().set_trainers_never_write(false);
    builder.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    builder.config().mutable_mixed_precision()->set_reduce_dtype(v1::DTYPE_FLOAT32);
    return builder;
  }
  EditsTest() : HandInTest(Spec()) {}
  // bfloat16 is the upper half of a float.
  uint16_t* memory_bf16() { return SlabAt<uint16_t>(job_->memory().parameters(), 0); }
  float Cast() {
    const uint32_t bits = static_cast<uint32_t>(*memory_bf16()) << 16;
    float result = 0;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
};

TEST_F(EditsTest, EditsBetweenStepsAreInTheVersionAndCastCopy) {
  Ask(0);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 1; }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 4.0f);
  Enter(0);
  Enter(1);
  ASSERT_TRUE(Until([&] { return Passes(0) == 1; }));
  EXPECT_EQ(Cast(), 4.0f);
}

TEST_F(EditsTest, ARankMayEditBeforeItsStepAfterAnothers) {
  Enter(0);
  Enter(1);
  Backward(0);
  Leave(0);
  Ask(0);  // rank 1 still reads
  Backward(1);
  Step(1);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 1; }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 4.0f);
  Step(0);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  // The gradient slot is bfloat16: floats of 1 are elements of 0 and 1 in turn.
  EXPECT_EQ(SlabAt<float>(job_->memory().shards(), 0)[0], 4.0f);
  EXPECT_EQ(SlabAt<float>(job_->memory().shards(), 0)[1], 3.5f) << "the edit, then lr times the gradient";
}

// The daemon's step changes shards, moments and counts: what was kept before it is of no use any more.
TEST_F(EditsTest, ASecondDeathInAnEditLosesNoStep) {
  Ask(1);
  ASSERT_TRUE(Until([&] { return HandIns(1) == 1; }));
  Die(1);
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  for (int rank = 0; rank < kRanks; ++rank) {
    Attach(rank);
  }
  Enter(0);
  Enter(1);
  Backward(0);
  Backward(1);
  Step(0);
  Step(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  const float* const shards = SlabAt<float>(job_->memory().shards(), 0);
  ASSERT_EQ(shards[1], -0.5f);
  const uint64_t before = version();
  Ask(0);
  ASSERT_TRUE(Until([&] { return HandIns(0) == 1; }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 4.0f);
  Die(0);
  ASSERT_TRUE(Until([&] { return job_->committed().version() == before + 1; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(shards[1], -0.5f);
}

TEST_F(EditsTest, DeathInAnEditLosesTheEditAndNoStep) {
  Ask(1);
  ASSERT_TRUE(Until([&] { return HandIns(1) == 1; }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 4.0f);
  Die(1);
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  EXPECT_EQ(value(), 0.0f);
  EXPECT_EQ(Cast(), 0.0f);
}

}  // namespace
}  // namespace shardd
