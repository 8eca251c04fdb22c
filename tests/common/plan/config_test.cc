// Defaults, refusals and optimizer groups.

#include <cmath>
#include <limits>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

SpecBuilder Model() {
  SpecBuilder b(3);
  b.Param(0, "a", {2});
  b.Param(0, "b", {2}, {.storage_id = 4});
  b.Param(0, "tied", {2}, {.storage_id = 4});
  b.Param(0, "frozen", {2}, {.requires_grad = false});
  return b;
}

TEST(Config, DefaultsAreWrittenOut) {
  const v1::JobConfig config = Model().Plan().config;
  EXPECT_EQ(config.strategy(), v1::STRATEGY_FULL_SHARD);
  EXPECT_EQ(config.layout(), v1::LAYOUT_FLAT);
  EXPECT_EQ(config.unshard_mode(), v1::UNSHARD_MODE_ZERO_COPY);
  EXPECT_EQ(config.max_inflight_unshards(), 2);
  EXPECT_EQ(config.backward_prefetch(), v1::BACKWARD_PREFETCH_PRE);
  EXPECT_EQ(config.optimizer().kind(), v1::OPTIMIZER_KIND_NONE);
  EXPECT_EQ(config.gradient_divide_factor(), 3);
  EXPECT_EQ(config.silence_timeout_ms(), 120'000);
  EXPECT_EQ(config.grace_ms(), 900'000);
  EXPECT_EQ(config.mixed_precision().param_dtype(), v1::DTYPE_UNSPECIFIED);
}

TEST(Config, DefaultsSpelledOutGiveTheSameDigest) {
  SpecBuilder b = Model();
  const std::string digest = b.Plan().digest;
  *b.spec().mutable_config() = b.Plan().config;
  EXPECT_EQ(b.Plan().digest, digest);
}

TEST(Config, JobsWhoseTrainersWritePlanASnapshot) {
  SpecBuilder b = Model();
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  EXPECT_EQ(b.Plan().memory.kept_bytes, 0);
  b.config().set_trainers_never_write(false);
  EXPECT_EQ(b.Plan().config.keep_every(), 1);
  EXPECT_EQ(b.Plan().memory.kept_bytes, b.Plan().memory.shards_bytes);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  b.config().mutable_optimizer()->set_trainer_states(2);
  EXPECT_EQ(b.Plan().config.keep_every(), 10);
  EXPECT_TRUE(b.Plan().snapshots_by_cost);
  EXPECT_EQ(b.Plan().memory.kept_bytes, b.Plan().memory.shards_bytes + b.Plan().memory.optimizer_bytes);
  b.config().set_keep_every(10);
  EXPECT_FALSE(b.Plan().snapshots_by_cost);
  b.config().set_keep_every(0);
  b.config().set_trainers_never_write(true);
  EXPECT_TRUE(Invalid(b.spec(), {"trainers_never_write", "got true"}));
}

TEST(Config, PassCopiesNeedWritingTrainersAndSetTheSnapshotInterval) {
  SpecBuilder b = Model();
  b.config().set_pass_copies(true);
  EXPECT_TRUE(Invalid(b.spec(), {"pass_copies", "trainers_never_write"}));
  b.config().set_trainers_never_write(false);
  const std::string digest = b.Plan().digest;
  EXPECT_EQ(b.Plan().config.keep_every(), 1);
  b.config().set_keep_every(3);
  EXPECT_EQ(b.Plan().config.keep_every(), 3) << "nothing of the daemon's changes with a step";
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  EXPECT_TRUE(Invalid(b.spec(), {"keep_every", "got 3 with OPTIMIZER_KIND_ADAMW", "want 0 or 1"}));
  b.config().clear_optimizer();
  b.config().set_pass_copies(false);
  EXPECT_TRUE(Invalid(b.spec(), {"keep_every", "got 3 with OPTIMIZER_KIND_NONE and without pass_copies"}));
  b.config().set_pass_copies(true);
  b.config().set_keep_every(0);
  EXPECT_EQ(b.Plan().config.keep_every(), 1);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  EXPECT_EQ(b.Plan().config.keep_every(), 10);
  b.config().set_pass_copies(false);
  EXPECT_TRUE(b.Plan().config.pass_copies()) << "its steps are stores that nobody sees";
  b.config().clear_optimizer();
  b.config().clear_keep_every();
  EXPECT_NE(b.Plan().digest, digest);
}

TEST(Config, ValuesOutOfRangeAreRefusedByName) {
  const auto refused = [](auto&& change, const std::vector<std::string>& fragments) {
    SpecBuilder b = Model();
    change(b.config());
    return Invalid(b.spec(), fragments);
  };
  using C = v1::JobConfig;
  EXPECT_TRUE(refused([](C& c) { c.set_strategy(static_cast<v1::Strategy>(42)); }, {"strategy", "got 42"}));
  EXPECT_TRUE(refused([](C& c) { c.set_layout(static_cast<v1::Layout>(42)); }, {"layout"}));
  EXPECT_TRUE(refused([](C& c) { c.set_unshard_mode(static_cast<v1::UnshardMode>(42)); }, {"unshard_mode"}));
  EXPECT_TRUE(
      refused([](C& c) { c.set_backward_prefetch(static_cast<v1::BackwardPrefetch>(42)); }, {"backward_prefetch"}));
  EXPECT_TRUE(
      refused([](C& c) { c.mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(42)); }, {"optimizer.kind"}));
  EXPECT_TRUE(refused([](C& c) { c.set_max_inflight_unshards(-1); }, {"max_inflight_unshards", "got -1"}));
  EXPECT_TRUE(refused([](C& c) { c.set_max_inflight_unshards(1 << 30); }, {"max_inflight_unshards"}));
  EXPECT_TRUE(refused([](C& c) { c.set_silence_timeout_ms(-1); }, {"silence_timeout_ms"}));
  EXPECT_TRUE(refused([](C& c) { c.set_grace_ms(std::numeric_limits<int64_t>::max()); }, {"grace_ms"}));
  for (double factor : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(refused([&](C& c) { c.set_gradient_divide_factor(factor); }, {"gradient_divide_factor"}));
  }
  {
    SpecBuilder b;
    b.Param(b.Add(0, "child", "Block"), "w", {3});
    b.module(1).mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    EXPECT_TRUE(Invalid(b.spec(), {"plan module \"child\": mixed_precision is for fully sharded modules"}));
  }
  for (DType dtype : {v1::DTYPE_INT8, v1::DTYPE_FLOAT64, static_cast<DType>(99)}) {
    EXPECT_TRUE(refused([&](C& c) { c.mutable_mixed_precision()->set_param_dtype(dtype); }, {"param_dtype"}));
    EXPECT_TRUE(refused([&](C& c) { c.mutable_mixed_precision()->set_reduce_dtype(dtype); }, {"reduce_dtype"}));
    SpecBuilder b;
    const int child = b.AddSharded(0, "child");
    b.Param(child, "w", {3});
    b.module(child).mutable_mixed_precision()->set_param_dtype(dtype);
    EXPECT_TRUE(
        Invalid(b.spec(), {"plan module \"child\": mixed_precision.param_dtype", std::string(DTypeName(dtype))}));
  }
  for (v1::OptimizerKind kind : {v1::OPTIMIZER_KIND_ADAMW, v1::OPTIMIZER_KIND_NONE}) {
    EXPECT_TRUE(refused(
        [&](C& c) {
          c.mutable_optimizer()->set_kind(kind);
          c.mutable_optimizer()->set_momentum(true);
        },
        {"optimizer.momentum", "SGD"}));
  }
}

TEST(OptimizerGroups, ParametersGetTheirGroupByAliasOrWrappedNameToo) {
  SpecBuilder b = Model();
  b.config().mutable_optimizer()->add_groups();
  auto& group = *b.config().mutable_optimizer()->add_groups();
  group.add_fqns("module.tied");
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.params[plan.FindParam("a")].optimizer_group, 0);
  EXPECT_EQ(plan.params[plan.FindParam("b")].optimizer_group, 2);
  EXPECT_EQ(plan.params[plan.FindParam("frozen")].optimizer_group, -1);
}

TEST(OptimizerGroups, KindsOfTheirOwnAreInAllGroupsOrInNone) {
  const auto with = [](v1::OptimizerKind first, v1::OptimizerKind second, bool momentum = false) {
    SpecBuilder b = Model();
    auto& optimizer = *b.config().mutable_optimizer();
    optimizer.set_kind(v1::OPTIMIZER_KIND_ADAMW);
    auto& one = *optimizer.add_groups();
    one.add_fqns("a");
    one.set_kind(first);
    auto& other = *optimizer.add_groups();
    other.add_fqns("b");
    other.set_kind(second);
    other.set_momentum(momentum);
    return b;
  };
  using enum v1::OptimizerKind;
  const ShardPlan plan = with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_ADAM_AMSGRAD).Plan();
  EXPECT_EQ(plan.optimizer_states, 3);
  EXPECT_TRUE(Invalid(with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_UNSPECIFIED).spec(), {"groups[1].kind", "or none"}));
  EXPECT_TRUE(Invalid(with(OPTIMIZER_KIND_UNSPECIFIED, OPTIMIZER_KIND_SGD).spec(), {"groups[1].kind", "or none"}));
  EXPECT_TRUE(Invalid(with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_TRAINER).spec(), {"groups[1].kind", "TRAINER"}));
  EXPECT_TRUE(Invalid(with(OPTIMIZER_KIND_SGD, static_cast<v1::OptimizerKind>(42)).spec(), {"groups[1].kind", "42"}));
  EXPECT_TRUE(Invalid(with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_LION, true).spec(), {"groups[1].momentum", "LION"}));
  // What none of them has is stepped by none, and has no state.
  EXPECT_TRUE(with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_SGD, true).Plan().memory.optimizer_bytes > 0);
  EXPECT_EQ(with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_SGD).Plan().memory.optimizer_bytes, 0);
  // They are part of what all ranks, and client and daemon, agree on.
  const v1::JobSpec sgd = with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_SGD).spec();
  const v1::JobSpec lion = with(OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_LION).spec();
  EXPECT_NE(PlanShards(sgd)->digest, PlanShards(lion)->digest);
  v1::JobSpec as_of_an_older_build = sgd;  // which does not know the fields
  for (auto& group : *as_of_an_older_build.mutable_config()->mutable_optimizer()->mutable_groups()) group.clear_kind();
  EXPECT_NE(PlanShards(sgd)->digest, PlanShards(as_of_an_older_build)->digest);
  EXPECT_NE(FirstDifference(sgd, lion).find("config optimizer.groups[1].kind differs (got OPTIMIZER_KIND_SGD, want "
                                            "OPTIMIZER_KIND_LION)"),
            std::string::npos)
      << FirstDifference(sgd, lion);
}

TEST(OptimizerGroups, UnknownFrozenAndDoublyListedParametersAreRefused) {
  const auto with = [](const std::vector<std::vector<std::string>>& groups) {
    SpecBuilder b = Model();
    for (const std::vector<std::string>& fqns : groups) {
      auto& group = *b.config().mutable_optimizer()->add_groups();
      group.mutable_fqns()->Assign(fqns.begin(), fqns.end());
    }
    return b.spec();
  };
  EXPECT_TRUE(Invalid(with({{"a"}, {"nope"}}), {"optimizer group 2", "\"nope\"", "unknown"}));
  EXPECT_TRUE(Invalid(with({{"frozen"}}), {"\"frozen\"", "is frozen"}));
  EXPECT_TRUE(Invalid(with({{"a"}, {"a"}}), {"optimizer group 2", "\"a\"", "listed twice"}));
  EXPECT_TRUE(Invalid(with({{"b", "tied"}}), {"\"tied\"", "listed twice"}));
  EXPECT_TRUE(PlanShards(with(std::vector<std::vector<std::string>>(1024))).ok());
  EXPECT_TRUE(Invalid(with(std::vector<std::vector<std::string>>(1025)), {"optimizer.groups", "got 1025"}));
}

TEST(Config, OffloadIsPooledAndZeroCopyIsRefusedByName) {
  SpecBuilder b(2);
  b.Param(0, "w", {8});
  EXPECT_EQ(b.Plan().config.offload(), v1::OFFLOAD_NONE);
  b.config().set_offload(v1::OFFLOAD_HOST);
  EXPECT_EQ(b.Plan().config.unshard_mode(), v1::UNSHARD_MODE_POOLED);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_ZERO_COPY);
  const absl::Status refused = PlanShards(b.spec()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("plan config offload: "));
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("got unshard_mode UNSHARD_MODE_ZERO_COPY"));
  b.config().set_offload(static_cast<v1::Offload>(3));
  EXPECT_THAT(std::string(PlanShards(b.spec()).status().message()),
              ::testing::HasSubstr("plan config offload: unknown value (got 3)"));
}

TEST(Config, TrainerSumsAreInThePlanAndRefusedWithOffload) {
  SpecBuilder b(2);
  b.Param(0, "w", {8});
  const ShardPlan by_devices = b.Plan();
  b.config().set_trainer_sums(true);
  EXPECT_NE(b.Plan().digest, by_devices.digest);
  b.config().set_offload(v1::OFFLOAD_HOST);
  const absl::Status refused = PlanShards(b.spec()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("plan config trainer_sums: "));
}

}  // namespace
}  // namespace shardd
