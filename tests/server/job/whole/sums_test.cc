// Gradients that sessions add themselves (JobConfig.trainer_sums): the library's part is this test's, on the loop.

#include <unistd.h>

#include "tests/server/collective/add_records.h"
#include "tests/server/job/job_core_fixture.h"
#include "tests/server/job/trainer_process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSilenceMs = 2000;

class SumsTest : public JobCoreTest {
 protected:
  explicit SumsTest(const SpecBuilder& builder = Job()) : JobCoreTest(builder) {}
  static SpecBuilder Job() {
    SpecBuilder builder = SgdJob();
    builder.config().set_trainer_sums(true);
    builder.config().set_silence_timeout_ms(kSilenceMs);
    return builder;
  }
  // A session's memory as its client has it, which outlives the session.
  struct Client {
    std::shared_ptr<SessionMemory> memory;
    SessionLayout layout;
    uint64_t epoch = 0;
    uint64_t taken = 0;
    SumRing& ring() const { return *memory->daemon_page->At<SumRing>(layout.sum_ring_offset_bytes); }
    SumWords& words() const { return *memory->memory->At<SumWords>(layout.sum_words_offset_bytes); }
    char* slots() const { return memory->memory->At<char>(layout.slots_offset_bytes); }
    void Say() const { words().summed.store(TimelineValue(epoch, taken)); }
  };
  Client ClientOf(int rank) {
    Client client;
    OnLoop([&] {
      Session* session = job_->sessions()[rank].get();
      ASSERT_NE(session, nullptr);
      client = {session->memory(), session->layout(), session->epoch()};
    });
    return client;
  }
  void Find() {
    for (int rank = 0; rank < kRanks; ++rank) clients_[rank] = ClientOf(rank);
  }
  // The rank's part of what it was told, `end` records, but not that it is there.
  void AddSilently(int rank, uint64_t end) {
    AddRecords(clients_[rank].ring(), &clients_[rank].taken, end, {clients_[0].slots(), clients_[1].slots()},
               SlabAt<char>(job_->memory().gradients(), 0));
  }
  void Add(int rank) {
    AddSilently(rank, Told(rank));
    clients_[rank].Say();
  }
  // The loop's part of it.
  void Poll() {
    OnLoop([&] { job_->PollRings(); });
  }
  bool UntilPolled(const std::function<bool()>& condition) {
    return Until([&] {
      job_->PollRings();
      return condition();
    });
  }
  uint64_t Told(int rank) { return TimelineSequence(clients_[rank].ring().written.load()); }
  absl::Status TryAttach(int rank) {
    auto session = Session::Create(plan_, ++sessions_made_, rank, epoch(), place_);
    if (session.ok()) (*session)->peer = {.uid = getuid(), .gid = 0, .pid = getpid()};
    return session.ok() ? AddSession(*std::move(session)) : session.status();
  }
  float Gradient(int64_t i) { return SlabAt<float>(job_->memory().gradients(), 0)[i]; }

  Client clients_[kRanks];
};

TEST_F(SumsTest, AreMadeBySessionsAloneAndTheStepTakesThem) {
  Find();
  for (const auto& device : devices_) device->Hold(StreamId::kPostBackward);
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  EXPECT_EQ(Told(0), 1u);
  EXPECT_EQ(Told(1), 1u);
  Add(0);
  Poll();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(committed(), 0);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return job_->view().committed_step() == 1; }));
  EXPECT_FALSE(devices_[0]->Waiting() || devices_[1]->Waiting()) << "a device has added";
  EXPECT_EQ(value(), -0.5f);
}

// A stream that waits for a sum may stand before it in a queue of the GPU.
TEST_F(SumsTest, NothingAnnouncesASumBeforeItIsThere) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  const DaemonPageView page(clients_[0].memory->daemon_page->data(), static_cast<int64_t>(plan_->gradient_slots.size()),
                            static_cast<int64_t>(plan_->groups.size()));
  EXPECT_EQ(TimelineSequence(page.slot(0).issued.load()), 0u);
  EXPECT_EQ(TimelineSequence(page.page().reducing.load()), 0u);
  Add(0);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return TimelineSequence(page.page().reducing.load()) == 1; }));
  EXPECT_EQ(TimelineSequence(page.slot(0).issued.load()), 1u);
  EXPECT_EQ(TimelineSequence(page.slot(0).released.load()), 1u);
  EXPECT_EQ(TimelineSequence(page.page().reduced.load()), 1u);
}

// No stream of the daemon's is in order with what trainers add.
TEST_F(SumsTest, FullParametersWithGradientsAreGivenBehindTheSums) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  v1::Command enter;
  enter.mutable_enter_full_params()->set_with_grads(true);
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, enter);
  const TimelineWord& given = clients_[0].memory->daemon_page->At<DaemonPage>(0)->full_params;
  Add(0);
  Poll();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(TimelineSequence(given.load()), 0u);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return TimelineSequence(given.load()) == 1; }));
  EXPECT_EQ(Gradient(63), 1.0f);
}

class SumsWithPassCopies : public SumsTest {
 protected:
  SumsWithPassCopies() : SumsTest(Job()) {}
  static SpecBuilder Job() {
    SpecBuilder builder = SumsTest::Job();
    builder.config().set_trainers_never_write(false);
    builder.config().set_pass_copies(true);
    builder.config().set_keep_every(1);
    return builder;
  }
  uint64_t Word(TimelineWord DaemonPage::*word) {
    return TimelineSequence((clients_[0].memory->daemon_page->At<DaemonPage>(0)->*word).load());
  }
  void Enter() {
    v1::Command enter;
    enter.mutable_enter_pass();
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, enter);
  }
};

// A stream that waits for a pass may stand before a sum of it in a queue of the GPU.
TEST_F(SumsWithPassCopies, APassIsAnnouncedWhenEarlierSumsAreThere) {
  Find();
  Enter();
  ASSERT_TRUE(UntilPolled([&] { return Word(&DaemonPage::passes) == 1; }));
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  v1::Command leave;
  leave.mutable_leave_pass();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, leave);
  Enter();
  Add(0);
  Poll();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(Word(&DaemonPage::passes_issued), 1u);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return Word(&DaemonPage::passes) == 2; }));
  EXPECT_EQ(Word(&DaemonPage::passes_issued), 2u);
}

// The worst moment: the sum lands when the next epoch has begun.
TEST_F(SumsTest, ASumThatLandsLateTouchesNothingThatCounts) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  Add(0);
  const uint64_t told = Told(1);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  ASSERT_TRUE(TryAttach(0).ok());
  const absl::Status early = TryAttach(1);
  EXPECT_EQ(early.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(early.message()), HasSubstr("sums of its last session"));
  AddSilently(1, told);  // into the gradient shards of the new epoch
  EXPECT_EQ(Gradient(63), 1.0f);
  EXPECT_FALSE(TryAttach(1).ok()) << "nobody has said that this was all";
  clients_[1].Say();
  ASSERT_TRUE(TryAttach(1).ok());
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  Add(0);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(value(), -0.5f) << "as without what was late";
  EXPECT_EQ(SlabAt<float>(job_->memory().shards(), 0)[63], -0.5f);
}

TEST_F(SumsTest, AClientThatSaysItHasEndedLeavesItsPlace) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  OnLoop([&] { job_->SessionLost(0, "its session stream ended"); });
  EXPECT_FALSE(TryAttach(0).ok());
  EXPECT_EQ(TimelineEpoch(clients_[0].ring().written.load()), epoch()) << "it is let go";
  clients_[0].words().ended.store(1);
  EXPECT_TRUE(TryAttach(0).ok());
}

TEST_F(SumsTest, EndedProcessesLeaveTheirPlaceAndReplacedOnesAreKilled) {
  TrainerProcess process;
  SetProcess(1, process.pid(), process.Descriptor());
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  OnLoop([&] { job_->SessionLost(1, "silence"); });
  EXPECT_FALSE(TryAttach(1).ok());
  absl::Status own, other;
  OnLoop([&] {
    own = job_->CheckMayAttach(1, process.pid(), /*replace=*/true);  // it is to live on
    other = job_->CheckMayAttach(1, process.pid() + 1, /*replace=*/false);
  });
  EXPECT_EQ(own.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(other.message()), HasSubstr(absl::StrCat("pid ", process.pid())));
  EXPECT_TRUE(process.Lives());
  OnLoop([&] { EXPECT_FALSE(job_->CheckMayAttach(1, getpid(), /*replace=*/true).ok()); });
  EXPECT_TRUE(process.WasKilled());
  EXPECT_TRUE(TryAttach(1).ok());
}

TEST_F(SumsTest, ASessionThatEndsBetweenSumsLeavesNothingBehind) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Train(rank);
  Add(0);
  Add(1);
  ASSERT_TRUE(UntilPolled([&] { return job_->view().committed_step() == 1; }));
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(TryAttach(rank).ok());
}

TEST_F(SumsTest, ARankThatDoesNotAddInTimeIsNamed) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  Add(0);
  Poll();
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Milliseconds(kSilenceMs / 2)); });
  EXPECT_EQ(epoch(), 1u);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Milliseconds(kSilenceMs + 100)); });
  EXPECT_EQ(epoch(), 2u);
  const v1::SessionEvent::Aborted aborted = streams_[0]->Aborted();
  EXPECT_EQ(aborted.code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(aborted.message(), HasSubstr("reduce (root) step 1: rank 1 has not added its part on cpu:1"));
  EXPECT_THAT(aborted.message(), HasSubstr("got 0 operations, want 1"));
}

TEST_F(SumsTest, AWordThatCannotBeEndsTheEpoch) {
  Find();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  clients_[1].words().summed.store(TimelineValue(clients_[1].epoch, 7));
  ASSERT_TRUE(UntilPolled([&] { return job_->committed().epoch() == 2; }));
  EXPECT_THAT(streams_[0]->Aborted().message(), HasSubstr("out of range (got 7"));
  clients_[1].words().ended.store(1);
  EXPECT_TRUE(TryAttach(1).ok());
}

}  // namespace
}  // namespace shardd
