// What every Collective must do with gradients. A new implementation joins with one line in collective_fixture.h.

#include <cstring>
#include <limits>

#include "tests/common/plan/odd_params.h"
#include "tests/server/collective/collective_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// A model with odd sizes (alignment gaps), a frozen parameter and two modules.
SpecBuilder OddModel(int world_size, v1::Layout layout, v1::Strategy strategy, DType param_dtype) {
  SpecBuilder builder(world_size);
  builder.config().set_layout(layout);
  builder.config().set_strategy(strategy);
  builder.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
  AddOddParams(&builder);
  return builder;
}

float RoundTo(DType dtype, float x) {
  float rounded = 0;
  char narrow[sizeof(float)];
  Cast(&x, v1::DTYPE_FLOAT32, narrow, dtype, 1);
  Cast(narrow, dtype, &rounded, v1::DTYPE_FLOAT32, 1);
  return rounded;
}

class ReduceScatterTest : public CollectiveTest {
 protected:
  static constexpr int kSeed = 100;

  void Stop() override {
    slots_.clear();
    CollectiveTest::Stop();
  }

  // Gives every rank a slot that is NaN but for the gradients in its mask.
  void FillSlots(const std::vector<std::vector<bool>>& present) {
    const GroupPlan& group = plan_.groups[group_];
    slots_.clear();
    for (size_t rank = 0; rank < present.size(); ++rank) {
      BytesMemory() = world_->slot_memory(static_cast<int>(rank));
      slots_.emplace_back(group.gradient_bytes, 0xff);
      BytesMemory() = world_->memory();
      for (size_t i = 0; i < group.params.size(); ++i) {
        if (present[rank][i]) {
          WriteSlot(plan_, slots_.back(), group.params[i],
                    ParamValues(plan_, group.params[i], kSeed + static_cast<int>(rank)));
        }
      }
    }
    present_ = present;
  }
  std::vector<bool> Mask(bool value) const {
    std::vector<bool> mask(plan_.groups[group_].params.size(), value);
    for (size_t i = 0; i < mask.size(); ++i) {
      if (!plan_.params[plan_.groups[group_].params[i]].requires_grad) mask[i] = false;
    }
    return mask;
  }
  void FillAllSlots() { FillSlots(std::vector<std::vector<bool>>(static_cast<size_t>(plan_.world_size), Mask(true))); }

  ReduceScatterRequest Request(Bytes& gradients, GradientMode mode = GradientMode::kOverwrite, float scale = 0.5f) {
    ReduceScatterRequest request;
    request.plan = &plan_;
    request.group = group_;
    for (size_t rank = 0; rank < slots_.size(); ++rank) {
      request.sources.push_back({static_cast<int>(rank), slots_[rank].data(), present_[rank]});
    }
    request.modes.assign(plan_.groups[group_].params.size(), mode);
    request.gradients = gradients.data();
    request.scale = scale;
    request.label = "reduce";
    return request;
  }
  absl::Status Reduce(ReduceScatterRequest request) {
    return WaitFor([&](Collective::Done done) { collective_->ReduceScatter(std::move(request), std::move(done)); });
  }

  // What parameter `param` gets from the ranks that have it: added in fp32 in rank order, and a number of the dtype in
  // which they gave it.
  std::vector<float> Expected(int param, float scale = 0.5f) const {
    std::vector<float> sum(static_cast<size_t>(plan_.params[param].numel));
    bool first = true;
    for (size_t rank = 0; rank < present_.size(); ++rank) {
      if (!present_[rank][plan_.params[param].index_in_group]) continue;
      const std::vector<float> values = ParamValues(plan_, param, kSeed + static_cast<int>(rank));
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = first ? values[i] : sum[i] + values[i];
      first = false;
    }
    const DType dtype = plan_.flat_params[plan_.params[param].flat_param].unsharded_dtype;
    for (float& x : sum) x = RoundTo(dtype, x * scale);
    return sum;
  }
  // All of `want` are in place and every byte of the slab that is none of theirs is as it was.
  void ExpectOnlyWritten(const Bytes& gradients, const Bytes& before,
                         const std::vector<std::pair<int, std::vector<float>>>& want) {
    Bytes expected = before.Copy();
    for (const auto& [param, values] : want) WriteGradient(plan_, expected, param, values);
    EXPECT_TRUE(gradients == expected);
  }

  int group_ = 0;
  std::vector<Bytes> slots_;
  std::vector<std::vector<bool>> present_;
};

TEST_P(ReduceScatterTest, EveryPlanAddsUpAndLeavesPaddingUntouched) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_NO_SHARD}) {
      for (DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
        for (int world_size : {1, 2, 3, 4, 7}) {
          SCOPED_TRACE(absl::StrCat(v1::Layout_Name(layout), " ", v1::Strategy_Name(strategy), " ", DTypeName(dtype),
                                    " ranks: ", world_size));
          Start(OddModel(world_size, layout, strategy, dtype).Plan(), 2);
          for (group_ = 0; group_ < static_cast<int>(plan_.groups.size()); ++group_) {
            FillAllSlots();
            Bytes gradients(plan_.memory.gradients_bytes, 0xff);
            const Bytes before = gradients.Copy();
            ASSERT_TRUE(Reduce(Request(gradients)).ok());
            std::vector<std::pair<int, std::vector<float>>> want;
            for (int param : plan_.groups[group_].params) {
              if (plan_.params[param].requires_grad) want.emplace_back(param, Expected(param));
            }
            ExpectOnlyWritten(gradients, before, want);
          }
        }
      }
    }
  }
}

TEST_P(ReduceScatterTest, EveryReplicasCopyGetsTheSumOfAllRanks) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    SpecBuilder builder = OddModel(4, layout, v1::STRATEGY_HYBRID_SHARD, v1::DTYPE_UNSPECIFIED);
    builder.config().set_shard_group_size(2);
    builder.config().set_replica_copies(true);
    Start(builder.Plan(), 3);
    ASSERT_EQ(plan_.gradient_copies, 2);
    for (group_ = 0; group_ < static_cast<int>(plan_.groups.size()); ++group_) {
      FillAllSlots();
      Bytes gradients(plan_.memory.gradients_bytes, 0xff);
      Bytes once(plan_.gradients_stride_bytes, 0xff);
      for (int param : plan_.groups[group_].params) {
        if (plan_.params[param].requires_grad) WriteGradient(plan_, once, param, Expected(param));
      }
      ASSERT_TRUE(Reduce(Request(gradients)).ok());
      for (int copy = 0; copy < 2; ++copy) {
        EXPECT_EQ(std::memcmp(gradients.data() + copy * plan_.gradients_stride_bytes, once.data(),
                              static_cast<size_t>(plan_.gradients_stride_bytes)),
                  0)
            << "copy " << copy << " of group " << group_;
      }
    }
  }
}

TEST_P(ReduceScatterTest, AReplicasOwnChangeToItsCopyIsReplaced) {
  SpecBuilder builder = OddModel(4, v1::LAYOUT_DIM0, v1::STRATEGY_HYBRID_SHARD, v1::DTYPE_UNSPECIFIED);
  builder.config().set_shard_group_size(2);
  builder.config().set_replica_copies(true);
  Start(builder.Plan(), 3);
  group_ = plan_.FindGroup("a");
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ASSERT_TRUE(Reduce(Request(gradients)).ok());
  Bytes once(plan_.gradients_stride_bytes, 0xff);
  for (int param : plan_.groups[group_].params) {
    if (!plan_.params[param].requires_grad) continue;
    std::vector<float> sum = Expected(param);
    std::vector<float> halved = sum;
    for (float& x : halved) x /= 2;
    WriteGradient(plan_, gradients, param, halved);  // by the first replica, in copy 0; the other one leaves its own
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += halved[i];
    WriteGradient(plan_, once, param, sum);
  }
  FillAllSlots();
  ASSERT_TRUE(Reduce(Request(gradients, GradientMode::kAccumulate)).ok());
  for (int copy = 0; copy < 2; ++copy) {
    EXPECT_EQ(std::memcmp(gradients.data() + copy * plan_.gradients_stride_bytes, once.data(),
                          static_cast<size_t>(plan_.gradients_stride_bytes)),
              0)
        << "copy " << copy;
  }
}

class OddReduceScatterTest : public ReduceScatterTest {
 protected:
  void SetUp() override {
    ReduceScatterTest::SetUp();
    if (IsSkipped()) return;
    Start(OddModel(3, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED).Plan(), 3);
    group_ = plan_.FindGroup("a");
    ASSERT_GE(group_, 0);
  }
  int Param(const char* name) { return plan_.FindParam(name); }
  int Index(const char* name) { return plan_.params[Param(name)].index_in_group; }
};

TEST_P(OddReduceScatterTest, AbsentGradientsAreNotReadNorWrittenIfAbsentEverywhere) {
  std::vector<std::vector<bool>> present(3, Mask(true));
  present[0][Index("a.weight")] = false;
  present[2][Index("a.weight")] = false;
  present[1][Index("a.norm")] = false;
  for (std::vector<bool>& mask : present) mask[Index("a.bias")] = false;
  FillSlots(present);  // what is absent is NaN
  Bytes gradients(plan_.memory.gradients_bytes, 0x11);
  const Bytes before = gradients.Copy();
  ASSERT_TRUE(Reduce(Request(gradients)).ok());
  ExpectOnlyWritten(gradients, before,
                    {{Param("a.weight"), Expected(Param("a.weight"))},
                     {Param("a.norm"), Expected(Param("a.norm"))},
                     {Param("a.gain"), Expected(Param("a.gain"))}});
}

TEST_P(OddReduceScatterTest, ModesArePerParameter) {
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  const std::vector<float> old = ParamValues(plan_, Param("a.norm"), 1);
  WriteGradient(plan_, gradients, Param("a.norm"), old);
  ReduceScatterRequest request = Request(gradients);
  request.modes[Index("a.norm")] = GradientMode::kAccumulate;
  ASSERT_TRUE(Reduce(std::move(request)).ok());
  std::vector<float> want = Expected(Param("a.norm"));
  for (size_t i = 0; i < want.size(); ++i) want[i] = old[i] + want[i];
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.norm")), want);
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.weight")), Expected(Param("a.weight")));
}

TEST_P(OddReduceScatterTest, TwoSubmissionsOfDisjointMasksAccumulateLikeOne) {
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ASSERT_TRUE(Reduce(Request(gradients)).ok());
  FillAllSlots();
  ASSERT_TRUE(Reduce(Request(gradients, GradientMode::kAccumulate)).ok());
  std::vector<float> want = Expected(Param("a.weight"));
  for (float& x : want) x += x;
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.weight")), want);
}

TEST_P(OddReduceScatterTest, OneRankAloneIsASource) {
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ReduceScatterRequest request = Request(gradients, GradientMode::kOverwrite, 1);
  request.sources.erase(request.sources.begin());
  request.sources.pop_back();
  ASSERT_TRUE(Reduce(std::move(request)).ok());
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.weight")), ParamValues(plan_, Param("a.weight"), kSeed + 1));
}

TEST_P(OddReduceScatterTest, SourcesAreRoundedToTheReduceDtypeBeforeAdding) {
  if (!GetParam().rounds_sources) GTEST_SKIP() << "it adds them as they are";
  FillAllSlots();
  // 1 + 2^-10 is 1 in bf16; three of them add up to 3 and not to 3 + 3 * 2^-10.
  for (Bytes& slot : slots_) {
    WriteSlot(plan_, slot, Param("a.bias"), std::vector<float>(7, 1 + 0x1p-10f));
  }
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ReduceScatterRequest request = Request(gradients, GradientMode::kOverwrite, 1);
  request.reduce_dtype = v1::DTYPE_BFLOAT16;
  ASSERT_TRUE(Reduce(request).ok());
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.bias")), std::vector<float>(7, 3.0f));
  request.reduce_dtype = v1::DTYPE_UNSPECIFIED;
  ASSERT_TRUE(Reduce(request).ok());
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.bias")), std::vector<float>(7, 3 + 3 * 0x1p-10f));
}

TEST_P(OddReduceScatterTest, RoundedSumsAreAddedInTheDtypeOfTheGradient) {
  FillAllSlots();
  // The sum, 2 + 2^-7, lies halfway between two numbers of bf16.
  const float parts[] = {1, 1, 0x1p-7f};
  for (size_t rank = 0; rank < 3; ++rank) {
    WriteSlot(plan_, slots_[rank], Param("a.bias"), std::vector<float>(7, parts[rank]));
  }
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ReduceScatterRequest request = Request(gradients, GradientMode::kOverwrite, 1);
  request.reduce_dtype = v1::DTYPE_BFLOAT16;
  ASSERT_TRUE(Reduce(request).ok());
  EXPECT_EQ(ReadGradient(plan_, gradients, Param("a.bias")), std::vector<float>(7, 2.0f));

  const auto added_to = [&](float old) {
    WriteGradient(plan_, gradients, Param("a.bias"), std::vector<float>(7, old));
    request.modes.assign(request.modes.size(), GradientMode::kAccumulate);
    EXPECT_TRUE(Reduce(request).ok());
    return ReadGradient(plan_, gradients, Param("a.bias"));
  };
  EXPECT_EQ(added_to(0x1p-7f), std::vector<float>(7, 2 + 0x1p-7f)) << "of an fp32 parameter";
  request.keep_low_precision = true;
  EXPECT_EQ(added_to(0x1p-7f), std::vector<float>(7, 2.0f)) << "kept in bf16";
}

TEST_P(OddReduceScatterTest, WithoutAnySourceNothingIsTouchedAndDoneStillRuns) {
  Bytes gradients(plan_.memory.gradients_bytes, 0x22);
  const Bytes before = gradients.Copy();
  ASSERT_TRUE(Reduce(Request(gradients)).ok());
  EXPECT_TRUE(gradients == before);
}

TEST_P(OddReduceScatterTest, AnotherPlanAfterTheFirstIsNotConfusedWithIt) {
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  ASSERT_TRUE(Reduce(Request(gradients)).ok());
  plan_ = OddModel(3, v1::LAYOUT_DIM0, v1::STRATEGY_FULL_SHARD, v1::DTYPE_BFLOAT16).Plan();
  FillAllSlots();
  Bytes others(plan_.memory.gradients_bytes, 0xff);
  ASSERT_TRUE(Reduce(Request(others)).ok());
  for (const char* name : {"a.weight", "a.bias", "a.norm", "a.gain"}) {
    EXPECT_EQ(ReadGradient(plan_, others, Param(name)), Expected(Param(name))) << name;
  }
}

TEST_P(OddReduceScatterTest, DoneRunsOnceWithTheFirstErrorOfADevice) {
  if (!GetParam().devices_add) GTEST_SKIP() << "its devices have no part";
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  wrapped_[0]->FailWith(absl::UnavailableError("device cpu:0 is gone"));
  wrapped_[1]->FailWith(absl::UnavailableError("device cpu:1 is gone"));
  const absl::Status status = Reduce(Request(gradients));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is gone"));
}

TEST_P(OddReduceScatterTest, AfterShutdownOfADeviceTheResultIsCancelled) {
  if (!GetParam().devices_add) GTEST_SKIP() << "its devices have no part";
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0xff);
  wrapped_[1]->Shutdown();
  EXPECT_EQ(Reduce(Request(gradients)).code(), absl::StatusCode::kCancelled);
}

TEST_P(OddReduceScatterTest, MalformedRequestsAreRefusedAndTouchNothing) {
  FillAllSlots();
  Bytes gradients(plan_.memory.gradients_bytes, 0x22);
  const Bytes before = gradients.Copy();
  using Change = std::function<void(ReduceScatterRequest&)>;
  const std::vector<std::pair<const char*, Change>> malformed = {
      {"no plan", [](auto& r) { r.plan = nullptr; }},
      {"group is out of range (got 99", [](auto& r) { r.group = 99; }},
      {"group is out of range (got -1", [](auto& r) { r.group = -1; }},
      {"no gradient shards", [](auto& r) { r.gradients = nullptr; }},
      {"wrong number of modes", [](auto& r) { r.modes.pop_back(); }},
      {"reduce_dtype is not served (got int8)", [](auto& r) { r.reduce_dtype = v1::DTYPE_INT8; }},
      {"not ascending ranks (got 0 after 1)", [](auto& r) { std::swap(r.sources[0], r.sources[1]); }},
      {"not ascending ranks (got 3", [](auto& r) { r.sources[2].rank = 3; }},
      {"has no slot (rank=1)", [](auto& r) { r.sources[1].slot = nullptr; }},
      {"presence mask has the wrong length", [](auto& r) { r.sources[1].present.push_back(true); }},
  };
  for (const auto& [message, change] : malformed) {
    ReduceScatterRequest request = Request(gradients);
    change(request);
    const absl::Status status = Reduce(std::move(request));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_TRUE(gradients == before);
}

SHARDD_FOR_EACH_COLLECTIVE(ReduceScatterTest);
SHARDD_FOR_EACH_COLLECTIVE(OddReduceScatterTest);

}  // namespace
}  // namespace shardd
