#include "server/loop/post_within.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/synchronization/notification.h"

namespace shardd {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(20);

TEST(PostWithinTest, WhatAStuckQueueDoesNotBeginIsLateOnce) {
  absl::Notification go_on;
  std::vector<std::string> seen;
  CoreLoop loop;
  CoreLoop queue(nullptr, "queue", CoreLoop::Urgency::kQueue);
  const auto post = [&](absl::Duration limit, absl::Notification* decided) {
    const auto says = [&seen, decided](const char* what) {
      return [&seen, decided, what] {
        seen.emplace_back(what);
        decided->Notify();  // a second time ends the test
      };
    };
    PostWithin(limit, queue, says("begun"), loop, says("late"));
  };
  absl::Notification begun, late;
  post(kLimit, &begun);
  ASSERT_TRUE(begun.WaitForNotificationWithTimeout(kLimit));
  queue.Post([&] { go_on.WaitForNotification(); });
  post(absl::Milliseconds(20), &late);
  ASSERT_TRUE(late.WaitForNotificationWithTimeout(kLimit));
  go_on.Notify();
  queue.RunAndWait([] {});
  loop.RunAndWait([] {});
  EXPECT_EQ(seen, (std::vector<std::string>{"begun", "late"}));
}

}  // namespace
}  // namespace shardd
