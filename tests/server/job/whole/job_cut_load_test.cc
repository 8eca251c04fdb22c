// Ranks write values in place of a version where parameters are cut over two nodes.

#include <array>

#include "absl/time/clock.h"
#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobCutLoad : public JobNodesTest {
 protected:
  explicit JobCutLoad(bool outlives = false) : JobNodesTest(2, v1::STRATEGY_FULL_SHARD, outlives) {}

  void Enter(int node, int group = -1) {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    command.mutable_enter_full_params()->set_scope(group + 1);
    Send(node, command);
    ++entries_[static_cast<size_t>(node)];
  }
  void Leave(int node) {
    v1::Command command;
    command.mutable_leave_full_params();
    Send(node, command);
  }
  bool Inside(int node) {
    const v1::SessionEvent::FullParams last = StreamOf(node).FullParams();
    return last.code() == 0 && last.number() == entries_[static_cast<size_t>(node)];
  }
  bool AllInside() {
    return testing::PollUntil([&] { return Inside(0) && Inside(1); }, kPatience);
  }
  bool AllAt(uint64_t version) {
    return Until([&] { return job(0).committed().version() == version && job(1).committed().version() == version; });
  }
  void EnterAll() {
    for (int node = 0; node < 2; ++node) Enter(node);
    ASSERT_TRUE(AllInside()) << Why(0) << Why(1);
  }
  void LoadAll(float value) {
    ASSERT_NO_FATAL_FAILURE(EnterAll());
    for (int node = 0; node < 2; ++node) WriteWhole(node, value);
    for (int node = 0; node < 2; ++node) CommitParameters(node);
  }
  void Unshard(int node) {
    // What is sent to a session that is held while values are taken back is for its stream to keep, which is not here.
    ASSERT_TRUE(Until([&] {
      const Session* session = job(node).sessions()[0].get();
      return session == nullptr || !session->held;
    }));
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
    Send(node, command);
  }
  // What the node's rank reads: its half, and what it gathers.
  void ExpectReads(int node, float first, float step) {
    Unshard(node);
    ASSERT_TRUE(Until([&] {
      const Session* session = job(node).sessions()[0].get();
      return session != nullptr && session->handles[0].storage() == StorageState::kUnsharded;
    })) << Why(node);
    for (int i = 0; i < 64; ++i) {
      ASSERT_EQ(SlabAt<float>(job(node).memory().pool(), 0)[i], first + step * static_cast<float>(i))
          << node << " " << i;
    }
    v1::Command command;
    command.mutable_reshard()->set_group(0);
    Send(node, command);
  }
  void AttachAll() {
    for (int node = 0; node < 2; ++node) {
      if (job(node).sessions()[0].get() != nullptr) continue;
      Attach(node);
      entries_[static_cast<size_t>(node)] = 0;
    }
  }

  std::array<uint64_t, 2> entries_ = {};  // of each node's session
};

TEST_F(JobCutLoad, WhatAllNodesWriteIsTheNextVersion) {
  Begin();
  TrainsTo(1);
  LoadAll(100);
  ASSERT_TRUE(AllAt(3)) << Why(0) << Why(1);
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) ExpectReads(node, 100, 1);
  LoadAll(200);
  ASSERT_TRUE(AllAt(4));
  for (int node = 0; node < 2; ++node) Leave(node);
  TrainAll();
  ASSERT_TRUE(AllAt(5));
  for (int node = 0; node < 2; ++node) ExpectReads(node, 199, 1);
}

TEST_F(JobCutLoad, NobodyWritesWhileAnotherNodeReadsTheVersion) {
  Begin();
  TrainsTo(1);
  Enter(0);
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_FALSE(Inside(0));
  ExpectReads(1, -1, 0);
  v1::ListRanksResponse ranks;
  OnLoop([&] { job(0).view().DescribeRanks(&ranks); });
  EXPECT_THAT(ranks.ranks(0).waiting_for(), HasSubstr("node 1 (host1:7000) has not asked to write values"));
  Enter(1);
  EXPECT_TRUE(AllInside());
}

TEST_F(JobCutLoad, WhatALostRankHadNotCommittedIsTakenBackOnAllNodes) {
  Begin();
  TrainsTo(1);
  ASSERT_NO_FATAL_FAILURE(EnterAll());
  for (int node = 0; node < 2; ++node) WriteWhole(node, 100);
  CommitParameters(0);
  EXPECT_TRUE(Until([&] { return job(0).nodes().promised(); }));
  Lose(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  AttachAll();
  for (int node = 0; node < 2; ++node) ExpectReads(node, -1, 0);
  ASSERT_TRUE(AllAt(2));
  TrainsTo(2);
}

TEST_F(JobCutLoad, WritesThatNobodyCommitsAreTakenBackAndMayBeRepeated) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(EnterAll());
  for (int node = 0; node < 2; ++node) WriteWhole(node, 100);
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) ExpectReads(node, 0, 0);
  LoadAll(50);
  ASSERT_TRUE(AllAt(2)) << Why(0) << Why(1);
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) ExpectReads(node, 50, 1);
}

TEST_F(JobCutLoad, ThatNodesMightWriteOnceSaysNothingOfLaterVersions) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(EnterAll());
  for (int node = 0; node < 2; ++node) Leave(node);
  TrainsTo(1);
  Enter(0);
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_FALSE(Inside(0)) << "node 1 reads";
  ExpectReads(1, -1, 0);
  Enter(1);
  EXPECT_TRUE(AllInside());
}

TEST_F(JobCutLoad, NodesThatWriteDifferentPartsAreToldOfIt) {
  Begin();
  TrainsTo(1);
  ASSERT_NO_FATAL_FAILURE(EnterAll());
  WriteWhole(0, 100);
  for (int node = 0; node < 2; ++node) CommitParameters(node);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("of \"w\", the ranks of node 1"), HasSubstr("wrote other parts")));
  AttachAll();
  for (int node = 0; node < 2; ++node) ExpectReads(node, -1, 0);
  TrainsTo(2);
}

TEST_F(JobCutLoad, NodesThatEnterForDifferentGroupsAreToldOfIt) {
  Begin();
  TrainsTo(1);
  Enter(0);
  Enter(1, 0);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("node 1 (host1:7000) asks to write others than node 0"), HasSubstr("group -1")));
  AttachAll();
  TrainsTo(2);
}

TEST_F(JobCutLoad, ANodeWithoutRoomForOldBytesIsNamedOnAll) {
  Begin();
  TrainsTo(1);
  promised_bytes_[1] = int64_t{1} << 60;
  for (int node = 0; node < 2; ++node) Enter(node);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_EQ(StreamOf(0).Aborted().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("node 1 (host1:7000): "), HasSubstr("for the undo of the writeback")));
  AttachAll();
  TrainsTo(2);
}

class JobCutLoadKept : public JobCutLoad {
 protected:
  JobCutLoadKept() : JobCutLoad(/*outlives=*/true) {}
  // Counts of the header that a daemon finds which takes nothing back: of more than 3 it knows nothing.
  bool OlderDaemonReads(int node) {
    std::array<std::pair<uint64_t, uint32_t>, 2> headers;  // sequence, counts
    for (int i = 0; i < 2; ++i) {
      const int fd = nodes_[static_cast<size_t>(node)].log_fd.get();
      EXPECT_EQ(pread(fd, &headers[static_cast<size_t>(i)].first, 8, 64 * i + 8), 8);
      EXPECT_EQ(pread(fd, &headers[static_cast<size_t>(i)].second, 4, 64 * i + 48), 4);
    }
    return std::max(headers[0], headers[1]).second <= 3;
  }
};

TEST_F(JobCutLoadKept, NoOlderDaemonServesWhatIsHalfLoaded) {
  Begin();
  TrainsTo(1);
  EXPECT_TRUE(OlderDaemonReads(0));
  ASSERT_NO_FATAL_FAILURE(EnterAll());
  for (int node = 0; node < 2; ++node) WriteWhole(node, 100);
  for (int node = 0; node < 2; ++node) EXPECT_FALSE(OlderDaemonReads(node));
  Lose(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  AttachAll();
  for (int node = 0; node < 2; ++node) EXPECT_TRUE(OlderDaemonReads(node)) << "all is taken back";
  LoadAll(50);
  ASSERT_TRUE(AllAt(3)) << Why(0) << Why(1);
  for (int node = 0; node < 2; ++node) EXPECT_TRUE(Until([&] { return OlderDaemonReads(node); }));
}

// The word that all agree is lost with the link; the version is there with the next one, however long that takes.
TEST_F(JobCutLoad, WhoMissesTheAgreementHearsOfItWithTheNextLink) {
  Begin();
  TrainsTo(1);
  wire_.Drop([](int to, const v1::PeerMessage& message) {
    return message.kind_case() == v1::PeerMessage::kValuesAgreed && to == 1;
  });
  LoadAll(100);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 3; }));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  OnLoop([&] { job(1).CheckSilence(MonotonicNow() + absl::Minutes(10)); });
  OnLoop([&] { EXPECT_TRUE(job(1).nodes().promised()); });
  wire_.SetUp(true);
  ASSERT_TRUE(AllAt(3)) << Why(1);
  ASSERT_TRUE(Gone(0));
  Leave(1);  // it has waited all the time
  AttachAll();
  for (int node = 0; node < 2; ++node) ExpectReads(node, 100, 1);
}

// A trainer that keeps no rule: node 0 may have made a version of what would be taken back.
TEST_F(JobCutLoad, NobodyLeavesBetweenItsCommitAndTheVersion) {
  Begin();
  wire_.Drop([](int to, const v1::PeerMessage& message) {
    return message.kind_case() == v1::PeerMessage::kValuesAgreed && to == 1;
  });
  LoadAll(100);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 2; }));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  Leave(1);
  wire_.SetUp(true);
  ASSERT_TRUE(AllAt(2)) << Why(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  AttachAll();
  for (int node = 0; node < 2; ++node) ExpectReads(node, 100, 1);
}

TEST_F(JobCutLoad, AnOlderDaemonOfAnotherNodeIsNamed) {
  wire_.IsOfOlderDaemon(1);
  Begin();
  TrainsTo(1);
  Enter(0);
  ASSERT_TRUE(Until([&] { return StreamOf(0).FullParams().code() != 0; }));
  EXPECT_EQ(StreamOf(0).FullParams().code(), static_cast<int>(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(StreamOf(0).FullParams().message(),
              AllOf(HasSubstr("the daemon of node 1 (host1:7000) is of an older release"), HasSubstr("upgrade it")));
  TrainsTo(2);
}

}  // namespace
}  // namespace shardd
