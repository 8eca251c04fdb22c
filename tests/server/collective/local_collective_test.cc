// What the local collective makes of a request: which devices get which operations.

#include "server/collective/local/local_collective.h"

#include "tests/server/collective/collective_fixture.h"

namespace shardd {
namespace {

class LocalCollectiveTest : public CollectiveTest {
 protected:
  // Parameters of 64 elements, so that there are no gaps: p0 .. p3 in group "a".
  void StartFour(int world_size, int device_count) {
    SpecBuilder builder(world_size);
    const int a = builder.AddSharded(0, "a");
    for (int i = 0; i < 4; ++i) builder.Param(a, absl::StrCat("p", i), {64});
    Start(builder.Plan(), device_count);
    group_ = plan_.FindGroup("a");
  }
  void Reduce(const std::vector<std::vector<bool>>& present, const std::vector<GradientMode>& modes) {
    Bytes slot(plan_.groups[group_].gradient_bytes), gradients(plan_.memory.gradients_bytes);
    ReduceScatterRequest request;
    request.plan = &plan_;
    request.group = group_;
    for (size_t rank = 0; rank < present.size(); ++rank) {
      request.sources.push_back({static_cast<int>(rank), slot.data(), present[rank]});
    }
    request.modes = modes;
    request.gradients = gradients.data();
    request.label = "reduce a step 3";
    EXPECT_TRUE(WaitFor([&](Collective::Done done) { collective_->ReduceScatter(request, std::move(done)); }).ok());
  }
  std::vector<int64_t> NumelsOf(int device) {
    std::vector<int64_t> numels;
    for (const WrappedDevice::Record& record : wrapped_[static_cast<size_t>(device)]->records()) {
      EXPECT_EQ(record.stream, StreamId::kPostBackward);
      EXPECT_EQ(record.label, "reduce a step 3");
      for (const DeviceOp& op : record.ops) numels.push_back(std::get<ReduceOp>(op).numel);
    }
    return numels;
  }

  static constexpr GradientMode kOver = GradientMode::kOverwrite;
  static constexpr GradientMode kAdd = GradientMode::kAccumulate;
  int group_ = 0;
};

using testing::ElementsAre;
using testing::IsEmpty;

TEST_P(LocalCollectiveTest, TouchingParametersOfOneTreatmentAreOneOperationPerRank) {
  StartFour(2, 2);
  Reduce({{1, 1, 1, 1}, {1, 1, 1, 1}}, {kOver, kOver, kOver, kOver});
  EXPECT_THAT(NumelsOf(0), ElementsAre(128));
  EXPECT_THAT(NumelsOf(1), ElementsAre(128));
}

TEST_P(LocalCollectiveTest, AnotherModeOrAnotherSetOfSourcesIsAnotherOperation) {
  StartFour(1, 1);
  Reduce({{1, 1, 1, 1}}, {kOver, kOver, kAdd, kAdd});
  EXPECT_THAT(NumelsOf(0), ElementsAre(128, 128));
  StartFour(2, 1);
  Reduce({{1, 1, 1, 1}, {1, 0, 1, 1}}, {kOver, kOver, kOver, kOver});
  EXPECT_THAT(NumelsOf(0), ElementsAre(64, 64, 128));
}

TEST_P(LocalCollectiveTest, AParameterPresentNowhereSplitsTheRange) {
  StartFour(1, 1);
  Reduce({{1, 0, 1, 1}}, {kOver, kOver, kOver, kOver});
  EXPECT_THAT(NumelsOf(0), ElementsAre(64, 128));
}

TEST_P(LocalCollectiveTest, ADeviceWithoutWorkGetsNothing) {
  StartFour(4, 4);
  Reduce({{1, 0, 0, 0}, {1, 0, 0, 0}}, {kOver, kOver, kOver, kOver});
  EXPECT_THAT(NumelsOf(0), ElementsAre(64));
  for (int device : {1, 2, 3}) EXPECT_THAT(wrapped_[static_cast<size_t>(device)]->records(), IsEmpty());
}

TEST_P(LocalCollectiveTest, RanksThatShareADeviceAreOneWork) {
  StartFour(4, 1);
  Reduce({{1, 1, 1, 1}}, {kOver, kOver, kOver, kOver});
  EXPECT_EQ(wrapped_[0]->records().size(), 1u);
  EXPECT_THAT(NumelsOf(0), ElementsAre(64, 64, 64, 64));
}

INSTANTIATE_TEST_SUITE_P(Collectives, LocalCollectiveTest,
                         testing::Values(CollectiveImplementation{"local", &MakeLocalWorld}), CollectiveName);

}  // namespace
}  // namespace shardd
