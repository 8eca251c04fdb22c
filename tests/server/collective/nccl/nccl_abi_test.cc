// That NCCL's API is declared as its header declares it: sizes, numbers and the types of every function.

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "server/collective/nccl/nccl_api.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

namespace shardd {
namespace {

static_assert(NCCL_VERSION_CODE >= nccl::kLeastVersion);
static_assert(sizeof(nccl::Result) == sizeof(ncclResult_t) && sizeof(nccl::DataType) == sizeof(ncclDataType_t) &&
              sizeof(nccl::RedOp) == sizeof(ncclRedOp_t));
static_assert(nccl::kSuccess == ncclSuccess && nccl::kUnhandledCudaError == ncclUnhandledCudaError &&
              nccl::kSystemError == ncclSystemError && nccl::kInternalError == ncclInternalError &&
              nccl::kInvalidArgument == ncclInvalidArgument && nccl::kInvalidUsage == ncclInvalidUsage &&
              nccl::kRemoteError == ncclRemoteError && nccl::kInProgress == ncclInProgress);
static_assert(nccl::kFloat32 == ncclFloat32 && nccl::kSum == ncclSum);
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));

static_assert(nccl::kUndefined == NCCL_CONFIG_UNDEF_INT && nccl::kCtaPolicyEfficiency == NCCL_CTA_POLICY_EFFICIENCY &&
              nccl::kCtaPolicyZero == NCCL_CTA_POLICY_ZERO);

static_assert(sizeof(nccl::Window) == sizeof(ncclWindow_t) && nccl::kWinCollSymmetric == NCCL_WIN_COLL_SYMMETRIC &&
              nccl::kWinAlignmentBytes == NCCL_WIN_REQUIRED_ALIGNMENT);

// Ours ends where the members of 2.27 do.
static_assert(offsetof(nccl::Config, size) == offsetof(ncclConfig_t, size) &&
              offsetof(nccl::Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(nccl::Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(nccl::Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              offsetof(nccl::Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize) &&
              offsetof(nccl::Config, min_ctas) == offsetof(ncclConfig_t, minCTAs) &&
              offsetof(nccl::Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs) &&
              offsetof(nccl::Config, net_name) == offsetof(ncclConfig_t, netName) &&
              offsetof(nccl::Config, split_share) == offsetof(ncclConfig_t, splitShare) &&
              offsetof(nccl::Config, traffic_class) == offsetof(ncclConfig_t, trafficClass) &&
              offsetof(nccl::Config, comm_name) == offsetof(ncclConfig_t, commName) &&
              offsetof(nccl::Config, collnet_enable) == offsetof(ncclConfig_t, collnetEnable) &&
              offsetof(nccl::Config, cta_policy) == offsetof(ncclConfig_t, CTAPolicy) &&
              offsetof(nccl::Config, shrink_share) == offsetof(ncclConfig_t, shrinkShare) &&
              offsetof(nccl::Config, nvls_ctas) == offsetof(ncclConfig_t, nvlsCTAs) &&
              sizeof(nccl::Config) <= sizeof(ncclConfig_t));

// Of equal size where one is the other's pointer, number or struct.
template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename... Ours, typename... Theirs>
struct SameCall<nccl::Result (*)(Ours...), ncclResult_t (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return ((sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>)&&...);
    }
    return false;
  }();
};
#define SHARDD_NCCL_COMPARE(name, parameters) \
  static_assert(SameCall<decltype(nccl::Table::name), decltype(&nccl##name)>::value, "nccl" #name);
SHARDD_NCCL_FUNCTIONS(SHARDD_NCCL_COMPARE)
SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_NCCL_COMPARE)
#undef SHARDD_NCCL_COMPARE

TEST(NcclAbiTest, IsThatOfTheHeader) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const nccl::Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
  EXPECT_EQ(ours.comm_name, theirs.commName);
  EXPECT_EQ(ours.nvls_ctas, theirs.nvlsCTAs);
}

}  // namespace
}  // namespace shardd
#else
TEST(NcclAbiTest, IsThatOfTheHeader) {
  GTEST_SKIP() << "no nccl.h here: pip install --no-deps nvidia-nccl-cu13, and a CUDA toolkit's headers";
}
#endif
