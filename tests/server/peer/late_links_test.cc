#include "server/peer/late_links.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

struct Sent {
  std::atomic<int> messages = 0;
  std::atomic<int> renewed = 0;
  std::atomic<bool> gone = false;
};

class Links final : public PeerLinks {
 public:
  explicit Links(Sent* sent) : sent_(sent) {}
  ~Links() override { sent_->gone = true; }
  int node() const override { return 1; }
  int nodes() const override { return 2; }
  int protocol_version(int) const override { return 7; }
  bool takes_extensions(int) const override { return false; }
  bool takes_fetch_ends(int) const override { return false; }
  void Renew(int) override { ++sent_->renewed; }
  void Send(int, v1::PeerMessage) override { ++sent_->messages; }
  void SendData(int, const v1::PeerData&, absl::string_view, std::function<void(absl::Status)> sent) override {
    sent(absl::OkStatus());
  }

 private:
  Sent* const sent_;
};

TEST(LateLinks, AreMadeWhenTheNameIsFreeAndNotBeforeStart) {
  Sent sent;
  std::atomic<int> tries = 0;
  {
    LateLinks links(
        1, 2,
        [&]() -> absl::StatusOr<std::unique_ptr<PeerLinks>> {
          if (++tries < 3) return absl::AlreadyExistsError("taken");
          return std::make_unique<Links>(&sent);
        },
        [](const absl::Status& why) { ADD_FAILURE() << why; });
    links.Send(0, {});
    EXPECT_EQ(links.protocol_version(0), 0);
    EXPECT_EQ(tries, 0);
    links.Start();
    ASSERT_TRUE(testing::PollUntil([&] { return links.protocol_version(0) == 7; }));
    links.Send(0, {});
    EXPECT_FALSE(links.takes_extensions(0));
    EXPECT_FALSE(links.takes_fetch_ends(0));
    links.Renew(0);
  }
  EXPECT_EQ(sent.renewed, 1);
  EXPECT_EQ(sent.messages, 1);
  EXPECT_TRUE(sent.gone);
  EXPECT_EQ(tries, 3);
}

// A link may be heard of before the call that has made it returns.
TEST(LateLinks, WhatIsSaidWhileTheyAreMadeIsSent) {
  Sent sent;
  absl::Notification begun;
  absl::Notification go_on;
  LateLinks links(
      1, 2,
      [&]() -> absl::StatusOr<std::unique_ptr<PeerLinks>> {
        begun.Notify();
        go_on.WaitForNotification();
        return std::make_unique<Links>(&sent);
      },
      [](const absl::Status& why) { ADD_FAILURE() << why; });
  links.Start();
  begun.WaitForNotification();
  std::thread says([&] { links.Send(0, {}); });
  go_on.Notify();
  says.join();
  EXPECT_EQ(sent.messages, 1);
}

TEST(LateLinks, AnErrorIsToldOnceAndIsTheLast) {
  std::atomic<int> tries = 0;
  std::atomic<int> told = 0;
  {
    LateLinks refused(
        1, 2,
        [&]() -> absl::StatusOr<std::unique_ptr<PeerLinks>> {
          if (++tries < 3) return absl::AlreadyExistsError("taken");
          return absl::InvalidArgumentError("no such node");
        },
        [&](const absl::Status& why) {
          EXPECT_EQ(why.code(), absl::StatusCode::kInvalidArgument) << why;
          ++told;
        });
    refused.Start();
    EXPECT_TRUE(testing::PollUntil([&] { return told == 1; }));
    absl::Status sent;
    refused.SendData(0, {}, "", [&](absl::Status status) { sent = std::move(status); });
    EXPECT_EQ(sent.code(), absl::StatusCode::kUnavailable) << "there are none, and will be none";
  }
  EXPECT_EQ(tries, 3);
  EXPECT_EQ(told, 1);
}

TEST(LateLinks, WhoEndsThemWaitsForNoName) {
  std::atomic<int> tries = 0;
  LateLinks waits(
      1, 2,
      [&]() -> absl::StatusOr<std::unique_ptr<PeerLinks>> {
        ++tries;
        return absl::AlreadyExistsError("taken");
      },
      [](const absl::Status& why) { ADD_FAILURE() << why; });
  waits.Start();
  EXPECT_TRUE(testing::PollUntil([&] { return tries >= 2; }));
}

}  // namespace
}  // namespace shardd
