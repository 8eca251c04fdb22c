#include "common/plan/optimizer_kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST(OptimizerKinds, EachValueOfTheProtoIsOneRow) {
  const google::protobuf::EnumDescriptor& kinds = *v1::OptimizerKind_descriptor();
  ASSERT_EQ(static_cast<int>(OptimizerKinds().size()), kinds.value_count() - 1);
  for (int i = 0; i < kinds.value_count(); ++i) {
    const auto kind = static_cast<v1::OptimizerKind>(kinds.value(i)->number());
    EXPECT_EQ(FindOptimizerKind(kind) != nullptr, kind != v1::OPTIMIZER_KIND_UNSPECIFIED) << kinds.value(i)->name();
  }
}

// Three states are what slices and the log of updates have room for.
TEST(OptimizerKinds, HaveTheStatesThatTheirPlanHas) {
  for (const OptimizerKindRow& row : OptimizerKinds()) {
    for (const bool momentum : {false, true}) {
      if (momentum && row.momentum_state == nullptr) continue;
      SpecBuilder b(1);
      b.Param(0, "p", {2, 2});
      b.config().mutable_optimizer()->set_kind(row.kind);
      b.config().set_trainers_never_write(row.kind != v1::OPTIMIZER_KIND_TRAINER);
      b.config().mutable_optimizer()->set_momentum(momentum);
      const auto want = static_cast<int>(row.states.size()) + (momentum ? 1 : 0);
      EXPECT_EQ(b.Plan().optimizer_states, want) << OptimizerKindText(row.kind);
      EXPECT_LE(want, 3);
    }
  }
}

TEST(OptimizerKinds, AHyperParameterOutOfRangeIsNamed) {
  for (const OptimizerKindRow& row : OptimizerKinds()) {
    v1::OptimizerConfig config;
    config.set_kind(row.kind);
    config.set_momentum(row.momentum_state != nullptr);
    EXPECT_TRUE(CheckHyperParameters(config, 0, {}).ok()) << OptimizerKindText(row.kind);
    for (const HyperParameterRange& range : row.hyperparameters) {
      v1::HyperParameters values;
      const auto* const field = v1::HyperParameters::descriptor()->FindFieldByName(range.name);
      ASSERT_NE(field, nullptr) << range.name;
      values.GetReflection()->SetDouble(&values, field, -0.5);
      const absl::Status refused = CheckHyperParameters(config, 3, values);
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr(std::string("optimizer group 3: ") + range.name + " is out of range (got -0.5"));
      values.GetReflection()->SetDouble(&values, field, 1);
      EXPECT_EQ(CheckHyperParameters(config, 3, values).ok(), !range.below_one) << range.name;
    }
  }
}

TEST(OptimizerKinds, WhatMuonDoesNotDoIsNamed) {
  v1::OptimizerConfig config;
  config.set_kind(v1::OPTIMIZER_KIND_MUON);
  const auto refused = [&](const auto& set) {
    v1::HyperParameters values;
    set(values);
    return std::string(CheckHyperParameters(config, 0, values).message());
  };
  EXPECT_THAT(refused([](auto& v) { v.set_ns_steps(100); }),
              HasSubstr("ns_steps is out of range (got 100, want 0 to 99"));
  EXPECT_THAT(refused([](auto& v) { v.set_ns_steps(-1); }), HasSubstr("got -1"));
  EXPECT_THAT(refused([](auto& v) { v.set_ns_b(HUGE_VAL); }),
              HasSubstr("ns_coefficients are not finite (got 0, inf, 0"));
  EXPECT_THAT(refused([](auto& v) { v.set_adjust_lr(static_cast<v1::AdjustLr>(7)); }),
              HasSubstr("adjust_lr is unknown (got 7"));
  // As torch: no momentum, and Nesterov's all the same.
  EXPECT_EQ(refused([](auto& v) { v.set_nesterov(true); }), "");
  EXPECT_EQ(refused([](auto& v) { v.set_ns_b(-4.775); }), "");
}

TEST(OptimizerKinds, WhatAdafactorDoesNotDoIsNamed) {
  v1::OptimizerConfig config;
  config.set_kind(v1::OPTIMIZER_KIND_ADAFACTOR);
  const auto refused = [&](const auto& set) {
    v1::HyperParameters values;
    set(values);
    return std::string(CheckHyperParameters(config, 0, values).message());
  };
  EXPECT_THAT(refused([](auto& v) { v.set_beta2_decay(0.1); }),
              HasSubstr("beta2_decay is out of range (got 0.1, want finite, <= 0)"));
  EXPECT_THAT(refused([](auto& v) { v.set_d(0.5); }), HasSubstr("d is out of range (got 0.5, want finite, >= 1"));
  EXPECT_THAT(refused([](auto& v) { v.set_eps(-2); }), HasSubstr("eps is out of range (got -2"));
  EXPECT_THAT(refused([](auto& v) { v.set_eps(HUGE_VAL); }), HasSubstr("eps is out of range (got inf"));
  EXPECT_EQ(refused([](auto& v) { v.set_eps(-1), v.set_d(1), v.set_beta2_decay(-0.8); }), "");
}

TEST(OptimizerKinds, AnUnknownKindIsNamedWithThoseThatAreKnown) {
  v1::OptimizerConfig config;
  config.set_kind(static_cast<v1::OptimizerKind>(42));
  EXPECT_EQ(OptimizerGroups(config), 0);
  EXPECT_THAT(std::string(CheckHyperParameters(config, 0, {}).message()), HasSubstr("no such optimizer kind (got 42"));
  SpecBuilder b(1);
  b.Param(0, "p", {4});
  *b.config().mutable_optimizer() = config;
  EXPECT_TRUE(Invalid(b.spec(), {"optimizer.kind", "got 42", "OPTIMIZER_KIND_LION"}));
}

}  // namespace
}  // namespace shardd
