#include "server/job/writes/value_copies.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"
#include "common/shm/slab.h"
#include "server/loop/core_loop.h"
#include "server/storage/job_slab.h"
#include "server/turns/turn_queue.h"

namespace shardd {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);

class ValueCopiesTest : public ::testing::Test {
 protected:
  // Runs a copy that waits for go_.
  void RunHeld() {
    loop_.RunAndWait([this] {
      copies_.Run(
          nullptr,
          [this](bool*) {
            begun_.Notify();
            go_.WaitForNotificationWithTimeout(kPatience);
            return absl::OkStatus();
          },
          [this](absl::Status) { order_ += "1"; });
    });
    ASSERT_TRUE(begun_.WaitForNotificationWithTimeout(kPatience));
  }
  void Drain() {
    copier_.Drain();
    loop_.RunAndWait([] {});
  }

  JobSlab slab_{*Slab::Create("shards", SlabBacking::kSealedMemfd, int64_t{1} << 20)};
  CoreLoop loop_;
  TurnQueue copier_{"copier"};
  ValueCopies copies_{&loop_, &copier_, WorkOwner{1, 1}};
  absl::Notification begun_;
  absl::Notification go_;
  std::string order_;  // of the loop
};

TEST_F(ValueCopiesTest, EndOnTheLoopInOrderWithTheirStatus) {
  absl::Status ended;
  RunHeld();
  loop_.RunAndWait([&] {
    copies_.Run(
        nullptr, [](bool*) { return absl::DataLossError("gone"); },
        [&](absl::Status status) {
          EXPECT_TRUE(loop_.InLoop());
          ended = std::move(status);
          order_ += "2";
        });
    copies_.Behind([&] { loop_.Post([&] { order_ += "3"; }); });
  });
  go_.Notify();
  Drain();
  EXPECT_EQ(order_, "123");
  EXPECT_EQ(ended.message(), "gone");
}

TEST_F(ValueCopiesTest, FewHostBytesAreCopiedAtOnceUnlessOthersAre) {
  EXPECT_TRUE(copies_.IsMadeAtOnce(slab_, 4096));
  EXPECT_FALSE(copies_.IsMadeAtOnce(slab_, int64_t{1} << 20));
  RunHeld();
  loop_.RunAndWait([&] { EXPECT_FALSE(copies_.IsMadeAtOnce(slab_, 4096)); });
  go_.Notify();
  Drain();
  EXPECT_TRUE(copies_.IsMadeAtOnce(slab_, 4096));
}

TEST_F(ValueCopiesTest, ACopyIsStuckWithoutProgressAlone) {
  const absl::Time late = MonotonicNow() + 2 * ValueCopies::kLimit;
  EXPECT_FALSE(copies_.IsStuck(late)) << "none is under way";
  RunHeld();
  EXPECT_FALSE(copies_.IsStuck(MonotonicNow()));
  EXPECT_TRUE(copies_.IsStuck(late));
  go_.Notify();
  Drain();
  EXPECT_FALSE(copies_.IsStuck(late));
}

TEST_F(ValueCopiesTest, ACopyKeepsItsJobAlive) {
  auto job = std::make_shared<int>(0);
  const std::weak_ptr<int> weak = job;
  go_.Notify();
  loop_.RunAndWait([&] {
    copies_.Run(
        std::exchange(job, nullptr),
        [&](bool*) { return weak.expired() ? absl::InternalError("gone") : absl::OkStatus(); },
        [&](absl::Status status) { EXPECT_TRUE(status.ok() && !weak.expired()); });
  });
  Drain();
  EXPECT_TRUE(weak.expired());
}

}  // namespace
}  // namespace shardd
