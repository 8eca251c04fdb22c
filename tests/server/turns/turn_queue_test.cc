#include "server/turns/turn_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/notification.h"

namespace shardd {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(30);

class TurnQueueTest : public ::testing::Test {
 protected:
  ~TurnQueueTest() override { Release(); }

  // Until Release, nothing else runs.
  void Hold() {
    queue_.Post({9, 9}, [this] {
      held_.Notify();
      go_.WaitForNotificationWithTimeout(kLimit);
      return true;
    });
    held_.WaitForNotification();
  }
  void Release() {
    if (!go_.HasBeenNotified()) go_.Notify();
  }
  // Work of so many pieces, each as long as `piece`, which notes its name at its end.
  void Post(WorkOwner owner, char name, int pieces, absl::Duration piece = absl::Microseconds(100)) {
    queue_.Post(owner, [this, name, pieces, piece]() mutable {
      for (const absl::Time end = absl::Now() + piece; absl::Now() < end;) {
      }
      if (--pieces == 0) order_ += name;
      return pieces == 0;
    });
  }

  std::string order_;  // of the queue's thread
  absl::Notification held_, go_;
  TurnQueue queue_{"turns"};
};

TEST_F(TurnQueueTest, AJobsLongWorkDelaysAnothersByAPieceOnly) {
  Hold();
  Post({1, 1}, 'l', 200);
  Post({2, 2}, 's', 2);
  Release();
  queue_.Drain();
  EXPECT_EQ(order_, "sl");
}

TEST_F(TurnQueueTest, WorkOfOneJobKeepsItsOrder) {
  Hold();
  for (const char name : {'a', 'b', 'c'}) Post({1, 1}, name, 5);
  Release();
  queue_.Drain();
  EXPECT_EQ(order_, "abc");
}

TEST_F(TurnQueueTest, ManyJobsOfAUserDelayOthersLikeOne) {
  Hold();
  for (uint64_t job = 0; job < 30; ++job) Post({1, job}, 'm', 40);
  Post({2, 100}, 's', 40);
  Release();
  queue_.Drain();
  EXPECT_LT(order_.find('s'), 25u) << order_;
}

TEST_F(TurnQueueTest, StopFinishesWhatIsPostedAndDropsTheRest) {
  Hold();
  Post({1, 1}, 'a', 3);
  Release();
  EXPECT_TRUE(queue_.Stop());
  EXPECT_EQ(order_, "a");
  Post({1, 1}, 'b', 1);
  EXPECT_TRUE(queue_.Stop());
  EXPECT_EQ(order_, "a");
}

TEST(TurnQueueStuckTest, StopLeavesAThreadThatDoesNotComeBack) {
  static absl::Notification never;
  auto* const queue = new TurnQueue("stuck");
  absl::Notification begun;
  queue->Post({1, 1}, [&] {
    begun.Notify();
    never.WaitForNotification();
    return true;
  });
  begun.WaitForNotification();
  EXPECT_FALSE(queue->Stop(absl::Milliseconds(1)));
  never.Notify();
}

}  // namespace
}  // namespace shardd
