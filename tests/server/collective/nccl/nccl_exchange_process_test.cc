// Sums between nodes that are processes: one is killed, the others go on as soon as they are told.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/collective/nccl/nccl_node.h"
#include "tests/testing/sanitizers.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kSoon = testing::kSanitized ? absl::Seconds(10) : absl::Seconds(1);

class NcclExchangeProcessTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> hosts) { nodes_ = std::make_unique<NcclNodes>(std::move(hosts)); }
  void BeginAndSum(uint64_t generation, uint64_t sequences) {
    for (int node = 0; node < nodes_->size(); ++node) nodes_->Begin(node, generation);
    SumOnAll(generation, sequences);
    ExpectSums(generation, sequences);
  }
  void SumOnAll(uint64_t generation, uint64_t sequences) {
    for (uint64_t sequence = 0; sequence < sequences; ++sequence) {
      for (int node = 0; node < nodes_->size(); ++node) nodes_->Sum(node, generation, sequence);
    }
  }
  void ExpectSums(uint64_t generation, uint64_t sequences) {
    for (uint64_t sequence = 0; sequence < sequences; ++sequence) {
      std::string digest;
      for (int node = 0; node < nodes_->size(); ++node) {
        const auto done = nodes_->Await(node, generation, sequence);
        ASSERT_TRUE(done.has_value()) << "node " << node << ", sequence " << sequence;
        ASSERT_EQ(done->code, 0) << done->bytes;
        EXPECT_EQ(done->wrong, 0) << "node " << node << ", sequence " << sequence;
        if (node == 0) digest = done->bytes;
        EXPECT_EQ(done->bytes, digest) << "other bits on node " << node;
      }
    }
  }
  // What processes that were killed have left behind, or those that are there.
  void TearDown() override {
    if (nodes_ == nullptr) return;
    const std::vector<pid_t> pids = nodes_->pids();
    nodes_.reset();
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      for (const pid_t pid : pids) {
        EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr(absl::StrCat("fake-nccl-", pid, "-"))));
      }
    }
  }

  std::unique_ptr<NcclNodes> nodes_;
};

TEST_F(NcclExchangeProcessTest, SumsCoverAllNodesWithTheSameBitsEverywhere) {
  Start({"a", "b", "c"});
  for (uint64_t generation = 1; generation < 4; ++generation) BeginAndSum(generation, 20);
}

TEST_F(NcclExchangeProcessTest, AKilledNodeHoldsSumsUntilTheGenerationEnds) {
  Start({"a", "b", "c"});
  BeginAndSum(1, 2);
  uint64_t generation = 1;
  for (const int killed : {1, 2, 0}) {
    generation += 3;
    BeginAndSum(generation, 1);
    for (int node = 0; node < 3; ++node) {
      for (uint64_t sequence = 1; sequence < 4 && node != killed; ++sequence) nodes_->Sum(node, generation, sequence);
    }
    nodes_->PassOn(absl::Milliseconds(100));  // they are under way
    nodes_->Kill(killed);
    nodes_->PassOn(absl::Milliseconds(300));
    for (int node = 0; node < 3; ++node) EXPECT_FALSE(nodes_->IsDone(node, generation, 1)) << "nobody has noticed";
    const absl::Time begin = absl::Now();
    for (int node = 0; node < 3; ++node) {
      if (node != killed) nodes_->Begin(node, generation + 1);
    }
    for (int node = 0; node < 3; ++node) {
      for (uint64_t sequence = 1; sequence < 4 && node != killed; ++sequence) {
        const auto done = nodes_->Await(node, generation, sequence);
        ASSERT_TRUE(done.has_value()) << "node " << node << ", sequence " << sequence;
        EXPECT_EQ(static_cast<absl::StatusCode>(done->code), absl::StatusCode::kAborted) << done->bytes;
      }
    }
    EXPECT_LT(absl::Now() - begin, kSoon);
    nodes_->Start(killed);
    BeginAndSum(generation + 2, 3);
  }
}

// Wherever it is when it dies, the others have the same bits of what they have.
TEST_F(NcclExchangeProcessTest, AKillDuringManySumsLeavesNoWrongOne) {
  Start({"a", "b", "c"});
  constexpr uint64_t kSums = 60;
  for (int round = 0; round < 6; ++round) {
    const int killed = round % 3;
    const auto generation = static_cast<uint64_t>(2 * round + 1);
    for (int node = 0; node < 3; ++node) nodes_->Begin(node, generation);
    SumOnAll(generation, kSums);
    if (round > 0) nodes_->Await((killed + 1) % 3, generation, static_cast<uint64_t>(round) * 7);
    nodes_->Kill(killed);
    const absl::Time begin = absl::Now();
    const int others[] = {(killed + 1) % 3, (killed + 2) % 3};
    for (const int node : others) nodes_->Begin(node, generation + 1);
    int right = 0;
    for (uint64_t sequence = 0; sequence < kSums; ++sequence) {
      std::string digests[2];
      for (int i = 0; i < 2; ++i) {
        const auto done = nodes_->Await(others[i], generation, sequence);
        ASSERT_TRUE(done.has_value()) << "node " << others[i] << ", sequence " << sequence;
        EXPECT_EQ(done->wrong, 0);
        EXPECT_THAT(static_cast<absl::StatusCode>(done->code),
                    ::testing::AnyOf(absl::StatusCode::kOk, absl::StatusCode::kAborted));
        if (done->code == 0) digests[i] = done->bytes;
      }
      right += digests[0].empty() ? 0 : 1;
      EXPECT_TRUE(digests[0] == digests[1] || digests[0].empty() || digests[1].empty()) << sequence;
    }
    EXPECT_LT(absl::Now() - begin, kSoon);
    std::printf("[          ] round %d: %d of %d sums were right\n", round, right, static_cast<int>(kSums));
    nodes_->Start(killed);
    BeginAndSum(generation + 1, 2);
  }
}

TEST_F(NcclExchangeProcessTest, ANodeKilledBeforeJoiningHoldsSumsForTheGeneration) {
  Start({"a", "b", "c"});
  for (int node = 0; node < 3; ++node) nodes_->Begin(node, 1);
  nodes_->Lose(2, true);  // it never gets the ids
  SumOnAll(1, 2);
  nodes_->PassOn(absl::Milliseconds(200));
  nodes_->Kill(2);
  nodes_->PassOn(absl::Milliseconds(100));
  for (int node = 0; node < 2; ++node) EXPECT_FALSE(nodes_->IsDone(node, 1, 0));
  const absl::Time begin = absl::Now();
  for (int node = 0; node < 2; ++node) nodes_->Begin(node, 2);
  for (int node = 0; node < 2; ++node) {
    const auto done = nodes_->Await(node, 1, 1);
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(static_cast<absl::StatusCode>(done->code), absl::StatusCode::kAborted) << done->bytes;
  }
  EXPECT_LT(absl::Now() - begin, kSoon);
  nodes_->Lose(2, false);
  nodes_->Start(2);
  BeginAndSum(2, 3);
}

// As NVIDIA's does: who wants two daemons on one GPU has to give them names (NCCL_HOSTID).
TEST_F(NcclExchangeProcessTest, NodesOnOneGpuAreRefusedInTheLibrarysWords) {
  Start({"a", "a"});
  for (int node = 0; node < 2; ++node) nodes_->Begin(node, 1);
  SumOnAll(1, 1);
  for (int node = 0; node < 2; ++node) {
    const auto done = nodes_->Await(node, 1, 0);
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(static_cast<absl::StatusCode>(done->code), absl::StatusCode::kInternal);
    EXPECT_THAT(done->bytes, HasSubstr("Duplicate GPU detected"));
  }
}

}  // namespace
}  // namespace shardd
