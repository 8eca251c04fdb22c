#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/collective/local/local_collective.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/device/device_world.h"
#include "tests/server/device/plan_slabs.h"
#include "tests/server/device/wrapped_device.h"

namespace shardd {

// Devices of one kind, the memory that they reach, and the collective over them.
class CollectiveWorld {
 public:
  virtual ~CollectiveWorld() = default;
  virtual std::vector<std::unique_ptr<Device>> MakeDevices() = 0;
  virtual std::pmr::memory_resource* memory() { return std::pmr::new_delete_resource(); }
  // Where the rank's gradient slots are to lie.
  virtual std::pmr::memory_resource* slot_memory(int /*rank*/) { return memory(); }
  // The collective is gone, and so is all that requests named; devices are there.
  virtual void CollectiveIsGone() {}
  // of_ranks: those of MakeDevices, by rank.
  virtual std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) = 0;
};

struct CollectiveImplementation {
  const char* name;
  // `devices` for `ranks`, or as many as ranks where they cannot share.
  std::function<std::unique_ptr<CollectiveWorld>(int ranks, int devices)> make;
  // Empty, or why its tests are skipped here.
  std::function<std::string()> why_not = [] { return std::string(); };
  bool devices_add = true;     // else sessions do
  bool rounds_sources = true;  // to a narrower reduce_dtype, before it adds them
};

class CollectiveTest : public ::testing::TestWithParam<CollectiveImplementation> {
 protected:
  static constexpr absl::Duration kLimit = absl::Seconds(60);

  // A job of `plan` whose ranks share `device_count` devices.
  void Start(ShardPlan plan, int device_count) {
    Stop();
    plan_ = std::move(plan);
    world_ = GetParam().make(plan_.world_size, device_count);
    BytesMemory() = world_->memory();
    devices_ = world_->MakeDevices();
    for (const auto& device : devices_) wrapped_.push_back(std::make_unique<WrappedDevice>(device.get()));
    std::vector<Device*> of_ranks;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      of_ranks.push_back(wrapped_[static_cast<size_t>(rank) % wrapped_.size()].get());
    }
    collective_ = world_->Make(std::move(of_ranks));
  }
  // Before what is in the devices' memory ends.
  virtual void Stop() {
    collective_.reset();
    if (world_ != nullptr) world_->CollectiveIsGone();
    wrapped_.clear();
    devices_.clear();
    BytesMemory() = std::pmr::new_delete_resource();
    world_.reset();
  }
  void SetUp() override {
    if (const std::string why_not = GetParam().why_not(); !why_not.empty()) GTEST_SKIP() << why_not;
  }
  void TearDown() override { Stop(); }

  // Calls start(done) and waits; checks that `done` ran once.
  template <typename Start>
  absl::Status WaitFor(Start&& start) {
    // Shared: a second call of `done`, which is what this looks for, would come after the end of this scope.
    struct State {
      std::atomic<int> calls{0};
      absl::Notification notification;
      absl::Status status;
    };
    auto state = std::make_shared<State>();
    start([state](absl::Status status) {
      if (state->calls.fetch_add(1) > 0) return;
      state->status = std::move(status);
      state->notification.Notify();
    });
    EXPECT_TRUE(state->notification.WaitForNotificationWithTimeout(kLimit));
    Drain();
    EXPECT_EQ(state->calls.load(), 1);
    return state->status;
  }
  // Every device has run what was submitted to it so far.
  void Drain() {
    for (const auto& device : devices_) {
      for (int stream = 0; stream < kStreamCount; ++stream) {
        absl::Notification drained;
        device->Submit(static_cast<StreamId>(stream), {"drain", {}, [&](absl::Status) { drained.Notify(); }});
        EXPECT_TRUE(drained.WaitForNotificationWithTimeout(kLimit));
      }
    }
  }

  ShardPlan plan_;
  std::unique_ptr<CollectiveWorld> world_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<WrappedDevice>> wrapped_;
  std::unique_ptr<Collective> collective_;
};

inline std::string CollectiveName(const ::testing::TestParamInfo<CollectiveImplementation>& info) {
  return info.param.name;
}
inline void PrintTo(const CollectiveImplementation& implementation, std::ostream* out) { *out << implementation.name; }

// Those that this binary has: all, and `local` on whatever devices.
std::vector<CollectiveImplementation> Collectives();
std::vector<CollectiveImplementation> LocalCollectives();

#define SHARDD_FOR_EACH_COLLECTIVE(suite) \
  INSTANTIATE_TEST_SUITE_P(Collectives, suite, ::testing::ValuesIn(Collectives()), CollectiveName)
#define SHARDD_FOR_EACH_LOCAL_COLLECTIVE(suite) \
  INSTANTIATE_TEST_SUITE_P(Collectives, suite, ::testing::ValuesIn(LocalCollectives()), CollectiveName)

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_
