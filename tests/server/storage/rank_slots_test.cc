#include "server/storage/rank_slots.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/process/process_stat.h"

namespace shardd {
namespace {

constexpr int64_t kBytes = 8192;
constexpr RankSlots::Process kFirst{100, 7};

class RankSlotsTest : public ::testing::Test {
 protected:
  // What a custodian would have.
  RankSlots::HandOver KeepHere() {
    return [this](const std::string& name, int fd) {
      kept_[name] = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      return refused_;
    };
  }
  std::shared_ptr<Slab> For(RankSlots& slots, int rank, RankSlots::Process process) {
    auto made = slots.For(rank, process);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *made : nullptr;
  }
  // Process kFirst writes 42 into the rank's slots, and its daemon ends.
  void LeaveSlotsOf(int rank, int ranks) {
    RankSlots slots(ranks, kBytes);
    EXPECT_TRUE(slots.KeepBy(KeepHere()).ok());
    *For(slots, rank, kFirst)->At<int>(0) = 42;
  }

  std::map<std::string, UniqueFd> kept_;
  absl::Status refused_;
};

TEST_F(RankSlotsTest, AreTheSameForAProcessThatComesAgain) {
  RankSlots slots(2, kBytes);
  const auto first = For(slots, 1, kFirst);
  *first->At<int>(0) = 42;
  EXPECT_EQ(For(slots, 1, kFirst), first);
  EXPECT_EQ(*first->At<int>(0), 42);
  EXPECT_NE(For(slots, 0, kFirst), first) << "of its other rank";
  EXPECT_EQ(slots.allocated_bytes(), 2 * kBytes);
}

TEST_F(RankSlotsTest, OfAnotherProcessAreNewAndFreeTheFormerMemory) {
  RankSlots slots(1, kBytes);
  for (const RankSlots::Process& other : {RankSlots::Process{101, 7}, {100, 8}, {100, 0}, {100, 0}}) {
    const auto before = For(slots, 0, kFirst);
    *before->At<int>(0) = 42;
    const auto after = For(slots, 0, other);
    EXPECT_NE(after, before);
    EXPECT_EQ(*after->At<int>(0), 0);
    EXPECT_EQ(*before->At<int>(0), 0) << "whoever still maps it keeps no memory";
    EXPECT_EQ(slots.allocated_bytes(), kBytes);
  }
}

// Who asked for memory to be freed did so while no rank had a session, and ranks may have come since.
TEST_F(RankSlotsTest, OfASessionAreNotFreedWhoeverItsProcessIs) {
  RankSlots slots(1, kBytes);
  auto held = For(slots, 0, RankSlots::Process());
  *held->At<int>(0) = 42;
  slots.FreeOfEnded();
  EXPECT_EQ(*held->At<int>(0), 42);
  EXPECT_EQ(slots.allocated_bytes(), kBytes);
  held.reset();
  slots.FreeOfEnded();
  EXPECT_EQ(slots.allocated_bytes(), 0);
}

TEST_F(RankSlotsTest, AreTheSameAtTheDaemonThatTakesThemUp) {
  LeaveSlotsOf(1, /*ranks=*/2);
  RankSlots slots(2, kBytes);
  std::vector<const Slab*> taken_up;
  slots.TakeUp(kept_, &taken_up);
  EXPECT_TRUE(kept_.empty());
  EXPECT_EQ(slots.allocated_bytes(), kBytes);
  slots.SetProcess(1, kFirst);
  EXPECT_EQ(*For(slots, 1, kFirst)->At<int>(0), 42);
  EXPECT_EQ(*For(slots, 1, {101, 7})->At<int>(0), 0);
}

TEST_F(RankSlotsTest, OfUnknownProcessesAreNobodysAtTheNextDaemon) {
  LeaveSlotsOf(0, /*ranks=*/1);
  RankSlots slots(1, kBytes);
  std::vector<const Slab*> taken_up;
  slots.TakeUp(kept_, &taken_up);
  EXPECT_EQ(*For(slots, 0, kFirst)->At<int>(0), 0);
}

TEST_F(RankSlotsTest, ThatCannotBeHandedOverAreNotGivenToAnybody) {
  RankSlots slots(1, kBytes);
  ASSERT_TRUE(slots.KeepBy(KeepHere()).ok());
  refused_ = absl::UnavailableError("there is no custodian");
  EXPECT_FALSE(slots.For(0, kFirst).ok());
  EXPECT_EQ(slots.allocated_bytes(), 0);
}

TEST_F(RankSlotsTest, AreDroppedForAProcessThatHasItsOwn) {
  RankSlots slots(1, kBytes);
  const auto before = For(slots, 0, kFirst);
  *before->At<int>(0) = 42;
  slots.Drop(0);
  EXPECT_EQ(slots.allocated_bytes(), 0);
  EXPECT_EQ(*before->At<int>(0), 0);
}

TEST_F(RankSlotsTest, OfAJobThatHasEndedLeaveNoMemory) {
  auto slots = std::make_unique<RankSlots>(1, kBytes);
  ASSERT_TRUE(slots->KeepBy(KeepHere()).ok());
  const auto slab = For(*slots, 0, kFirst);
  *slab->At<int>(0) = 42;
  slots->EndCustody();
  slots.reset();
  EXPECT_EQ(*slab->At<int>(0), 0);
}

TEST_F(RankSlotsTest, OfProcessesThatHaveEndedAreFreed) {
  RankSlots slots(2, kBytes);
  const RankSlots::Process self{getpid(), ReadProcessStat(getpid())->start_ticks};
  const auto own = For(slots, 0, self);
  For(slots, 1, {self.pid, self.start_ticks + 1});
  slots.FreeOfEnded();
  EXPECT_EQ(slots.allocated_bytes(), kBytes);
  EXPECT_EQ(For(slots, 0, self), own);
}

}  // namespace
}  // namespace shardd
