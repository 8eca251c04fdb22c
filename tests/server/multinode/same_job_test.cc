// Which descriptions of a job are one job, and who hears that it has missed an extension.

#include "server/multinode/same_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/extend.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::StatusCode kOk = absl::StatusCode::kOk;
constexpr absl::StatusCode kComesAgain = absl::StatusCode::kUnavailable;
constexpr absl::StatusCode kAnother = absl::StatusCode::kFailedPrecondition;

// Of two nodes. "f" is trained, or frozen.
SpecBuilder Model(bool trains_f) {
  SpecBuilder builder(1);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  for (int node = 0; node < 2; ++node) {
    builder.config().mutable_nodes()->add_addresses(absl::StrCat("host", node, ":7000"));
  }
  builder.Param(0, "w", {64});
  builder.Param(0, "f", {9}, {.requires_grad = trains_f});
  return builder;
}

class SameJobTest : public ::testing::Test {
 protected:
  static std::unique_ptr<OwnJob> Own(const v1::JobSpec& spec) {
    absl::StatusOr<ShardPlan> plan = PlanShards(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return std::make_unique<OwnJob>(spec, spec.SerializeAsString(), std::make_shared<const ShardPlan>(*std::move(plan)),
                                    "links", /*on_gpus=*/false);
  }
  static v1::PeerHello Hello(const v1::JobSpec& spec, bool has_parameters) {
    v1::PeerHello hello;
    hello.set_node(1);
    hello.set_data_path("links");
    hello.set_takes_extensions(true);
    hello.set_has_parameters(has_parameters);
    hello.set_spec(spec.SerializeAsString());
    return hello;
  }
  absl::Status Check(OwnJob* own, bool has_parameters, const v1::PeerHello& hello) {
    return own->CheckSame(hello, has_parameters,
                          [this](std::shared_ptr<const Extension> missed) { missed_.push_back(std::move(missed)); });
  }

  std::vector<std::shared_ptr<const Extension>> missed_;
};

TEST_F(SameJobTest, WhoHasParametersSaysWhatIsTrained) {
  const v1::JobSpec narrow = Model(false).spec();
  const v1::JobSpec wide = Model(true).spec();
  const struct {
    bool own_wide, own_has, other_wide, other_has;
    absl::StatusCode code;
    size_t missed;
  } kCases[] = {
      {false, false, true, false, kAnother, 0},   {false, false, true, true, kComesAgain, 1},
      {false, true, true, false, kComesAgain, 0}, {false, true, true, true, kComesAgain, 1},
      {true, false, false, false, kAnother, 0},   {true, false, false, true, kComesAgain, 0},
      {true, true, false, false, kOk, 0},         {true, true, false, true, kOk, 0},
      {false, true, false, false, kOk, 0},        {true, false, true, true, kOk, 0},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.own_wide << c.own_has << c.other_wide << c.other_has);
    missed_.clear();
    const auto own = Own(c.own_wide ? wide : narrow);
    const absl::Status status = Check(own.get(), c.own_has, Hello(c.other_wide ? wide : narrow, c.other_has));
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_EQ(missed_.size(), c.missed);
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("node 1"));
    }
  }
}

TEST_F(SameJobTest, EachCallOfTheOtherNodeSaysWhatWasMissed) {
  const auto own = Own(Model(false).spec());
  const v1::PeerHello hello = Hello(Model(true).spec(), true);
  const absl::Status first = Check(own.get(), true, hello);
  EXPECT_THAT(std::string(first.message()), HasSubstr("node 1 trains parameter \"f\" by now"));
  EXPECT_EQ(Check(own.get(), true, hello), first);
  ASSERT_EQ(missed_.size(), 2u);
  EXPECT_EQ(missed_[0], missed_[1]) << "it is planned once";
  v1::PeerHello without = hello;
  without.set_has_parameters(false);
  EXPECT_EQ(Check(own.get(), true, without).code(), kComesAgain);
  EXPECT_EQ(missed_.size(), 2u);
}

TEST_F(SameJobTest, AnAnswerIsRememberedForTheSameQuestionAlone) {
  const auto own = Own(Model(true).spec());
  const v1::PeerHello hello = Hello(Model(false).spec(), true);
  const absl::Status first = Check(own.get(), false, hello);
  EXPECT_EQ(first.code(), kComesAgain);
  EXPECT_EQ(Check(own.get(), false, hello), first);
  EXPECT_TRUE(Check(own.get(), true, hello).ok()) << "it has parameters by now";
  EXPECT_EQ(Check(own.get(), false, Hello(Model(false).spec(), false)).code(), kAnother);
  EXPECT_EQ(Check(own.get(), false, hello), first);
}

TEST_F(SameJobTest, AnOlderDaemonsJobIsAnotherOne) {
  for (const bool own_wide : {false, true}) {
    v1::PeerHello hello = Hello(Model(!own_wide).spec(), true);
    hello.set_takes_extensions(false);
    const absl::Status status = Check(Own(Model(own_wide).spec()).get(), true, hello);
    EXPECT_EQ(status.code(), kAnother) << status;
  }
  EXPECT_TRUE(missed_.empty());
}

TEST_F(SameJobTest, WhatDiffersOtherwiseIsAnotherJob) {
  SpecBuilder other = Model(true);
  other.config().set_grace_ms(77'000);
  const absl::Status status = Check(Own(Model(false).spec()).get(), true, Hello(other.spec(), true));
  EXPECT_EQ(status.code(), kAnother) << status;
  EXPECT_TRUE(missed_.empty());
}

// With it nodes would undo each other's extensions.
TEST_F(SameJobTest, OptimizerGroupsAloneAreNoExtension) {
  SpecBuilder grouped = Model(false);
  grouped.config().mutable_optimizer()->add_groups()->add_fqns("w");
  const v1::JobSpec plain = Model(false).spec();
  const absl::StatusOr<Extension> extension = Extend(grouped.spec(), plain, Model(false).Plan());
  ASSERT_TRUE(extension.ok()) << extension.status();
  EXPECT_EQ(extension->what, "optimizer groups");
  EXPECT_FALSE(extension->trains_more);
  const absl::Status refused = CheckExtension(Model(false).Plan(), *extension);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("optimizer groups alone"), HasSubstr("say them when the job is opened")));
  EXPECT_EQ(Check(Own(plain).get(), true, Hello(grouped.spec(), true)).code(), kAnother);
  EXPECT_EQ(Check(Own(grouped.spec()).get(), true, Hello(plain, true)).code(), kAnother);
  EXPECT_TRUE(missed_.empty());
}

TEST_F(SameJobTest, WhatNodesCannotBecomeIsTriedAgainAndSaysWhy) {
  const auto cut = [](bool trains_f) {
    SpecBuilder builder = Model(trains_f);
    builder.config().set_strategy(v1::STRATEGY_FULL_SHARD);
    builder.config().set_layout(v1::LAYOUT_FLAT);
    return builder;
  };
  const absl::Status parts = Check(Own(cut(false).spec()).get(), true, Hello(cut(true).spec(), true));
  EXPECT_EQ(parts.code(), kComesAgain) << parts;
  EXPECT_THAT(std::string(parts.message()),
              AllOf(HasSubstr("node 1 trains parameter \"f\""), HasSubstr("parts do not move between nodes")));
  const auto edited = [](bool trains_f) {
    SpecBuilder builder = Model(trains_f);
    builder.config().set_trainers_never_write(false);
    return builder;
  };
  const absl::Status edits = Check(Own(edited(false).spec()).get(), true, Hello(edited(true).spec(), true));
  EXPECT_EQ(edits.code(), kComesAgain) << edits;
  EXPECT_THAT(std::string(edits.message()), HasSubstr("beside edits in place"));
  EXPECT_TRUE(missed_.empty());
}

TEST_F(SameJobTest, DaemonsThatPlanTheJobOtherwiseAreNamed) {
  SpecBuilder float8 = Model(true);
  float8.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  float8.config().mutable_mixed_precision()->set_float8_gathers(true);
  for (const bool with_float8 : {false, true}) {
    const v1::JobSpec spec = with_float8 ? float8.spec() : Model(true).spec();
    const auto own = Own(spec);
    v1::PeerHello hello = Hello(spec, true);
    hello.set_plan_digest(PlanShards(spec)->digest);
    EXPECT_TRUE(Check(own.get(), true, hello).ok());
    hello.set_plan_digest("other");
    const absl::Status other = Check(own.get(), true, hello);
    EXPECT_EQ(other.code(), absl::StatusCode::kUnimplemented) << other;
    EXPECT_THAT(std::string(other.message()),
                AllOf(HasSubstr("daemon of node 1"), HasSubstr("got digest 6f74686572"), HasSubstr("same version")));
    hello.clear_plan_digest();
    const absl::Status older = Check(own.get(), true, hello);
    EXPECT_EQ(older.code(), with_float8 ? absl::StatusCode::kUnimplemented : kOk) << older;
    if (with_float8) {
      EXPECT_THAT(std::string(older.message()), HasSubstr("float8_gathers"));
    }
  }
}

TEST_F(SameJobTest, AMissedExtensionIsPlannedAlikeFirst) {
  const v1::JobSpec wide = Model(true).spec();
  const auto own = Own(Model(false).spec());
  v1::PeerHello hello = Hello(wide, true);
  hello.set_plan_digest("other");
  EXPECT_EQ(Check(own.get(), true, hello).code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(missed_.empty());
  hello.set_plan_digest(PlanShards(wide)->digest);
  EXPECT_EQ(Check(own.get(), true, hello).code(), kComesAgain);
  EXPECT_EQ(missed_.size(), 1u);
}

// Matrices that are there keep their places when others' biases are trained; one that is trained anew was cut.
TEST_F(SameJobTest, CutModelsOfMuonUnfreezeWhatIsNoMatrix) {
  const auto plan_of = [](bool bias, bool matrix) {
    SpecBuilder b(1);
    b.config().set_layout(v1::LAYOUT_DIM0);
    b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
    b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_MUON);
    for (int node = 0; node < 2; ++node) b.config().mutable_nodes()->add_addresses(absl::StrCat("host", node, ":7000"));
    v1::OptimizerConfig::Group& muon = *b.config().mutable_optimizer()->add_groups();
    v1::OptimizerConfig::Group& sgd = *b.config().mutable_optimizer()->add_groups();
    muon.set_kind(v1::OPTIMIZER_KIND_MUON);
    sgd.set_kind(v1::OPTIMIZER_KIND_SGD);
    b.Param(0, "w", {8, 6});
    b.Param(0, "v", {4, 4});
    muon.add_fqns("w");
    b.Param(0, "bias", {8}, {.requires_grad = bias});
    if (bias) sgd.add_fqns("bias");
    b.Param(0, "late", {6, 8}, {.requires_grad = matrix});
    if (matrix) muon.add_fqns("late");
    return b.spec();
  };
  const v1::JobSpec before = plan_of(false, false);
  const absl::StatusOr<ShardPlan> plan = PlanShards(before);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto check = [&](const v1::JobSpec& asked) {
    const absl::StatusOr<Extension> extension = Extend(asked, before, *plan);
    return extension.ok() ? CheckExtension(*plan, *extension) : extension.status();
  };
  EXPECT_TRUE(check(plan_of(true, false)).ok()) << check(plan_of(true, false));
  const absl::Status refused = check(plan_of(false, true));
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("parameter \"late\": node 0 would hold another part of it"),
                    HasSubstr("one rank has all of a matrix of OPTIMIZER_KIND_MUON, so say what is trained when")));
}

// As many as a model has, and a group that names all of them.
TEST_F(SameJobTest, ADescriptionGrowsWithWhatIsTrained) {
  const auto many = [](bool trains_all) {
    SpecBuilder builder = Model(false);
    for (int i = 0; i < 3000; ++i) {
      const std::string name = absl::StrCat("a_long_name_of_a_parameter_", i);
      builder.Param(0, name, {1}, {.requires_grad = trains_all});
      if (trains_all) {
        if (i == 0) builder.config().mutable_optimizer()->add_groups()->add_fqns("w");
        builder.config().mutable_optimizer()->mutable_groups(0)->add_fqns(name);
      }
    }
    return builder.spec();
  };
  const v1::JobSpec narrow = many(false);
  const v1::JobSpec wide = many(true);
  ASSERT_GT(wide.ByteSizeLong(), narrow.ByteSizeLong() + (64 << 10));
  const auto own = Own(narrow);
  EXPECT_EQ(Check(own.get(), true, Hello(wide, true)).code(), kComesAgain);
  EXPECT_EQ(missed_.size(), 1u);
  const absl::Status larger = Check(own.get(), false, Hello(wide, false));
  EXPECT_EQ(larger.code(), kAnother) << "it is not planned";
  EXPECT_THAT(std::string(larger.message()), HasSubstr("a larger one"));
}

}  // namespace
}  // namespace shardd
