#include "server/job/membership/extensions.h"

#include <gtest/gtest.h>

namespace shardd {
namespace {

std::shared_ptr<const Extension> Training(const std::string& digest) {
  auto extension = std::make_shared<Extension>();
  extension->plan.digest = digest;
  return extension;
}

class ExtensionsTest : public ::testing::Test {
 protected:
  void Ask(int rank, const std::string& digest) {
    extensions_.Ask(
        rank, Training(digest), [this, rank](absl::Status status) { answers_[rank] = std::move(status); },
        [this](const std::shared_ptr<const Extension>& agreed, std::vector<Extensions::Done> waiting) {
          EXPECT_EQ(agreed->plan.digest, "a");
          built_for_ = std::move(waiting);
        });
  }
  Extensions extensions_;
  std::vector<Extensions::Done> built_for_;
  std::map<int, absl::Status> answers_;
};

TEST_F(ExtensionsTest, NamesARankThatAsksForSomethingElseThanTheFirst) {
  Ask(1, "a");
  Ask(2, "a");
  EXPECT_EQ(extensions_.FindDifferent(), extensions_.by_rank().end());
  Ask(0, "b");
  ASSERT_NE(extensions_.FindDifferent(), extensions_.by_rank().end());
  EXPECT_EQ(extensions_.FindDifferent()->first, 1);
}

TEST_F(ExtensionsTest, WhoBuildsAnswersAllThatWait) {
  Ask(0, "a");
  Ask(1, "a");
  extensions_.StartBuild();
  EXPECT_TRUE(extensions_.building());
  Extensions::Answer(extensions_.TakeAll(), absl::CancelledError());
  EXPECT_TRUE(answers_.empty());
  ASSERT_EQ(built_for_.size(), 2u);
  for (const auto& done : built_for_) done(absl::OkStatus());
  EXPECT_EQ(answers_.size(), 2u);
  EXPECT_FALSE(extensions_.building());
}

TEST_F(ExtensionsTest, ARankThatGoesOnAsksNoMore) {
  Ask(0, "a");
  Ask(1, "a");
  extensions_.Take(0)(absl::CancelledError());
  EXPECT_FALSE(extensions_.Has(0));
  Extensions::Answer(extensions_.TakeAll(), absl::AbortedError(""));
  EXPECT_EQ(answers_[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(answers_[1].code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace shardd
