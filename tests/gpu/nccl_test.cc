// NVIDIA's NCCL on one GPU: SHARDD_NCCL_LIBRARY is its path, else libnccl.so.2. Sums of more members than GPUs are what
// NCCL refuses; what the product does then is shown here, sums themselves only of one member.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "server/collective/nccl/nccl_communicators.h"
#include "tests/gpu/real_cuda_world.h"
#include "tests/server/collective/nccl/nccl_node.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class RealNcclTest : public ::testing::Test {
 protected:
  static constexpr int64_t kNumel = 1'000'003;
  void SetUp() override {
    if (const std::string why_not = world_.why_not(); !why_not.empty()) GTEST_SKIP() << why_not;
    const char* const path = std::getenv("SHARDD_NCCL_LIBRARY");
    auto library = NcclLibrary::Load(path == nullptr || *path == '\0' ? NcclLibrary::kDefault : path);
    if (!library.ok()) {
      ASSERT_TRUE(path == nullptr || *path == '\0') << library.status();  // who names one wants it tested
      GTEST_SKIP() << library.status();
    }
    library_ = std::make_unique<NcclLibrary>(*library);
    device_ = world_.Make();
    slab_ = *device_->memory()->MakeSlab("gradients", 3 * kNumel * 4, {device_->memory()});
  }
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> Make(const std::vector<int>& ordinals, bool takes_window = false) {
    NcclCommunicator::Options options;
    options.takes_window = takes_window;
    auto made = NcclCommunicator::Create(*library_, world_.driver(), ordinals, options);
    if (made.ok()) made_.push_back(*made);
    return made;
  }
  void TearDown() override {
    slab_.reset();
    device_.reset();
    for (const auto& communicator : made_) {
      for (int i = 0; i < 30000 && !communicator.expired(); ++i) absl::SleepFor(absl::Milliseconds(1));
      EXPECT_TRUE(communicator.expired()) << "its abort does not end";
    }
  }
  absl::Status Sum(NcclCommunicator* communicator, bool scatter, float* src, float* dst) {
    SumOp sum;
    sum.communicator = communicator;
    sum.member = 0;
    sum.scatter = scatter;
    sum.numel = kNumel;
    if (scatter) {
      sum.parts = {{src, dst, kNumel, 0}};
    } else {
      sum.parts = {{src, dst, 77, root_}, {src + 77, dst + 77, kNumel - 77, root_}};
    }
    absl::Notification notification;
    absl::Status result;
    device_->Submit(StreamId::kPostBackward, {"sum", {sum}, [&](absl::Status status) {
                                                result = std::move(status);
                                                notification.Notify();
                                              }});
    EXPECT_TRUE(notification.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return result;
  }
  // Where a sum puts what one member has: itself.
  void ExpectSums(NcclCommunicator* communicator) {
    auto* const src = reinterpret_cast<float*>(slab_->data());
    std::vector<float> values(kNumel), got(kNumel);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 9973) / 7 - 500;
    for (const bool scatter : {true, false}) {
      for (float* dst : {src, src + kNumel}) {
        ASSERT_TRUE(device_->memory()->Zero(slab_->data(), 2 * kNumel * 4).ok());
        ASSERT_TRUE(device_->memory()->Write(slab_->data(), values.data(), kNumel * 4).ok());
        const absl::Status summed = Sum(communicator, scatter, src, dst);
        ASSERT_TRUE(summed.ok()) << summed;
        ASSERT_TRUE(device_->memory()->Read(got.data(), reinterpret_cast<char*>(dst), kNumel * 4).ok());
        EXPECT_TRUE(got == values) << (scatter ? "scattered" : "reduced") << (dst == src ? " in place" : "");
      }
    }
  }

  RealCudaWorld world_;
  std::unique_ptr<NcclLibrary> library_;
  std::unique_ptr<CudaDevice> device_;
  std::shared_ptr<DeviceSlab> slab_;
  int root_ = 0;  // of sums that are not scattered
  std::vector<std::weak_ptr<NcclCommunicator>> made_;
};

TEST_F(RealNcclTest, ALoneMemberKeepsItsBitsEvenAfterAnAbort) {
  const absl::Time begin = absl::Now();
  auto communicator = Make({0});
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  std::printf("[ GPU      ] %s; %s; made in %.0f ms\n", (*communicator)->name().c_str(),
              (*communicator)->details().c_str(), absl::ToDoubleMilliseconds(absl::Now() - begin));
  ExpectSums(communicator->get());
  (*communicator)->Break(absl::UnavailableError("enough"));
  auto* const src = reinterpret_cast<float*>(slab_->data());
  const absl::Status refused = Sum(communicator->get(), true, src, src);
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted) << refused;
  auto anew = Make({0});
  ASSERT_TRUE(anew.ok()) << anew.status();
  ExpectSums(anew->get());
}

// A slab of cuMemCreate as NCCL wants it. With one member no kernel reads another's GPU; that takes NVLink and two.
TEST_F(RealNcclTest, ASlabServesAsWindowUntilDeregisteredOrAborted) {
  auto communicator = Make({0}, /*takes_window=*/true);
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  absl::Time begin = absl::Now();
  const absl::Status registered = (*communicator)->RegisterWindow({slab_});
  if (absl::IsFailedPrecondition(registered)) GTEST_SKIP() << registered;
  ASSERT_TRUE(registered.ok()) << registered;
  std::printf("[ GPU      ] a window of %lld bytes: registered in %.1f ms", static_cast<long long>(slab_->size_bytes()),
              absl::ToDoubleMilliseconds(absl::Now() - begin));
  ExpectSums(communicator->get());
  EXPECT_EQ(slab_.use_count(), 2);
  begin = absl::Now();
  const absl::Status deregistered = (*communicator)->DeregisterWindow();
  ASSERT_TRUE(deregistered.ok()) << deregistered;
  std::printf(", deregistered in %.1f ms\n", absl::ToDoubleMilliseconds(absl::Now() - begin));
  EXPECT_EQ(slab_.use_count(), 1);
  ExpectSums(communicator->get());
  const absl::Status again = (*communicator)->RegisterWindow({slab_});
  ASSERT_TRUE(again.ok()) << again;
  ExpectSums(communicator->get());
  (*communicator)->Break(absl::UnavailableError("enough"));
  for (int i = 0; i < 30000 && slab_.use_count() > 1; ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(slab_.use_count(), 1) << "the abort does not let go of it";
}

TEST_F(RealNcclTest, TwoMembersOrRanksOnOneGpuAreRefused) {
  const absl::Status refused = Make({0, 0}).status();
  std::printf("[ GPU      ] two members: %s\n", std::string(refused.message()).c_str());
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("cuda:0"));
  NcclCommunicators communicators(*library_, world_.driver(), {0});
  EXPECT_THAT(std::string(communicators.For(2).status().message()),
              HasSubstr("NCCL wants a GPU for each rank (got 2 ranks on 1 GPUs)"));
  auto one = Make({0});
  ASSERT_TRUE(one.ok()) << one.status();
  ExpectSums(one->get());
}

// A communicator of several processes, of which this one has all members: what it calls is ncclAllReduce, or, where
// nodes own what they add, ncclReduceScatter.
TEST_F(RealNcclTest, ALoneMemberOfAllNodesAlsoKeepsItsBits) {
  root_ = kAllMembers;
  for (int times = 0; times < 2; ++times) {
    NcclCommunicator::Share share;
    const absl::Status id = library_->Check((*library_)->GetUniqueId(&share.id), "ncclGetUniqueId", "");
    ASSERT_TRUE(id.ok()) << id;
    share.members = 1;
    share.ordinals = {0};
    const auto communicator = NcclCommunicator::Prepare(*library_, world_.driver(), share, {});
    made_.push_back(communicator);
    const absl::Status joined = NcclCommunicator::Join({communicator});
    ASSERT_TRUE(joined.ok()) << joined;
    ExpectSums(communicator.get());
    EXPECT_TRUE(communicator->Ask().ok()) << communicator->Ask();
    communicator->Break(absl::UnavailableError("enough"));
  }
}

// Two daemons on this one GPU: NCCL takes their members for those of two machines, which meet over its sockets. Kernels
// of the two share the GPU by turns, so what this takes says nothing of nodes. Moves go on beside the sums.
TEST_F(RealNcclTest, NodesOnOneGpuSumAndAKilledOneReturns) {
  NcclNodes nodes({"shardd-node-0", "shardd-node-1"});
  const auto sum = [&](uint64_t generation, uint64_t sequences) {
    for (int node = 0; node < 2; ++node) {
      nodes.Begin(node, generation);
      for (uint64_t sequence = 0; sequence < sequences; ++sequence) nodes.Sum(node, generation, sequence);
    }
    for (uint64_t sequence = 0; sequence < sequences; ++sequence) {
      const auto first = nodes.Await(0, generation, sequence);
      const auto second = nodes.Await(1, generation, sequence);
      if (!first.has_value() || !second.has_value()) return std::string("a sum does not end");
      if (first->code != 0 || second->code != 0) return first->bytes + "; " + second->bytes;
      EXPECT_EQ(first->wrong + second->wrong, 0);
      EXPECT_EQ(first->bytes, second->bytes) << "other bits";
    }
    return std::string();
  };
  if (const std::string refused = sum(1, 1); !refused.empty()) {
    GTEST_SKIP() << "NCCL does not sum between two processes on this machine's GPU: " << refused;
  }
  EXPECT_EQ(sum(2, 20), "");
  nodes.Sum(0, 2, 20);
  nodes.PassOn(absl::Milliseconds(200));
  nodes.Kill(1);
  const absl::Time begin = absl::Now();
  nodes.Begin(0, 3);
  const auto aborted = nodes.Await(0, 2, 20);
  ASSERT_TRUE(aborted.has_value()) << "its abort does not end";
  // NCCL may hear of the other's end before it is told.
  EXPECT_THAT(static_cast<absl::StatusCode>(aborted->code),
              ::testing::AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kUnavailable))
      << aborted->bytes;
  std::printf("[ GPU      ] a sum whose other node was killed: ended %.0f ms after it was told\n",
              absl::ToDoubleMilliseconds(absl::Now() - begin));
  nodes.Start(1);
  EXPECT_EQ(sum(4, 5), "");
}

}  // namespace
}  // namespace shardd
