// Nodes that reach each other through a network that harms connections at random, by seeds: links end, begin again, are
// silent, slow or doubled at any moment of a job, and what is trained has the bits of a run that nobody disturbs.

#include <sys/resource.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/long_run.h"
#include "tests/testing/tcp_proxy.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::TcpProxy;
using Fault = TcpProxy::Fault;

// For each kind of job; three nodes take long to find each other. A long run: SHARDD_PROXY_SEEDS=30.
int Seeds(int nodes) { return testing::LongRun("SHARDD_PROXY_SEEDS", nodes > 2 ? 1 : 2); }

constexpr int kSteps = 300;
constexpr int kBursts = 5;  // of harm, each at a step of its own

struct ProxyCase {
  const char* name;
  const char* strategy;
  int nodes;
};

class NodesProxy : public Nodes, public ::testing::WithParamInterface<ProxyCase> {
 protected:
  static Args Training(const std::string& name) {
    return {
        {"name", name},   {"strategy", GetParam().strategy}, {"steps", absl::StrCat(kSteps)}, {"optimizer", "adamw"},
        {"recover", "1"}, {"silence_ms", "60000"},           {"timeout_ms", "60000"}};
  }
  static bool AllEnded(std::vector<Child>& ranks) {
    bool all = true;
    for (Child& rank : ranks) all = rank.Ended() && all;
    return all;
  }
  // For a while every new connection is harmed by chance, and now and then all of a node at once.
  void Harm(std::mt19937_64& random) {
    constexpr Fault kOfAll[] = {Fault::kClose,       Fault::kReset,       Fault::kResetCaller, Fault::kResetTarget,
                                Fault::kFinToCaller, Fault::kFinToTarget, Fault::kSilence};
    for (int k = 0; k < count(); ++k) proxy(k).SetChoose(TcpProxy::Random(random()));
    for (const absl::Time end = absl::Now() + absl::Milliseconds(20 + random() % 800); absl::Now() < end;) {
      proxy(static_cast<int>(random() % static_cast<uint64_t>(count()))).HarmAll(kOfAll[random() % std::size(kOfAll)]);
      absl::SleepFor(absl::Milliseconds(5 + random() % 150));
    }
    // What is half dead goes at once, or when somebody notices it.
    const bool resets = random() % 2 == 0;
    for (int k = 0; k < count(); ++k) {
      proxy(k).SetChoose(nullptr);
      if (resets) proxy(k).HarmAll(Fault::kReset);
    }
  }
  // At random steps; with some seeds also before the first one, or while ranks finish.
  void HarmAtSteps(uint64_t seed, const Args& args, std::vector<Child>& ranks) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> steps;
    for (int burst = 0; burst < kBursts; ++burst) steps.push_back(static_cast<int64_t>(random() % kSteps));
    if (seed % 2 == 1) steps.front() = 0;
    if (seed % 3 == 2) steps.back() = kSteps;
    std::sort(steps.begin(), steps.end());
    for (const int64_t step : steps) {
      ASSERT_TRUE(testing::PollUntil([&] {
        return AllEnded(ranks) || node(0).Job(args.Text("name")).committed_step() >= step;
      })) << "step "
          << step << " does not come";
      if (AllEnded(ranks)) return;
      Harm(random);
    }
  }
};

TEST_P(NodesProxy, HarmedConnectionsDoNotChangeTheResult) {
  BehindProxies();
  Start(GetParam().nodes, 1, {"--peer_keepalive_ms=1000"});
  const std::vector<TrainerReport> want = RunAll(Training("undisturbed"));
  int aborts = 0;
  for (int seed = 1; seed <= Seeds(count()); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const Args args = Training(absl::StrCat("seed-", seed));
    std::vector<Child> ranks = StartRanks(args);
    HarmAtSteps(static_cast<uint64_t>(seed), args, ranks);
    std::vector<TrainerReport> reports;
    for (int k = 0; k < count(); ++k) {
      EXPECT_EQ(ranks[static_cast<size_t>(k)].Wait(), 0)
          << "node " << k << testing::ReadWholeFile(absl::StrCat(node(k).Folder(args), "/log.0"));
      reports.push_back(Report(k, 0, args));
      aborts +=
          static_cast<int>(std::count_if(reports.back().notes.begin(), reports.back().notes.end(),
                                         [](const std::string& note) { return absl::StartsWith(note, "aborted "); }));
    }
    ExpectAllOk(reports);
    ExpectSame(reports, want);
    if (HasFailure()) return;
  }
  EXPECT_GE(aborts, Seeds(count())) << "little was harmed while it trained";
  for (int k = 0; k < count(); ++k) EXPECT_TRUE(node(k).DaemonAlive()) << k;
}

// What is open is served, and nothing else is opened, while links end and begin again.
TEST_P(NodesProxy, LinksOfANodeWithoutDescriptorsComeAgain) {
  if (GetParam().nodes > 2 && Seeds(3) == 1) GTEST_SKIP() << "takes a minute; a long run has it (SHARDD_PROXY_SEEDS=2)";
  BehindProxies();
  Start(GetParam().nodes, 1, {"--peer_keepalive_ms=1000"});
  const std::vector<TrainerReport> want = RunAll(Training("undisturbed"));
  const Args args = Training("no-files");
  std::vector<Child> ranks = StartRanks(args);
  const auto step = [&] { return node(0).Job(args.Text("name")).committed_step(); };
  for (int k = 0; k < count(); ++k) {
    const int64_t first = step();
    ASSERT_TRUE(testing::PollUntil([&] { return AllEnded(ranks) || step() >= first + 10; }));
    ASSERT_FALSE(AllEnded(ranks)) << "too few steps";
    rlimit before{};
    ASSERT_EQ(prlimit(node(k).daemon_pid(), RLIMIT_NOFILE, nullptr, &before), 0);
    const rlimit none = {3, before.rlim_max};
    ASSERT_EQ(prlimit(node(k).daemon_pid(), RLIMIT_NOFILE, &none, nullptr), 0);
    for (int other = 0; other < count(); ++other) proxy(other).HarmAll(Fault::kReset);
    absl::SleepFor(absl::Milliseconds(1500));  // some tries to begin again
    ASSERT_EQ(prlimit(node(k).daemon_pid(), RLIMIT_NOFILE, &before, nullptr), 0);
    ASSERT_TRUE(node(k).DaemonAlive()) << k;
  }
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(2 * testing::kLimit), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  ExpectSame(reports, want);
}

INSTANTIATE_TEST_SUITE_P(Jobs, NodesProxy,
                         ::testing::Values(ProxyCase{"Cut", "FULL_SHARD", 2}, ProxyCase{"Replicas", "HYBRID_SHARD", 2},
                                           ProxyCase{"CutOfThree", "FULL_SHARD", 3},
                                           ProxyCase{"ReplicasOfThree", "HYBRID_SHARD", 3}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
