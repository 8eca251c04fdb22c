// A rank that has paused between a forward and its backward says so in a word of its page: what the daemon makes of any
// value there, and of a death meanwhile.

#include <unistd.h>

#include <algorithm>

#include "absl/synchronization/notification.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

SpecBuilder TrainersWrite() {
  SpecBuilder builder(2);
  builder.config().set_trainers_never_write(false);
  builder.Param(0, "w", {64});
  return builder;
}

class PauseTest : public JobCoreTest {
 protected:
  PauseTest() : JobCoreTest(TrainersWrite()) {}

  void EnterBoth() {
    v1::Command command;
    command.mutable_enter_pass();
    Send(0, command);
    Send(1, command);
  }
  void Leave(int rank) {
    v1::Command command;
    command.mutable_leave_pass();
    Send(rank, command);
  }
  void AskToHandIn(int rank) {
    v1::Command command;
    command.mutable_hand_in();
    Send(rank, command);
  }
  std::atomic<uint32_t>& PassOf(int rank) {
    return job_->sessions()[rank].get()->memory()->memory->At<ClientPage>(0)->pass;
  }
  void Say(int rank, uint32_t word) {
    OnLoop([&] { PassOf(rank) = word; });
  }
  void Pause(int rank) { Say(rank, static_cast<uint32_t>(PassWord::kPaused)); }
  uint64_t HandIns(int rank) {
    uint64_t result = 0;
    OnLoop([&] {
      const DaemonPage* page = job_->sessions()[rank].get()->memory()->daemon_page->At<DaemonPage>(0);
      result = TimelineSequence(page->hand_ins.load());
    });
    return result;
  }
  // The daemon has looked for pauses several times.
  void LetItLook() {
    absl::Notification looked;
    OnLoop([&] { loop_.AddTimer(MonotonicNow() + absl::Milliseconds(5), [&] { looked.Notify(); }); });
    ASSERT_TRUE(looked.WaitForNotificationWithTimeout(kPatience));
  }
  int Aborts(int rank) { return streams_[rank]->Count(v1::SessionEvent::kAborted); }
};

TEST_F(PauseTest, OnlyTheWordForAPauseLetsAnotherHandIn) {
  EnterBoth();
  Leave(0);
  AskToHandIn(0);
  for (const uint32_t word : {2u, 3u, 99u, 0x80000001u, 0xffffffffu}) {
    Say(1, word);
    LetItLook();
    EXPECT_EQ(HandIns(0), 0u) << word;
    OnLoop([&] { EXPECT_EQ(PassOf(1), word) << "it is the client's"; });
  }
  Pause(1);
  ASSERT_TRUE(Until([&] { return PassOf(1) == static_cast<uint32_t>(PassWord::kOvertaken); }));
  EXPECT_EQ(HandIns(0), 1u);
  Pause(1);  // of a pass that is over
  Leave(1);
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 5.0f);
  EnterBoth();
  ASSERT_TRUE(Until([&] { return job_->committed().version() == 2; }));
  EXPECT_EQ(Aborts(0) + Aborts(1), 0);
}

TEST_F(PauseTest, DeathWhileItIsPausedLosesNothingWhereNobodyWrites) {
  EnterBoth();
  Pause(1);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  EXPECT_EQ(epoch(), 2u);
  Attach(0);
  Attach(1);
  EnterBoth();
  OnLoop([&] { EXPECT_EQ(job_->committed().version(), 1u); });
  EXPECT_EQ(Aborts(0) + Aborts(1), 0) << "of the new sessions";
}

TEST_F(PauseTest, ADeathAfterAnotherEndedThePauseTakesEditsBack) {
  EnterBoth();
  Pause(1);
  Leave(0);
  AskToHandIn(0);
  ASSERT_TRUE(Until([&] { return PassOf(1) == static_cast<uint32_t>(PassWord::kOvertaken); }));
  std::fill_n(SlabAt<float>(job_->memory().shards(), 0), 64, 5.0f);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  const auto attach = [&] {  // rank 0, which was handing in, stores no more when it asks again
    auto session = Session::Create(plan_, ++sessions_made_, 0, epoch());
    if (session.ok()) (*session)->peer.pid = getpid();
    absl::Status status = session.status();
    OnLoop([&] { status = job_->AddSession(*std::move(session)); });
    return status;
  };
  ASSERT_TRUE(testing::PollUntil([&] { return attach().ok(); }, kPatience));
  EXPECT_EQ(value(), 0) << "what was kept";
  EXPECT_EQ(epoch(), 2u);
  EXPECT_EQ(committed(), 0);
}

// A rank that has finished and is kept for its gradients.
class HeldTest : public JobCoreTest {};

TEST_F(HeldTest, IsDroppedForItsSuccessorWithWhatItGave) {
  Backward(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  OnLoop([&] { ASSERT_NE(job_->sessions()[0].get(), nullptr) << "rank 1 still needs its gradients"; });
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });
  EXPECT_EQ(epoch(), 1u);
  OnLoop([&] { job_->SessionLost(0, "its process ended", /*replaced=*/true); });
  EXPECT_EQ(epoch(), 2u);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 was replaced"), std::string::npos);
  Attach(0);
  Attach(1);
  Train(0);
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(value(), -0.5f) << "one gradient of each rank";
}

TEST_F(HeldTest, WhoHasSteppedIsNotDropped) {
  Train(0);
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  OnLoop([&] { job_->SessionLost(0, "it was replaced", /*replaced=*/true); });
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(epoch(), 1u);
}

}  // namespace
}  // namespace shardd
