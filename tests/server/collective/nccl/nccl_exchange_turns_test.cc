// Two jobs over the same two nodes' GPUs take turns: whoever comes first, and whatever ends or stops, the other goes
// on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/collective/nodes/nccl/nccl_exchanges.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/nccl/fake_nccl_world.h"
#include "tests/server/collective/nodes/node_values.h"
#include "tests/server/device/wrapped_device.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// One rank a node, on a GPU of its own, which has room for one kernel of NCCL's that waits.
class NcclTurnsTest : public ::testing::Test {
 protected:
  static constexpr int kNodes = 2;
  static constexpr int64_t kNumel = 3000;
  struct Pending {
    absl::Notification done;
    absl::Status status;
    float* data = nullptr;
  };
  using PendingPtr = std::shared_ptr<Pending>;
  using Held = std::vector<std::pair<int, v1::PeerMessage>>;  // receiver
  struct Job {
    std::vector<std::unique_ptr<NcclExchange>> by_node = std::vector<std::unique_ptr<NcclExchange>>(kNodes);
    bool hold = false;
    int hold_to = -1;  // a node; -1: all
    Held held;
    bool older = false;   // node 1 is of a build that knows of no turns
    int says_turns = 0;   // messages
    uint64_t ready1 = 0;  // sums, as node 1 has said last
    uint64_t next = 0;    // sequence of a sum
  };

  NcclTurnsTest() {
    SetRoom(1);
    owned_ = gpus_.MakeAll();
    for (int node = 0; node < kNodes; ++node) {
      devices_.push_back(std::make_unique<WrappedDevice>(owned_[static_cast<size_t>(node)].get()));
      daemons_.push_back(std::make_unique<NcclExchanges>(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(),
                                                         std::vector<int>{node}));
    }
  }
  ~NcclTurnsTest() override { (void)unsetenv("FAKE_NCCL_ROOM"); }
  static void SetRoom(int room) { (void)setenv("FAKE_NCCL_ROOM", std::to_string(room).c_str(), 1); }
  void TearDown() override {
    for (auto& [name, job] : jobs_) {
      for (int node = 0; node < kNodes; ++node) Close(name, node);
    }
    devices_.clear();
    owned_.clear();
    AwaitEnds(gpus_.machine());
  }

  void Open(const std::string& name, bool moves = false, bool turns = true) {
    absl::MutexLock lock(&mutex_);
    jobs_[name];
    for (int node = 0; node < kNodes; ++node) {
      NcclExchange::Options options;
      options.node = node;
      options.nodes = kNodes;
      options.devices = {devices_[static_cast<size_t>(node)].get()};
      options.addresses = {"one:1", "two:1"};
      if (moves) options.greetings = {static_cast<char*>(Memory(NcclExchange::GreetingBytes(kNodes)))};
      options.send = [this, name, node](int to, v1::PeerMessage message) { Deliver(name, node, to, message); };
      std::unique_ptr<NcclExchange>& made = jobs_[name].by_node[static_cast<size_t>(node)];
      if (turns) {
        made = *daemons_[static_cast<size_t>(node)]->Make(name, std::move(options));
      } else {
        options.ordinals = {node};
        made =
            std::make_unique<NcclExchange>(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), std::move(options));
      }
    }
  }
  void Close(const std::string& name, int node) {
    std::unique_ptr<NcclExchange> ended;
    {
      absl::MutexLock lock(&mutex_);
      ended.swap(jobs_[name].by_node[static_cast<size_t>(node)]);
    }
    ended.reset();
  }
  NcclExchange& Of(const std::string& name, int node) { return *jobs_[name].by_node[static_cast<size_t>(node)]; }
  void Begin(const std::string& name, uint64_t generation) {
    for (int node = 0; node < kNodes; ++node) Of(name, node).Begin(generation);
    jobs_[name].next = 0;
  }
  void Deliver(const std::string& name, int from, int to, v1::PeerMessage message) {
    absl::MutexLock lock(&mutex_);
    Job& job = jobs_[name];
    if (job.older) message.mutable_exchange()->clear_turns();
    if (message.exchange().turns().round() > 0) ++job.says_turns;
    if (to == 0) job.ready1 = message.exchange().turns().ready_sums();
    if (job.hold && (job.hold_to < 0 || job.hold_to == to)) {
      job.held.emplace_back(to, message);
    } else if (const auto& exchange = job.by_node[static_cast<size_t>(to)]; exchange != nullptr) {
      exchange->OnMessage(from, message.exchange());
    }
  }
  // While held, nothing that is said of the job arrives (`to`: at that node).
  void Hold(const std::string& name, int to = -1) {
    absl::MutexLock lock(&mutex_);
    jobs_[name].hold = true;
    jobs_[name].hold_to = to;
  }
  void LetGo(const std::string& name) {
    absl::MutexLock lock(&mutex_);
    jobs_[name].hold = false;
    for (const auto& [to, message] : std::exchange(jobs_[name].held, {})) {
      Of(name, to).OnMessage(1 - to, message.exchange());
    }
  }
  int SaysTurns(const std::string& name) {
    absl::MutexLock lock(&mutex_);
    return jobs_[name].says_turns;
  }
  // The job's sum on node 1, of which node 0 has heard that it is ready.
  PendingPtr ReadyOn1(const std::string& name, uint64_t generation, uint64_t sequence) {
    PendingPtr pending = Sum(name, 1, generation, sequence);
    Await([&] {
      absl::MutexLock lock(&mutex_);
      return jobs_[name].ready1 == sequence + 1;
    });
    return pending;
  }
  // One at least, to that node.
  void AwaitHeld(const std::string& name, int to) {
    Await([&] {
      absl::MutexLock lock(&mutex_);
      for (const auto& [receiver, message] : jobs_[name].held) {
        if (receiver == to) return true;
      }
      return false;
    });
  }
  static void Await(const std::function<bool()>& holds) {
    for (int i = 0; i < 20000 && !holds(); ++i) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(holds()) << "it does not come";
  }
  // A device has it.
  bool IsIssued(int node, const std::string& label) {
    for (const auto& record : devices_[static_cast<size_t>(node)]->records()) {
      if (record.label == label) return true;
    }
    return false;
  }
  void* Memory(int64_t bytes) { return gpus_.memory()->allocate(static_cast<size_t>(bytes), 64); }

  static std::string Label(const std::string& name, uint64_t sequence) { return absl::StrCat(name, " ", sequence); }
  PendingPtr Sum(const std::string& name, int node, uint64_t generation, uint64_t sequence) {
    auto pending = std::make_shared<Pending>();
    pending->data = static_cast<float*>(Memory(kNumel * 4));
    FillNodeValues(node, 0, sequence, pending->data, kNumel);
    Of(name, node)
        .AllReduce(generation, sequence, {{0, pending->data, kNumel}}, Label(name, sequence),
                   [pending](absl::Status status) {
                     pending->status = std::move(status);
                     pending->done.Notify();
                   });
    return pending;
  }
  PendingPtr Move(const std::string& name, int node, uint64_t generation, uint64_t sequence) {
    auto pending = std::make_shared<Pending>();
    auto* const bytes = static_cast<char*>(Memory(128));
    Of(name, node)
        .Move(generation, sequence, {{0, {1 - node, bytes, nullptr, 1}}, {0, {1 - node, nullptr, bytes + 64, 1}}},
              "move", [pending](absl::Status status) {
                pending->status = std::move(status);
                pending->done.Notify();
              });
    return pending;
  }
  static absl::Status Await(const PendingPtr& pending) {
    EXPECT_TRUE(pending->done.WaitForNotificationWithTimeout(absl::Seconds(60))) << "it does not end";
    return pending->done.HasBeenNotified() ? pending->status : absl::DeadlineExceededError("it does not end");
  }
  void ExpectSum(const PendingPtr& pending, uint64_t sequence) {
    ASSERT_TRUE(Await(pending).ok()) << pending->status;
    EXPECT_EQ(WrongNodeSums(kNodes, 0, sequence, pending->data, kNumel), 0);
  }
  // The job's next sums, on both nodes.
  void ExpectSums(const std::string& name, uint64_t generation, int count) {
    for (int i = 0; i < count; ++i) {
      const uint64_t sequence = jobs_[name].next++;
      const std::vector<PendingPtr> all = {Sum(name, 0, generation, sequence), Sum(name, 1, generation, sequence)};
      for (const PendingPtr& pending : all) ASSERT_NO_FATAL_FAILURE(ExpectSum(pending, sequence));
    }
  }
  // Jobs "a" and "b" are there, and have each had a sum in turns.
  void OpenBoth(bool moves = false) {
    Open("a", moves);
    Open("b", moves);
    Begin("a", 1);
    Begin("b", 1);
    ASSERT_NO_FATAL_FAILURE(ExpectSums("a", 1, 1));
    ASSERT_NO_FATAL_FAILURE(ExpectSums("b", 1, 1));
    ASSERT_NO_FATAL_FAILURE(ExpectSums("a", 1, 1));
    ASSERT_GT(SaysTurns("a"), 0);
  }

  FakeCudaWorld gpus_{/*delay_seed=*/7, kNodes, /*queue_limit=*/1024};
  std::vector<std::unique_ptr<Device>> owned_;
  std::vector<std::unique_ptr<WrappedDevice>> devices_;  // by node
  std::vector<std::unique_ptr<NcclExchanges>> daemons_;  // likewise
  absl::Mutex mutex_;                                    // exchanges come and go under it
  std::map<std::string, Job> jobs_;
};

TEST_F(NcclTurnsTest, WithoutTurnsTwoJobsWaitForEachOther) {
  for (const std::string name : {"a", "b"}) {
    Open(name, /*moves=*/false, /*turns=*/false);
    Begin(name, 1);
    ExpectSums(name, 1, 1);
  }
  std::vector<PendingPtr> all = {Sum("a", 0, 1, 1), Sum("b", 1, 1, 1)};
  Await([&] { return IsIssued(0, "a 1") && IsIssued(1, "b 1"); });
  all.push_back(Sum("b", 0, 1, 1));
  all.push_back(Sum("a", 1, 1, 1));
  Await([&] { return IsIssued(0, "b 1") && IsIssued(1, "a 1"); });
  Begin("a", 2);
  for (const size_t of_a : {0, 3}) EXPECT_EQ(Await(all[of_a]).code(), absl::StatusCode::kAborted);
  for (const size_t of_b : {1, 2}) EXPECT_TRUE(Await(all[of_b]).ok()) << "a's was in the way";
}

TEST_F(NcclTurnsTest, SumsInOtherOrdersOnTwoNodesAreRight) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  for (uint64_t k = 2; k < 30; ++k) {
    const std::vector<PendingPtr> all = {Sum("a", 0, 1, k), Sum("b", 1, 1, k - 1), Sum("b", 0, 1, k - 1),
                                         Sum("a", 1, 1, k)};
    for (const size_t i : {0, 3}) ASSERT_NO_FATAL_FAILURE(ExpectSum(all[i], k));
    for (const size_t i : {1, 2}) ASSERT_NO_FATAL_FAILURE(ExpectSum(all[i], k - 1));
  }
  EXPECT_THAT(Of("a", 0).Describe(), HasSubstr("; takes turns with job \"b\""));
}

TEST_F(NcclTurnsTest, MovesAndSumsOfTwoJobsAreRight) {
  SetRoom(2);  // a job's own move and sum may wait side by side
  ASSERT_NO_FATAL_FAILURE(OpenBoth(/*moves=*/true));
  for (uint64_t k = 0; k < 20; ++k) {
    std::vector<PendingPtr> all;
    for (const int node : {0, 1}) {
      const std::string first = node == 0 ? "a" : "b";
      const std::string second = node == 0 ? "b" : "a";
      const auto sum = [&](const std::string& name) { return Sum(name, node, 1, k + (name == "a" ? 2 : 1)); };
      all.push_back(sum(first));
      all.push_back(Move(second, node, 1, k));
      all.push_back(Move(first, node, 1, k));
      all.push_back(sum(second));
    }
    for (const PendingPtr& pending : all) ASSERT_TRUE(Await(pending).ok()) << pending->status;
  }
}

TEST_F(NcclTurnsTest, AJobAloneSaysNothingOfTurns) {
  Open("a");
  Begin("a", 1);
  ExpectSums("a", 1, 10);
  Begin("a", 2);
  ExpectSums("a", 2, 10);
  EXPECT_EQ(SaysTurns("a"), 0);
  EXPECT_EQ(Of("a", 0).Describe().find("turns"), std::string::npos);
}

TEST_F(NcclTurnsTest, TheSecondWaitsForWhatTheFirstHasUnderWay) {
  Open("a");
  Begin("a", 1);
  ExpectSums("a", 1, 3);
  const PendingPtr on0 = Sum("a", 0, 1, 3);
  Await([&] { return IsIssued(0, "a 3"); });
  Open("b");
  Begin("b", 1);
  const std::vector<PendingPtr> of_b = {Sum("b", 0, 1, 0), Sum("b", 1, 1, 0)};
  Await([&] { return Of("b", 0).Describe().find("and waits for the next") != std::string::npos; });
  EXPECT_FALSE(of_b[0]->done.HasBeenNotified());
  ExpectSum(Sum("a", 1, 1, 3), 3);
  ExpectSum(on0, 3);
  for (const PendingPtr& pending : of_b) ExpectSum(pending, 0);
}

TEST_F(NcclTurnsTest, ASlowRankHoldsOnlyItsOwnJob) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  const PendingPtr slow = Sum("a", 0, 1, 2);
  ExpectSums("b", 1, 10);
  EXPECT_FALSE(IsIssued(0, "a 2")) << "the other node's rank has not come";
  ExpectSum(Sum("a", 1, 1, 2), 2);
  ExpectSum(slow, 2);
}

TEST_F(NcclTurnsTest, AGenerationThatEndsGivesItsTurnBack) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  const PendingPtr on1 = ReadyOn1("a", 1, 2);
  ExpectSums("b", 1, 1);
  Hold("a");  // node 1 does not hear that it may
  const PendingPtr on0 = Sum("a", 0, 1, 2);
  Await([&] { return IsIssued(0, "a 2"); });
  const std::vector<PendingPtr> of_b = {Sum("b", 0, 1, 2), Sum("b", 1, 1, 2)};
  Begin("a", 2);
  for (const PendingPtr& pending : {on0, on1}) EXPECT_EQ(Await(pending).code(), absl::StatusCode::kAborted);
  for (const PendingPtr& pending : of_b) ExpectSum(pending, 2);
  LetGo("a");  // what was said of the generation before says nothing of this one
  ExpectSums("a", 2, 3);
}

TEST_F(NcclTurnsTest, ANodeThatHasFinishedHoldsNobody) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  const PendingPtr on1 = ReadyOn1("a", 1, 2);
  Hold("a", /*to=*/0);  // that it is done
  for (const PendingPtr& pending : {on1, Sum("a", 0, 1, 2)}) ExpectSum(pending, 2);
  AwaitHeld("a", 0);
  const std::vector<PendingPtr> of_b = {Sum("b", 0, 1, 1), Sum("b", 1, 1, 1)};
  Await([&] { return Of("b", 0).Describe().find("and waits for the next") != std::string::npos; });
  EXPECT_FALSE(of_b[0]->done.HasBeenNotified());
  Close("a", 1);
  Of("a", 0).OnDown(1, absl::UnavailableError("the job is closed there"));
  for (const PendingPtr& pending : of_b) ExpectSum(pending, 1);
}

TEST_F(NcclTurnsTest, WhoIsLeftAloneIsFreeAgain) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  for (const int node : {0, 1}) Close("b", node);
  ExpectSums("a", 1, 3);
  const int said = SaysTurns("a");
  ExpectSums("a", 1, 10);
  EXPECT_EQ(SaysTurns("a"), said);
  Open("c");
  Begin("c", 1);
  ExpectSums("c", 1, 3);
  ExpectSums("a", 1, 3);
}

TEST_F(NcclTurnsTest, AJobWhoseNode0EndsLeavesTheOtherFree) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  const PendingPtr on1 = ReadyOn1("a", 1, 2);
  Hold("a", /*to=*/1);  // that it may
  const PendingPtr cut = Sum("a", 0, 1, 2);
  Await([&] { return IsIssued(0, "a 2"); });
  Close("a", 0);
  EXPECT_FALSE(Await(cut).ok());
  ExpectSums("b", 1, 5);
  Close("a", 1);
}

TEST_F(NcclTurnsTest, WhatComesBehindALostLinkIsNotIssued) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  Of("a", 0).OnDown(1, absl::UnavailableError("the link is lost"));
  const PendingPtr cut = Sum("a", 0, 1, 2);
  ExpectSums("b", 1, 5);
  EXPECT_FALSE(IsIssued(0, "a 2"));
  Begin("a", 2);
  EXPECT_EQ(Await(cut).code(), absl::StatusCode::kAborted);
  ExpectSums("a", 2, 3);
  ExpectSums("b", 1, 3);
}

// Whose other job, refused there, is not. Here it is, so that it wants the turn.
TEST_F(NcclTurnsTest, NoLimitIsSaidWhereANodeKnowsOfNone) {
  {
    absl::MutexLock lock(&mutex_);
    jobs_["a"].older = true;
  }
  Open("a");
  Begin("a", 1);
  ExpectSums("a", 1, 2);
  Open("b");
  Begin("b", 1);
  const std::vector<PendingPtr> of_b = {Sum("b", 0, 1, 0), Sum("b", 1, 1, 0)};
  Await([&] { return Of("b", 0).Describe().find("and waits for the next") != std::string::npos; });
  ExpectSums("a", 1, 5);
  Begin("a", 2);
  ASSERT_NO_FATAL_FAILURE(ExpectSums("a", 2, 5));
  EXPECT_EQ(SaysTurns("a"), 0);
  for (const int node : {0, 1}) Close("a", node);
  for (const PendingPtr& pending : of_b) ExpectSum(pending, 0);
}

TEST_F(NcclTurnsTest, AJobThatOnlyHasItsPlaceLimitsNobody) {
  Open("a");
  Open("b");  // whose ranks have not come
  Begin("a", 1);
  ExpectSums("a", 1, 3);
  Begin("a", 2);
  ExpectSums("a", 2, 3);
  EXPECT_EQ(SaysTurns("a"), 0);
  Begin("b", 1);
  ExpectSums("b", 1, 3);
  ExpectSums("a", 2, 3);
  EXPECT_GT(SaysTurns("a"), 0);
}

TEST_F(NcclTurnsTest, BothMakeTheirCommunicatorsAnewInTurns) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  for (uint64_t generation = 2; generation < 8; ++generation) {
    std::vector<PendingPtr> cut = {Sum("a", 0, generation - 1, jobs_["a"].next),
                                   Sum("b", 1, generation - 1, jobs_["b"].next)};
    for (const std::string name : {"a", "b"}) Begin(name, generation);
    for (const PendingPtr& pending : cut) EXPECT_EQ(Await(pending).code(), absl::StatusCode::kAborted);
    const std::vector<PendingPtr> all = {Sum("a", 0, generation, 0), Sum("b", 1, generation, 0),
                                         Sum("b", 0, generation, 0), Sum("a", 1, generation, 0)};
    for (const PendingPtr& pending : all) ASSERT_NO_FATAL_FAILURE(ExpectSum(pending, 0));
    jobs_["a"].next = jobs_["b"].next = 1;
  }
}

TEST_F(NcclTurnsTest, WhatCannotBeEndsTheGeneration) {
  ASSERT_NO_FATAL_FAILURE(OpenBoth());
  v1::PeerMessage::Exchange message;
  message.set_generation(1);
  message.mutable_turns()->set_round(1);
  message.mutable_turns()->set_issued_sums(7);
  Of("a", 0).OnMessage(1, message);
  const absl::Status status = Await(Sum("a", 0, 1, 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("node 1 says of its turn what cannot be (got 0 sums done of 7 issued of 0 ready"));
  ExpectSums("b", 1, 3);
  Begin("a", 2);
  ExpectSums("a", 2, 3);
}

}  // namespace
}  // namespace shardd
