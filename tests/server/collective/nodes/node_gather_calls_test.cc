// What one node is asked and sent, word by word; what cannot be is refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "absl/time/clock.h"
#include "tests/server/collective/nodes/gather_world.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Links of node 0 of two, where the test is node 1.
class HandLinks final : public PeerLinks {
 public:
  struct Piece {
    v1::PeerData header;
    std::string elements;
  };
  int node() const override { return 0; }
  int nodes() const override { return 2; }
  void Send(int, v1::PeerMessage message) override {
    absl::MutexLock lock(&mutex_);
    said_.push_back(std::move(message));
  }
  void SendData(int, const v1::PeerData& header, absl::string_view elements,
                std::function<void(absl::Status)> sent) override {
    absl::MutexLock lock(&mutex_);
    pieces_.push_back({header, std::string(elements)});
    if (hold_) {
      held_.push_back(std::move(sent));
    } else {
      mutex_.Unlock();
      sent(absl::OkStatus());
      mutex_.Lock();
    }
  }
  void Hold(bool hold) {
    std::deque<std::function<void(absl::Status)>> held;
    {
      absl::MutexLock lock(&mutex_);
      hold_ = hold;
      held.swap(held_);
    }
    for (const auto& sent : held) sent(absl::OkStatus());
  }
  size_t pieces() const {
    absl::MutexLock lock(&mutex_);
    return pieces_.size();
  }
  Piece TakePiece() {
    absl::MutexLock lock(&mutex_);
    const auto some = [this] { return !pieces_.empty(); };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&some), kLimit));
    Piece piece = pieces_.empty() ? Piece{} : std::move(pieces_.front());
    if (!pieces_.empty()) pieces_.pop_front();
    return piece;
  }
  v1::PeerMessage TakeSaid() {
    absl::MutexLock lock(&mutex_);
    const auto some = [this] { return !said_.empty(); };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&some), kLimit));
    v1::PeerMessage message = said_.empty() ? v1::PeerMessage{} : std::move(said_.front());
    if (!said_.empty()) said_.pop_front();
    return message;
  }
  size_t said() const {
    absl::MutexLock lock(&mutex_);
    return said_.size();
  }

 private:
  mutable absl::Mutex mutex_;
  bool hold_ = false;
  std::deque<v1::PeerMessage> said_;
  std::deque<Piece> pieces_;
  std::deque<std::function<void(absl::Status)>> held_;
};

class NodeGatherCallsTest : public ::testing::Test {
 protected:
  NodeGatherCallsTest()
      : spec_(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED)), node_(spec_, 0), other_(*PlanShards(spec_, 1)) {
    node_.Start(&links_);
    node_.OnUp(1);
    node_->Begin(1);
    block_ = node_.plan->FindGroup("block");
    large_ = node_.plan->FindGroup("large");
  }
  ~NodeGatherCallsTest() override {
    links_.Hold(false);
    node_.Stop();
  }
  int64_t BytesOf(int node, int group) const { return GatherParts(other_, group, node).bytes(); }
  v1::PeerMessage Pull(uint64_t generation, uint64_t transfer, int group, uint64_t version) {
    v1::PeerMessage message;
    message.set_generation(generation);
    message.mutable_pull()->set_transfer(transfer);
    message.mutable_pull()->set_group(group);
    message.mutable_pull()->set_version(version);
    return message;
  }
  v1::PeerData Header(uint64_t generation, uint64_t transfer, int64_t offset, int64_t bytes) {
    v1::PeerData header;
    header.set_generation(generation);
    header.set_sequence(transfer);
    header.set_slab(v1::SLAB_UNSHARDED);
    header.set_offset(offset);
    header.set_numel(bytes);
    return header;
  }

  v1::JobSpec spec_;
  HandLinks links_;
  GatherNode node_;
  ShardPlan other_;
  int block_ = 0;
  int large_ = 0;
};

// A block without all its elements cannot be read, and nobody who runs this code sends one.
TEST(NodeGatherCalls, APieceThatEndsWithinAFloat8BlockIsRefused) {
  HandLinks links;
  GatherNode node(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16, 0, /*float8=*/true), 0);
  node.Start(&links);
  node.OnUp(1);
  node->Begin(1);
  const int large = node.plan->FindGroup("large");
  const std::unique_ptr<Gathered> gathered = node.Ask(1, large, 1);
  v1::PeerData header;
  header.set_generation(1);
  header.set_sequence(links.TakeSaid().pull().transfer());
  header.set_slab(v1::SLAB_UNSHARDED);
  header.set_numel(GatherParts(*node.plan, large, 1).bytes());
  node->OnData(1, header, std::string(2 * 129, 'a'));
  EXPECT_FALSE(gathered->done());
  header.set_offset(2 * 129);
  node->OnData(1, header, std::string(130, 'a'));
  EXPECT_TRUE(absl::IsInvalidArgument(gathered->Wait())) << gathered->Wait();
  EXPECT_THAT(gathered->Wait().message(), HasSubstr("ends within a float8 block (got 130 bytes at 258"));
  node.Stop();
}

TEST_F(NodeGatherCallsTest, WhatIsAskedAndSent) {
  const std::unique_ptr<Gathered> gathered = node_.Ask(1, block_, 3);
  const v1::PeerMessage pull = links_.TakeSaid();
  EXPECT_EQ(pull.generation(), 1u);
  EXPECT_EQ(pull.pull().group(), block_);
  EXPECT_EQ(pull.pull().version(), 3u);
  EXPECT_EQ(pull.pull().code(), 0);
  const int64_t bytes = BytesOf(1, block_);
  EXPECT_THAT(node_->Describe(), HasSubstr("1 parts on their way here"));
  node_->OnData(1, Header(1, pull.pull().transfer(), 0, bytes), std::string(bytes - 3, 'a'));
  EXPECT_FALSE(gathered->done());
  node_->OnData(1, Header(1, pull.pull().transfer(), bytes - 3, bytes), "abc");
  EXPECT_TRUE(gathered->Wait().ok()) << gathered->Wait();
  EXPECT_EQ(std::count(gathered->image.begin(), gathered->image.end(), 'a'), bytes - 2);
  EXPECT_THAT(node_->Describe(), HasSubstr(absl::StrCat(bytes, " bytes gathered, 0 parts")));
}

TEST_F(NodeGatherCallsTest, AtMostFourPiecesOfAMegabyteAreUnderWay) {
  ASSERT_GT(BytesOf(0, large_), PeerLinks::kMaxDataBytes);
  node_.SetVersion(1);
  links_.Hold(true);
  node_->OnPull(1, Pull(1, 9, large_, 1));
  node_->OnPull(1, Pull(1, 10, large_, 1));
  node_->OnPull(1, Pull(1, 11, large_, 1));
  ASSERT_TRUE(PollUntil([&] { return links_.pieces() == 4; })) << links_.pieces();
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(links_.pieces(), 4u);
  links_.Hold(false);
  for (const uint64_t transfer : {uint64_t{9}, uint64_t{10}, uint64_t{11}}) {
    for (int64_t at = 0; at < BytesOf(0, large_);) {
      const HandLinks::Piece piece = links_.TakePiece();
      ASSERT_EQ(piece.header.sequence(), transfer);
      ASSERT_EQ(piece.header.offset(), at);
      ASSERT_EQ(piece.header.numel(), BytesOf(0, large_));
      ASSERT_GT(piece.elements.size(), 0u);
      ASSERT_LE(piece.elements.size(), static_cast<size_t>(PeerLinks::kMaxDataBytes));
      at += static_cast<int64_t>(piece.elements.size());
    }
  }
}

TEST_F(NodeGatherCallsTest, PullsThatCannotBeAreRefused) {
  node_.SetVersion(5);
  const int tiny = node_.plan->FindGroup("tiny");
  const auto groups = static_cast<int>(node_.plan->groups.size());
  ASSERT_EQ(BytesOf(1, tiny), 0);
  struct Bad {
    int group;
    uint64_t version;
    const char* text;
  };
  for (const Bad& bad : {Bad{groups, 5, "no such group"}, Bad{-1, 5, "no such group"}, Bad{block_, 0, "version 0"},
                         Bad{block_, 4, "it has version 5 now"}}) {
    node_->OnPull(1, Pull(1, 77, bad.group, bad.version));
    const v1::PeerMessage answer = links_.TakeSaid();
    EXPECT_EQ(answer.generation(), 1u);
    EXPECT_EQ(answer.pull().transfer(), 77u);
    EXPECT_NE(answer.pull().code(), 0);
    EXPECT_THAT(answer.pull().message(), HasSubstr(bad.text));
  }
  node_->OnPull(1, Pull(1, 78, block_, 6));
  node_->OnPull(1, Pull(1, 78, block_, 6));
  EXPECT_THAT(links_.TakeSaid().pull().message(), HasSubstr("asked for before"));
  EXPECT_EQ(links_.pieces(), 0u);
}

TEST_F(NodeGatherCallsTest, WhoAsksWithoutEndIsRefused) {
  const auto most = 2 * node_.plan->groups.size();
  for (uint64_t i = 0; i < most; ++i) {
    node_->OnPull(1, Pull(1, i + 1, block_, 2));
  }
  absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(links_.said(), 0u);
  node_->OnPull(1, Pull(1, 1000, block_, 2));
  const v1::PeerMessage answer = links_.TakeSaid();
  EXPECT_EQ(answer.pull().transfer(), 1000u);
  EXPECT_THAT(answer.pull().message(), HasSubstr("too much is asked for"));
}

TEST_F(NodeGatherCallsTest, PullsOfOtherGenerations) {
  node_.SetVersion(1);
  node_->Begin(3);
  node_->OnPull(1, Pull(2, 5, block_, 1));
  node_->OnPull(1, Pull(3, 6, block_, 1));
  EXPECT_EQ(links_.TakePiece().header.sequence(), 6u) << "the older one is dropped";
  const std::unique_ptr<Gathered> gathered = node_.Ask(3, block_, 2);
  node_->OnPull(1, Pull(4, 7, block_, 1));
  EXPECT_EQ(links_.TakePiece().header.generation(), 4u);
  EXPECT_TRUE(absl::IsAborted(gathered->Wait())) << "others have begun the next: " << gathered->Wait();
  EXPECT_TRUE(absl::IsAborted(node_.Ask(3, block_, 2)->Wait()));
  EXPECT_EQ(links_.pieces(), 0u);
}

TEST_F(NodeGatherCallsTest, DataThatCannotBeEndsTheGeneration) {
  const int64_t bytes = BytesOf(1, block_);
  struct Bad {
    uint64_t transfer_more;
    int64_t offset, numel, count;
    const char* text;
  };
  uint64_t generation = 1;
  for (const Bad& bad : {Bad{1, 0, bytes, 8, "not asked for"}, Bad{0, 8, bytes, 8, "another part of group \"block\""},
                         Bad{0, 0, bytes + 2, 8, "another part"}, Bad{0, 0, bytes, bytes + 1, "another part"},
                         Bad{0, 0, bytes, 0, "another part"}}) {
    const std::unique_ptr<Gathered> gathered = node_.Ask(generation, block_, 3);
    const std::unique_ptr<Gathered> large = node_.Ask(generation, large_, 3);
    const uint64_t transfer = links_.TakeSaid().pull().transfer();
    const uint64_t last = links_.TakeSaid().pull().transfer();
    node_->OnPull(1, Pull(generation, 1, block_, 9));
    node_->OnData(1, Header(generation, bad.transfer_more == 0 ? transfer : last + 1, bad.offset, bad.numel),
                  std::string(bad.count, 'a'));
    for (const auto& one : {gathered.get(), large.get()}) {
      EXPECT_TRUE(absl::IsInvalidArgument(one->Wait())) << one->Wait();
      EXPECT_THAT(one->Wait().message(), HasSubstr(bad.text));
      EXPECT_THAT(one->Wait().message(), HasSubstr("node 1"));
      EXPECT_EQ(one->image.find_first_not_of(kUntouched), std::string::npos);
    }
    EXPECT_TRUE(absl::IsInvalidArgument(node_.Ask(generation, block_, 3)->Wait()));
    const v1::PeerMessage refusal = links_.TakeSaid();
    EXPECT_EQ(refusal.pull().transfer(), 1u) << "who asks this node hears of it";
    EXPECT_EQ(refusal.pull().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
    node_->Begin(++generation);
  }
  const std::unique_ptr<Gathered> next = node_.Ask(generation, block_, 3);
  node_->OnData(1, Header(generation - 1, 4711, 0, 8), "of old ");
  node_->OnData(1, Header(generation, links_.TakeSaid().pull().transfer(), 0, bytes), std::string(bytes, 'a'));
  EXPECT_TRUE(next->Wait().ok()) << next->Wait();
}

TEST_F(NodeGatherCallsTest, RefusalsOvertakeWhatWasSentBefore) {
  const int64_t bytes = BytesOf(1, block_);
  const std::unique_ptr<Gathered> gathered = node_.Ask(1, block_, 3);
  const uint64_t transfer = links_.TakeSaid().pull().transfer();
  v1::PeerMessage refusal = Pull(1, transfer, block_, 3);
  refusal.mutable_pull()->set_code(static_cast<int>(absl::StatusCode::kUnavailable));
  refusal.mutable_pull()->set_message("node 2 is gone");
  node_->OnPull(1, refusal);
  EXPECT_TRUE(absl::IsUnavailable(gathered->Wait())) << gathered->Wait();
  EXPECT_THAT(gathered->Wait().message(), HasSubstr("node 1 does not send version 3: node 2 is gone"));
  node_->OnData(1, Header(1, transfer, 0, bytes), std::string(bytes, 'a'));
  EXPECT_EQ(gathered->image.find_first_not_of(kUntouched), std::string::npos);
  const std::unique_ptr<Gathered> next = node_.Ask(1, block_, 3);
  refusal.mutable_pull()->set_transfer(4711);
  node_->OnPull(1, refusal);
  EXPECT_TRUE(absl::IsInvalidArgument(next->Wait())) << "of what was never asked for: " << next->Wait();
}

TEST_F(NodeGatherCallsTest, OverdueNamesNodeGroupAndVersion) {
  const absl::Time before = absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  const std::unique_ptr<Gathered> gathered = node_.Ask(1, block_, 3);
  EXPECT_THAT(node_->Overdue(before, absl::Seconds(10)), IsEmpty());
  EXPECT_THAT(node_->Overdue(before + absl::Seconds(60), absl::Seconds(10)),
              HasSubstr("node 1 has not sent its part of group \"block\" of version 3"));
  const int64_t bytes = BytesOf(1, block_);
  node_->OnData(1, Header(1, links_.TakeSaid().pull().transfer(), 0, bytes), std::string(bytes, 'a'));
  EXPECT_TRUE(gathered->Wait().ok());
  EXPECT_THAT(node_->Overdue(before + absl::Seconds(60), absl::Seconds(10)), IsEmpty());
}

TEST_F(NodeGatherCallsTest, CallsAreChecked) {
  for (const int group : {-1, static_cast<int>(node_.plan->groups.size())}) {
    Gathered gathered(8);
    node_->Gather(1, group, 1, gathered.image.data(), "x", gathered.Done());
    EXPECT_TRUE(absl::IsInvalidArgument(gathered.Wait())) << gathered.Wait();
  }
  EXPECT_TRUE(absl::IsInvalidArgument(node_.Ask(1, block_, 0)->Wait()));
  EXPECT_TRUE(absl::IsAborted(node_.Ask(0, block_, 1)->Wait()));
  EXPECT_TRUE(node_.Ask(1, node_.plan->FindGroup("tiny"), 1)->Wait().ok()) << "nobody else holds anything of it";
  node_.OnDown(1, absl::UnavailableError("its process has ended"));
  EXPECT_TRUE(absl::IsUnavailable(node_.Ask(1, block_, 1)->Wait()));
  node_.OnUp(1);
  const std::unique_ptr<Gathered> gathered = node_.Ask(1, block_, 1);
  EXPECT_TRUE(links_.TakeSaid().has_pull()) << "a link that nobody missed has ended nothing";
  EXPECT_FALSE(gathered->done());
  node_->Begin(2);
  EXPECT_TRUE(absl::IsAborted(gathered->Wait())) << gathered->Wait();
}

// The widest dtype last, and a piece that ends in the middle of it.
TEST(GatherPartsTest, WholeElementsOfAnyDType) {
  const v1::JobSpec spec = GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16);
  GatherNode node(spec, 0);
  node.Write(1);
  const int root = 0;
  const GatherParts parts(*node.plan, root, 0);
  std::string whole;
  alignas(16) char buffer[64];
  for (const int64_t most : {16, 22, 64}) {
    std::string image(static_cast<size_t>(node.plan->groups[root].unsharded_bytes), kUntouched);
    for (int64_t at = 0; at < parts.bytes();) {
      const int64_t bytes = parts.CopyOut(node.shards.data(), at, buffer, most);
      ASSERT_GT(bytes, 0);
      ASSERT_LE(bytes, most);
      parts.CopyIn(at, buffer, bytes, image.data());
      at += bytes;
    }
    if (most == 16) {
      whole = image;
    }
    EXPECT_EQ(image, whole) << most;
  }
  EXPECT_GT(static_cast<int64_t>(whole.size()) - std::count(whole.begin(), whole.end(), kUntouched),
            parts.bytes() * 9 / 10);
}

}  // namespace
}  // namespace shardd::testing
