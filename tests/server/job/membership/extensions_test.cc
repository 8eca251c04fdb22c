#include "server/job/membership/extensions.h"

#include <gtest/gtest.h>

#include "server/service/answer.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

class ExtensionsTest : public FactsTest {
 protected:
  void Ask(int rank, const std::string& digest) {
    auto extension = std::make_shared<Extension>();
    extension->plan.digest = digest;
    extension->what = digest;
    extensions_.Ask(
        rank, std::move(extension), [this, rank](absl::Status status) { answers_[rank] = std::move(status); },
        [this](const std::shared_ptr<const Extension>& agreed, std::vector<Extensions::Done> waiting) {
          EXPECT_EQ(agreed->plan.digest, "a");
          built_for_ = std::move(waiting);
        });
  }
  std::vector<Extensions::Done> built_for_;
};

TEST_F(ExtensionsTest, NamesARankThatAsksForSomethingElse) {
  Ask(0, "a");
  EXPECT_TRUE(extensions_.CheckEqual().ok());
  EXPECT_FALSE(extensions_.all_asked());
  EXPECT_EQ(extensions_.WaitingFor(0).rank, 1);
  Ask(1, "b");
  EXPECT_TRUE(extensions_.all_asked());
  EXPECT_EQ(extensions_.WaitingFor(0).rank, -1);
  ExpectRefused(extensions_.CheckEqual(), "(got b, rank 0: a) (rank=1");
}

TEST_F(ExtensionsTest, WhoBuildsAnswersAllThatWait) {
  Ask(0, "a");
  Ask(1, "a");
  extensions_.StartBuild();
  EXPECT_TRUE(extensions_.building());
  ExpectRefused(extensions_.GoOn(0), "goes on before it is answered");
  Extensions::Answer(extensions_.TakeAll(), absl::CancelledError());
  EXPECT_TRUE(answers_.empty());
  ASSERT_EQ(built_for_.size(), 2u);
  for (const auto& done : built_for_) done(absl::OkStatus());
  EXPECT_EQ(answers_.size(), 2u);
  EXPECT_FALSE(extensions_.building());
}

TEST_F(ExtensionsTest, ARankThatGoesOnAsksNoMore) {
  Ask(0, "a");
  Ask(1, "a");
  EXPECT_TRUE(extensions_.GoOn(0).ok());
  EXPECT_FALSE(extensions_.Has(0));
  EXPECT_TRUE(extensions_.GoOn(0).ok()) << "it does not ask";
  Extensions::Answer(extensions_.TakeAll(), absl::AbortedError(""));
  EXPECT_EQ(answers_[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(answers_[1].code(), absl::StatusCode::kAborted);
}

TEST_F(ExtensionsTest, ARankAsksBetweenStepsOnly) {
  EXPECT_TRUE(extensions_.CheckMayAsk(0).ok());
  steps_.Ask(0, {}, 0);
  ExpectRefused(extensions_.CheckMayAsk(0), "ExtendJob: a step is not committed yet");
  steps_.EndEpoch();
  leavers_.Left(1, /*finished=*/true);
  ExpectRefused(extensions_.CheckMayAsk(0), "rank 1 has finished");
}

TEST_F(ExtensionsTest, NobodyAsksBetweenPartsOfAStep) {
  decision_.PartMade();
  ExpectRefused(extensions_.CheckMayAsk(0), "ExtendJob: a step is not committed yet");
  decision_.EndParts();
  EXPECT_TRUE(extensions_.CheckMayAsk(0).ok());
}

// Over several nodes.
TEST_F(ExtensionsTest, RanksThatWaitForNodesHearOfOneThatLeaves) {
  Attach(0);
  Ask(0, "a");
  Ask(1, "a");
  EXPECT_FALSE(extensions_.awaits_nodes());
  EXPECT_EQ(extensions_.BeginAsking().what, "a");
  EXPECT_TRUE(extensions_.awaits_nodes());
  extensions_.SessionEnds(sessions_[0].get());
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(answers_[rank].code(), absl::StatusCode::kAborted) << rank;
    EXPECT_THAT(std::string(answers_[rank].message()), ::testing::HasSubstr("(rank=0")) << rank;
  }
  EXPECT_FALSE(extensions_.building() || extensions_.awaits_nodes());
}

TEST_F(ExtensionsTest, WhatCannotBeWidenedIsTriedAgainLaterOn) {
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  EXPECT_FALSE(extensions_.MayWiden(now)) << "no other node trains more";
  int builds = 0;
  extensions_.Widen(std::make_shared<Extension>(),
                    [&](const std::shared_ptr<const Extension>&, const std::vector<Extensions::Done>&) { ++builds; });
  EXPECT_TRUE(extensions_.MayWiden(now));
  extensions_.StartWidening();
  EXPECT_FALSE(extensions_.MayWiden(now)) << "it is being built";
  EXPECT_EQ(extensions_.PutOffWidening(now, absl::Seconds(1)), absl::ZeroDuration());
  EXPECT_TRUE(extensions_.widens());
  EXPECT_FALSE(extensions_.MayWiden(now + absl::Milliseconds(999)));
  EXPECT_TRUE(extensions_.MayWiden(now + absl::Seconds(1)));
  extensions_.StartWidening();
  EXPECT_EQ(builds, 2);
  EXPECT_EQ(extensions_.PutOffWidening(now + absl::Seconds(3), absl::Seconds(1)), absl::Seconds(3));
  EXPECT_FALSE(extensions_.building());
}

TEST_F(ExtensionsTest, WhoeverGoesOnIsToldWhatOthersWaitFor) {
  EXPECT_TRUE(extensions_.CheckNobodyWentOn(0, "the head").ok());
  Submit(1);
  ExpectRefused(extensions_.CheckNobodyWentOn(0, "the head"), "rank 0 trains the head from here on");
  Ask(0, "a");
  ExpectRefused(extensions_.CheckAllTakePart(1, "Step"), "Step: rank 0 trains a from here on");
  EXPECT_TRUE(extensions_.CheckAllTakePart(0, "Step").ok()) << "it waits for nobody but itself";
}

}  // namespace
}  // namespace shardd
