// Parameters of several nodes, gathered over queues of this process and over the daemons' sockets.

#include "server/collective/nodes/node_gather.h"

#include <atomic>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "tests/server/collective/nodes/gather_world.h"

namespace shardd::testing {
namespace {

using ::testing::HasSubstr;

struct Case {
  int nodes;
  bool sockets;
  v1::Layout layout;
  DType param_dtype;
  bool gpus = false;  // by NCCL
  int row = 0;        // as GatherSpec
  bool float8 = false;
};

class NodeGatherTest : public ::testing::TestWithParam<Case> {
 protected:
  static v1::JobSpec Spec() {
    return GatherSpec(GetParam().nodes, GetParam().layout, GetParam().param_dtype, GetParam().row, GetParam().float8);
  }
};

class OneSidedGatherTest : public NodeGatherTest {};

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  return absl::StrCat(info.param.nodes, info.param.row > 0 ? absl::StrCat("InRowsOf", info.param.row) : "",
                      info.param.gpus      ? "ByNccl"
                      : info.param.sockets ? "OverSockets"
                                           : "OverQueues",
                      info.param.layout == v1::LAYOUT_FLAT ? "Flat" : "Dim0",
                      info.param.param_dtype == v1::DTYPE_BFLOAT16 ? "Bf16" : "Fp32",
                      info.param.float8 ? "Float8" : "");
}

const auto kOneSided = ::testing::Values(
    Case{2, false, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED}, Case{3, false, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16},
    Case{2, false, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16}, Case{3, false, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED},
    Case{3, true, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16}, Case{4, false, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16, false, 2},
    Case{6, true, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED, false, 3},
    Case{3, true, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16, false, 0, true},
    Case{2, false, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED, false, 0, true},
    Case{6, false, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16, false, 3, true});
INSTANTIATE_TEST_SUITE_P(Nodes, NodeGatherTest, kOneSided, NameOf);
INSTANTIATE_TEST_SUITE_P(Nodes, OneSidedGatherTest, kOneSided, NameOf);
INSTANTIATE_TEST_SUITE_P(OnGpus, NodeGatherTest,
                         ::testing::Values(Case{2, false, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED, true},
                                           Case{3, false, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16, true},
                                           Case{4, false, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16, true, 2},
                                           Case{6, false, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED, true, 3}),
                         NameOf);

TEST_P(NodeGatherTest, AllNodesHaveWhatTheOthersHold) {
  GatherWorld world(Spec(), GetParam().sockets, GetParam().gpus);
  const auto groups = static_cast<int>(world.node[0]->plan->groups.size());
  const int tiny = world.node[0]->plan->FindGroup("tiny");
  ASSERT_TRUE(GatherParts(*world.node[0]->plan, tiny, world.nodes - 1).bytes() == 0) << "somebody holds nothing of it";
  for (uint64_t version = 1; version <= 3; ++version) {
    std::vector<std::thread> threads;
    for (int i = 0; i < world.nodes; ++i) {
      threads.emplace_back([&, i] {
        GatherNode& node = *world.node[i];
        node.SetVersion(version);
        std::vector<std::unique_ptr<Gathered>> all;
        for (int turn = 0; turn < 2 * groups; ++turn) {  // as many at a time as may be, from another one on
          all.push_back(node.Ask(1, (turn + i) % groups, version));
        }
        for (int turn = 0; turn < 2 * groups; ++turn) {
          EXPECT_TRUE(all[turn]->Wait().ok()) << all[turn]->Wait();
          node.Check(*all[turn], (turn + i) % groups, version);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_FALSE(HasFailure()) << "version " << version;
    // Nobody asks any more: all may be written.
  }
}

TEST_P(NodeGatherTest, VersionThatIsNotThereYetIsWaitedFor) {
  GatherWorld world(Spec(), GetParam().sockets, GetParam().gpus);
  const int large = world.node[0]->plan->FindGroup("large");
  for (int i = 0; i < world.nodes; ++i) {
    world.node[i]->SetVersion(i == 1 ? 4 : 5);
  }
  const std::unique_ptr<Gathered> gathered = world.node[0]->Ask(1, large, 5);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(gathered->done());
  world.node[1]->SetVersion(5);
  EXPECT_TRUE(gathered->Wait().ok()) << gathered->Wait();
  world.node[0]->Check(*gathered, large, 5);
}

// Where nodes gather by NCCL, the one that asks refuses by itself what it has gone on from, and no other one has gone
// on before it.
TEST_P(OneSidedGatherTest, EarlierVersionsAreRefused) {
  GatherWorld world(Spec(), GetParam().sockets);
  const int large = world.node[0]->plan->FindGroup("large");
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(5);
  const absl::Status late = world.node[0]->Ask(1, large, 4)->Wait();
  EXPECT_TRUE(absl::IsFailedPrecondition(late)) << late;
  EXPECT_THAT(late.message(), HasSubstr("does not send version 4: it has version 5 now"));
  const std::unique_ptr<Gathered> next = world.node[0]->Ask(1, large, 5);
  EXPECT_TRUE(next->Wait().ok()) << "a refusal ends but the one: " << next->Wait();
}

// Nodes go on when they like, in the middle of what others ask for: what is gathered is of the version, or refused.
TEST_P(OneSidedGatherTest, SlabIsWrittenWhenNobodyReadsIt) {
  constexpr uint64_t kVersions = 12;
  GatherWorld world(Spec(), GetParam().sockets);
  const auto groups = static_cast<int>(world.node[0]->plan->groups.size());
  std::atomic<int> gathered = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < world.nodes; ++i) {
    threads.emplace_back([&, i] {
      GatherNode& node = *world.node[i];
      std::minstd_rand random(static_cast<uint32_t>(i) + 1);
      for (uint64_t version = 1; version <= kVersions; ++version) {
        const uint64_t asked = version;
        node.SetVersion(version);
        std::vector<std::unique_ptr<Gathered>> all;
        for (int group = 0; group < groups; ++group) {
          all.push_back(node.Ask(1, group, version));
        }
        absl::SleepFor(absl::Microseconds(random() % 4000));
        if (version % 3 != 0) {  // the others may still read; every third version is waited for
          node.SetVersion(++version);
        }
        for (int group = 0; group < groups; ++group) {
          const absl::Status status = all[group]->Wait();
          EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
          if (status.ok()) {
            node.Check(*all[group], group, asked);
            ++gathered;
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_GT(gathered, 0);
}

// A new generation at any moment: what is gathered is right, or given up and not touched any more.
TEST_P(NodeGatherTest, GenerationsEndAtEveryMoment) {
  GatherWorld world(Spec(), GetParam().sockets, GetParam().gpus);
  const int large = world.node[0]->plan->FindGroup("large");
  const int block = world.node[0]->plan->FindGroup("block");
  for (int i = 0; i < world.nodes; ++i) {
    world.node[i]->SetVersion(7);
  }
  std::minstd_rand random(3);
  std::vector<std::unique_ptr<Gathered>> given_up;
  for (uint64_t generation = 1; generation <= 20; ++generation) {
    std::vector<std::vector<std::unique_ptr<Gathered>>> all(static_cast<size_t>(world.nodes));
    std::vector<std::thread> threads;
    for (int i = 0; i < world.nodes; ++i) {
      const uint32_t first = random() % 2000;
      const uint32_t last = random() % 12'000;
      threads.emplace_back([&, i, first, last] {
        GatherNode& node = *world.node[i];
        node->Begin(generation);
        all[i].push_back(node.Ask(generation, block, 7));
        absl::SleepFor(absl::Microseconds(first));
        all[i].push_back(node.Ask(generation, large, 7));
        absl::SleepFor(absl::Microseconds(last));
        node->Begin(generation + 1);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (int i = 0; i < world.nodes; ++i) {
      for (std::unique_ptr<Gathered>& one : all[i]) {
        const absl::Status status = one->Wait();
        if (status.ok()) {
          world.node[i]->Check(*one, &one == &all[i][0] ? block : large, 7);
        } else {
          ASSERT_TRUE(absl::IsAborted(status)) << status;
          one->image.assign(one->image.size(), 'x');
          given_up.push_back(std::move(one));
        }
      }
    }
    ASSERT_FALSE(HasFailure()) << "generation " << generation;
  }
  EXPECT_FALSE(given_up.empty());
  const std::unique_ptr<Gathered> last = world.node[0]->Ask(50, large, 7);
  EXPECT_TRUE(last->Wait().ok()) << last->Wait();
  world.node[0]->Check(*last, large, 7);
  for (const std::unique_ptr<Gathered>& one : given_up) {
    ASSERT_EQ(one->image.find_first_not_of('x'), std::string::npos) << "written after it was told";
  }
}

TEST_P(NodeGatherTest, LostNodeEndsGathersAndTheNextGenerationGoesOn) {
  GatherWorld world(Spec(), GetParam().sockets, GetParam().gpus);
  const int large = world.node[0]->plan->FindGroup("large");
  const int lost = world.nodes - 1;
  const int first = world.nodes - NodesOfRow(*world.node[0]->plan);  // of its row, the others ask nothing of
  std::vector<std::unique_ptr<Gathered>> given_up;
  for (uint64_t generation = 1; generation <= 6; generation += 2) {
    for (int i = 0; i < world.nodes; ++i) {
      world.node[i]->SetVersion(generation);
    }
    if (generation > 1) world.node[lost]->operator->()->SetReadable(0);  // it is lost before it has sent anything
    std::vector<std::unique_ptr<Gathered>> all;
    for (int i = 0; i < world.nodes; ++i) {
      all.push_back(world.node[i]->Ask(generation, large, generation));
    }
    absl::SleepFor(absl::Microseconds(300 * generation));
    world.Leave(lost);
    EXPECT_TRUE(all[lost]->Wait().ok() || absl::IsAborted(all[lost]->Wait()) || absl::IsUnavailable(all[lost]->Wait()));
    for (int i = 0; i < lost; ++i) {
      ASSERT_TRUE(PollUntil([&] { return !world.node[i]->up(lost); }));
      const absl::Status status = all[i]->Wait();
      const bool of_row = i >= first;
      if (!of_row && !GetParam().gpus) {
        EXPECT_TRUE(status.ok()) << status;
        continue;
      }
      // NCCL has one order of all rows, which the loss ends; what another row does by then may be done.
      EXPECT_TRUE(absl::IsUnavailable(status) || ((generation == 1 || !of_row) && status.ok())) << status;
      const absl::Status later = world.node[i]->Ask(generation, large, generation)->Wait();
      EXPECT_TRUE(absl::IsUnavailable(later)) << "the generation has ended: " << later;
      EXPECT_THAT(later.message(), HasSubstr(absl::StrCat("node ", lost)));
      all[i]->image.assign(all[i]->image.size(), 'x');
    }
    all.erase(all.begin() + lost);
    given_up.insert(given_up.end(), std::make_move_iterator(all.begin() + first), std::make_move_iterator(all.end()));
    world.Join(lost);
    world.WaitUp();
    world.node[lost]->SetVersion(generation);
    for (int i = 0; i < world.nodes; ++i) {
      const std::unique_ptr<Gathered> next = world.node[i]->Ask(generation + 1, large, generation);
      EXPECT_TRUE(next->Wait().ok()) << next->Wait();
      world.node[i]->Check(*next, large, generation);
    }
    ASSERT_FALSE(HasFailure()) << "generation " << generation;
  }
  for (const std::unique_ptr<Gathered>& one : given_up) {
    ASSERT_EQ(one->image.find_first_not_of('x'), std::string::npos) << "written after it was told";
  }
}

// A byte for each element and one for each block, where bf16 takes two for each element.
TEST(NodeGather, Float8TakesHalfTheBytesOfBf16) {
  int64_t received[2] = {0, 0};
  for (const bool float8 : {false, true}) {
    GatherWorld world(GatherSpec(2, v1::LAYOUT_DIM0, v1::DTYPE_BFLOAT16, 0, float8), /*sockets=*/true);
    for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(1);
    const int large = world.node[0]->plan->FindGroup("large");
    const std::unique_ptr<Gathered> gathered = world.node[0]->Ask(1, large, 1);
    ASSERT_TRUE(gathered->Wait().ok()) << gathered->Wait();
    const std::string described = world.node[0]->operator->()->Describe();
    ASSERT_TRUE(absl::SimpleAtoi(
        described.substr(described.find(": ") + 2, described.find(" bytes") - described.find(": ") - 2),
        &received[float8 ? 1 : 0]))
        << described;
  }
  const int64_t numel = int64_t{349} * 1001;  // the rows of node 1
  EXPECT_EQ(received[0], 2 * numel);
  EXPECT_EQ(received[1], numel + (numel + 127) / 128);
}

TEST(NodeGather, ANodeOfAnotherRowIsRefused) {
  GatherWorld world(GatherSpec(4, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED, 2), /*sockets=*/false);
  for (int i = 0; i < world.nodes; ++i) world.node[i]->SetVersion(1);
  v1::PeerMessage message;
  message.set_generation(1);
  message.mutable_pull()->set_transfer(1);
  message.mutable_pull()->set_group(0);
  message.mutable_pull()->set_version(1);
  const std::unique_ptr<Gathered> under_way = world.node[0]->Ask(1, world.node[0]->plan->FindGroup("large"), 1);
  world.links[2]->Send(0, message);
  EXPECT_TRUE(under_way->Wait().ok()) << "of its own row: " << under_way->Wait();
  // It did not ask for that, and gives up; what it is told says why.
  const std::unique_ptr<Gathered> next = world.node[2]->Ask(1, 0, 1);
  EXPECT_TRUE(PollUntil([&] { return !world.node[2]->Ask(1, 0, 1)->Wait().ok(); })) << next->Wait();
}

TEST_P(NodeGatherTest, EndWhileGathersAreUnderWay) {
  for (int turn = 0; turn < 6; ++turn) {
    GatherWorld world(Spec(), GetParam().sockets, GetParam().gpus);
    std::vector<std::unique_ptr<Gathered>> all;
    for (int i = 0; i < world.nodes; ++i) {
      world.node[i]->SetVersion(1);
      all.push_back(world.node[i]->Ask(1, world.node[0]->plan->FindGroup("large"), 1));
    }
    absl::SleepFor(absl::Microseconds(400 * turn));
    for (int i = 0; i < world.nodes; ++i) world.Leave(i);
    for (const std::unique_ptr<Gathered>& one : all) {
      EXPECT_TRUE(one->done()) << "told when the gathers are gone";
    }
  }
}

}  // namespace
}  // namespace shardd::testing
