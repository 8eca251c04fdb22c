#include "client/fsdp/gradient_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardd::fsdp {
namespace {

using ::testing::ElementsAre;

char memory[100];

GradientRange Range(int group, int begin, int end) { return {memory + begin, memory + end, group}; }

TEST(SharedSlots, DisjointGroupsEachHaveTheirOwn) {
  EXPECT_THAT(SharedSlots({Range(1, 10, 20), Range(0, 0, 10)}, 2), ElementsAre(0, 1));
}

TEST(SharedSlots, ParametersOfOneGroupMayTouch) {
  EXPECT_THAT(SharedSlots({Range(0, 0, 10), Range(0, 10, 20), Range(1, 20, 30)}, 2), ElementsAre(0, 1));
}

TEST(SharedSlots, OverlapPutsGroupsIntoTheSlotOfTheSmallest) {
  EXPECT_THAT(SharedSlots({Range(2, 0, 30), Range(1, 0, 10), Range(1, 10, 20), Range(0, 50, 60)}, 3),
              ElementsAre(0, 1, 1));
}

TEST(SharedSlots, GroupsThatMeetOnlyThroughAThirdShareOne) {
  EXPECT_THAT(SharedSlots({Range(0, 0, 10), Range(1, 20, 30), Range(2, 0, 30)}, 3), ElementsAre(0, 0, 0));
}

TEST(SharedSlots, AGroupWithoutGradientsIsAlone) {
  EXPECT_THAT(SharedSlots({Range(0, 0, 10), Range(2, 0, 5)}, 3), ElementsAre(0, 1, 0));
}

}  // namespace
}  // namespace shardd::fsdp
