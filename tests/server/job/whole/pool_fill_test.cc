// Fills of the unsharded pool that are under way when what they bring is made anew.

#include "absl/strings/str_cat.h"
#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

class PoolFillTest : public GradientsTest {
 protected:
  explicit PoolFillTest(const SpecBuilder& builder = Pooled()) : GradientsTest(builder) {}
  static SpecBuilder Pooled() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_trainers_never_write(true);
    builder.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
    return builder;
  }
  void SendAll(const v1::Command& command) {
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  }
  // The next version, by full parameters that are written back.
  void CommitWriteback() {
    const uint64_t before = version();
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    SendAll(command);
    command.mutable_commit_parameters();
    SendAll(command);
    ASSERT_TRUE(Until([&] { return job_->committed().version() == before + 1; })) << Error();
    command.mutable_leave_full_params();
    SendAll(command);
  }
  // How many of the rank's unshards of the group are there.
  uint64_t Unsharded(int rank, int group) {
    uint64_t result = 0;
    const auto read = [&] {
      const DaemonPageView page(job_->sessions()[rank].get()->memory()->daemon_page->data(),
                                static_cast<int64_t>(plan_->gradient_slots.size()),
                                static_cast<int64_t>(plan_->groups.size()));
      result = TimelineSequence(page.group(group).unsharded.load());
    };
    loop_.InLoop() ? read() : OnLoop(read);
    return result;
  }
  void HoldFills() {
    for (const auto& device : devices_) device->Hold(StreamId::kUnshard);
  }
};

TEST_F(PoolFillTest, AnInvalidatedFillOpensNoOtherSlotToReaders) {
  HoldFills();
  Unshard(0, kA, v1::PHASE_FORWARD);
  ASSERT_TRUE(Until([&] { return devices_[0]->Waiting() || devices_[1]->Waiting(); }));
  Reshard(0, kA);  // it has not waited for it
  ASSERT_NO_FATAL_FAILURE(CommitWriteback());
  Unshard(0, kA, v1::PHASE_FORWARD);  // of the new version: into another slot, as the first is being written
  EXPECT_EQ(Unsharded(0, kA), 0u);
  for (const auto& device : devices_) device->RunFirst();
  EXPECT_LT(Unsharded(0, kA), 2u) << "the old version has come, and to another slot";
  Release();
  EXPECT_TRUE(Until([&] { return Unsharded(0, kA) == 2; }));
  EXPECT_TRUE(Alive()) << Error();
}

// Ranks whose hosts are ahead of their GPUs: they give back what is still being filled.
class MoreGroupsThanSlotsTest : public PoolFillTest {
 protected:
  static constexpr int kGroups = 10;  // and the root
  MoreGroupsThanSlotsTest() : PoolFillTest(ManyGroups()) {}
  static SpecBuilder ManyGroups() {
    SpecBuilder builder = Pooled();
    for (int g = 2; g < kGroups; ++g) builder.Param(builder.AddSharded(0, absl::StrCat("g", g)), "w", {kNumel});
    return builder;
  }
  void SetUp() override {
    PoolFillTest::SetUp();
    ASSERT_EQ(plan_->pool_slots, kSlots);
    HoldFills();
    for (int group = 1; group <= kSlots; ++group) {
      Unshard(0, group, v1::PHASE_FORWARD);
      Reshard(0, group);
    }
  }
  static constexpr int kSlots = 8;
};

TEST_F(MoreGroupsThanSlotsTest, TheNextOneWaitsUntilAFillEnds) {
  for (int group = kSlots + 1; group <= kGroups; ++group) {
    Unshard(0, group, v1::PHASE_FORWARD);
    Unshard(1, group, v1::PHASE_FORWARD);
  }
  EXPECT_TRUE(Alive()) << Error();
  EXPECT_EQ(Unsharded(0, kSlots + 1), 0u);
  Release();
  for (int group = kSlots + 1; group <= kGroups; ++group) {
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_TRUE(Until([&] { return Unsharded(rank, group) == 1; })) << "rank " << rank << " group " << group;
    }
  }
  EXPECT_TRUE(Alive()) << Error();
}

TEST_F(MoreGroupsThanSlotsTest, OneGivenBackBeforeItHasASlotTakesNone) {
  Unshard(0, kSlots + 1, v1::PHASE_FORWARD);
  Reshard(0, kSlots + 1);
  Unshard(0, kSlots + 2, v1::PHASE_FORWARD);
  Release();
  EXPECT_TRUE(Until([&] { return Unsharded(0, kSlots + 2) == 1; }));
  EXPECT_EQ(Unsharded(0, kSlots + 1), 0u);
  EXPECT_EQ(Counters().unshard_copies(), static_cast<uint64_t>(kSlots + 1));
  EXPECT_TRUE(Alive()) << Error();
}

// The second request of the group stands behind one that has no slot, though the rank holds it by the first.
TEST_F(MoreGroupsThanSlotsTest, OneAskedForAndGivenBackTwiceIsNotHeld) {
  Unshard(1, 1, v1::PHASE_FORWARD);
  Unshard(1, kSlots + 1, v1::PHASE_FORWARD);
  Unshard(1, 1, v1::PHASE_BACKWARD);
  Reshard(1, 1);
  Reshard(1, 1);
  Reshard(1, kSlots + 1);
  Release();
  const int quota = plan_->pool_quota;
  ASSERT_LT(quota, kSlots);
  for (int group = 2; group < 2 + quota; ++group) Unshard(1, group, v1::PHASE_FORWARD);
  EXPECT_TRUE(Until([&] { return Unsharded(1, 1 + quota) == 1; })) << Error();
  EXPECT_TRUE(Alive()) << Error();
}

// Fills of the epoch before are under way in every slot.
TEST_F(MoreGroupsThanSlotsTest, ARankThatAttachesAgainWaitsForThemToo) {
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  ASSERT_TRUE(Until([&] { return !Alive(); }));
  for (int rank = 0; rank < kRanks; ++rank) Attach(rank);
  Unshard(0, kSlots + 1, v1::PHASE_FORWARD);
  EXPECT_EQ(Unsharded(0, kSlots + 1), 0u);
  Release();
  EXPECT_TRUE(Until([&] { return Unsharded(0, kSlots + 1) == 1; }));
}

}  // namespace
}  // namespace shardd
