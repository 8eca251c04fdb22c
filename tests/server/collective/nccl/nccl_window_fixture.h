#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_WINDOW_FIXTURE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_WINDOW_FIXTURE_H_

// A job of three ranks on fake GPUs whose gradient slots become the window of its communicator.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/collective/nccl/fake_nccl_world.h"

namespace shardd {

// What the library is asked, and when it may go on.
struct Asked {
  std::atomic<int> registrations = 0, deregistrations = 0;
  std::atomic<bool> hold = false;
  std::atomic<int> sums = 0;
  std::atomic<bool> hold_sums = false;  // but the first member's
};
inline Asked& Library() {
  static Asked asked;
  return asked;
}

class NcclWindowTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int64_t kSlotsBytes = 4 << 20;

  void SetUp() override {
    Library().registrations = Library().deregistrations = 0;
    Library().hold = Library().hold_sums = false;
    table_.CommWindowRegister = [](ncclComm_t comm, void* p, size_t size_bytes, ncclWindow_t* window, int flags) {
      ++Library().registrations;
      while (Library().hold) absl::SleepFor(absl::Milliseconds(1));
      return fake_nccl::Table().CommWindowRegister(comm, p, size_bytes, window, flags);
    };
    table_.CommWindowDeregister = [](ncclComm_t comm, ncclWindow_t window) {
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
    EXPECT_THAT(collective_->Describe(), ::testing::HasSubstr(part));
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

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_WINDOW_FIXTURE_H_
