// Which parameters belong to a module, for full parameters of a part of the model.

#include "common/plan/summon.h"

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

// root(p) / outer(w, tied) / inner(w) ; other(tied as t)
class SummonTest : public ::testing::Test {
 protected:
  SummonTest() {
    builder_.Param(0, "p", {3});
    const int outer = builder_.AddSharded(0, "outer");
    builder_.Param(outer, "w", {3});
    ParamOptions tied;
    tied.storage_id = 7;
    builder_.Param(outer, "tied", {3}, tied);
    const int plain = builder_.Add(outer, "plain");
    builder_.Param(plain, "w", {3});
    const int inner = builder_.AddSharded(plain, "inner");
    builder_.Param(inner, "w", {3});
    const int other = builder_.AddSharded(0, "outer2");
    builder_.Param(other, "t", {3}, tied);
    builder_.Param(other, "w", {3});
    plan_ = builder_.Plan();
  }
  std::vector<std::string> Summoned(const char* group, bool recurse) {
    const int index = group == nullptr ? -1 : plan_.FindGroup(group);
    const std::vector<bool> params = SummonedParams(builder_.spec(), plan_, index, recurse);
    std::vector<std::string> names;
    for (size_t p = 0; p < params.size(); ++p) {
      if (params[p]) names.push_back(plan_.params[p].fqn);
    }
    return names;
  }
  SpecBuilder builder_;
  ShardPlan plan_;
};

TEST_F(SummonTest, WholeModelIsEverything) {
  EXPECT_EQ(Summoned(nullptr, true).size(), plan_.params.size());
  EXPECT_EQ(Summoned("(root)", true).size(), plan_.params.size());
}

TEST_F(SummonTest, OnlyWithRecurseDoesAModuleHaveWhatIsBeneath) {
  EXPECT_THAT(Summoned("outer", true), ElementsAre("outer.w", "outer.tied", "outer.plain.w", "outer.plain.inner.w"));
  EXPECT_THAT(Summoned("outer", false), ElementsAre("outer.w", "outer.tied", "outer.plain.w"));
  EXPECT_THAT(Summoned("(root)", false), ElementsAre("p"));
  EXPECT_THAT(Summoned("outer.plain.inner", true), ElementsAre("outer.plain.inner.w"));
}

TEST_F(SummonTest, TiedParameterBelongsToEachModuleThatUsesIt) {
  EXPECT_THAT(Summoned("outer2", true), ElementsAre("outer.tied", "outer2.w"));
}

}  // namespace
}  // namespace shardd
