// Links over real sockets, all nodes in this process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "common/version.h"
#include "server/peer/peer_wire.h"
#include "tests/server/peer/peer_fixture.h"

namespace shardd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PeerLinksTest, MessagesArriveInOrderBothWaysBetweenAllNodes) {
  constexpr int kNodes = 3;
  constexpr int kMessages = 300;
  Nodes nodes(kNodes);
  nodes.JoinAll();
  for (int i = 0; i < kMessages; ++i) {
    for (int a = 0; a < kNodes; ++a) {
      for (int b = 0; b < kNodes; ++b) {
        if (a != b) {
          nodes.links[a]->Send(b, Step(1000 * a + i));
        }
      }
    }
  }
  for (int a = 0; a < kNodes; ++a) {
    EXPECT_EQ(nodes.links[a]->node(), a);
    EXPECT_EQ(nodes.links[a]->nodes(), kNodes);
    for (int b = 0; b < kNodes; ++b) {
      if (a == b) {
        continue;
      }
      ASSERT_TRUE(nodes.at(b).WaitMessages(a, kMessages));
      const Recorder::Node seen = nodes.at(b).node(a);
      EXPECT_EQ(seen.spec, "what it is made of");
      for (int i = 0; i < kMessages; ++i) {
        ASSERT_EQ(seen.messages[i].reduced().step(), 1000 * a + i);
        ASSERT_EQ(seen.messages[i].generation(), 1u);
      }
    }
  }
}

TEST(PeerLinksTest, PiecesOfGradientsArriveWhole) {
  Nodes nodes(2);
  nodes.JoinAll();
  std::string sent_bytes;
  std::atomic<int> taken = 0;
  std::vector<std::string> pieces;
  for (const int64_t numel : {int64_t{1}, int64_t{1000}, PeerLinks::kMaxDataBytes / 4, int64_t{17}}) {
    std::string piece(numel * 4, '\0');
    for (size_t i = 0; i < piece.size(); ++i) {
      piece[i] = static_cast<char>((i * 7 + static_cast<size_t>(numel)) % 251);
    }
    sent_bytes += piece;
    pieces.push_back(std::move(piece));
  }
  for (const int from : {0, 1}) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      v1::PeerData header;
      header.set_generation(kMaxPeerGeneration);
      header.set_sequence(i);
      header.set_is_sum(i % 2 == 1);
      header.set_offset(static_cast<int64_t>(i) << 40);
      header.set_numel(int64_t{1} << 50);
      nodes.links[from]->SendData(1 - from, header, pieces[i], [&taken](absl::Status status) {
        EXPECT_TRUE(status.ok()) << status;
        ++taken;
      });
    }
  }
  for (const int from : {0, 1}) {
    ASSERT_TRUE(nodes.at(1 - from).Await(
        from, [&](const Recorder::Node& seen) { return seen.headers.size() == pieces.size(); }));
    const Recorder::Node seen = nodes.at(1 - from).node(from);
    EXPECT_EQ(seen.elements, sent_bytes);
    for (size_t i = 0; i < pieces.size(); ++i) {
      EXPECT_EQ(seen.headers[i].generation(), kMaxPeerGeneration);
      EXPECT_EQ(seen.headers[i].sequence(), i);
      EXPECT_EQ(seen.headers[i].is_sum(), i % 2 == 1);
      EXPECT_EQ(seen.headers[i].offset(), static_cast<int64_t>(i) << 40);
    }
  }
  EXPECT_TRUE(PollUntil([&] { return taken == 8; }));
}

TEST(PeerLinksTest, PieceWithoutALinkOrTooLargeIsToldSo) {
  Nodes nodes(2);
  nodes.Join(0);
  const std::string large(PeerLinks::kMaxDataBytes + 4, '\0');
  std::atomic<int> told = 0;
  nodes.links[0]->SendData(1, {}, absl::string_view(large).substr(0, 4), [&](absl::Status status) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    ++told;
  });
  nodes.links[0]->SendData(1, {}, large, [&](absl::Status status) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    ++told;
  });
  EXPECT_TRUE(PollUntil([&] { return told == 2; }));
}

TEST(PeerLinksTest, NodeThatComesLaterIsWaitedForAndSaidOnce) {
  Nodes nodes(2);
  nodes.Join(1);                     // it calls, and nobody knows the job there
  nodes.links[1]->Send(0, Step(1));  // dropped
  ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
  EXPECT_TRUE(absl::IsNotFound(nodes.at(1).node(0).downs[0])) << nodes.at(1).node(0).downs[0];
  absl::SleepFor(absl::Milliseconds(1500));  // more calls
  EXPECT_EQ(nodes.at(1).node(0).downs.size(), 1u);
  nodes.Join(0);
  ASSERT_TRUE(nodes.at(1).WaitUp(0));
  ASSERT_TRUE(nodes.at(0).WaitUp(1));
  EXPECT_EQ(nodes.at(0).node(1).messages.size(), 0u);
}

TEST(PeerLinksTest, NodeThatDoesNotCallIsTold) {
  Nodes nodes(2);
  nodes.Join(0);
  ASSERT_TRUE(nodes.at(0).WaitDowns(1, 1));
  EXPECT_TRUE(absl::IsUnavailable(nodes.at(0).node(1).downs[0]));
  EXPECT_THAT(nodes.at(0).node(1).downs[0].message(), HasSubstr("has not called yet"));
}

TEST(PeerLinksTest, WhatIsSentRightBeforeTheEndArrives) {
  for (const int leaver : {0, 1}) {
    Nodes nodes(2);
    nodes.JoinAll();
    constexpr int kMessages = 2000;
    for (int i = 0; i < kMessages; ++i) {
      nodes.links[leaver]->Send(1 - leaver, Step(i));
    }
    const absl::Time begin = absl::Now();
    nodes.Leave(leaver);
    EXPECT_LT(absl::Now() - begin, kLimit / 2);
    ASSERT_TRUE(nodes.at(1 - leaver).WaitDowns(leaver, 1));
    EXPECT_EQ(nodes.at(1 - leaver).node(leaver).messages.size(), static_cast<size_t>(kMessages)) << "leaver " << leaver;
  }
}

TEST(PeerLinksTest, NodeThatComesBackHasItsLinkAgain) {
  for (const int leaver : {0, 1}) {
    Nodes nodes(2);
    nodes.JoinAll();
    for (int round = 2; round < 5; ++round) {
      nodes.Leave(leaver);
      EXPECT_EQ(nodes.at(leaver).broken(), "");
      nodes.recorders[leaver] = std::make_unique<Recorder>(2);
      nodes.Join(leaver);
      ASSERT_TRUE(nodes.at(leaver).WaitUp(1 - leaver));
      ASSERT_TRUE(nodes.at(1 - leaver).Await(leaver, [round](const Recorder::Node& seen) {
        return seen.up && seen.ups == round;
      }));
      nodes.links[leaver]->Send(1 - leaver, Step(round));
      ASSERT_TRUE(nodes.at(1 - leaver).WaitMessages(leaver, round - 1));
    }
  }
}

TEST(PeerLinksTest, ALinkThatIsRenewedEndsAndComesAgain) {
  Nodes nodes(2);
  nodes.JoinAll();
  EXPECT_TRUE(nodes.links[0]->takes_fetch_ends(1) && nodes.links[1]->takes_fetch_ends(0));
  for (const int renews : {1, 0}) {
    const int ups = renews == 1 ? 2 : 3;
    nodes.links[renews]->Renew(1 - renews);
    for (const int node : {0, 1}) {
      EXPECT_TRUE(nodes.at(node).Await(1 - node, [ups](const Recorder::Node& seen) {
        return seen.up && seen.ups == ups;
      })) << node;
    }
  }
}

TEST(PeerLinksTest, OtherUserIsRefusedAndAsksOn) {
  Nodes nodes(2);
  nodes.Join(0);
  PeerJoin options = nodes.Options(1);
  options.uid = 1001;
  nodes.Join(1, options);
  ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
  const absl::Status why = nodes.at(1).node(0).downs[0];
  EXPECT_TRUE(absl::IsPermissionDenied(why)) << why;
  EXPECT_THAT(why.message(), AllOf(HasSubstr("node 0"), HasSubstr("got uid 1001, want 1000")));
  absl::SleepFor(absl::Seconds(1));
  EXPECT_EQ(nodes.at(1).node(0).downs.size(), 1u);
  EXPECT_EQ(nodes.at(0).node(1).hellos, 0);
}

TEST(PeerLinksTest, JobsOfOneNameAndTwoUsersHaveSeparateLinks) {
  Nodes nodes(2);
  nodes.JoinAll();
  Recorder theirs[] = {Recorder(2), Recorder(2)};
  std::vector<std::unique_ptr<PeerLinks>> links;
  for (int node = 0; node < 2; ++node) {
    PeerJoin options = nodes.Options(node);
    options.uid = 1001;
    absl::StatusOr<std::unique_ptr<PeerLinks>> joined = nodes.networks[node]->Join(options, &theirs[node]);
    ASSERT_TRUE(joined.ok()) << joined.status();
    links.push_back(*std::move(joined));
  }
  EXPECT_TRUE(theirs[0].WaitUp(1) && theirs[1].WaitUp(0));
  links.clear();
  nodes.links[1]->Send(0, Step(7));
  EXPECT_TRUE(nodes.at(0).WaitMessages(1, 1));
}

TEST(PeerLinksTest, ANodeWithTheSameSecretIsLinked) {
  Nodes nodes(3);
  for (int node = 0; node < 3; ++node) {
    PeerJoin options = nodes.Options(node);
    options.link_key = std::string(32, 'k');
    nodes.Join(node, options);
  }
  EXPECT_TRUE(nodes.at(1).WaitUp(0));
  EXPECT_TRUE(nodes.at(2).WaitUp(1));
  EXPECT_TRUE(nodes.at(0).WaitUp(2));
}

TEST(PeerLinksTest, ANodeWithAnotherSecretOrNoneIsRefused) {
  for (const auto& [called, calls, text] :
       {std::tuple<const char*, const char*, const char*>{"k", "q", "with a secret and node 0 with another one"},
        {"k", "", "without a secret and node 0 with one"},
        {"", "k", "with a secret and node 0 without one"}}) {
    Nodes nodes(2);
    for (int node = 0; node < 2; ++node) {
      PeerJoin options = nodes.Options(node);
      const std::string key = node == 0 ? called : calls;
      options.link_key = key.empty() ? "" : std::string(32, key[0]);
      nodes.Join(node, options);
    }
    ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1)) << text;
    const absl::Status why = nodes.at(1).node(0).downs[0];
    EXPECT_TRUE(absl::IsPermissionDenied(why)) << why;
    EXPECT_THAT(why.message(), AllOf(HasSubstr(text), HasSubstr("the same SHARDD_JOB_SECRET")));
    ASSERT_TRUE(nodes.at(0).WaitDowns(1, 1)) << text;
    EXPECT_THAT(nodes.at(0).node(1).downs[0].message(), HasSubstr(text));
    EXPECT_EQ(nodes.at(0).node(1).hellos, 0);
    EXPECT_EQ(nodes.at(1).node(0).hellos, 0);
  }
}

TEST(PeerLinksTest, OtherJobOfThatNameIsRefusedByEitherSide) {
  for (const int refuses : {0, 1}) {
    Nodes nodes(2);
    nodes.at(refuses).Refuse(absl::FailedPreconditionError("another module tree"));
    nodes.Join(0);
    nodes.Join(1);
    ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
    const absl::Status why = nodes.at(1).node(0).downs[0];
    EXPECT_TRUE(absl::IsFailedPrecondition(why)) << why;
    EXPECT_THAT(why.message(), HasSubstr("another module tree"));
    ASSERT_TRUE(nodes.at(0).WaitDowns(1, 1));
    EXPECT_TRUE(absl::IsUnavailable(nodes.at(0).node(1).downs[0])) << nodes.at(0).node(1).downs[0];
    absl::SleepFor(absl::Milliseconds(200));
    EXPECT_EQ(nodes.at(1).node(0).hellos, refuses == 1 ? 1 : 0) << "it was called again";
  }
}

TEST(PeerLinksTest, NumbersAreChecked) {
  Nodes nodes(3);
  nodes.Join(0);
  {
    PeerJoin options = nodes.Options(2);  // knows of one node more than node 0
    options.addresses.push_back("127.0.0.1:1");
    options.node = 3;
    auto recorder = std::make_unique<Recorder>(4);
    auto links = nodes.networks[2]->Join(options, recorder.get());
    ASSERT_TRUE(links.ok());
    ASSERT_TRUE(recorder->WaitDowns(0, 1));
    EXPECT_TRUE(absl::IsFailedPrecondition(recorder->node(0).downs[0])) << recorder->node(0).downs[0];
    EXPECT_THAT(recorder->node(0).downs[0].message(), HasSubstr("no such other node (got node 3 of 3)"));
    links->reset();
  }
  // Where another node than that answers.
  nodes.Join(1);
  ASSERT_TRUE(nodes.at(1).WaitUp(0));
  PeerJoin swapped = nodes.Options(2);
  std::swap(swapped.addresses[0], swapped.addresses[1]);
  nodes.Join(2, swapped);
  ASSERT_TRUE(nodes.at(2).WaitDowns(0, 1));
  EXPECT_THAT(nodes.at(2).node(0).downs[0].message(), HasSubstr("another node answers there (got node 1)"));
}

TEST(PeerLinksTest, ANodesSecondDaemonWaitsWhileTheFirstGoesOn) {
  Nodes nodes(2);
  nodes.JoinAll();
  absl::StatusOr<std::unique_ptr<PeerNetwork>> other = PeerNetwork::Create(Loopback());
  ASSERT_TRUE(other.ok()) << other.status();
  Recorder recorder(2);
  absl::StatusOr<std::unique_ptr<PeerLinks>> second = (*other)->Join(nodes.Options(1), &recorder);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(recorder.WaitDowns(0, 1));
  EXPECT_TRUE(absl::IsAlreadyExists(recorder.node(0).downs[0])) << recorder.node(0).downs[0];
  nodes.links[1]->Send(0, Step(1));
  ASSERT_TRUE(nodes.at(0).WaitMessages(1, 1));
  EXPECT_EQ(nodes.at(0).node(1).ups, 1);
  nodes.Leave(1);
  ASSERT_TRUE(recorder.WaitUp(0)) << "when the first has gone, the second has its place";
  second->reset();
  EXPECT_EQ(recorder.broken(), "");
}

TEST(PeerLinksTest, NameIsJoinedOnce) {
  Nodes nodes(2);
  nodes.Join(0);
  Recorder recorder(2);
  EXPECT_TRUE(absl::IsAlreadyExists(nodes.networks[0]->Join(nodes.Options(0), &recorder).status()));
  PeerJoin options = nodes.Options(0);
  options.job = "another";
  EXPECT_TRUE(nodes.networks[0]->Join(options, &recorder).ok());
  options.node = 2;
  EXPECT_TRUE(absl::IsInvalidArgument(nodes.networks[0]->Join(options, &recorder).status()));
  options.node = 0;
  options.addresses[1] = "unix:/run/other";
  EXPECT_TRUE(absl::IsInvalidArgument(nodes.networks[0]->Join(options, &recorder).status()));
  options.addresses = nodes.addresses;
  options.spec.resize((64 << 20) + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(nodes.networks[0]->Join(options, &recorder).status()));
}

TEST(PeerLinksTest, DescriptionsOfSixtyFourMebibytesAreExchanged) {
  Nodes nodes(2);
  for (const int node : {0, 1}) {
    PeerJoin options = nodes.Options(node);
    options.spec = std::string(64 << 20, static_cast<char>('a' + node));
    nodes.Join(node, options);
  }
  ASSERT_TRUE(nodes.at(0).WaitUp(1));
  ASSERT_TRUE(nodes.at(1).WaitUp(0));
  EXPECT_EQ(nodes.at(0).node(1).spec, std::string(64 << 20, 'b'));
  EXPECT_EQ(nodes.at(1).node(0).spec, std::string(64 << 20, 'a'));
}

// One that holds up its events, as a daemon that is busy: it does not read.
class Stuck final : public Recorder {
 public:
  Stuck() : Recorder(2) {}
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) override {
    go_on.WaitForNotification();
    Recorder::OnMessage(node, std::move(message), std::move(receipt));
  }
  absl::Notification go_on;
};

TEST(PeerLinksTest, WhoDoesNotReadLosesItsLinkAndNobodyElse) {
  Nodes nodes(2);
  auto owned = std::make_unique<Stuck>();
  Stuck* stuck = owned.get();
  nodes.recorders[1] = std::move(owned);
  nodes.JoinAll();
  v1::PeerMessage large;
  large.mutable_closing()->set_why(std::string(1 << 20, 'x'));
  for (int i = 0; i < 60; ++i) {
    nodes.links[0]->Send(1, large);
  }
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_TRUE(nodes.at(0).node(1).up) << "as many may wait";
  for (int i = 0; i < 20; ++i) {
    nodes.links[0]->Send(1, large);
  }
  ASSERT_TRUE(nodes.at(0).WaitDowns(1, 1));
  EXPECT_THAT(nodes.at(0).node(1).downs[0].message(), HasSubstr("does not read"));
  stuck->go_on.Notify();
  ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));
  ASSERT_TRUE(nodes.at(0).Await(1, [](const Recorder::Node& seen) { return seen.ups == 2; }));
}

// One whose loop is behind: it takes what comes and deals with nothing of it until it is let go.
class Behind final : public Recorder {
 public:
  Behind() : Recorder(2) {}
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) override {
    {
      absl::MutexLock lock(&mutex_);
      if (behind_) receipts_.push_back(std::move(receipt));
    }
    Recorder::OnMessage(node, std::move(message), nullptr);
  }
  void CatchUp() {
    std::vector<PeerReceipt> dealt_with;  // their ends read on, without the mutex
    absl::MutexLock lock(&mutex_);
    behind_ = false;
    std::swap(dealt_with, receipts_);
  }

 private:
  absl::Mutex mutex_;
  bool behind_ = true;
  std::vector<PeerReceipt> receipts_;
};

TEST(PeerLinksTest, LittleIsReadOfANodeThatIsBehind) {
  constexpr size_t kMessages = 64;
  Nodes nodes(2);
  auto owned = std::make_unique<Behind>();
  Behind* behind = owned.get();
  nodes.recorders[1] = std::move(owned);
  nodes.JoinAll();
  for (size_t i = 0; i < kMessages; ++i) {
    v1::PeerMessage message;
    message.mutable_closing()->set_why(absl::StrCat(i, " ", std::string(512 << 10, 'x')));
    nodes.links[0]->Send(1, message);
  }
  ASSERT_TRUE(behind->WaitMessages(0, 8));  // 4 MiB
  EXPECT_FALSE(PollUntil([&] { return behind->node(0).messages.size() > 9; }, absl::Milliseconds(500)));
  behind->CatchUp();
  ASSERT_TRUE(behind->WaitMessages(0, kMessages));
  for (size_t i = 0; i < kMessages; ++i) {
    EXPECT_TRUE(absl::StartsWith(behind->node(0).messages[i].closing().why(), absl::StrCat(i, " "))) << i;
  }
}

TEST(PeerLinksTest, EndUnderLoadHasToldEveryPiece) {
  for (int round = 0; round < 20; ++round) {
    Nodes nodes(2);
    nodes.JoinAll();
    const std::string piece(256 << 10, 'g');
    v1::PeerData header;
    header.set_numel(64 << 10);
    std::atomic<int> told = 0;
    constexpr int kPieces = 64;
    for (const int from : {0, 1}) {
      for (int i = 0; i < kPieces; ++i) {
        nodes.links[from]->SendData(1 - from, header, piece, [&told](absl::Status) { ++told; });
        nodes.links[from]->Send(1 - from, Step(i));
      }
    }
    std::thread other([&] { nodes.Leave(1); });
    nodes.Leave(0);
    other.join();
    EXPECT_EQ(told, 2 * kPieces) << "round " << round;
  }
}

}  // namespace
}  // namespace shardd::testing
