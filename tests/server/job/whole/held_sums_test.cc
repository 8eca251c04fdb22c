// Sums that a collective holds back, as it does while the window of the job's slots is registered: what follows them
// has their results, whatever the devices do meanwhile.

#include <utility>
#include <vector>

#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

// Adds as `local/` does, when it is let.
class HoldingCollective final : public Collective {
 public:
  explicit HoldingCollective(std::vector<Device*> devices) : local_(std::move(devices)) {}
  const char* name() const override { return "holding"; }
  std::string Describe() const override { return "holding"; }
  bool may_hold_requests() const override { return true; }
  void ReduceScatter(ReduceScatterRequest request, Done done) override {
    {
      absl::MutexLock lock(&mutex_);
      if (holds_) {
        kept_.emplace_back(std::move(request), std::move(done));
        return;
      }
    }
    local_.ReduceScatter(std::move(request), std::move(done));
  }
  void AllGather(AllGatherRequest request, Done done) override {
    local_.AllGather(std::move(request), std::move(done));
  }
  void Hold() {
    absl::MutexLock lock(&mutex_);
    holds_ = true;
  }
  void Release() {
    std::vector<std::pair<ReduceScatterRequest, Done>> kept;
    {
      absl::MutexLock lock(&mutex_);
      holds_ = false;
      kept.swap(kept_);
    }
    for (auto& [request, done] : kept) local_.ReduceScatter(std::move(request), std::move(done));
  }
  size_t kept() const {
    absl::MutexLock lock(&mutex_);
    return kept_.size();
  }

 private:
  LocalCollective local_;
  mutable absl::Mutex mutex_;
  bool holds_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<ReduceScatterRequest, Done>> kept_ ABSL_GUARDED_BY(mutex_);
};

struct OfTheJob {  // is there before it
  HoldingCollective* collective_ = nullptr;
};

class HeldSumsTest : protected OfTheJob, public GradientsTest {
 protected:
  HeldSumsTest()
      : GradientsTest(Job(), [this](std::vector<Device*> devices) {
          auto made = std::make_unique<HoldingCollective>(std::move(devices));
          collective_ = made.get();
          return made;
        }) {}
  static SpecBuilder Job() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_allow_missing_contribution(true);
    return builder;
  }
  ~HeldSumsTest() override { collective_->Release(); }
  using JobCoreTest::Word;  // of the page; GradientsTest has one of slots
  // Time for what should not happen.
  void DevicesAreIdle() {
    absl::SleepFor(absl::Milliseconds(50));
    OnLoop([] {});
  }
};

TEST_F(HeldSumsTest, FullParametersWithGradientsAreGivenBehindThem) {
  collective_->Hold();
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank, rank == 0 ? 2.0f : 4.0f);
  EXPECT_EQ(collective_->kept(), 2u);
  v1::Command enter;
  enter.mutable_enter_full_params()->set_with_grads(true);
  enter.mutable_enter_full_params()->set_writeback(true);
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, enter);
  DevicesAreIdle();
  EXPECT_EQ(Word(0, &DaemonPage::full_params), 0u) << "they hold no sum yet";
  collective_->Release();
  ASSERT_TRUE(testing::PollUntil(
      [&] { return Word(0, &DaemonPage::full_params) == 1 && Word(1, &DaemonPage::full_params) == 1; }, kPatience));
  EXPECT_EQ(Gradient(kA)[0], 3);
  EXPECT_EQ(Gradient(kB)[kNumel - 1], 3);
}

// Rank 0 drops its part of the first sum. Each has contributions of one rank, for a slot is free when its sum is there.
TEST_F(HeldSumsTest, ZerosOfALaterSumAreBehindThem) {
  collective_->Hold();
  Submit(0, kB, 2);
  Done(0);
  Done(1);
  EXPECT_EQ(collective_->kept(), 1u);
  Say(0, kB, false);
  Submit(1, kB, 10);
  Done(1);
  Done(0);
  EXPECT_EQ(collective_->kept(), 2u);
  DevicesAreIdle();
  collective_->Release();
  AwaitAdded(0, kB);
  AwaitAdded(1, kB);
  EXPECT_EQ(Gradient(kB)[0], 5) << "dropped there";
  EXPECT_EQ(Gradient(kB)[kNumel - 1], 6);
  StepAll(1);
  EXPECT_EQ(First(kB), -5);
  EXPECT_EQ(Last(kB), -6);
}

}  // namespace
}  // namespace shardd
