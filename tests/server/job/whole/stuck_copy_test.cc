// A copy of values that never ends, because a GPU's driver does not return: its own job is closed, others on the same
// GPU train on, and their copies wait for the copier that is stuck.

#include <cstring>
#include <optional>

#include "gmock/gmock.h"
#include "tests/server/job/held_memory.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

SpecBuilder OnlyTheDaemonWrites() {
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_trainers_never_write(true);
  builder.Param(0, "w", {64});
  return builder;
}

// A job with verbs.
class OnGpu : public JobCoreTest {
 public:
  OnGpu(HeldMemory* memory, TurnQueue* copier)
      : JobCoreTest(OnlyTheDaemonWrites(), copier, SlabPlace{memory, {memory}}) {}
  void TestBody() override {}

  void EnterWithWriteback() {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  }
  // Rank 0's.
  void Write(float value) {
    v1::Command command;
    OnLoop([&] {
      Session* const session = job_->sessions()[0].get();
      const int64_t staging = session->layout().payload_offset_bytes;
      std::memcpy(session->memory()->memory->At<char>(staging), &value, sizeof(value));
      command.mutable_write_parameters()->set_numel(1);
      command.mutable_write_parameters()->set_staging_offset_bytes(staging);
    });
    Send(0, command);
  }
  bool Held() {
    bool held = false;
    OnLoop([&] { held = job_->sessions()[0].get()->held; });
    return held;
  }
  // Whether it is closed when so much time has passed.
  bool ClosedAfter(absl::Duration time) {
    bool closed = false;
    OnLoop([&] {
      job_->CheckSilence(MonotonicNow() + time);
      closed = job_->closed();
    });
    return closed;
  }
  bool TrainsAStep() {
    const int64_t before = committed();
    for (int rank = 0; rank < kRanks; ++rank) Train(rank);
    return Until([&] { return job_->view().committed_step() == before + 1; });
  }
  std::string LastEvent() {
    const std::vector<v1::Event> events = events_.List();
    return events.empty() ? "" : events.back().text();
  }
  using JobCoreTest::Until;
  using JobCoreTest::value;
};

class StuckCopyTest : public ::testing::Test {
 protected:
  StuckCopyTest() {
    stuck_.emplace(&memory_, &copier_);
    healthy_.emplace(&memory_, &copier_);
  }
  ~StuckCopyTest() override {
    memory_.LetGo();
    copier_.Drain();  // what names the jobs' loops
    healthy_.reset();
    stuck_.reset();
  }

  HeldMemory memory_;
  TurnQueue copier_{"copier"};
  std::optional<OnGpu> stuck_, healthy_;
};

TEST_F(StuckCopyTest, EndsItsOwnJobAndNoOtherOnItsGpu) {
  stuck_->EnterWithWriteback();
  memory_.Hold();
  stuck_->Write(7);
  ASSERT_TRUE(testing::PollUntil([&] { return memory_.Stuck(); }, kPatience));
  EXPECT_TRUE(healthy_->TrainsAStep());
  healthy_->EnterWithWriteback();
  healthy_->Write(9);
  EXPECT_TRUE(healthy_->Held());
  EXPECT_FALSE(stuck_->ClosedAfter(absl::Seconds(59)));
  EXPECT_TRUE(stuck_->ClosedAfter(absl::Seconds(61)));
  EXPECT_THAT(stuck_->LastEvent(), ::testing::HasSubstr("a copy of its values has not ended after 1m: a GPU's driver "
                                                        "does not return"));
  EXPECT_FALSE(healthy_->ClosedAfter(absl::Seconds(61))) << "it waits for another's copy";
  memory_.LetGo();
  EXPECT_TRUE(healthy_->Until([&] { return healthy_->value() == 9; }));
  EXPECT_FALSE(healthy_->Held());
  EXPECT_FALSE(healthy_->ClosedAfter(absl::Seconds(61))) << "its copy has ended";
}

}  // namespace
}  // namespace shardd
