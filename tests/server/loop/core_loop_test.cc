#include "server/loop/core_loop.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"

namespace shardd {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(20);

TEST(CoreLoopTest, ClosuresOfOneThreadRunInOrderOnTheLoop) {
  CoreLoop loop;
  std::vector<int> seen;
  bool in_loop = true;
  for (int i = 0; i < 1000; ++i) {
    loop.Post([&, i] {
      seen.push_back(i);
      in_loop = in_loop && loop.InLoop();
    });
  }
  loop.RunAndWait([] {});
  ASSERT_EQ(seen.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_TRUE(in_loop);
}

TEST(CoreLoopTest, NothingPostedByManyThreadsIsLost) {
  CoreLoop loop;
  std::atomic<int> count{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        loop.Post([&] { ++count; });
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  loop.RunAndWait([] {});
  EXPECT_EQ(count, 20000);
}

TEST(CoreLoopTest, WhatIsPostedAndWhatHasRunAreCounted) {
  CoreLoop loop;
  absl::Notification go;
  const uint64_t ran = loop.ran();
  EXPECT_EQ(loop.posted(), ran);
  loop.Post([&go] { go.WaitForNotification(); });
  loop.Post([] {});
  EXPECT_EQ(loop.posted(), ran + 2);
  EXPECT_EQ(loop.ran(), ran);
  go.Notify();
  loop.RunAndWait([] {});
  EXPECT_GE(loop.ran(), ran + 2);
}

TEST(CoreLoopTest, AHangingClosureHoldsUpNeitherWaitersNorTheEnd) {
  static auto* const loop = new CoreLoop();  // never destroyed: its thread is left to the closure
  static absl::Notification goes_on;
  loop->Post([&] { goes_on.WaitForNotification(); });
  EXPECT_FALSE(loop->RunAndWait([] {}, absl::Milliseconds(20)));
  EXPECT_FALSE(loop->Stop(absl::Milliseconds(20)));
  EXPECT_TRUE(loop->Stop(absl::Milliseconds(20))) << "it was said once";
  goes_on.Notify();
  CoreLoop other;
  EXPECT_TRUE(other.RunAndWait([] {}, kLimit));
  EXPECT_TRUE(other.Stop(kLimit));
}

TEST(CoreLoopTest, TimersRunInOrderAndCancelledOnesDoNot) {
  CoreLoop loop;
  std::vector<int> seen;
  absl::Notification done;
  loop.Post([&] {
    const absl::Time now = MonotonicNow();
    loop.AddTimer(now + absl::Milliseconds(30), [&] {
      seen.push_back(3);
      done.Notify();
    });
    loop.AddTimer(now + absl::Milliseconds(10), [&] { seen.push_back(1); });
    const uint64_t cancelled = loop.AddTimer(now + absl::Milliseconds(20), [&] { seen.push_back(2); });
    loop.CancelTimer(cancelled);
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kLimit));
  EXPECT_EQ(seen, (std::vector<int>{1, 3}));
}

TEST(CoreLoopTest, TimersThatWillNotRunLetGoOfWhatTheyHoldWhenItStops) {
  CoreLoop loop;
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> left = held;
  loop.RunAndWait([&] { loop.AddTimer(absl::InfiniteFuture(), [held = std::move(held)] {}); });
  EXPECT_FALSE(left.expired());
  loop.Stop();
  EXPECT_TRUE(left.expired()) << "a call that waits for its answer keeps the server from its end";
}

TEST(CoreLoopTest, AReadableDescriptorIsSeenUntilItIsRemoved) {
  CoreLoop loop;
  UniqueFd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  int calls = 0;
  absl::Notification seen;
  loop.RunAndWait([&] {
    loop.AddFd(event.get(), [&] {
      ++calls;
      loop.RemoveFd(event.get());  // from within its own callback
      seen.Notify();
    });
  });
  const uint64_t one = 1;
  ASSERT_EQ(write(event.get(), &one, 8), 8);
  ASSERT_TRUE(seen.WaitForNotificationWithTimeout(kLimit));
  loop.RunAndWait([] {});
  EXPECT_EQ(calls, 1) << "still readable, but no longer watched";
}

TEST(CoreLoopTest, BeforeSleepIsAskedAgainUntilItFindsNothing) {
  int work = 3;
  absl::Notification slept;
  CoreLoop loop([&] {
    if (work > 0) {
      --work;
      return true;  // without a post, a timer or a descriptor it must come back here by itself
    }
    if (!slept.HasBeenNotified()) {
      slept.Notify();
    }
    return false;
  });
  ASSERT_TRUE(slept.WaitForNotificationWithTimeout(kLimit));
  loop.Stop();
  EXPECT_EQ(work, 0);
}

TEST(CoreLoopTest, RunAndWaitAfterStopReturnsWithoutRunning) {
  CoreLoop loop;
  loop.Stop();
  bool ran = false;
  loop.RunAndWait([&] { ran = true; });
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace shardd
