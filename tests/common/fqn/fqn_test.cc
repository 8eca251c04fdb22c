#include "common/fqn/fqn.h"

#include <gtest/gtest.h>

#include <random>

namespace shardd {
namespace {

TEST(CleanFqn, DropsEveryWrapperWhereverItStands) {
  EXPECT_EQ(CleanFqn("module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight"), "layers.0.weight");
  EXPECT_EQ(CleanFqn("_orig_mod.layers.0._fsdp_wrapped_module.bias"), "layers.0.bias");
  EXPECT_EQ(CleanFqn("layers.0._fsdp_wrapped_module._flat_param"), "layers.0");
}

TEST(CleanFqn, DropsModuleOnlyAsAPrefix) {
  EXPECT_EQ(CleanFqn("module.module.weight"), "weight");
  EXPECT_EQ(CleanFqn("_orig_mod.module.weight"), "weight");
  EXPECT_EQ(CleanFqn("encoder.module.weight"), "encoder.module.weight");
  EXPECT_EQ(CleanFqn("module_list.weight"), "module_list.weight");
}

TEST(CleanFqn, KeepsNamesThatMerelyContainAWrapperPrefix) {
  EXPECT_EQ(CleanFqn("my_orig_mod.x_flat_param"), "my_orig_mod.x_flat_param");
  EXPECT_EQ(CleanFqn("layers._orig_module.weight"), "layers._orig_module.weight");
}

TEST(CleanFqn, OfWrappersAloneIsEmpty) {
  EXPECT_EQ(CleanFqn(""), "");
  EXPECT_EQ(CleanFqn("module"), "");
  EXPECT_EQ(CleanFqn("module._fsdp_wrapped_module._orig_mod"), "");
}

TEST(CleanFqn, IsIdempotentAlsoOnOddDots) {
  const char* const parts[] = {
      "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_flat_param", "", "a", "layers",
      "0"};
  constexpr uint32_t kSeed = 20250101;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (int i = 0; i < 20000; ++i) {
    std::string name;
    for (int n = static_cast<int>(random() % 7); n > 0; --n) {
      name += parts[random() % std::size(parts)];
      name += n > 1 ? "." : "";
    }
    const std::string clean = CleanFqn(name);
    ASSERT_EQ(CleanFqn(clean), clean) << "from \"" << name << "\"";
  }
}

TEST(JoinFqn, PutsADotOnlyBetweenNames) {
  EXPECT_EQ(JoinFqn("a.b", "c"), "a.b.c");
  EXPECT_EQ(JoinFqn("", "c"), "c");
  EXPECT_EQ(JoinFqn("a", ""), "a");
}

}  // namespace
}  // namespace shardd
