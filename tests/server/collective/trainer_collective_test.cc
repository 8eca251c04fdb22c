// What trainers are told, and what becomes of it when they answer what they must not, or end.

#include "server/collective/trainers/trainer_collective.h"

#include <chrono>
#include <cstring>

#include "server/device/devices.h"
#include "server/job/gradients/gradients.h"
#include "tests/server/collective/trainer_world.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class TrainerCollectiveTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  TrainerCollectiveTest() {
    SpecBuilder builder(kRanks);
    builder.Param(0, "w", {64});
    plan_ = *PlanShards(builder.spec());
    devices_ = std::move(MakeDevices("cpu:2")->devices);
    collective_ = std::make_unique<TrainerCollective>(std::vector<Device*>{devices_[0].get(), devices_[1].get()});
    slots_.assign(kRanks, std::vector<float>(static_cast<size_t>(plan_.memory.gradient_slots_bytes) / sizeof(float)));
    gradients_.assign(static_cast<size_t>(plan_.memory.gradients_bytes) / sizeof(float), -1);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::fill(slots_[static_cast<size_t>(rank)].begin(), slots_[static_cast<size_t>(rank)].end(), rank + 1.0f);
      Attach(rank);
    }
  }
  void Attach(int rank) {
    if (trainers_.size() <= static_cast<size_t>(rank)) trainers_.resize(static_cast<size_t>(rank) + 1);
    trainers_[static_cast<size_t>(rank)] = std::make_unique<FakeTrainer>(rank);
    collective_->SetSession(rank, 10 + static_cast<uint64_t>(rank), trainers_[static_cast<size_t>(rank)]->channel());
  }
  ReduceScatterRequest Request(GradientMode mode = GradientMode::kOverwrite) {
    ReduceScatterRequest request;
    request.plan = &plan_;
    request.gradients = Gradients();
    request.modes.assign(plan_.groups[0].params.size(), mode);
    request.label = "reduce (root) step 7";
    for (int rank = 0; rank < kRanks; ++rank) {
      GradientSource source;
      source.rank = rank;
      source.slot = reinterpret_cast<char*>(slots_[static_cast<size_t>(rank)].data());
      source.present.assign(plan_.groups[0].params.size(), true);
      request.sources.push_back(std::move(source));
    }
    return request;
  }
  void Reduce(ReduceScatterRequest request) {
    collective_->ReduceScatter(std::move(request), [this](absl::Status status) { ends_.push_back(std::move(status)); });
  }
  void Add(int rank) {
    std::vector<const char*> slots;
    for (const auto& slot : slots_) slots.push_back(reinterpret_cast<const char*>(slot.data()));
    trainers_[static_cast<size_t>(rank)]->Add(slots, Gradients());
  }
  char* Gradients() { return reinterpret_cast<char*>(gradients_.data()); }

  ShardPlan plan_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::vector<float>> slots_;
  std::vector<float> gradients_;
  std::vector<std::unique_ptr<FakeTrainer>> trainers_;
  std::unique_ptr<TrainerCollective> collective_;
  std::vector<absl::Status> ends_;
};

TEST_F(TrainerCollectiveTest, ARequestIsDoneWhenTheLastRankHasAdded) {
  Reduce(Request());
  EXPECT_FALSE(collective_->Poll());
  Add(0);
  EXPECT_FALSE(collective_->Poll());
  EXPECT_TRUE(collective_->waiting());
  Add(1);
  EXPECT_TRUE(collective_->Poll());
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_TRUE(ends_[0].ok()) << ends_[0];
  EXPECT_FALSE(collective_->waiting());
  for (int i = 0; i < 64; ++i) EXPECT_EQ(gradients_[static_cast<size_t>(i)], 3.0f) << i;
}

TEST_F(TrainerCollectiveTest, RecordsNameMemoryByOffsetsAndRanksByTheirSessions) {
  Reduce(Request(GradientMode::kAccumulate));
  FakeTrainer& second = *trainers_[1];
  ASSERT_EQ(second.written(), 1u);
  const SumRecord& record = second.record(0);
  EXPECT_EQ(record.kind, SumKind::kSum);
  EXPECT_EQ(record.ranks[0], 3u);
  EXPECT_EQ(record.source_offset_bytes, 32 * 4);
  EXPECT_EQ(record.dst_offset_bytes, 32 * 4);
  EXPECT_EQ(record.numel, 32);
  EXPECT_EQ(record.accumulate, 1u);
  EXPECT_EQ(second.ring().sessions[0].load(), 10u);
  EXPECT_EQ(second.ring().sessions[1].load(), 11u);
}

TEST_F(TrainerCollectiveTest, ZerosComeBeforeTheSums) {
  ReduceScatterRequest request = Request(GradientMode::kAccumulate);
  request.zeros = {{ZeroOp{Gradients(), 32 * 4}}, {}};
  Reduce(std::move(request));
  EXPECT_EQ(trainers_[0]->record(0).kind, SumKind::kZero);
  Add(0);
  Add(1);
  EXPECT_TRUE(collective_->Poll());
  EXPECT_EQ(gradients_[0], 3.0f);
  EXPECT_EQ(gradients_[32], 2.0f);  // of what was there
}

TEST_F(TrainerCollectiveTest, RequestsBeyondTheRingAreToldAsRoomAppears) {
  constexpr size_t kRequests = kSumRecords + 40;
  for (size_t i = 0; i < kRequests; ++i) Reduce(Request(i == 0 ? GradientMode::kOverwrite : GradientMode::kAccumulate));
  EXPECT_EQ(trainers_[0]->written(), kSumRecords);
  for (int i = 0; i < 2; ++i) {
    Add(0);
    Add(1);
    EXPECT_TRUE(collective_->Poll());
  }
  EXPECT_EQ(ends_.size(), kRequests);
  EXPECT_EQ(gradients_[63], 3.0f * kRequests);
}

TEST_F(TrainerCollectiveTest, AnImpossibleWordEndsTheRequestAndNamesTheRank) {
  for (const uint64_t word : {TimelineValue(FakeTrainer::kEpoch, 2), TimelineValue(FakeTrainer::kEpoch + 1, 1),
                              TimelineValue(FakeTrainer::kEpoch - 1, 1), ~uint64_t{0}}) {
    SCOPED_TRACE(word);
    ends_.clear();
    Attach(1);
    Reduce(Request());
    trainers_[1]->words().summed.store(word);
    EXPECT_TRUE(collective_->Poll());
    ASSERT_EQ(ends_.size(), 1u);
    EXPECT_EQ(ends_[0].code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(ends_[0].message()), HasSubstr("reduce (root) step 7: sums: "));
    EXPECT_THAT(std::string(ends_[0].message()), HasSubstr("rank=1"));
    EXPECT_FALSE(collective_->waiting());
    Add(0);
  }
}

TEST_F(TrainerCollectiveTest, AWordThatGoesBackIsRefused) {
  Reduce(Request());
  Reduce(Request(GradientMode::kAccumulate));
  trainers_[1]->words().summed.store(TimelineValue(FakeTrainer::kEpoch, 2));
  EXPECT_FALSE(collective_->Poll());
  Reduce(Request(GradientMode::kAccumulate));
  trainers_[1]->words().summed.store(TimelineValue(FakeTrainer::kEpoch, 1));
  EXPECT_TRUE(collective_->Poll());
  ASSERT_EQ(ends_.size(), 1u);  // the others wait for rank 0 alone
  EXPECT_EQ(ends_[0].code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TrainerCollectiveTest, ARankThatFailsEndsTheRequestWithItsWords) {
  Reduce(Request());
  FakeTrainer& trainer = *trainers_[1];
  std::memset(trainer.words().error, 'x', sizeof(trainer.words().error));  // no end
  std::memcpy(trainer.words().error, "no kernel\n", 10);
  trainer.words().ended.store(2);
  EXPECT_TRUE(collective_->Poll());
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_EQ(ends_[0].code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(ends_[0].message()), HasSubstr("rank 1 has ended"));
  EXPECT_THAT(std::string(ends_[0].message()), HasSubstr("no kernel\\nxx"));
}

TEST_F(TrainerCollectiveTest, AnEndedSessionsRequestsEndBeforeItIsIdle) {
  Reduce(Request());
  Add(0);
  collective_->SetSession(1, 0, nullptr);
  ASSERT_EQ(ends_.size(), 1u);
  EXPECT_EQ(ends_[0].code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(trainers_[0]->channel()->idle());
  EXPECT_FALSE(trainers_[1]->channel()->idle());
  trainers_[1]->channel()->Poison(FakeTrainer::kEpoch + 1);
  EXPECT_EQ(TimelineEpoch(trainers_[1]->ring().written.load()), FakeTrainer::kEpoch + 1);
  trainers_[1]->words().ended.store(1);
  EXPECT_TRUE(trainers_[1]->channel()->idle());
}

TEST_F(TrainerCollectiveTest, TheAwaitedRankIsNamedWhenItsTimeIsOver) {
  Reduce(Request());
  Add(0);
  (void)collective_->Poll();
  const absl::Time now = absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  EXPECT_EQ(collective_->FindLate(now, absl::Minutes(1)).rank, -1);
  const TrainerCollective::Late late = collective_->FindLate(now + absl::Minutes(2), absl::Minutes(1));
  EXPECT_EQ(late.rank, 1);
  EXPECT_EQ(late.what, "reduce (root) step 7");
  EXPECT_EQ(late.summed, 0u);
  EXPECT_EQ(late.told, 1u);
}

}  // namespace
}  // namespace shardd
