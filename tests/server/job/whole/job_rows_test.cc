// Jobs over four nodes in two rows: each row has one copy, of which each of its nodes has half.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/job/job_extend.h"
#include "server/job/nodes/state_transfers.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobRowsTest : public JobNodesTest {
 protected:
  explicit JobRowsTest(v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD, bool outlives = false, int nodes = 4)
      : JobNodesTest(nodes, strategy, outlives, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/false,
                     /*several=*/false, /*describe=*/nullptr, /*row=*/2) {}

  // Whole, as every node's ranks may; a node keeps its half.
  void BeginWith(float value) {
    for (int node = 0; node < count(); ++node) {
      Attach(node);
      WriteWhole(node, value);
      CommitParameters(node);
    }
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).committed().version() == 1; })) << Why(node);
    }
  }
  // Its whole model, gathered.
  std::vector<float> Model(int node) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(node, command);
    EXPECT_TRUE(Until([&] {
      const Session* session = job(node).sessions()[0].get();
      return session != nullptr && session->handles[0].storage() == StorageState::kUnsharded;
    })) << Why(node);
    const float* const pool = SlabAt<float>(job(node).memory().pool(), 0);
    std::vector<float> model(pool, pool + 64);
    command.mutable_reshard()->set_group(0);
    Send(node, command);
    return model;
  }
  // Gradients of which the order of addition shows.
  void TrainOdd(int step) {
    for (int node = 0; node < count(); ++node) {
      Train(node, 0.1f * static_cast<float>(node + 1) + 1e-3f * static_cast<float>(step) + 1e-7f / (1.0f + node));
    }
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == step; })) << "node " << node << Why(node);
    }
  }
  std::string Held(int node) {
    return {reinterpret_cast<const char*>(SlabAt<float>(job(node).memory().shards(), 128 * (node % 2))), 128};
  }
};

TEST_F(JobRowsTest, EachNodeKeepsItsHalfAndIsGivenTheOtherOfItsRow) {
  BeginWith(100);
  for (int node = 0; node < 4; ++node) {
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (node % 2)], 100 + 32 * (node % 2));
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (1 - node % 2)], 0) << "is another node's";
    const std::vector<float> model = Model(node);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(model[static_cast<size_t>(i)], 100 + i) << "node " << node;
  }
}

TEST_F(JobRowsTest, StepsAreTheMeanOfAllNodes) {
  Begin();
  for (int64_t step = 1; step <= 5; ++step) TrainsTo(step);
}

TEST_F(JobRowsTest, RowsHaveTheSameBits) {
  BeginWith(0.3f);
  for (int step = 1; step <= 6; ++step) TrainOdd(step);
  for (int node = 0; node < 2; ++node) EXPECT_EQ(Held(node), Held(node + 2)) << node;
  const std::vector<float> model = Model(0);
  for (int node = 1; node < 4; ++node) EXPECT_EQ(std::memcmp(Model(node).data(), model.data(), 256), 0) << node;
}

TEST_F(JobRowsTest, InitialValuesThatDifferBetweenRowsAreNamed) {
  for (int node = 0; node < 4; ++node) {
    Attach(node);
    WriteWhole(node, node == 3 ? 7 : 5);
    CommitParameters(node);
  }
  for (int node = 0; node < 4; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("the initial value of \"w\" on node 3 (host3:7000)"),
                                 HasSubstr("differs from node 1's")));
  }
}

TEST_F(JobRowsTest, AParameterThatDiffersIsNamedWithTheNextStep) {
  Begin();
  TrainsTo(1);
  OnLoop([&] { SlabAt<float>(job(2).memory().shards(), 0)[7] += 1; });  // a bit of its memory fell over
  TrainsTo(2);                                                          // behind which nodes compare
  TrainAll();
  for (int node = 0; node < 4; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("Step 3: node 2 (host2:7000) is no replica of node 0 (host0:7000)"),
                                 HasSubstr("\"w\" of group"), HasSubstr("behind step 2")));
    EXPECT_EQ(job(node).view().committed_step(), 2);
  }
}

TEST_F(JobRowsTest, ALostLinkBetweenRowsEndsTheAttemptOnAll) {
  Begin();
  TrainsTo(1);
  wire_.SetUp(1, 2, false);
  Train(0, GradientOf(0));
  Train(3, GradientOf(3));
  wire_.SetUp(1, 2, true);
  GoesOnTo(4);
}

// They would be of bytes that may be taken back, and then the node would be no replica with the next step.
TEST_F(JobRowsTest, NobodyAsksToWriteWhileDigestsAreTaken) {
  Begin();
  TrainsTo(1);
  absl::Notification go;
  worker_.Post([&] { go.WaitForNotification(); });
  TrainsTo(2);  // behind which nodes compare
  std::atomic<int> asked = 0;
  wire_.Drop([&](int, const v1::PeerMessage& message) {
    asked += message.has_asks_to_write() ? 1 : 0;
    return false;
  });
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  for (int node = 0; node < 4; ++node) Send(node, command);
  wire_.SetUp(true);  // behind all that was sent
  EXPECT_EQ(asked, 0);
  go.Notify();
  for (int node = 0; node < 4; ++node) {
    EXPECT_TRUE(testing::PollUntil([&] { return StreamOf(node).FullParams().number() == 1; }, kPatience)) << node;
  }
  EXPECT_EQ(asked, 3) << "node 0 needs no link";
  wire_.Drop(nullptr);  // what closing the job sends is not counted in a local that is no more
}

class JobRowsLost : public JobRowsTest {
 protected:
  explicit JobRowsLost(int nodes = 4) : JobRowsTest(v1::STRATEGY_HYBRID_SHARD, /*outlives=*/false, nodes) {}
  // The daemons of `lost` are, with all that they had, and others come in their places.
  void Replace(const std::vector<int>& lost) {
    for (const int node : lost) Kill(node);
    for (int node = 0; node < count(); ++node) {
      if (std::find(lost.begin(), lost.end(), node) == lost.end()) {
        ASSERT_TRUE(Gone(node));
      }
    }
    for (const int node : lost) OpenAgain(node);
  }
  bool IsRestored(int node, uint64_t version) {
    return Until([&] { return job(node).committed().version() == version && !job(node).nodes().fetching(); });
  }
  // What was there before, of all; nothing that another place holds.
  void ExpectRestored(const std::vector<int>& lost) {
    ASSERT_NO_FATAL_FAILURE(BeginWith(0.3f));
    for (int step = 1; step <= 3; ++step) ASSERT_NO_FATAL_FAILURE(TrainOdd(step));
    std::vector<std::string> held;
    for (int node = 0; node < count(); ++node) held.push_back(Held(node));
    ASSERT_NO_FATAL_FAILURE(Replace(lost));
    for (const int node : lost) {
      ASSERT_TRUE(IsRestored(node, 4)) << node;
      EXPECT_EQ(job(node).view().committed_step(), 3);
      EXPECT_EQ(Held(node), held[static_cast<size_t>(node)]) << node;
      EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (1 - node % 2)], 0) << "is another node's";
    }
    for (int node = 0; node < count(); ++node) Attach(node);
    for (int step = 4; step <= 5; ++step) ASSERT_NO_FATAL_FAILURE(TrainOdd(step));
    for (int node = 2; node < count(); ++node) EXPECT_EQ(Held(node), Held(node % 2)) << node;
    const std::vector<float> model = Model(0);
    for (int node = 1; node < count(); ++node) EXPECT_EQ(std::memcmp(Model(node).data(), model.data(), 256), 0) << node;
  }
};

TEST_F(JobRowsLost, ADaemonThatKeptNothingIsSentItsPart) { ExpectRestored({3}); }
TEST_F(JobRowsLost, Node0IsSentItsPartByItsPlacesNode) { ExpectRestored({0}); }
TEST_F(JobRowsLost, ARowThatIsLostAsAWholeIsSentItsParts) { ExpectRestored({0, 1}); }
TEST_F(JobRowsLost, NodesOfTwoRowsAreSentEachOthersParts) { ExpectRestored({0, 3}); }

class JobRowsCutOff : public JobRowsLost {
 protected:
  // All ranks write the whole model; `commits`: who asks to commit that.
  void Load(float value, const std::vector<int>& commits) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    for (int node = 0; node < count(); ++node) Send(node, command);
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(testing::PollUntil([&] { return StreamOf(node).FullParams().number() == 1; }, kPatience)) << node;
    }
    for (int node = 0; node < count(); ++node) WriteWhole(node, value);
    for (const int node : commits) CommitParameters(node);
  }
  // What a machine keeps of the node, which has promised values.
  void Keep(int node) {
    ASSERT_TRUE(Until([&] { return job(node).nodes().promised(); })) << Why(node);
    OnLoop([&] {
      const Committed& committed = job(node).committed();
      facts_.epoch = committed.epoch() + 1;
      facts_.version = committed.version();
      facts_.step = committed.step();
      facts_.step_counts = committed.step_counts();
      facts_.trainer_states = committed.trainer_states();
      facts_.generation = committed.generation();
      v1::PromisedValuesRecord& promised = facts_.promised_values.emplace();
      promised.set_generation(job(node).nodes().generation());
      promised.set_version(facts_.version + 1);
      for (const int64_t count : facts_.step_counts) promised.add_step_counts(count);
      kept_ = Held(node);
    });
  }
  // The machine is there again, in the place of the daemon that it was replaced by.
  void ComeBack(int node) {
    Kill(node);
    before_open_ = [this, node](JobCore::Init* init) {
      std::copy(kept_.begin(), kept_.end(), init->memory->shards()->At(128 * (node % 2)));
      init->committed = facts_;
      NodeLeft& left = init->nodes->left.emplace();
      left.promised_in = facts_.promised_values->generation();
      left.promised_values = true;
    };
    OpenAgain(node);
    before_open_ = nullptr;
  }
  CommittedFacts facts_;
  std::string kept_;
};

// Node 0's daemon is another one by then, which knows of the values by what the other nodes say.
TEST_F(JobRowsCutOff, AMachineThatPromisedOtherValuesIsSentTheOnesMade) {
  Begin();
  TrainsTo(1);
  ASSERT_NO_FATAL_FAILURE(Load(100, /*commits=*/{3}));
  ASSERT_NO_FATAL_FAILURE(Keep(3));
  ASSERT_NO_FATAL_FAILURE(Replace({3}));
  ASSERT_TRUE(IsRestored(3, 2));
  for (int node = 0; node < 4; ++node) Attach(node);
  ASSERT_NO_FATAL_FAILURE(Load(200, /*commits=*/{0, 1, 2, 3}));
  for (int node = 0; node < 4; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).committed().version() == 3; })) << node << Why(node);
  }
  ASSERT_NO_FATAL_FAILURE(Replace({0}));
  ASSERT_TRUE(IsRestored(0, 3));
  ASSERT_NO_FATAL_FAILURE(ComeBack(3));
  ASSERT_TRUE(IsRestored(3, 3));
  EXPECT_NE(Held(3), kept_);
  EXPECT_EQ(Held(3), Held(1));
  for (int node = 0; node < 4; ++node) Attach(node);
  for (int node = 0; node < 4; ++node) EXPECT_EQ(Model(node)[40], 240) << node;
}

class JobThreeRowsLost : public JobRowsLost {
 protected:
  JobThreeRowsLost() : JobRowsLost(6) {}
};

TEST_F(JobThreeRowsLost, TwoNodesOfAPlaceAreSentTheThirdsPart) { ExpectRestored({1, 5}); }
TEST_F(JobThreeRowsLost, TwoRowsThatAreLostAreSentTheThirds) { ExpectRestored({0, 1, 4, 5}); }

TEST_F(JobThreeRowsLost, APlaceLostInAllRowsClosesTheJob) {
  Begin();
  TrainsTo(1);
  ASSERT_NO_FATAL_FAILURE(Replace({1, 3, 5}));
  for (int node = 0; node < 6; ++node) EXPECT_TRUE(Until([&] { return job(node).closed(); })) << node;
}

// It takes the request and answers nothing, as a daemon that hangs.
TEST_F(JobThreeRowsLost, ASilentSenderIsPassedOver) {
  Begin();
  TrainsTo(1);
  std::atomic<int> unheard = 0;
  std::atomic<int> ended = 0;
  wire_.Drop([&](int to, const v1::PeerMessage& message) {
    const bool drops = to == 1 && message.has_fetch();
    (drops && message.fetch().transfer() == 0 ? ended : unheard) += drops ? 1 : 0;
    return drops;
  });
  ASSERT_NO_FATAL_FAILURE(Replace({3}));
  EXPECT_TRUE(testing::PollUntil([&] { return unheard > 0; }, kPatience));
  OnLoop([&] { job(3).CheckSilence(MonotonicNow() + absl::Minutes(3)); });
  EXPECT_TRUE(IsRestored(3, 2));
  EXPECT_EQ(ended, 1) << "it would send it all, beside the other";
  wire_.Drop(nullptr);
  GoesOnTo(3);
}

// Who sends trains less, too, and is about to become what the others are: its links end with that.
TEST_F(JobRowsLost, ANodeThatIsSentItsStateBecomesWhatOthersAre) {
  Begin();
  TrainsTo(1);
  wire_.Drop([&](int to, const v1::PeerMessage& message) { return to == 3 && message.has_state(); });
  ASSERT_NO_FATAL_FAILURE(Replace({3}));
  ASSERT_TRUE(Until([&] { return job(3).nodes().fetching(); }));
  int built = 0;
  OnLoop([&] {
    auto extension = std::make_shared<Extension>();
    extension->what = "parameter \"f\"";
    job(3).Widen(extension, /*as=*/0, [&](const auto&, const auto&) { ++built; });
    EXPECT_EQ(built, 1);
  });
  wire_.Drop(nullptr);
}

// Its sender may be gone by the time at which that is built, and then nobody else has it.
TEST_F(JobRowsLost, AStateThatComesWhileTheJobIsWidenedIsRestoredFirst) {
  Begin();
  TrainsTo(1);
  wire_.Drop([&](int to, const v1::PeerMessage& message) { return to == 3 && message.has_state(); });
  ASSERT_NO_FATAL_FAILURE(Replace({3}));
  ASSERT_TRUE(Until([&] { return job(3).nodes().fetching(); }));
  int builds = 0;
  OnLoop([&] {
    auto extension = std::make_shared<Extension>();
    extension->what = "parameter \"f\"";
    job(3).Widen(extension, /*as=*/0, [&](const auto&, const auto&) { ++builds; });
    EXPECT_TRUE(MayBeWidened(job(3))) << "the rest of it may never come";
  });
  wire_.Drop(nullptr);
  for (const bool up : {false, true}) wire_.SetUp(1, 3, up);  // what was dropped is asked for again
  ASSERT_TRUE(Until([&] { return job(3).nodes().states().has_come(); }));
  EXPECT_EQ(builds, 1);
  OnLoop([&] { EXPECT_FALSE(MayBeWidened(job(3))); });
  EXPECT_TRUE(Until([&] { return builds == 2; })) << "behind the restore";
  EXPECT_EQ(job(3).committed().version(), 2u);
  EXPECT_EQ(Held(3), Held(1));
}

// With it goes what all have: the job ends, and says where it was.
TEST_F(JobRowsLost, APlaceLostInAllRowsClosesTheJobByName) {
  Begin();
  TrainsTo(1);
  for (const int node : {1, 3}) Kill(node);
  for (const int node : {0, 2}) {
    ASSERT_TRUE(Gone(node));
    Attach(node);
  }
  for (const int node : {1, 3}) OpenAgain(node);
  for (const int node : {0, 2}) {
    ASSERT_TRUE(Until([&] { return job(node).closed(); })) << node;
    EXPECT_THAT(Why(node), AllOf(HasSubstr("has nothing of what other nodes have committed"),
                                 HasSubstr("What its ranks held has been in other rows on node"),
                                 HasSubstr("whose daemon has lost it, too")));
  }
}

class JobRowsSchedules : public JobRowsTest, public ::testing::WithParamInterface<int> {};

TEST_P(JobRowsSchedules, RanksAndLinksThatComeAndGoLoseNothing) { RunSchedule(GetParam(), 40); }

// One at a time, at random moments, while its row's neighbour and the other row train.
TEST_P(JobRowsSchedules, DaemonsThatKeepNothingLoseNothing) {
  constexpr int64_t kSteps = 40;
  std::mt19937_64 rng(static_cast<uint64_t>(GetParam()));
  Given given;
  int killed = 0;
  const absl::Time until = MonotonicNow() + absl::Seconds(120);
  std::vector<bool> behind(4, true);
  while (std::find(behind.begin(), behind.end(), true) != behind.end() && MonotonicNow() < until) {
    const int node = static_cast<int>(rng() % 4);
    const int other = (node + 2) % 4;
    bool has = false;
    OnLoop([&] {
      has =
          job(other).committed().version() > 0 && !job(other).nodes().fetching() && job(node).committed().version() > 0;
    });
    if (rng() % 40 == 0 && has) {
      Kill(node);
      OpenAgain(node);
      given.erase(node);
      ++killed;
    }
    behind[static_cast<size_t>(node)] = TrainsOn(node, kSteps, &given);
  }
  for (int node = 0; node < 4; ++node) IsAt(node, kSteps);
  EXPECT_GT(killed, 3) << "nothing happened";
}

INSTANTIATE_TEST_SUITE_P(Seeds, JobRowsSchedules, ::testing::Range(2, 7));

}  // namespace
}  // namespace shardd
