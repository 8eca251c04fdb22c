#include "server/job/gradients/given_by_others.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <vector>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kGroup = 1;  // the block; the root is 0

class GivenByOthersTest : public ::testing::Test {
 protected:
  GivenByOthersTest() {
    SpecBuilder builder(/*world_size=*/3);
    builder.Param(0, "root", {8});
    const int block = builder.AddSharded(0, "a");
    builder.Param(block, "v", {8});
    builder.Param(block, "w", {8});
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
    given_ = std::make_unique<GivenByOthers>(plan_);
  }
  // By rank, what it gives; an empty mask: it has no part.
  std::vector<int> Note(int backward, const std::vector<std::vector<bool>>& ranks,
                        const std::vector<bool>* by_all = nullptr) {
    std::vector<GivenByOthers::Part> parts;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!ranks[rank].empty()) parts.push_back({static_cast<int>(rank), &ranks[rank]});
    }
    return given_->Note(backward, kGroup, parts, by_all);
  }
  // What one of the ranks lacked in that backward or a later one.
  std::vector<int> Lacked(int first) {
    std::set<int> params;
    for (int rank = 0; rank < 3; ++rank) {
      for (int param : given_->Ask(rank, first, 9)) params.insert(param);
    }
    return {params.begin(), params.end()};
  }
  int param(int index) const { return plan_->groups[kGroup].params[static_cast<size_t>(index)]; }

  std::shared_ptr<const ShardPlan> plan_;
  std::unique_ptr<GivenByOthers> given_;
};

TEST_F(GivenByOthersTest, NobodyLacksWhatAllGiveOrNobody) {
  EXPECT_THAT(Note(0, {{true, false}, {true, false}, {true, false}}), IsEmpty());
  EXPECT_THAT(Lacked(0), IsEmpty());
}

TEST_F(GivenByOthersTest, GroupsOfWhichNothingWasLackedAreNotLookedThrough) {
  Note(0, {{true, false}, {true, false}, {true, false}});
  EXPECT_FALSE(given_->OfGroup(kGroup));
  Note(1, {{true, false}, {true, true}, {true, false}});
  EXPECT_TRUE(given_->OfGroup(kGroup));
  EXPECT_FALSE(given_->OfGroup(0));
  given_->Clear();
  EXPECT_FALSE(given_->OfGroup(kGroup));
  EXPECT_FALSE(given_->IsUnaware(0, param(1), 2));
}

TEST_F(GivenByOthersTest, WhoGivesLessLacks) {
  EXPECT_THAT(Note(2, {{true, false}, {true, true}, {true, false}}), ElementsAre(0, 2));
  EXPECT_THAT(Lacked(2), ElementsAre(param(1)));
  EXPECT_THAT(Lacked(3), IsEmpty());
}

TEST_F(GivenByOthersTest, WhoHasNoPartLacksAll) {
  EXPECT_THAT(Note(0, {{true, true}, {}, {true, true}}), ElementsAre(1));
  EXPECT_THAT(Lacked(-1), ElementsAre(param(0), param(1)));
}

TEST_F(GivenByOthersTest, WhatOtherNodesGiveIsLackedByAll) {
  const std::vector<bool> both = {true, true};
  EXPECT_THAT(Note(0, {{true, false}, {true, false}, {true, true}}, &both), ElementsAre(0, 1));
  EXPECT_THAT(Note(1, {{}, {}, {}}, &both), ElementsAre(0, 1, 2)) << "no rank of this node has a part";
  EXPECT_THAT(Note(2, {both, both, both}, &both), IsEmpty());
  EXPECT_THAT(Lacked(1), ElementsAre(param(0), param(1)));
}

TEST_F(GivenByOthersTest, TheLastBackwardCounts) {
  Note(0, {{true, false}, {true, true}, {true, true}});
  Note(1, {{true, true}, {true, true}, {true, true}});
  EXPECT_THAT(Lacked(0), ElementsAre(param(1))) << "all gave it since, but it may not have been asked for";
  Note(3, {{true, true}, {true, true}, {true, false}});
  EXPECT_THAT(Lacked(1), ElementsAre(param(1)));
}

TEST_F(GivenByOthersTest, WhatStaysOfARankThatBeginsAnewIsNamed) {
  given_->NoteTakenBack(/*rank=*/2, /*backward=*/1, kGroup, {false, true});
  EXPECT_THAT(given_->Ask(2, 1, 2), ElementsAre(param(1)));
  EXPECT_THAT(given_->Ask(0, 1, 2), IsEmpty());
  EXPECT_THAT(Lacked(1), ElementsAre(param(1)));
  given_->Forget(param(1));
  EXPECT_THAT(Lacked(0), IsEmpty());
}

TEST_F(GivenByOthersTest, EachRankIsToldWhatItLacks) {
  Note(0, {{true, false}, {false, true}, {true, true}});
  EXPECT_THAT(given_->Ask(0, 0, 1), ElementsAre(param(1)));
  EXPECT_THAT(given_->Ask(1, 0, 1), ElementsAre(param(0)));
  EXPECT_THAT(given_->Ask(2, 0, 1), IsEmpty());
}

TEST_F(GivenByOthersTest, WhoHasAskedIsAware) {
  Note(0, {{true, false}, {true, true}, {true, true}});
  EXPECT_TRUE(given_->IsUnaware(0, param(1), 1));
  EXPECT_FALSE(given_->IsUnaware(0, param(1), 0)) << "of what comes in the same backward";
  EXPECT_FALSE(given_->IsUnaware(0, param(0), 1));
  EXPECT_FALSE(given_->IsUnaware(1, param(1), 1));
  given_->NoteTakenBack(/*rank=*/0, /*backward=*/1, kGroup, {false, true});
  EXPECT_TRUE(given_->IsUnaware(0, param(1), 1)) << "still of the first";
  given_->Ask(0, 0, /*closed=*/1);
  EXPECT_FALSE(given_->IsUnaware(0, param(1), 1));
  Note(1, {{true, false}, {true, true}, {true, true}});
  EXPECT_TRUE(given_->IsUnaware(0, param(1), 2)) << "of another backward";
}

TEST_F(GivenByOthersTest, AnotherStepBeginsWithNone) {
  Note(0, {{true, false}, {true, true}, {true, true}});
  given_->Clear();
  EXPECT_THAT(Lacked(0), IsEmpty());
}

}  // namespace
}  // namespace shardd
