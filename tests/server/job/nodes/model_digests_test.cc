#include "server/job/nodes/model_digests.h"

#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "tests/server/job/nodes/over_nodes_fixture.h"

namespace shardd {
namespace {

class ModelDigestsTest : public OverNodesTest {
 protected:
  ModelDigestsTest() : memory_(*JobMemory::Create(*plan_, "job")) { Begin(Nobody()); }
  std::vector<uint64_t> SaidValues(std::vector<SlabPart> stale = {}) {
    loop_.RunAndWait([&] { digests_.SayValues(std::move(stale), {}, [this] { ++ended_; }); });
    Drain();
    const auto sent = Sent(v1::PeerMessage::kValues);
    if (sent.empty()) return {};
    return {sent.back().values().digests().begin(), sent.back().values().digests().end()};
  }
  void Write(float value) {
    const SlabPart part = WholePart(*plan_, *memory_, /*param=*/1, 0);
    ASSERT_TRUE(part.slab->Write(part.offset_bytes, reinterpret_cast<const char*>(&value), sizeof value).ok());
  }
  void CommitSteps(int64_t steps) {
    loop_.RunAndWait([&] {
      while (committed_.step() < steps) {
        committed_.CommitStep(std::vector<bool>(static_cast<size_t>(params_), true), {""});
        digests_.StepCommitted();
      }
    });
  }

  const std::unique_ptr<JobMemory> memory_;
  int ended_ = 0;
  ModelDigests digests_{{plan_.get(), memory_.get(), &committed_}, {&member_, &worker_, &work_, &job_}};
};

TEST_F(ModelDigestsTest, ValuesAreSaidByParameterAndFollowBytesAndCounts) {
  const std::vector<uint64_t> zeros = SaidValues();
  ASSERT_EQ(zeros.size(), static_cast<size_t>(params_));
  EXPECT_EQ(ended_, 1);
  EXPECT_EQ(job_.advanced > 0, true);
  Write(0.5);
  const std::vector<uint64_t> written = SaidValues();
  EXPECT_EQ(written[0], zeros[0]);
  EXPECT_NE(written[1], zeros[1]);
  committed_.SetStepCount(0, 3);
  EXPECT_NE(SaidValues()[0], zeros[0]);
}

TEST_F(ModelDigestsTest, WhatIsStaleIsClearedFirst) {
  const std::vector<uint64_t> zeros = SaidValues();
  Write(0.5);
  EXPECT_EQ(SaidValues({WholePart(*plan_, *memory_, /*param=*/1, 0)}), zeros);
}

TEST_F(ModelDigestsTest, ValuesOfAnEpochThatHasEndedAreNotSaid) {
  worker_.RunAndWait([&] {  // it reads nothing meanwhile
    loop_.RunAndWait([&] {
      digests_.SayValues({}, {}, [this] { ++ended_; });
      committed_.EndEpoch();
    });
  });
  Drain();
  EXPECT_EQ(ended_, 1) << "whoever waits for the reading goes on";
  EXPECT_TRUE(Sent(v1::PeerMessage::kValues).empty());
}

TEST_F(ModelDigestsTest, ReplicasAreReadWhenTheyAreDue) {
  const auto every = static_cast<int64_t>(plan_->config.compare_every());
  ASSERT_GT(every, 1);
  CommitSteps(every - 1);
  EXPECT_FALSE(digests_.under_way());
  CommitSteps(every);
  Drain();
  EXPECT_FALSE(digests_.under_way());
  EXPECT_EQ(digests_.OfCommitted().size(), static_cast<size_t>(params_));
  committed_.CommitVersion();
  EXPECT_TRUE(digests_.OfCommitted().empty());
}

TEST_F(ModelDigestsTest, AStateOfTheSameNumberThatHasComeHasNone) {
  CommitSteps(plan_->config.compare_every());
  Drain();
  ASSERT_FALSE(digests_.OfCommitted().empty());
  const int64_t step = committed_.step();
  const uint64_t version = committed_.version();
  const std::vector<int64_t> counts = *committed_.ShareStepCounts();
  committed_.Lose();
  committed_.Restore(step, version, counts, {""}, /*generation=*/7);
  EXPECT_TRUE(digests_.OfCommitted().empty());
}

TEST_F(ModelDigestsTest, TheyAreUnderWayUntilTheWorkerHasReadThem) {
  worker_.RunAndWait([&] {
    CommitSteps(plan_->config.compare_every());
    EXPECT_TRUE(digests_.under_way());
    EXPECT_GT(job_.alive.use_count(), 1) << "the job could go while its slabs are read";
  });
  Drain();
  EXPECT_FALSE(digests_.under_way());
}

class CutModelDigestsTest : public OverNodesTest {
 protected:
  CutModelDigestsTest() : OverNodesTest(/*cut=*/true), memory_(*JobMemory::Create(*plan_, "job")) {}
  const std::unique_ptr<JobMemory> memory_;
};

TEST_F(CutModelDigestsTest, NodesWithPartsOfTheirOwnCompareNoBytes) {
  Begin(Nobody());
  ModelDigests digests{{plan_.get(), memory_.get(), &committed_}, {&member_, &worker_, &work_, &job_}};
  loop_.RunAndWait([&] {
    while (committed_.step() < plan_->config.compare_every()) {
      committed_.CommitStep({}, {""});
      digests.StepCommitted();
    }
  });
  EXPECT_FALSE(digests.under_way());
}

}  // namespace
}  // namespace shardd
