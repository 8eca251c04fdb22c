#include "server/job/nodes/sums_over_nodes.h"

#include "server/multinode/backwards.h"
#include "server/multinode/given_gradients.h"
#include "server/multinode/param_mask.h"
#include "tests/server/job/nodes/over_nodes_fixture.h"

namespace shardd {
namespace {

constexpr int kGroup = 1;  // of one parameter
const PairKey kFirst(0, kGroup);

class SumsOverNodesTest : public OverNodesTest {
 protected:
  SumsOverNodesTest() { Begin({&sums_, this, this, this}); }
  void Give() {
    RankCommand command;
    command.group = kGroup;
    command.fresh = {true};
    absl::StatusOr<Contribution> given = pairing_.Check(0, std::move(command), "SubmitGradients");
    ASSERT_TRUE(given.ok()) << given.status();
    (void)pairing_.Give(0, kGroup, *std::move(given));
  }
  void SayReady() {
    const auto ranks = pairing_.Complete(kFirst);
    ASSERT_TRUE(ranks.has_value());
    if (const auto said = pairing_.Say(kFirst, *ranks)) {
      loop_.RunAndWait([&] { sums_.SayReady(kFirst, *said); });
    }
  }
  // Both nodes give the parameter.
  v1::PeerMessage Go(int64_t step, bool other_fresh = true) {
    v1::PeerMessage message;
    message.set_generation(1);
    v1::PeerMessage::Go* go = message.mutable_go();
    go->mutable_key()->set_step(step);
    go->mutable_key()->set_group(kGroup);
    for (const bool fresh : {other_fresh, true}) {
      auto* gives = go->add_gives();
      gives->set_present(MaskOf({true}));
      gives->set_fresh(MaskOf({fresh}));
    }
    return message;
  }

  absl::Status result_;  // of sums
  std::vector<std::pair<PairKey, int>> added_;
  SumsOverNodes sums_{{plan_.get(), &committed_, &decision_, &steps_, &pairing_},
                      {&member_, &job_},
                      [this](PairKey key, int occurrence, const GivenGradients& given) {
                        EXPECT_EQ(given.present, std::vector<bool>{true});
                        added_.emplace_back(key, occurrence);
                        return result_;
                      }};
};

TEST_F(SumsOverNodesTest, WhatRanksGiveIsSaidOnce) {
  Give();
  SayReady();
  SayReady();
  const auto sent = Sent(v1::PeerMessage::kReady);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].ready().key().step(), 1);
  EXPECT_EQ(sent[0].ready().key().group(), kGroup);
  EXPECT_EQ(sent[0].ready().gives().present(), MaskOf({true}));
}

TEST_F(SumsOverNodesTest, AGoAddsWhatAllNodesGave) {
  Hear(Go(/*step=*/1));
  ASSERT_EQ(added_.size(), 1u);
  EXPECT_EQ(added_[0], std::pair(kFirst, 0));
}

TEST_F(SumsOverNodesTest, AGoOfAnotherStepOrWhileCommittingIsIgnored) {
  Hear(Go(/*step=*/2));
  decision_.BeginCommit();
  Hear(Go(/*step=*/1));
  EXPECT_TRUE(added_.empty());
  EXPECT_TRUE(job_.failed.empty());
}

TEST_F(SumsOverNodesTest, NodesThatDoNotGiveTheSameEndTheEpoch) {
  Hear(Go(/*step=*/1, /*other_fresh=*/false));
  ASSERT_EQ(job_.failed.size(), 1u);
  EXPECT_EQ(job_.failed[0].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(added_.empty());
}

TEST_F(SumsOverNodesTest, ASumThatFailsEndsTheEpoch) {
  result_ = absl::InternalError("no sum");
  Hear(Go(/*step=*/1));
  ASSERT_EQ(job_.failed.size(), 1u);
  EXPECT_EQ(job_.failed[0].message(), "no sum");
}

TEST_F(SumsOverNodesTest, ClosedBackwardsAreSaidOnceEach) {
  EXPECT_FALSE(sums_.MaySayClosed());
  (void)pairing_.Close(0, /*done=*/0);
  ASSERT_TRUE(sums_.MaySayClosed());
  loop_.RunAndWait([&] { sums_.SayClosed(); });
  EXPECT_FALSE(sums_.MaySayClosed());
  v1::Step step;
  step.set_trainer_state("stays here");
  step.add_groups()->set_lr(0.5);
  steps_.Ask(0, step, /*signal=*/0);
  (void)pairing_.CloseAll(0);
  loop_.RunAndWait([&] { sums_.SayClosed(); });
  const auto sent = Sent(v1::PeerMessage::kClosed);
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].closed().backwards(), 1);
  EXPECT_EQ(sent[1].closed().backwards(), kAllBackwards);
  EXPECT_EQ(sent[1].closed().ranks_step().groups(0).lr(), 0.5);
  EXPECT_EQ(sent[1].closed().ranks_step().trainer_state(), "");
}

TEST_F(SumsOverNodesTest, BackwardsAreClosedByNode0UntilTheStepEnds) {
  EXPECT_EQ(sums_.closed(), 0);
  v1::PeerMessage message;
  message.set_generation(1);
  message.mutable_all_closed()->set_backwards(2);
  Hear(message);
  EXPECT_EQ(sums_.closed(), 2);
  sums_.EndStep();
  EXPECT_EQ(sums_.closed(), 0);
}

}  // namespace
}  // namespace shardd
