// Nodes that reach each other through a network that harms connections at random, by seeds: links end, begin again, are
// silent, slow or doubled at any moment of a job, and what is trained has the bits of a run that nobody disturbs.

#include <memory>
#include <random>
#include <string>
#include <vector>

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

// For each kind of job. A long run: SHARDD_PROXY_SEEDS=30.
int Seeds() { return testing::LongRun("SHARDD_PROXY_SEEDS", 2); }

// The network is harmed until all ranks have ended, but no longer than this.
constexpr absl::Duration kHarmed = absl::Seconds(5);

struct ProxyCase {
  const char* name;
  const char* strategy;
  int nodes;
};

class NodesProxy : public Nodes, public ::testing::WithParamInterface<ProxyCase> {
 protected:
  static Args Training(const std::string& name) {
    return {{"name", name},   {"strategy", GetParam().strategy}, {"steps", "300"},       {"optimizer", "adamw"},
            {"recover", "1"}, {"silence_ms", "60000"},           {"timeout_ms", "60000"}};
  }
  std::vector<Child> StartRanks(const Args& args) {
    std::vector<Child> ranks;
    for (int k = 0; k < count(); ++k) ranks.push_back(StartRank(k, 0, args));
    return ranks;
  }
  static bool AllEnded(std::vector<Child>& ranks) {
    bool all = true;
    for (Child& rank : ranks) all = rank.Ended() && all;
    return all;
  }
  // Every new connection is harmed by chance, and now and then all of a node at once.
  void Harm(uint64_t seed, std::vector<Child>& ranks) {
    for (int k = 0; k < count(); ++k) proxy(k).SetChoose(TcpProxy::Random(seed * 100 + static_cast<uint64_t>(k)));
    std::mt19937_64 random(seed);
    constexpr Fault kOfAll[] = {Fault::kClose,       Fault::kReset,       Fault::kResetCaller, Fault::kResetTarget,
                                Fault::kFinToCaller, Fault::kFinToTarget, Fault::kSilence};
    for (const absl::Time end = absl::Now() + kHarmed; absl::Now() < end && !AllEnded(ranks);) {
      absl::SleepFor(absl::Milliseconds(5 + random() % 150));
      proxy(static_cast<int>(random() % static_cast<uint64_t>(count()))).HarmAll(kOfAll[random() % std::size(kOfAll)]);
    }
  }
  // What is half dead goes.
  void Heal() {
    for (int k = 0; k < count(); ++k) {
      proxy(k).SetChoose(nullptr);
      proxy(k).HarmAll(Fault::kReset);
    }
  }
};

TEST_P(NodesProxy, WhateverConnectionsDoTheResultIsThatOfAnUndisturbedRun) {
  BehindProxies();
  Start(GetParam().nodes, 1, {"--peer_keepalive_ms=1000"});
  const std::vector<TrainerReport> want = RunAll(Training("undisturbed"));
  int aborts = 0;
  for (int seed = 1; seed <= Seeds(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const Args args = Training(absl::StrCat("seed-", seed));
    std::vector<Child> ranks = StartRanks(args);
    Harm(static_cast<uint64_t>(seed), ranks);
    Heal();
    std::vector<TrainerReport> reports;
    for (int k = 0; k < count(); ++k) {
      ASSERT_EQ(ranks[static_cast<size_t>(k)].Wait(), 0)
          << "node " << k << testing::ReadWholeFile(absl::StrCat(node(k).Folder(args), "/log.0"));
      reports.push_back(Report(k, 0, args));
      aborts += reports.back().Note("aborted").empty() ? 0 : 1;
    }
    ExpectAllOk(reports);
    ExpectSame(reports, want);
    if (HasFailure()) return;
  }
  EXPECT_GT(aborts, 0) << "nothing was harmed while it trained";
  for (int k = 0; k < count(); ++k) EXPECT_TRUE(node(k).DaemonAlive()) << k;
}

INSTANTIATE_TEST_SUITE_P(Jobs, NodesProxy,
                         ::testing::Values(ProxyCase{"Cut", "FULL_SHARD", 2}, ProxyCase{"Replicas", "HYBRID_SHARD", 2},
                                           ProxyCase{"CutOfThree", "FULL_SHARD", 3},
                                           ProxyCase{"ReplicasOfThree", "HYBRID_SHARD", 3}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
