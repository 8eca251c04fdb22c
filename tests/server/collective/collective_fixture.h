#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/collective/local/local_collective.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/device/plan_slabs.h"
#include "tests/server/device/wrapped_device.h"

namespace shardd {

struct CollectiveImplementation {
  const char* name;
  std::function<std::unique_ptr<Collective>(std::vector<Device*>)> make;
};

class CollectiveTest : public testing::TestWithParam<CollectiveImplementation> {
 protected:
  static constexpr absl::Duration kLimit = absl::Seconds(60);

  // A job of `plan` whose ranks share `device_count` devices.
  void Start(ShardPlan plan, int device_count) {
    plan_ = std::move(plan);
    collective_.reset();
    wrapped_.clear();
    devices_ = std::move(MakeDevices(absl::StrCat("cpu:", device_count))->devices);
    for (const auto& device : devices_) wrapped_.push_back(std::make_unique<WrappedDevice>(device.get()));
    std::vector<Device*> of_ranks;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      of_ranks.push_back(wrapped_[static_cast<size_t>(rank % device_count)].get());
    }
    collective_ = GetParam().make(std::move(of_ranks));
  }

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
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<WrappedDevice>> wrapped_;
  std::unique_ptr<Collective> collective_;
};

inline std::string CollectiveName(const testing::TestParamInfo<CollectiveImplementation>& info) {
  return info.param.name;
}
inline void PrintTo(const CollectiveImplementation& implementation, std::ostream* out) { *out << implementation.name; }

inline std::unique_ptr<Collective> MakeLocalCollective(std::vector<Device*> devices) {
  return std::make_unique<LocalCollective>(std::move(devices));
}

#define SHARDD_FOR_EACH_COLLECTIVE(suite)      \
  INSTANTIATE_TEST_SUITE_P(Collectives, suite, \
                           testing::Values(CollectiveImplementation{"local", &MakeLocalCollective}), CollectiveName)

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_COLLECTIVE_FIXTURE_H_
