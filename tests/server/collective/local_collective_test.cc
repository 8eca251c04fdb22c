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

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

// Whose gradient shards lie where devices come by copies alone.
class StagedSums : public LocalCollectiveTest {
 protected:
  static constexpr int64_t kStagingBytes = 4096;  // a piece is of 1024 elements
  void StartOne(int64_t numel, int device_count) {
    SpecBuilder builder(2);
    builder.Param(builder.AddSharded(0, "a"), "p", {numel});
    builder.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    Start(builder.Plan(), device_count);
    group_ = plan_.FindGroup("a");
  }
  // Twice, the second time on top of the first.
  Bytes Sums(bool staged) {
    std::vector<Bytes> slots;
    std::vector<Bytes> staging;
    Bytes gradients(plan_.memory.gradients_bytes, 0xff);
    for (int rank = 0; rank < 2; ++rank) staging.emplace_back(kStagingBytes, 0xff);
    for (const GradientMode mode : {kOver, kAdd}) {
      ReduceScatterRequest request;
      request.plan = &plan_;
      request.group = group_;
      request.gradients = gradients.data();
      request.modes = {mode};
      request.scale = 0.3f;
      for (int rank = 0; rank < 2; ++rank) {
        slots.emplace_back(plan_.groups[group_].gradient_bytes);
        WriteSlot(plan_, slots.back(), 0, ParamValues(plan_, 0, rank));
        request.sources.push_back({rank, slots.back().data(), {true}});
        if (staged) request.staging.push_back(staging[static_cast<size_t>(rank)].data());
      }
      request.staging_bytes = staged ? kStagingBytes : 0;
      EXPECT_TRUE(WaitFor([&](Collective::Done done) { collective_->ReduceScatter(request, std::move(done)); }).ok());
    }
    return gradients;
  }
};

TEST_P(StagedSums, EqualThoseInPlaceAndReachShardsByCopiesAlone) {
  StartOne(5001, 2);
  const Bytes want = Sums(/*staged=*/false);
  const size_t before = wrapped_[0]->records().size();
  const Bytes got = Sums(/*staged=*/true);
  EXPECT_TRUE(got == want);
  for (const auto& device : wrapped_) {
    int reductions = 0;
    int copies = 0;
    const std::vector<WrappedDevice::Record> records = device->records();
    for (size_t i = before; i < records.size(); ++i) {
      for (const DeviceOp& op : records[i].ops) {
        if (const auto* reduce = std::get_if<ReduceOp>(&op); reduce != nullptr) {
          ++reductions;
          EXPECT_LE(reduce->numel * 4, kStagingBytes);
          EXPECT_EQ(reduce->dst_file, -1);
          const char* const dst = reinterpret_cast<const char*>(reduce->dst);
          EXPECT_TRUE(dst < got.data() || dst >= got.data() + got.size_bytes());
        } else {
          ++copies;
        }
      }
    }
    EXPECT_EQ(reductions, 2 * 3);
    EXPECT_EQ(copies, 3 + 2 * 3) << "what is added to is copied there first";
  }
}

TEST_P(StagedSums, StagingThatIsNotThereForEveryRankIsRefused) {
  StartOne(100, 2);
  Bytes slot(plan_.groups[group_].gradient_bytes), gradients(plan_.memory.gradients_bytes), staging(kStagingBytes);
  ReduceScatterRequest request;
  request.plan = &plan_;
  request.group = group_;
  request.gradients = gradients.data();
  request.modes = {kOver};
  request.sources = {{0, slot.data(), {true}}};
  const auto refused = [&](std::vector<char*> by_rank, int64_t size_bytes) {
    request.staging = std::move(by_rank);
    request.staging_bytes = size_bytes;
    return WaitFor([&](Collective::Done done) { collective_->ReduceScatter(request, std::move(done)); });
  };
  for (const absl::Status& status : {refused({staging.data()}, 4096), refused({staging.data(), nullptr}, 4096),
                                     refused({staging.data(), staging.data()}, 100)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("staging"));
  }
}

SHARDD_FOR_EACH_LOCAL_COLLECTIVE(StagedSums);
SHARDD_FOR_EACH_LOCAL_COLLECTIVE(LocalCollectiveTest);

}  // namespace
}  // namespace shardd
