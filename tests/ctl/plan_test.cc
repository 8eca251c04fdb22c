#include "client/ctl/plan.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ctl/small_model.h"

namespace shardd::ctl {
namespace {

using ::testing::HasSubstr;

int64_t Bytes(const PlannedModel& planned, const std::string& purpose) {
  for (const v1::Purpose& each : planned.memory.purposes()) {
    if (each.purpose() == purpose) return each.planned_bytes();
  }
  return 0;
}

TEST(PlanTest, IsWhatTheDaemonPlans) {
  const absl::StatusOr<PlannedModel> planned = PlanModel(kSmallModel, 4, 0, /*on_gpus=*/false);
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->memory.job(), "small");
  EXPECT_EQ(Bytes(*planned, "shards"), 4 << 20);
  EXPECT_EQ(Bytes(*planned, "optimizer"), 8 << 20);
  EXPECT_GT(Bytes(*planned, "session"), 4 * (4 << 20)) << "each rank's gradient slot";
  int64_t sum = 0;
  for (const v1::Purpose& each : planned->memory.purposes()) sum += each.planned_bytes();
  EXPECT_EQ(sum, planned->memory.planned_bytes());
  EXPECT_THAT(planned->text, HasSubstr("small: 1048576 parameters in 1 groups, 4 ranks on 1 node, full_shard\n"));
  EXPECT_THAT(planned->text, HasSubstr("optimizer   8.0 MiB   2.0 MiB\n"));
  EXPECT_THAT(planned->text, HasSubstr("largest group hidden: 4.0 MiB unsharded"));
}

TEST(PlanTest, RanksAreSpreadOverNodes) {
  const absl::StatusOr<PlannedModel> one = PlanModel(kSmallModel, 64, 1, /*on_gpus=*/false);
  const absl::StatusOr<PlannedModel> eight = PlanModel(kSmallModel, 64, 8, /*on_gpus=*/false);
  ASSERT_TRUE(one.ok() && eight.ok()) << one.status() << eight.status();
  EXPECT_EQ(Bytes(*one, "optimizer"), 8 << 20);
  EXPECT_EQ(Bytes(*eight, "optimizer"), 1 << 20) << "cut over all nodes";
  EXPECT_THAT(eight->text, HasSubstr("64 ranks on 8 nodes"));
}

TEST(PlanTest, GpusOverNodesHaveStagingForGathers) {
  const absl::StatusOr<PlannedModel> one = PlanModel(kSmallModel, 64, 1, /*on_gpus=*/true);
  const absl::StatusOr<PlannedModel> cpus = PlanModel(kSmallModel, 64, 8, /*on_gpus=*/false);
  const absl::StatusOr<PlannedModel> gpus = PlanModel(kSmallModel, 64, 8, /*on_gpus=*/true);
  ASSERT_TRUE(one.ok() && cpus.ok() && gpus.ok()) << one.status() << cpus.status() << gpus.status();
  EXPECT_EQ(Bytes(*one, "gather staging"), 0);
  EXPECT_EQ(Bytes(*cpus, "gather staging"), 0);
  EXPECT_EQ(Bytes(*gpus, "node receive"), 0) << "NCCL's own";
  // Each GPU sends a 64th of the group, and has two slots for seven of these.
  EXPECT_GT(Bytes(*gpus, "gather staging"), 8 * (15 * (4 << 20) / 64));
  int64_t sum = 0;
  for (const v1::Purpose& each : gpus->memory.purposes()) sum += each.planned_bytes();
  EXPECT_EQ(sum, gpus->memory.planned_bytes());
}

TEST(PlanTest, WhatCannotBePlannedIsSaid) {
  const auto error = [](absl::string_view json, int world, int nodes) {
    return std::string(PlanModel(json, world, nodes, /*on_gpus=*/false).status().message());
  };
  EXPECT_THAT(error("{ not json", 4, 0), HasSubstr("no shardd.v1.JobSpec"));
  EXPECT_THAT(error(kSmallModel, 0, 0), HasSubstr("no --world"));
  EXPECT_THAT(error(kSmallModel, 7, 2), HasSubstr("7 ranks on 2 nodes"));
  EXPECT_THAT(error("{}", 2, 0), HasSubstr("tree"));
  EXPECT_THAT(std::string(ReadTextFile("/nonexistent").status().message()),
              HasSubstr("cannot read \"/nonexistent\": No such file"));
}

}  // namespace
}  // namespace shardd::ctl
