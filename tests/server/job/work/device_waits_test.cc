#include "server/job/work/device_waits.h"

#include "server/collective/local/local_collective.h"
#include "server/device/device.h"
#include "server/device/devices.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DeviceWaitsTest : public FactsTest {
 protected:
  DeviceWaitsTest() {
    Attach(0);
    Attach(1);
    job_.when_failed = [this] { committed_.EndEpoch(); };
  }
  // Work that waits for a signal of rank 1, and then comes to `status`.
  void Hold(uint64_t done, absl::Status status = absl::OkStatus()) {
    Held held;
    held.what = "work";
    held.signals = {waits_.given_back().SignalOf(/*rank=*/1, done)};
    held.run = [this, done, status] {
      ran_.push_back(done);
      return status;
    };
    loop_.RunAndWait([&] { EXPECT_TRUE(waits_.given_back().When(std::move(held)).ok()); });
  }
  ~DeviceWaitsTest() override {
    loop_.RunAndWait([&] { waits_.EndEpoch(); });
  }

  const Devices made_ = *MakeDevices("cpu:2");
  const std::vector<Device*> devices_{made_.devices[0].get(), made_.devices[1].get()};
  LocalCollective collective_{devices_};
  std::vector<uint64_t> ran_;
  DeviceWaits waits_{{plan_.get(), &committed_, &sessions_, &devices_}, {&collective_, &loop_, &loop_, &job_}};
};

TEST_F(DeviceWaitsTest, WorkRunsWhenItsSignalHasCome) {
  Hold(1);
  Hold(2);
  EXPECT_FALSE(waits_.Poll());
  Signal(1, 1);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(ran_, ElementsAre(1));
  EXPECT_EQ(job_.advanced, 1);
  Signal(1, 2);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(ran_, ElementsAre(1, 2));
}

TEST_F(DeviceWaitsTest, AnErrorEndsTheEpochAndNothingElseRuns) {
  Hold(1, absl::InternalError("cannot"));
  Hold(2);
  Signal(1, 2);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_EQ(job_.failure().message(), "cannot");
  EXPECT_THAT(ran_, ElementsAre(1));
}

TEST_F(DeviceWaitsTest, ASignalThatDoesNotComeNamesItsRank) {
  Hold(1);
  int rank = -1;
  EXPECT_TRUE(waits_.CheckSignals(MonotonicNow(), &rank).ok());
  const absl::Status late = waits_.CheckSignals(MonotonicNow() + absl::Hours(24), &rank);
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), HasSubstr("work: the stream of rank 1 on cpu:1 has not come to signal 1"));
  EXPECT_EQ(rank, 1);
  EXPECT_TRUE(waits_.CheckSums(MonotonicNow() + absl::Hours(24), &rank).ok()) << "trainers add nothing";
}

TEST_F(DeviceWaitsTest, NothingRunsOnceTheEpochHasEnded) {
  Hold(1);
  loop_.RunAndWait([&] { waits_.EndEpoch(); });
  Signal(1, 1);
  EXPECT_FALSE(waits_.Poll());
  EXPECT_TRUE(ran_.empty());
}

TEST_F(DeviceWaitsTest, WhereDevicesAddRanksMapNoOtherSlots) {
  EXPECT_EQ(waits_.SlotsOfPeer({kFdFirstPeerSlots, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(waits_.MayAttach("attach: ", /*rank=*/0, /*pid=*/1, /*replace=*/true).status.ok());
}

}  // namespace
}  // namespace shardd
