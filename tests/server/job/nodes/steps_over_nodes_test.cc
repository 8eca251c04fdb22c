#include "server/job/nodes/steps_over_nodes.h"

#include "server/job/nodes/model_digests.h"
#include "server/multinode/param_mask.h"
#include "server/storage/job_memory.h"
#include "server/storage/take_up_log.h"
#include "tests/server/job/nodes/over_nodes_fixture.h"

namespace shardd {
namespace {

class StepsOverNodesTest : public OverNodesTest {
 protected:
  explicit StepsOverNodesTest(bool cut = false) : OverNodesTest(cut), memory_(*JobMemory::Create(*plan_, "job")) {
    Begin({this, &over_, this, this});
  }
  static Norm NormOf(std::vector<float> values) {
    Norm norm;
    norm.Add(values.data(), static_cast<int64_t>(values.size()));
    return norm;
  }
  v1::PeerMessage::Reduced ReducedOf(const Norm& norm) const {
    v1::PeerMessage::Reduced reduced;
    reduced.set_present(MaskOf(std::vector<bool>(static_cast<size_t>(params_), true)));
    reduced.set_norm_scale(norm.state().scale);
    reduced.set_norm_sum(norm.state().sum);
    return reduced;
  }
  void SayReduced(const Norm& norm) {
    loop_.RunAndWait([&] { over_.SayReduced(norm); });
  }
  v1::PeerMessage Decided() const {
    v1::PeerMessage message;
    message.set_generation(1);
    message.mutable_decided()->set_step(1);
    message.mutable_decided()->set_grad_norm(2.5);
    message.mutable_decided()->set_present(MaskOf(std::vector<bool>(static_cast<size_t>(params_), true)));
    return message;
  }
  const std::unique_ptr<JobMemory> memory_;
  std::vector<double> measured_;
  std::vector<v1::PeerMessage::Decided> decided_;
  int agreed_ = 0;
  std::vector<std::string> ends_;
  ModelDigests digests_{{plan_.get(), memory_.get(), &committed_}, {&member_, &worker_, &work_, &job_}};
  StepsOverNodes over_{
      {plan_.get(), &steps_, &decision_, &digests_},
      {&committed_, &member_, &pairing_.presence()},
      {[this](double norm) { measured_.push_back(norm); },
       [this](const v1::PeerMessage::Decided& decided) { decided_.push_back(decided); }, [this] { ++agreed_; },
       [this](const absl::Status& cause) { ends_.emplace_back(cause.message()); }}};
};

TEST_F(StepsOverNodesTest, AReducedStepIsPromisedAndToldWithItsNorm) {
  SayReduced(NormOf({3, 4}));
  const auto sent = Sent(v1::PeerMessage::kReduced);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].reduced().step(), 1);
  EXPECT_EQ(sent[0].reduced().norm_sum(), 25);
  EXPECT_EQ(sent[0].reduced().digests_size(), 0) << "none are due";
  EXPECT_TRUE(member_.promised());
}

TEST_F(StepsOverNodesTest, AGenerationsPlannedEndIsToldWithItsStep) {
  loop_.RunAndWait([&] { over_.EndAttemptBehindStep(absl::AbortedError("the daemon is replaced")); });
  SayReduced(NormOf({3, 4}));
  EXPECT_EQ(Sent(v1::PeerMessage::kReduced)[0].reduced().ends_attempt(), "the daemon is replaced");
  v1::PeerMessage decided = Decided();
  decided.mutable_decided()->set_ends_attempt("node 1: the daemon is replaced");
  Hear(decided);
  EXPECT_EQ(ends_, std::vector<std::string>{"node 1: the daemon is replaced"});
  EXPECT_EQ(decided_.size(), 1u);
}

TEST_F(StepsOverNodesTest, APartIsToldAndHeardWithoutAPromise) {
  auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 1, .promises = true});
  const TakeUpLog& left = *log;
  loop_.RunAndWait([&] {
    committed_.KeepIn(std::move(log));
    v1::Step step;
    step.set_part(true);
    steps_.Ask(0, std::move(step), /*signal=*/0);
    over_.EndAttemptBehindStep(absl::AbortedError("the daemon is replaced"));
  });
  v1::PeerMessage decided = Decided();
  decided.mutable_decided()->set_part(true);
  Hear(decided);
  EXPECT_TRUE(decided_.empty()) << "it has not reduced it";
  SayReduced(NormOf({3, 4}));
  const auto sent = Sent(v1::PeerMessage::kReduced);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_TRUE(sent[0].reduced().part());
  EXPECT_EQ(sent[0].reduced().ends_attempt(), "") << "the attempt ends behind the whole step";
  EXPECT_FALSE(member_.promised());
  EXPECT_FALSE(left.Read()->promised.has_value());
  Hear(Decided());
  EXPECT_TRUE(decided_.empty()) << "of the whole step nothing was said";
  Hear(decided);
  Hear(decided);
  EXPECT_EQ(decided_.size(), 1u) << "once";
}

// What a daemon that takes this one's place needs to commit the step.
TEST_F(StepsOverNodesTest, APromiseIsWrittenBeforeItIsSaid) {
  auto log = *TakeUpLog::Create({.place_bytes = 4096, .ranks = 1, .promises = true});
  const TakeUpLog& left = *log;
  loop_.RunAndWait([&] {
    committed_.KeepIn(std::move(log));
    v1::Step step;
    step.add_groups()->set_lr(0.25);
    step.set_loss_scale(8);
    step.set_trainer_state("kept");
    steps_.Ask(0, std::move(step), /*signal=*/0);
  });
  SayReduced(NormOf({3, 4}));
  const TakeUpLog::Left read = *left.Read();
  ASSERT_TRUE(read.promised.has_value());
  EXPECT_EQ(read.promised->generation(), 1u);
  EXPECT_EQ(read.promised->step(), 1);
  EXPECT_EQ(read.promised->asked().groups(0).lr(), 0.25);
  EXPECT_EQ(read.promised->asked().loss_scale(), 8);
  EXPECT_EQ(read.promised->asked().trainer_state(), "");
  EXPECT_EQ(read.promised->trainer_states(0), "kept");
  EXPECT_EQ(read.promised->present(), MaskOf(pairing_.presence().by_param()));
  loop_.RunAndWait([&] { committed_.EndEpoch(); });
  EXPECT_FALSE(left.Read()->promised.has_value()) << "the attempt has ended";
}

TEST_F(StepsOverNodesTest, DigestsOfTheVersionAreSaidWithIt) {
  loop_.RunAndWait([&] {
    while (committed_.step() < plan_->config.compare_every()) {
      committed_.CommitStep({}, {""});
      digests_.StepCommitted();
    }
  });
  Drain();
  SayReduced(NormOf({1}));
  EXPECT_EQ(Sent(v1::PeerMessage::kReduced).back().reduced().digests_size(), params_);
}

TEST_F(StepsOverNodesTest, WhatNode0DecidesIsHeardOncePromised) {
  Hear(Decided());
  EXPECT_TRUE(decided_.empty()) << "this node has not reduced the step";
  SayReduced(NormOf({3, 4}));
  Hear(Decided());
  ASSERT_EQ(decided_.size(), 1u);
  EXPECT_EQ(decided_[0].grad_norm(), 2.5);
}

TEST_F(StepsOverNodesTest, NodesOtherThanNode0SayThatTheyHoldTheStep) {
  loop_.RunAndWait([&] { over_.SayDecided(); });
  const auto sent = Sent(v1::PeerMessage::kHeld);
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].held().step(), 1);
  EXPECT_TRUE(Sent(v1::PeerMessage::kDecided).empty());
}

TEST_F(StepsOverNodesTest, ReplicasMeasureWhatEachOfThemHas) {
  SayReduced(NormOf({3, 4}));
  over_.NodesReduced({ReducedOf(NormOf({3, 4})), ReducedOf(NormOf({3, 4}))});
  EXPECT_EQ(measured_, std::vector<double>{5});
}

TEST_F(StepsOverNodesTest, ValuesAreCommittedWhenAllNodesHaveAgreed) {
  over_.NodeValuesAgreed();
  EXPECT_EQ(agreed_, 1);
  EXPECT_EQ(committed_.next_generation(), member_.generation()) << "others may make that version in another one";
}

class CutStepsOverNodesTest : public StepsOverNodesTest {
 protected:
  CutStepsOverNodesTest() : StepsOverNodesTest(/*cut=*/true) {}
};

TEST_F(CutStepsOverNodesTest, PartsOfAllNodesAreMeasuredTogether) {
  SayReduced(NormOf({3}));
  over_.NodesReduced({ReducedOf(NormOf({4})), ReducedOf(NormOf({3}))});
  EXPECT_EQ(measured_, std::vector<double>{5});
  EXPECT_EQ(pairing_.presence().by_param(), std::vector<bool>(static_cast<size_t>(params_), true));
}

TEST_F(CutStepsOverNodesTest, WhichGradientsThereAreComesWithTheDecision) {
  SayReduced(NormOf({3}));
  Hear(Decided());
  EXPECT_EQ(pairing_.presence().by_param(), std::vector<bool>(static_cast<size_t>(params_), true));
}

}  // namespace
}  // namespace shardd
