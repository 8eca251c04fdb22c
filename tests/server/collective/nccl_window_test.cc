// The symmetric window of a job's gradient slots: when it is registered, what waits for it, what becomes of it.

#include <stdlib.h>

#include <atomic>

#include "server/collective/nccl/nccl_communicators.h"
#include "tests/server/collective/fake_nccl_world.h"

namespace shardd {
namespace {

using testing::HasSubstr;
using testing::Not;

// What the library is asked, and when it may go on.
struct Asked {
  std::atomic<int> registrations = 0, deregistrations = 0;
  std::atomic<bool> hold = false;
  std::atomic<int> sums = 0;
  std::atomic<bool> hold_sums = false;  // but the first member's
};
Asked& Library() {
  static Asked asked;
  return asked;
}

class NcclWindowTest : public testing::Test {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int64_t kSlotsBytes = 4 << 20;

  void SetUp() override {
    Library().registrations = Library().deregistrations = 0;
    Library().hold = Library().hold_sums = false;
    table_.CommWindowRegister = [](nccl::Comm comm, void* p, size_t size_bytes, nccl::Window* window, int flags) {
      ++Library().registrations;
      while (Library().hold) absl::SleepFor(absl::Milliseconds(1));
      return fake_nccl::Table().CommWindowRegister(comm, p, size_bytes, window, flags);
    };
    table_.CommWindowDeregister = [](nccl::Comm comm, nccl::Window window) {
      ++Library().deregistrations;
      return fake_nccl::Table().CommWindowDeregister(comm, window);
    };
  }
  // Group "a" of one parameter of `rows` rows, and of another that makes it a sum of two in layout dim0.
  void Start(int rows, v1::Layout layout = v1::LAYOUT_FLAT, bool remakes = false) {
    SpecBuilder builder(kRanks);
    builder.config().set_layout(layout);
    const int a = builder.AddSharded(0, "a");
    builder.Param(a, "w", {rows, 32});
    builder.Param(a, "v", {192});
    plan_ = builder.Plan();
    group_ = plan_.FindGroup("a");
    BytesMemory() = gpus_.memory();
    devices_ = gpus_.MakeAll();
    NcclCollective::Remake remake = nullptr;
    if (remakes) {
      remake = [this] {
        auto made = Make();
        if (made.ok()) {
          absl::MutexLock lock(&mutex_);
          made_.push_back(*made);
        }
        return made;
      };
    }
    auto made = Make();
    ASSERT_TRUE(made.ok()) << made.status();
    communicator_ = made->get();
    made_.push_back(*made);
    collective_ = std::make_unique<NcclCollective>(
        std::vector<Device*>{devices_[0].get(), devices_[1].get(), devices_[2].get()}, *std::move(made), remake);
    for (int rank = 0; rank < kRanks; ++rank) {
      slabs_.push_back(NewSlab(rank));
      collective_->SetSlots(rank, slabs_.back());
    }
    gradients_.emplace_back(plan_.memory.gradients_bytes, 0xff);
  }
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> Make() {
    NcclCommunicator::Options options;
    options.takes_window = true;
    options.limit = limit_;
    return NcclCommunicator::Create(NcclLibrary(table_, 22809), gpus_.driver(), {0, 1, 2}, options);
  }
  std::shared_ptr<const DeviceSlab> NewSlab(int rank, int64_t size_bytes = kSlotsBytes) {
    std::vector<DeviceMemory*> users;
    for (const auto& device : devices_) users.push_back(device->memory());
    return *users[static_cast<size_t>(rank)]->MakeSlab("slots", size_bytes, users);
  }
  void TearDown() override {
    Library().hold = Library().hold_sums = false;
    collective_.reset();
    {
      absl::MutexLock lock(&mutex_);
      for (const auto& made : made_) AwaitEnd(made);
    }
    slabs_.clear();
    devices_.clear();
    gradients_.clear();
    BytesMemory() = std::pmr::new_delete_resource();
    AwaitEnds(gpus_.machine());
  }
  // Of the ranks' slots at `at` bytes of their slabs.
  ReduceScatterRequest Request(const std::vector<int64_t>& at = {0, 0, 0}) {
    ReduceScatterRequest request;
    request.plan = &plan_;
    request.group = group_;
    const GroupPlan& group = plan_.groups[static_cast<size_t>(group_)];
    for (int rank = 0; rank < kRanks; ++rank) {
      char* const slot = slabs_[static_cast<size_t>(rank)]->data() + at[static_cast<size_t>(rank)];
      Bytes bytes(group.gradient_bytes, 0xff);
      for (const int param : group.params) WriteSlot(plan_, bytes, param, ParamValues(plan_, param, rank));
      std::memcpy(slot, bytes.data(), static_cast<size_t>(group.gradient_bytes));
      request.sources.push_back({rank, slot, std::vector<bool>(group.params.size(), true)});
    }
    request.modes.assign(group.params.size(), GradientMode::kOverwrite);
    request.gradients = gradients_[0].data();
    request.label = "reduce a";
    return request;
  }
  absl::Status Reduce(const std::vector<int64_t>& at = {0, 0, 0}) {
    absl::Notification done;
    absl::Status result;
    collective_->ReduceScatter(Request(at), [&](absl::Status status) {
      result = std::move(status);
      done.Notify();
    });
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return result;
  }
  void ExpectSums() {
    for (const int param : plan_.groups[static_cast<size_t>(group_)].params) {
      std::vector<float> want(static_cast<size_t>(plan_.params[static_cast<size_t>(param)].numel));
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::vector<float> values = ParamValues(plan_, param, rank);
        for (size_t k = 0; k < want.size(); ++k) want[k] += values[k];
      }
      EXPECT_EQ(ReadGradient(plan_, gradients_[0], param), want);
    }
  }
  void AwaitStatus(const std::string& part) {
    for (int i = 0; i < 10000 && collective_->Describe().find(part) == std::string::npos; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_THAT(collective_->Describe(), HasSubstr(part));
  }

  FakeCudaWorld gpus_{/*delay_seed=*/3, /*gpus=*/kRanks, /*queue_limit=*/1024};
  nccl::Table table_ = fake_nccl::Table();
  absl::Duration limit_ = absl::Seconds(30);
  ShardPlan plan_;
  std::vector<std::unique_ptr<Device>> devices_;
  NcclCommunicator* communicator_ = nullptr;
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<NcclCommunicator>> made_;
  std::unique_ptr<NcclCollective> collective_;
  std::vector<std::shared_ptr<const DeviceSlab>> slabs_;
  std::vector<Bytes> gradients_;
  int group_ = 0;
};

TEST_F(NcclWindowTest, EqualPartsAreSummedInTheWindowAndStatusNamesTheGroup) {
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
TEST_F(NcclWindowTest, SlotsThatAreReplacedAreRegisteredAnewAndTheOldOnesGo) {
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
  table_.ReduceScatter = [](const void* send, void* receive, size_t count, nccl::DataType dtype, nccl::RedOp op,
                            nccl::Comm comm, nccl::Stream stream) {
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

TEST_F(NcclWindowTest, RequestsWaitForTheRegistrationInOrderOrEndWithTheCollective) {
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
TEST_F(NcclWindowTest, ARegistrationThatFailsLeavesSumsAlongRingsAndStatusSaysWhy) {
  table_.CommWindowRegister = [](nccl::Comm, void*, size_t, nccl::Window*, int) { return nccl::kUnhandledCudaError; };
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
  table_.CommWindowRegister = [](nccl::Comm comm, void* p, size_t size_bytes, nccl::Window* window, int flags) {
    if (++Library().registrations == kRanks) return nccl::kSuccess;
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

TEST_F(NcclWindowTest, ALibraryWithoutWindowsAndSlabsThatDoNotMatchAreReasonsToo) {
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
