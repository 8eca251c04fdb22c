// Ranks of two nodes that store their steps and what they edit between them, by seeded schedules: every version has
// values of its own, so that one that is torn, old or another's is seen.

#include <array>
#include <memory>
#include <random>
#include <tuple>
#include <utility>

#include "tests/server/job/stores_over_nodes.h"

namespace shardd {
namespace {

// Values are minus what a version is behind the first, states of the optimizer twice that.
class JobNodesVersions : public StoresOverNodes, public ::testing::WithParamInterface<std::tuple<v1::Strategy, int>> {
 protected:
  JobNodesVersions() : StoresOverNodes(std::get<0>(GetParam())) {}
  struct Rank {
    uint64_t epoch = 0;
    uint64_t passes = 0;
    uint64_t version = 0;
    int64_t step = 0;
    bool torn = false;
    bool said = false;
    Life::At at = Life::At::kOutside;
  };
  void StoreVersion(int node, uint64_t version) {
    Store(node, -static_cast<float>(version - 1), 2 * static_cast<float>(version - 1));
  }
  void AttachAsRank(int node, Rank* rank) {
    if (!TryAttach(node).ok()) return;
    OnLoop([&] {
      const Committed& committed = job(node).committed();
      *rank = Rank();
      rank->epoch = committed.epoch();
      rank->version = committed.version();
      rank->step = committed.step();
      if (rank->version == 0) return;
      const auto behind = static_cast<float>(rank->version - 1);
      EXPECT_EQ(Value(node), -behind) << "attached, node " << node << " version " << rank->version;
      EXPECT_EQ(*At(job(node).memory().optimizer(), node), 2 * behind) << node;
      EXPECT_EQ(committed.trainer_states()[0], rank->step == 0 ? "" : absl::StrCat("step ", rank->step));
    });
  }
  void BePassed(int node, Rank* rank) {
    if (Passes(node) == rank->passes) return;
    ++rank->passes;
    ++rank->version;
    rank->at = Life::At::kInside;
    OnLoop([&] {
      Session* const session = job(node).sessions()[0].get();
      if (session == nullptr || session->epoch() != rank->epoch) return;
      EXPECT_EQ(job(node).committed().version(), rank->version) << node;
      EXPECT_EQ(Read(node), -static_cast<float>(rank->version - 1)) << "node " << node;
    });
  }
  // Every third version is a pass without a step.
  void MakeVersion(int node, Rank* rank, std::mt19937_64* rng) {
    const bool steps = rank->version % 3 != 0;
    if (!std::exchange(rank->torn, true)) {
      steps ? Backward(node) : Leave(node);
      Store(node, 1000, 1000);
      if ((*rng)() % 4 == 0) return;  // for a while
    }
    rank->torn = false;
    StoreVersion(node, rank->version + 1);
    Enter(node, steps ? ++rank->step : 0);
    rank->at = Life::At::kEntering;
  }
  // What it does next, if it can do anything.
  void Do(int node, Rank* rank, std::mt19937_64* rng) {
    uint64_t epoch = 0;
    OnLoop([&] { epoch = job(node).committed().epoch(); });
    if (!Attached(node)) {
      AttachAsRank(node, rank);
    } else if (rank->epoch != epoch) {
      return;  // it has ended since
    } else if (rank->version == 0) {
      if (!std::exchange(rank->said, true)) CommitParameters(node);
      OnLoop([&] { rank->version = job(node).committed().version(); });
    } else if (rank->at == Life::At::kOutside) {
      StoreVersion(node, rank->version + 1);
      Enter(node);
      rank->at = Life::At::kEntering;
    } else if (rank->at == Life::At::kEntering) {
      BePassed(node, rank);
    } else {
      MakeVersion(node, rank, rng);
    }
  }
  void KillRank(int node, const Rank& rank) {
    bool had = false;
    OnLoop([&] {
      had = job(node).sessions()[0].get() != nullptr;
      if (had) job(node).SessionLost(0, "killed");
    });
    if (had && rank.version > 0) Store(node, 500, 500);
  }
  // From the next word that decides anything on, nothing comes to a node before the link is made anew.
  void BeginLoss() {
    auto cut_off = std::make_shared<std::array<std::atomic<bool>, 2>>();
    wire_.Drop([cut_off](int to, const v1::PeerMessage& message) {
      std::atomic<bool>& cut = (*cut_off)[static_cast<size_t>(to)];
      if (message.has_decided() || message.has_values_agreed() || message.has_held() || message.has_all_hold()) {
        cut = true;
      }
      return cut.load();
    });
  }
  void EndLoss() {
    wire_.SetUp(false);
    wire_.Drop(nullptr);
    wire_.SetUp(true);
  }
  bool AllBehind(uint64_t version) {
    bool result = false;
    OnLoop([&] {
      for (int node = 0; node < 2; ++node) result = result || job(node).committed().version() < version;
    });
    return result;
  }
};

TEST_P(JobNodesVersions, EveryVersionHasItsValues) {
  constexpr uint64_t kVersions = 100;
  const int seed = std::get<1>(GetParam());
  const bool cut = std::get<0>(GetParam()) == v1::STRATEGY_FULL_SHARD;
  std::mt19937_64 rng(static_cast<uint64_t>(seed));
  std::array<Rank, 2> ranks;
  bool up = true;
  int lossy = 0;
  const absl::Time until = MonotonicNow() + absl::Seconds(60);
  while (AllBehind(kVersions) && MonotonicNow() < until && !HasFailure()) {
    const auto node = static_cast<int>(rng() % 2);
    Rank& rank = ranks[static_cast<size_t>(node)];
    const uint64_t what = rng() % static_cast<uint64_t>(24 * (1 + seed));
    if (what == 0) {
      KillRank(node, rank);
    } else if (what == 1 || (!up && rng() % 8 == 0)) {
      if (up && lossy == 0 && rng() % 2 == 0) {
        BeginLoss();
        lossy = 3;
      } else if (lossy == 0) {
        up = !up;
        wire_.SetUp(up);
      }
    } else if (what == 2 && !cut) {
      OnLoop([&] { job(node).CheckSilence(MonotonicNow() + absl::Seconds(150)); });
    } else if (what == 3 && !cut && rng() % 4 == 0 && up && !AllBehind(1)) {
      Kill(node);
      OpenAgain(node);
      rank = Rank();
    }
    if (lossy > 0 && rng() % 12 == 0 && --lossy == 0) EndLoss();
    OnLoop([&] { ASSERT_FALSE(job(node).closed()); });
    Do(node, &rank, &rng);
  }
  EXPECT_FALSE(AllBehind(kVersions)) << job(0).committed().version() << " " << job(1).committed().version() << Why(0)
                                     << Why(1);
}

INSTANTIATE_TEST_SUITE_P(Seeds, JobNodesVersions,
                         ::testing::Combine(::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                                            ::testing::Range(1, 6)));

}  // namespace
}  // namespace shardd
