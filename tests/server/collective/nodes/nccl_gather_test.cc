// What nodes send each other where NCCL gathers their parameters.

#include "server/collective/nodes/nccl/nccl_gather.h"

#include "absl/strings/match.h"
#include "common/clock/monotonic_now.h"
#include "tests/server/collective/nodes/gather_world.h"

namespace shardd::testing {
namespace {

int64_t BytesOf(const ShardPlan& plan, int group, int node) {
  int64_t bytes = 0;
  for (int rank = 0; rank < plan.world_size; ++rank) bytes += RailParts(plan, group, node, rank).bytes();
  return bytes;
}

TEST(NcclGatherTest, PartsCrossTheNetworkOnceForAllPoolsOfANode) {
  GatherWorld world(GatherSpec(3, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16), /*sockets=*/false, /*gpus=*/true);
  const ShardPlan& plan = *world.node[0]->plan;
  const int large = plan.FindGroup("large");
  std::vector<std::unique_ptr<Gathered>> all;
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(1);
  for (int pool = 0; pool < 2; ++pool) {
    for (int i = 0; i < world.nodes; ++i) all.push_back(world.node[i]->Ask(1, large, 1));
  }
  for (size_t k = 0; k < all.size(); ++k) {
    ASSERT_TRUE(all[k]->Wait().ok()) << all[k]->Wait();
    world.node[k % 3]->Check(*all[k], large, 1);
  }
  const int64_t whole = BytesOf(plan, large, 0) + BytesOf(plan, large, 1) + BytesOf(plan, large, 2);
  EXPECT_EQ(whole, 701 * 1001 * 2);
  for (size_t group = 0; group < plan.groups.size(); ++group) {
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(RailParts(plan, static_cast<int>(group), i / 2, i % 2).bytes(),
                RailBytes(plan, static_cast<int>(group), i / 2, i % 2));
    }
  }
  for (int i = 0; i < world.nodes; ++i) {
    const int64_t own = BytesOf(plan, large, i);
    const std::string want = absl::StrCat(whole - own, " bytes gathered, ", 2 * own, " sent");
    EXPECT_TRUE(PollUntil([&] { return absl::StrContains((*world.node[i])->Describe(), want); }))
        << "got " << (*world.node[i])->Describe() << ", want " << want;
  }
}

TEST(NcclGatherTest, NodesThatNeedOtherGroupsAtATimeAllGetThem) {
  GatherWorld world(GatherSpec(3, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(1);
  std::vector<std::unique_ptr<Gathered>> all;
  for (int i = 0; i < world.nodes; ++i) all.push_back(world.node[i]->Ask(1, i, 1));  // others have no place for it
  for (int i = 0; i < world.nodes; ++i) {
    EXPECT_TRUE(all[i]->Wait().ok()) << all[i]->Wait();
    world.node[i]->Check(*all[i], i, 1);
  }
}

TEST(NcclGatherTest, AnOrderForNodesThatAreNotThereFailsTheAttempt) {
  for (const auto& receivers : {std::vector<int>{7}, {-1, 1}, {1, 1}}) {
    GatherWorld world(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
    const int large = world.node[0]->plan->FindGroup("large");
    world.node[1]->SetVersion(1);  // node 0 has nothing yet, so the order is nobody's
    const auto gathered = world.node[1]->Ask(1, large, 1);
    v1::PeerMessage order;
    order.set_generation(1);
    order.mutable_pull()->set_group(large);
    order.mutable_pull()->set_version(1);
    for (const int node : receivers) order.mutable_pull()->add_receivers(node);
    (*world.node[1])->OnPull(0, order);
    EXPECT_THAT(std::string(gathered->Wait().message()), ::testing::HasSubstr("an order for nodes that are not there"));
  }
}

v1::PeerMessage OrderOf(uint64_t sequence, int group, uint64_t version, int receiver) {
  v1::PeerMessage order;
  order.set_generation(1);
  order.mutable_pull()->set_transfer(sequence);
  order.mutable_pull()->set_group(group);
  order.mutable_pull()->set_version(version);
  order.mutable_pull()->add_receivers(receiver);
  return order;
}

TEST(NcclGatherTest, ANodeThatFailsWithoutAGatherTellsAllOthers) {
  GatherWorld world(GatherSpec(3, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  const int large = world.node[0]->plan->FindGroup("large");
  const auto gathered = world.node[1]->Ask(1, large, 1);              // nobody has it yet
  (*world.node[2])->OnPull(0, OrderOf(/*sequence=*/9, large, 1, 1));  // an impossible order
  const auto of_node_0 = world.node[0]->Ask(1, large, 1);
  for (const absl::Status& status : {gathered->Wait(), of_node_0->Wait()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("node 2 gathers nothing more in this attempt"));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("not the next order of gathers"));
  }
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(1);
  const auto next = world.node[1]->Ask(2, large, 1);
  EXPECT_TRUE(next->Wait().ok()) << "the next attempt goes on: " << next->Wait();
}

TEST(NcclGatherTest, Node0DoesNotDecideVersionsThatCannotBe) {
  GatherWorld world(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  const int large = world.node[0]->plan->FindGroup("large");
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(4);
  const auto next = world.node[1]->Ask(1, large, 5);  // which it may have before node 0
  const auto far = world.node[1]->Ask(1, large, 6);
  EXPECT_THAT(std::string(far->Wait().message()),
              ::testing::HasSubstr("node 1 asks for a version that cannot be (got 6, node 0 had 4 last)"));
  EXPECT_TRUE(absl::IsInvalidArgument(next->Wait())) << next->Wait();
}

TEST(NcclGatherTest, OrdersThatHaveNotBegunAreBounded) {
  GatherWorld world(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  const int large = world.node[0]->plan->FindGroup("large");
  const auto failed = [&] {
    return std::string(world.node[1]->Ask(1, large, 0)->Wait().message());  // refused in any case
  };
  constexpr uint64_t kOrders = 1 << 16;
  for (uint64_t sequence = 0; sequence < kOrders; ++sequence) {  // it has no version
    (*world.node[1])->OnPull(0, OrderOf(sequence, large, 1, 0));
  }
  EXPECT_THAT(failed(), ::testing::HasSubstr("no such group"));
  (*world.node[1])->OnPull(0, OrderOf(kOrders, large, 1, 0));
  EXPECT_THAT(failed(), ::testing::HasSubstr("node 0 is too far ahead with its orders of gathers"));
}

TEST(NcclGatherTest, WhoHasNoPartInAGatherMayGoOn) {
  GatherWorld world(GatherSpec(3, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  const ShardPlan& plan = *world.node[0]->plan;
  const int tiny = plan.FindGroup("tiny");
  ASSERT_GT(BytesOf(plan, tiny, 0), 0);
  ASSERT_EQ(BytesOf(plan, tiny, 2), 0);
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(i == 2 ? 2 : 1);
  const auto gathered = world.node[1]->Ask(1, tiny, 1);
  ASSERT_TRUE(gathered->Wait().ok()) << gathered->Wait();
  world.node[1]->Check(*gathered, tiny, 1);
}

TEST(NcclGatherTest, OverdueNamesGroupAndVersion) {
  GatherWorld world(GatherSpec(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED), /*sockets=*/false, /*gpus=*/true);
  const int large = world.node[0]->plan->FindGroup("large");
  world.node[0]->SetVersion(2);  // node 1 has nothing yet
  const auto gathered = world.node[0]->Ask(1, large, 2);
  const auto overdue = [&] { return (*world.node[0])->Overdue(MonotonicNow(), absl::ZeroDuration()); };
  EXPECT_TRUE(PollUntil([&] {
    return absl::StrContains(overdue(),
                             "the other nodes have not sent their parts of group \"large\" of version 2 for");
  })) << overdue();
  EXPECT_EQ((*world.node[0])->Overdue(MonotonicNow(), absl::Seconds(60)), "");
  world.node[1]->SetVersion(2);
  EXPECT_TRUE(gathered->Wait().ok()) << gathered->Wait();
  EXPECT_EQ(overdue(), "");
}

}  // namespace
}  // namespace shardd::testing
