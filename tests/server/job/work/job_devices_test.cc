#include "server/job/work/job_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "server/collective/local/local_collective.h"
#include "server/loop/core_loop.h"
#include "tests/server/job/writes/kept_work.h"

namespace shardd {
namespace {

class CountedDevice final : public Device {
 public:
  explicit CountedDevice(int* alive) : alive_(alive) { ++*alive_; }
  ~CountedDevice() override { --*alive_; }
  const std::string& name() const override { return name_; }
  void Submit(StreamId, DeviceWork) override {}
  std::vector<StreamStatus> Status() const override { return {}; }
  void Shutdown() override {}

 private:
  const std::string name_ = "counted";
  int* const alive_;
};

class JobDevicesTest : public ::testing::Test {
 protected:
  JobDevices::Parts OwnDevices() {
    JobDevices::Parts parts;
    for (int rank = 0; rank < 2; ++rank) {
      parts.own.push_back(std::make_unique<CountedDevice>(&alive_));
      parts.by_rank.push_back(parts.own.back().get());
    }
    parts.collective = std::make_unique<LocalCollective>(parts.by_rank);
    parts.memory_worker = CoreLoop::MakeQueue("job memory");
    return parts;
  }
  int alive_ = 0;
};

TEST_F(JobDevicesTest, TheOptimizerRunsOnTheRanksDevicesByDefault) {
  EXPECT_EQ(JobDevices(OwnDevices()).optimizer().count(), 2);
  KeptWork host;
  JobDevices::Parts parts = OwnDevices();
  parts.optimizer = {&host, &host, &host, &host};
  EXPECT_EQ(JobDevices(std::move(parts)).optimizer().count(), 4);
}

TEST_F(JobDevicesTest, EndsWhenAllThatItWasGivenIsFree) {
  auto devices = std::make_unique<JobDevices>(OwnDevices());
  auto gone = std::make_shared<int>(0);
  devices->memory_worker()->Post([gone] {});
  EXPECT_TRUE(devices->EndMemoryWorker(absl::Seconds(20)));
  EXPECT_EQ(gone.use_count(), 1);
  devices->EndCollective();
  EXPECT_EQ(devices->collective(), nullptr);
  EXPECT_EQ(alive_, 2);
  devices.reset();
  EXPECT_EQ(alive_, 0);
}

TEST_F(JobDevicesTest, MemoryNotFreedInTimeStaysWithThreadAndDevices) {
  JobDevices::Parts parts = OwnDevices();
  const std::vector<Device*> left = parts.by_rank;
  static CoreLoop* worker = nullptr;  // never destroyed: its thread is left to the closure
  static absl::Notification written;
  worker = parts.memory_worker.get();
  auto devices = std::make_unique<JobDevices>(std::move(parts));
  worker->Post([] { written.WaitForNotification(); });
  EXPECT_FALSE(devices->EndMemoryWorker(absl::Milliseconds(10)));
  devices.reset();
  EXPECT_EQ(alive_, 2);
  written.Notify();
  for (Device* const device : left) delete device;
}

}  // namespace
}  // namespace shardd
