#include "server/tenant/tenant.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

JobSecret Secret(absl::string_view text) { return *JobSecret::Create(text); }
Tenant Of(uint32_t uid, absl::string_view text) { return {uid, Secret(text).digest()}; }

constexpr char kSecret[] = "sixteen bytes...";
constexpr char kOther[] = "sixteen bytes,..";

TEST(TenantTest, WithoutASecretTheUidDecides) {
  EXPECT_TRUE((Tenant{7}.Admits({7})));
  EXPECT_FALSE((Tenant{7}.Admits({8})));
  EXPECT_TRUE((Tenant{7}.Admits(Of(7, kSecret)))) << "nobody asks for the secret";
  EXPECT_FALSE((Tenant{7}.Admits(Of(8, kSecret))));
}

TEST(TenantTest, WithASecretBothDecide) {
  const Tenant owner = Of(7, kSecret);
  EXPECT_TRUE(owner.Admits(Of(7, kSecret)));
  EXPECT_FALSE(owner.Admits({7}));
  EXPECT_FALSE(owner.Admits(Of(7, kOther)));
  EXPECT_FALSE(owner.Admits(Of(8, kSecret)));
}

TEST(TenantTest, EqualMeansTheSameSecretOrNone) {
  EXPECT_TRUE((Tenant{7} == Tenant{7}));
  EXPECT_TRUE(Of(7, kSecret) == Of(7, kSecret));
  EXPECT_FALSE((Tenant{7} == Of(7, kSecret)));
  EXPECT_FALSE((Of(7, kSecret) == Tenant{7}));
}

TEST(TenantTest, ADigestContainsNothingOfTheSecret) {
  const std::string plain(64, 'a');
  const SecretDigest digest = *Secret(plain).digest();
  EXPECT_THAT(std::string(digest.begin(), digest.end()), Not(HasSubstr("aaaa")));
  EXPECT_NE(digest, *Secret(kSecret).digest());
}

TEST(TenantTest, ASecretHasALength) {
  for (const size_t size : {size_t{0}, size_t{15}, size_t{65}}) {
    const absl::Status status = JobSecret::Create(std::string(size, 'z')).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << size;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("want 16 to 64"), Not(HasSubstr("zz"))));
  }
  EXPECT_FALSE(JobSecret().digest().has_value());
}

TEST(TenantTest, ARefusalNamesTheRemedyAndWhatWasGiven) {
  const absl::Status none = SecretRefused("attach rank 1", {7});
  EXPECT_TRUE(absl::IsPermissionDenied(none));
  EXPECT_THAT(std::string(none.message()),
              AllOf(HasSubstr("attach rank 1"), HasSubstr("none was given"), HasSubstr("SHARDD_JOB_SECRET")));
  EXPECT_THAT(std::string(SecretRefused("x", Of(7, kSecret)).message()), HasSubstr("another one was given"));
}

TEST(LinkProofTest, IsOfOneJobLinkAndDirection) {
  const std::string key = *Secret(kSecret).LinkKey("job");
  const std::string proof = MakeLinkProof(key, "token", 1, 0);
  EXPECT_EQ(key.size(), 32u);
  EXPECT_TRUE(IsLinkProof(proof, key, "token", 1, 0));
  EXPECT_FALSE(IsLinkProof(proof, key, "token", 0, 1));
  EXPECT_FALSE(IsLinkProof(proof, key, "tokem", 1, 0));
  EXPECT_FALSE(IsLinkProof(proof, *Secret(kSecret).LinkKey("jib"), "token", 1, 0));
  EXPECT_FALSE(IsLinkProof(proof, *Secret(kOther).LinkKey("job"), "token", 1, 0));
}

TEST(LinkProofTest, BothHaveASecretOrNeither) {
  const std::string key = *Secret(kSecret).LinkKey("job");
  EXPECT_EQ(*JobSecret().LinkKey("job"), "");
  EXPECT_TRUE(IsLinkProof("", "", "token", 1, 0));
  EXPECT_FALSE(IsLinkProof("", key, "token", 1, 0));
  EXPECT_FALSE(IsLinkProof(MakeLinkProof(key, "token", 1, 0), "", "token", 1, 0));
}

}  // namespace
}  // namespace shardd
