// How a rank's norms and updates are taken apart for several devices.

#include "server/job/work/optimizer_devices.h"

#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/ops/check.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = 70'001;  // of the largest operation: no multiple of anything

struct State {
  State() : p(kNumel), g(kNumel), m(kNumel), v(kNumel), cast(kNumel) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto at = static_cast<size_t>(i);
      p[at] = static_cast<float>(i % 97) / 16;
      g[at] = static_cast<float>(i % 89 - 44) / 64;
    }
  }
  std::vector<float> p, g, m, v;
  std::vector<uint16_t> cast;
  bool operator==(const State& other) const = default;

  std::vector<DeviceOp> Updates() {
    AdamWOp adamw;
    adamw.params = {0.01, 0.9, 0.99, 1e-8, 0.1, 3, 0.5, false};
    adamw.p = p.data();
    adamw.param_dtype = v1::DTYPE_FLOAT32;
    adamw.g = g.data();
    adamw.m = m.data();
    adamw.v = v.data();
    adamw.cast_dst = cast.data();
    adamw.cast_dtype = v1::DTYPE_BFLOAT16;
    adamw.numel = 50'000;
    SgdOp sgd;
    sgd.params = {0.1, 0.9, 0, 0.01, false, false, 1};
    sgd.p = p.data() + 50'000;
    sgd.param_dtype = v1::DTYPE_FLOAT32;
    sgd.g = g.data() + 50'000;
    sgd.buf = m.data() + 50'000;
    sgd.cast_dst = nullptr;
    sgd.cast_dtype = v1::DTYPE_FLOAT32;
    sgd.numel = 20'000;
    return {adamw, sgd, CastOp{g.data() + 70'000, v1::DTYPE_FLOAT32, cast.data() + 70'000, v1::DTYPE_BFLOAT16, 1}};
  }
};

void RunAll(const std::vector<DeviceOp>& ops) {
  for (const DeviceOp& op : ops) {
    ASSERT_TRUE(CheckCpuOp(op).ok());
    RunCpuOp(op, 0, OpExtent(op));
  }
}

TEST(SplitOps, EqualPartsDoWhatTheWholeDoesToTheBit) {
  State want;
  RunAll(want.Updates());
  for (const int parts : {1, 2, 3, 7, 40}) {
    State got;
    const DeviceOps split = SplitOps(got.Updates(), parts);
    ASSERT_EQ(split.size(), static_cast<size_t>(parts));
    int64_t total = 0;
    for (size_t i = split.size(); i-- > 0;) {  // in whatever order they run
      RunAll(split[i]);
      int64_t extent = 0;
      for (const DeviceOp& op : split[i]) extent += OpExtent(op);
      EXPECT_LE(extent, kNumel / parts + 2 * 4096) << "part " << i << " of " << parts;
      total += extent;
    }
    EXPECT_EQ(total, kNumel);
    EXPECT_TRUE(got == want) << parts << " parts";
  }
}

TEST(SplitOps, NormsOfPartsAddUpToThatOfTheWhole) {
  State state;
  Norm whole(2);
  RunAll({NormOp{state.g.data(), kNumel, &whole}});
  DeviceOps split = SplitOps({NormOp{state.g.data(), kNumel, &whole}}, 3);
  Norm total(2);
  for (std::vector<DeviceOp>& part : split) {
    Norm norm(2);
    for (DeviceOp& op : part) std::get<NormOp>(op).result = &norm;
    RunAll(part);
    EXPECT_GT(norm.value(), 0);
    total.Add(norm);
  }
  EXPECT_DOUBLE_EQ(total.value(), whole.value());
}

TEST(SplitOps, NothingIsNothingInEveryPart) {
  const DeviceOps split = SplitOps({}, 3);
  ASSERT_EQ(split.size(), 3u);
  for (const std::vector<DeviceOp>& part : split) EXPECT_TRUE(part.empty());
}

TEST(OptimizerDevices, OneDeviceOfARankRunsDependentOperations) {
  std::vector<float> gradients(100'000, 1);
  const auto ops_of = [&](int rank) {
    float* const first = gradients.data() + rank * 50'000;
    return std::vector<DeviceOp>{ZeroOp{first, 200'000}, CopyOp{first, gradients.data(), 4}};
  };
  const OptimizerDevices devices({nullptr, nullptr, nullptr, nullptr}, 2);
  EXPECT_EQ(devices.count(), 4);
  const auto sizes = [](const DeviceOps& ops) {
    std::vector<size_t> sizes;
    for (const auto& of_device : ops) sizes.push_back(of_device.size());
    return sizes;
  };
  EXPECT_THAT(sizes(devices.Divide({ops_of(0), ops_of(1)}, /*in_order=*/true)), ::testing::ElementsAre(2, 0, 2, 0));
  EXPECT_THAT(sizes(devices.Divide({ops_of(0), ops_of(1)})), ::testing::ElementsAre(1, 2, 1, 2));
}

}  // namespace
}  // namespace shardd
