// Jobs whose parameters are cut over two nodes: each has half of everything, and asks the other for the rest.

#include <atomic>

#include "absl/time/clock.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class JobCutTest : public JobNodesTest {
 protected:
  JobCutTest() : JobNodesTest(2, v1::STRATEGY_FULL_SHARD) {}

  // Whole, as every node's ranks may; a node keeps its half.
  void BeginWith(float value) {
    for (int node = 0; node < 2; ++node) {
      Attach(node);
      WriteWhole(node, value);
      CommitParameters(node);
    }
    ASSERT_TRUE(Until([&] { return job(0).committed().version() == 1 && job(1).committed().version() == 1; }));
  }
  // And then there is no link.
  void DecidesUnheardBy1() {
    wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
    TrainAll();
    ASSERT_TRUE(Until([&] {
      v1::Job described;
      job(0).view().Describe(&described).Complete(&described);
      return described.state() == v1::JOB_STATE_COMMITTING;
    }));
    wire_.SetUp(false);
    wire_.Drop(nullptr);
    ASSERT_TRUE(Gone(0));
  }
  void Unshard(int node) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(node, command);
  }
  void Reshard(int node) {
    v1::Command command;
    command.mutable_reshard()->set_group(0);
    Send(node, command);
  }
  bool IsUnsharded(int node) {
    bool result = false;
    OnLoop([&] {
      const Session* session = job(node).sessions()[0].get();
      result = session != nullptr && session->handles[0].storage() == StorageState::kUnsharded;
    });
    return result;
  }
  float Unsharded(int node, int i) { return SlabAt<float>(job(node).memory().pool(), 0)[i]; }
};

// Before there are parameters, by a node 0 that keeps no rule: node 1 has said its initial values, and no step.
TEST_F(JobCutTest, AStepDecidedBeforeInitialValuesAgreeIsIgnored) {
  std::atomic<uint64_t> generation = 0;
  wire_.Drop([&generation](int to, const v1::PeerMessage& message) {
    const bool agreed = message.kind_case() == v1::PeerMessage::kValuesAgreed;
    if (agreed) generation = message.generation();
    return agreed && to == 1;
  });
  Attach(0);
  Attach(1);
  CommitParameters(0);
  CommitParameters(1);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 1; }));
  v1::PeerMessage decided;
  decided.set_generation(generation);
  decided.mutable_decided()->set_step(1);
  decided.mutable_decided()->set_present("\x01");
  wire_.Say(0, 1, decided);
  absl::SleepFor(absl::Milliseconds(50));
  OnLoop([&] {
    EXPECT_FALSE(job(1).closed());
    EXPECT_EQ(job(1).view().committed_step(), 0);
    EXPECT_EQ(job(1).committed().version(), 0u);
  });
  wire_.Drop(nullptr);
}

// Node 0 has decided it, and the link that was to say so is away for longer than others may be silent.
TEST_F(JobCutTest, APromiseOutlastsALongSilenceAndClosesNoNode) {
  Begin();
  TrainsTo(1);
  ASSERT_NO_FATAL_FAILURE(DecidesUnheardBy1());
  for (int node = 0; node < 2; ++node) {
    OnLoop([&] { job(node).CheckSilence(MonotonicNow() + absl::Minutes(10)); });
    EXPECT_FALSE(job(node).closed()) << Why(node);
    EXPECT_EQ(job(node).view().committed_step(), 1) << "node " << node;
  }
  wire_.SetUp(true);
  for (int node = 0; node < 2; ++node) IsAt(node, 2);
  for (int node = 0; node < 2; ++node) {
    bool attached = false;
    OnLoop([&] { attached = job(node).sessions()[0].get() != nullptr; });
    if (!attached) Attach(node);
  }
  TrainsTo(3);
}

// The part of a node that stays away is nowhere else: a promise does not outlast the job's grace.
TEST_F(JobCutTest, APromiseEndsWithTheJobsGrace) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(DecidesUnheardBy1());
  OnLoop([&] {
    const absl::Time now = MonotonicNow();
    job(1).CheckSilence(now);
    job(1).CheckSilence(now + absl::Minutes(16));
    EXPECT_TRUE(job(1).closed());
  });
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) is not reached"));
}

TEST_F(JobCutTest, EachNodeKeepsItsHalfAndIsGivenTheOther) {
  BeginWith(100);
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * node], 100 + 32 * node);
    EXPECT_EQ(SlabAt<float>(job(node).memory().shards(), 0)[32 * (1 - node)], 0) << "is the other node's";
    Unshard(node);
    ASSERT_TRUE(Until([&] { return job(node).sessions()[0].get()->handles[0].storage() == StorageState::kUnsharded; }))
        << Why(node);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(Unsharded(node, i), 100 + i) << "node " << node;
    Reshard(node);
  }
}

TEST_F(JobCutTest, ValuesOfOtherNodesAndEmptyOnesAreNotWritten) {
  for (int node = 0; node < 2; ++node) Attach(node);
  for (const auto& [first, numel] : {std::pair{0, 0}, {40, 0}, {64, 0}, {32, 32}, {30, 3}}) {
    v1::Command command;
    command.mutable_write_parameters()->set_first_element(first);
    command.mutable_write_parameters()->set_numel(numel);
    OnLoop([&] {
      const Session& session = *job(0).sessions()[0].get();
      const int64_t at = session.layout().payload_offset_bytes;
      command.mutable_write_parameters()->set_staging_offset_bytes(at);
      std::fill_n(reinterpret_cast<float*>(const_cast<char*>(session.Staging(at, 256))), 64, 7.0f);
    });
    Send(0, command);
    OnLoop([&, first = first, numel = numel] {
      EXPECT_NE(job(0).sessions()[0].get(), nullptr) << first << " + " << numel;
    });
  }
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(SlabAt<float>(job(0).memory().shards(), 0)[i], i == 30 || i == 31 ? 7 : 0) << i;
  }
}

TEST_F(JobCutTest, StepsAreTheMeanOfBothNodes) {
  Begin();
  for (int64_t step = 1; step <= 3; ++step) TrainsTo(step);
  for (int node = 0; node < 2; ++node) EXPECT_EQ(SlabAt<float>(job(node).memory().gradients(), 0)[32 * (1 - node)], 0);
}

TEST_F(JobCutTest, UnshardingDuringALostLinkWaitsAndTroublesNobody) {
  Begin();
  TrainsTo(1);
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) Attach(node);
  const uint64_t epochs[] = {job(0).committed().epoch(), job(1).committed().epoch()};
  Unshard(0);
  Unshard(1);
  absl::SleepFor(absl::Milliseconds(100));
  for (int node = 0; node < 2; ++node) {
    EXPECT_FALSE(IsUnsharded(node));
    EXPECT_EQ(job(node).committed().epoch(), epochs[node]) << Why(node);
  }
  v1::ListRanksResponse ranks;
  OnLoop([&] { job(0).view().DescribeRanks(&ranks); });
  EXPECT_THAT(ranks.ranks(0).waiting_for(), HasSubstr("node 1 (host1:7000) is not reached: the link broke"));
  wire_.SetUp(true);
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(testing::PollUntil([&] { return IsUnsharded(node); }, kPatience)) << Why(node);
  }
}

TEST_F(JobCutTest, WhoHasFinishedServesTheOther) {
  Begin();
  TrainsTo(1);
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  OnLoop([&] { EXPECT_FALSE(job(0).nodes().finished()); });
  EXPECT_THAT(std::string(TryAttach(0).message()), HasSubstr("all ranks of this node have finished"));
  Unshard(1);
  EXPECT_TRUE(testing::PollUntil([&] { return IsUnsharded(1); }, kPatience)) << Why(1);
  EXPECT_EQ(Unsharded(1, 0), -1);
  Reshard(1);
  OnLoop([&] { job(1).Detach(0, /*finished=*/true); });
  EXPECT_TRUE(Until([&] { return job(0).nodes().finished() && job(1).nodes().finished(); }));
}

TEST_F(JobCutTest, APartThatIsClosedClosesTheJob) {
  Begin();
  OnLoop([&] { job(1).Close("the daemon is shutting down"); });
  EXPECT_TRUE(Until([&] { return job(0).closed(); }));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000) has closed it: the daemon is shutting down"));
}

TEST_F(JobCutTest, ClosingAFinishedNodeStillTellsOthersWhoDidIt) {
  Begin();
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  OnLoop([&] { job(0).Close("closed by pid 1", JobCore::CloseOn::kAllNodes); });
  EXPECT_TRUE(Until([&] { return job(1).closed(); }));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) has closed it: closed by pid 1"));
}

class JobCutSchedules : public JobCutTest, public ::testing::WithParamInterface<int> {};

TEST_P(JobCutSchedules, RanksAndLinksThatComeAndGoLoseNothing) { RunSchedule(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Seeds, JobCutSchedules, ::testing::Range(0, 8));

}  // namespace
}  // namespace shardd
