// The symmetric window of a job's gradient slots: when it is registered, what waits for it, what becomes of it.

#include <stdlib.h>

#include "server/collective/nccl/nccl_communicators.h"
#include "tests/server/collective/nccl/nccl_window_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(NcclWindowTest, TheWindowReducesEqualPartsAndStatusNamesTheGroup) {
  Start(/*rows=*/6);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_EQ(Library().registrations, kRanks);
  EXPECT_THAT(collective_->Describe(), HasSubstr("symmetric window of 4194304 bytes on each GPU, registered 1 time(s); "
                                                 "sums in it: \"a\""));
}

TEST_F(NcclWindowTest, UnequalPartsGoAlongRingsByName) {
  Start(/*rows=*/5, v1::LAYOUT_DIM0);  // "v" is a reduce-scatter, "w" has 2, 2 and 1 rows
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("sums in it: \"a\" (3 of 6 parts are not equal ones of all ranks, one "
                                                 "behind the other)"));
  TearDown();
  SetUp();
  slabs_.clear();
  Start(/*rows=*/5);  // 352 elements, and padding
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("sums in it: \"a\""));
}

// As a rank's replacement has them: other addresses, another window, and the memory before is given back.
TEST_F(NcclWindowTest, ReplacedSlotsAreRegisteredAnewAndTheOldOnesGo) {
  Start(/*rows=*/6);
  ASSERT_TRUE(Reduce().ok());
  const std::weak_ptr<const DeviceSlab> before = slabs_[1];
  slabs_[1] = nullptr;
  collective_->SetSlots(1, nullptr);
  AwaitStatus("no symmetric window now, registered 1 time(s): not every rank has gradient slots");
  for (int i = 0; i < 10000 && !before.expired(); ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(before.expired());
  EXPECT_EQ(Library().deregistrations, kRanks);
  slabs_[1] = NewSlab(1);
  collective_->SetSlots(1, slabs_[1]);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("registered 2 time(s)"));
  EXPECT_TRUE(communicator_->broken().ok());
}

// A window in use is never deregistered: the fake refuses it, which would break the communicator. Two members' sums
// are not enqueued yet, the third's waits for them.
TEST_F(NcclWindowTest, AWindowStaysUntilTheLastSumHasLeft) {
  table_.ReduceScatter = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                            ncclComm_t comm, cudaStream_t stream) {
    if (++Library().sums > 1) {
      while (Library().hold_sums) absl::SleepFor(absl::Milliseconds(1));
    }
    return fake_nccl::Table().ReduceScatter(send, receive, count, dtype, op, comm, stream);
  };
  Library().sums = 0;
  Library().hold_sums = true;
  Start(/*rows=*/6);
  absl::Notification first, second;
  absl::Status status;
  collective_->ReduceScatter(Request(), [&](absl::Status ended) {
    status = std::move(ended);
    first.Notify();
  });
  for (int i = 0; i < 10000 && Library().sums < kRanks; ++i) absl::SleepFor(absl::Milliseconds(1));
  collective_->SetSlots(2, nullptr);
  collective_->ReduceScatter(Request({4096, 4096, 4096}), [&](const absl::Status&) { second.Notify(); });
  EXPECT_FALSE(second.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  EXPECT_EQ(Library().deregistrations, 0);
  EXPECT_EQ(Library().sums, kRanks) << "the second waits for the window";
  Library().hold_sums = false;
  ASSERT_TRUE(first.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(second.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectSums();
  EXPECT_EQ(Library().deregistrations, kRanks);
  EXPECT_TRUE(communicator_->broken().ok()) << communicator_->broken();
}

TEST_F(NcclWindowTest, SlotsMayChangeBetweenAnySums) {
  Start(/*rows=*/6);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<absl::Notification>> done;
    std::atomic<int> failed = 0;
    for (int sum = 0; sum < 4; ++sum) {
      done.push_back(std::make_unique<absl::Notification>());
      collective_->ReduceScatter(Request({sum * 65536, sum * 65536, sum * 65536}),
                                 [&failed, notification = done.back().get()](const absl::Status& status) {
                                   failed += status.ok() ? 0 : 1;
                                   notification->Notify();
                                 });
      if (sum == 1) {
        const auto kept = slabs_[2];  // what the requests name
        collective_->SetSlots(2, nullptr);
        collective_->SetSlots(2, kept);
      }
      if (sum == 2) collective_->SetSlots(0, nullptr);
    }
    for (const auto& notification : done) notification->WaitForNotification();
    EXPECT_EQ(failed, 0);
    ExpectSums();
    collective_->SetSlots(0, slabs_[0]);
  }
  EXPECT_TRUE(communicator_->broken().ok()) << communicator_->broken();
}

TEST_F(NcclWindowTest, RequestsAwaitRegistrationInOrderOrEndWithTheCollective) {
  Library().hold = true;
  Start(/*rows=*/6);
  absl::Notification first, second;
  absl::Status status;
  collective_->ReduceScatter(Request(), [&](absl::Status) { first.Notify(); });
  EXPECT_FALSE(first.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  EXPECT_THAT(collective_->Describe(), HasSubstr("it is being registered"));
  Library().hold = false;
  ASSERT_TRUE(first.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectSums();
  AwaitStatus("registered 1 time(s)");
  slabs_[0] = NewSlab(0);
  Library().hold = true;
  collective_->SetSlots(0, slabs_[0]);
  collective_->ReduceScatter(Request(), [&](absl::Status ended) {
    status = std::move(ended);
    second.Notify();
  });
  collective_.reset();
  ASSERT_TRUE(second.HasBeenNotified());
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

// Of no use is then the communicator, too: another is made, without a window.
TEST_F(NcclWindowTest, AfterAFailedRegistrationRingsReduceAndStatusSaysWhy) {
  table_.CommWindowRegister = [](ncclComm_t, void*, size_t, ncclWindow_t*, int) { return ncclUnhandledCudaError; };
  Start(/*rows=*/6, v1::LAYOUT_FLAT, /*remakes=*/true);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("384 gradient elements summed by it, 0 by copies"));
  EXPECT_THAT(collective_->Describe(),
              HasSubstr("no symmetric window, registered 0 time(s): ncclCommWindowRegister cuda:0: "
                        "unhandled cuda error (result 1)"));
  EXPECT_THAT(collective_->Describe(), HasSubstr("along rings: \"a\""));
  EXPECT_THAT(collective_->Describe(), Not(HasSubstr("made anew")));
  slabs_[1] = NewSlab(1);
  collective_->SetSlots(1, slabs_[1]);  // once is enough
  ASSERT_TRUE(Reduce().ok());
  EXPECT_THAT(collective_->Describe(), HasSubstr("768 gradient elements summed by it"));
}

// As where NCCL loses the message of a member.
TEST_F(NcclWindowTest, ARegistrationThatNeverEndsIsGivenUpInTime) {
  table_.CommWindowRegister = [](ncclComm_t comm, void* p, size_t size_bytes, ncclWindow_t* window, int flags) {
    if (++Library().registrations == kRanks) return ncclSuccess;
    return fake_nccl::Table().CommWindowRegister(comm, p, size_bytes, window, flags);
  };
  limit_ = absl::Milliseconds(500);
  Start(/*rows=*/6, v1::LAYOUT_FLAT, /*remakes=*/true);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("ncclCommWindowRegister on cuda:0: not done after 500ms"));
  EXPECT_THAT(collective_->Describe(), HasSubstr("384 gradient elements summed by it, 0 by copies"));
}

TEST_F(NcclWindowTest, WhereNcclHasNoSymmetricMemoryTheCommunicatorGoesOn) {
  setenv("FAKE_NCCL_SYMMETRIC", "0", 1);
  Start(/*rows=*/6);
  const absl::Status status = Reduce();
  unsetenv("FAKE_NCCL_SYMMETRIC");
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(communicator_->broken().ok());
  EXPECT_THAT(collective_->Describe(), HasSubstr("NCCL has no symmetric memory over these GPUs"));
  EXPECT_THAT(collective_->Describe(), HasSubstr("384 gradient elements summed by it"));
}

TEST_F(NcclWindowTest, OldLibrariesAndUnequalSlabsAreReasonsForNoWindow) {
  table_.CommWindowDeregister = nullptr;
  Start(/*rows=*/6);
  ASSERT_TRUE(Reduce().ok());
  EXPECT_THAT(collective_->Describe(), HasSubstr("NCCL 2.28.9 has no ncclCommWindowRegister"));
  TearDown();
  slabs_.clear();
  table_.CommWindowDeregister = fake_nccl::Table().CommWindowDeregister;
  Start(/*rows=*/6);
  slabs_[2] = NewSlab(2, 2 * kSlotsBytes);
  AwaitStatus("registered 1 time(s)");
  collective_->SetSlots(2, slabs_[2]);
  ASSERT_TRUE(Reduce().ok());
  EXPECT_THAT(collective_->Describe(),
              HasSubstr("the slab on cuda:2 is of another size than the first (got 8388608 bytes, "
                        "want 4194304)"));
  EXPECT_TRUE(communicator_->broken().ok());
}

TEST_F(NcclWindowTest, ACommunicatorThatIsMadeAnewHasTheWindowAgain) {
  Start(/*rows=*/6, v1::LAYOUT_FLAT, /*remakes=*/true);
  ASSERT_TRUE(Reduce().ok());
  communicator_->Break(absl::UnavailableError("enough"));
  ASSERT_TRUE(Reduce().ok()) << "by copies";
  AwaitStatus("aborted and made anew 1 time(s)");
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  AwaitStatus("registered 2 time(s); sums in it: \"a\"");
  EXPECT_THAT(collective_->Describe(), HasSubstr("768 gradient elements summed by it"));
  EXPECT_EQ(Library().deregistrations, 0) << "the abort has taken the first";
}

// What lies at other offsets of the window is what a symmetric kernel would read wrongly. It is found on the streams.
TEST_F(NcclWindowTest, TheFakeRefusesWhatIsNotSymmetric) {
  Start(/*rows=*/6);
  ASSERT_TRUE(Reduce({4096, 4096, 4096}).ok());
  ExpectSums();
  const bool first = Reduce({0, 4096, 0}).ok();
  EXPECT_FALSE(first && Reduce().ok());
}

TEST_F(NcclWindowTest, CommunicatorsWithWindowsAreOneForEachJob) {
  Start(/*rows=*/6);
  NcclCommunicators communicators(NcclLibrary(table_, 22809), gpus_.driver(), {0, 1, 2}, /*windows=*/true);
  const auto first = communicators.For(2), second = communicators.For(2);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_NE(*first, *second);
  EXPECT_TRUE((*first)->takes_window());
}

}  // namespace
}  // namespace shardd
