// Jobs over two nodes whose ranks train more from a step on: the same bits as on one node, and through deaths.

#include <signal.h>

#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/files.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using Fault = testing::TcpProxy::Fault;

// For each kind of job. A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills() { return testing::LongRun("SHARDD_DEATHS", 6); }

class NodesExtend : public Nodes, public ::testing::WithParamInterface<const char*> {
 protected:
  bool cut() const { return GetParam() == std::string("FULL_SHARD"); }
  // Biases are frozen before step 3, and trained from there on.
  static Args Training() {
    return {{"model", "blocks"}, {"blocks", "2"},  {"numel", "20011"},      {"strategy", GetParam()},
            {"layout", "DIM0"},  {"bits", "1"},    {"optimizer", "adamw"},  {"extend", "3"},
            {"steps", "6"},      {"recover", "1"}, {"silence_ms", "60000"}, {"timeout_ms", "60000"}};
  }
  // As metrics show it, of the one user.
  int64_t QuotaBytes(int k) {
    grpc::ClientContext context;
    v1::GetMetricsResponse response;
    EXPECT_TRUE(node(k).jobs().GetMetrics(&context, {}, &response).ok());
    return response.daemon().quotas_size() == 1 ? response.daemon().quotas(0).planned_bytes() : 0;
  }
  void ExpectUndisturbed(const Args& args, std::vector<Child>& ranks, const std::vector<TrainerReport>& want) {
    std::vector<TrainerReport> reports;
    for (int k = 0; k < count(); ++k) {
      EXPECT_EQ(ranks[static_cast<size_t>(k)].Wait(2 * testing::kLimit), 0)
          << k << testing::ReadWholeFile(absl::StrCat(node(k).Folder(args), "/log.0"));
      reports.push_back(Report(k, 0, args));
    }
    ExpectAllOk(reports);
    for (size_t k = 0; k < want.size(); ++k) {
      EXPECT_EQ(reports[k].bits, want[k].bits) << k;
      // A process that comes later knows no earlier ones.
      ASSERT_EQ(reports[k].losses.size(), want[k].losses.size()) << k;
      for (size_t step = 3; step < want[k].losses.size(); ++step) {
        EXPECT_EQ(reports[k].losses[step], want[k].losses[step]) << k << " in step " << step;
      }
    }
  }
};

TEST_P(NodesExtend, TrainsMoreFromAStepOnAsOneNodeDoes) {
  Start(2, 1);
  const Args args = Training().With({{"recover", "0"}});
  const std::vector<TrainerReport> got = RunAll(args);
  ExpectAllOk(got);
  const Args alone = args.With({{"name", "alone"}, {"world", cut() ? "2" : "1"}});
  const std::vector<TrainerReport> wanted = RunOnNode0(alone);
  for (int k = 0; k < 2; ++k) {
    EXPECT_EQ(got[static_cast<size_t>(k)].Note("extended at 3"), "extended at 3") << k;
    const TrainerReport& want = wanted[cut() ? static_cast<size_t>(k) : 0];
    EXPECT_FALSE(want.bits.empty());
    EXPECT_EQ(got[static_cast<size_t>(k)].bits, want.bits) << k;
    EXPECT_EQ(got[static_cast<size_t>(k)].losses, want.losses) << k;
    EXPECT_FALSE(node(k).HasEvent("job", "abort", "")) << k;
  }
}

TEST_P(NodesExtend, DaemonsKilledMeanwhileCostNothing) {
  WithCustodians();
  Start(2, 1);
  const std::vector<TrainerReport> want = RunAll(Training().With({{"name", "undisturbed"}}));
  std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 41)));
  int widened = 0;
  for (int kill = 0; kill < Kills(); ++kill) {
    const Args args = Training().With({{"name", absl::StrCat("job", kill)}, {"pause", "extending@0"}});
    std::vector<Child> ranks = StartRanks(args);
    for (int k = 0; k < 2; ++k) node(k).AwaitPause(args, "extending", 0);
    for (int k = 0; k < 2; ++k) node(k).LetGo(args, "extending", 0);
    const unsigned us = random() % 40'000;
    absl::SleepFor(absl::Microseconds(us));
    ReplaceDaemon(kill % 2);
    if (HasFatalFailure()) return;
    ExpectUndisturbed(args, ranks, want);
    ASSERT_FALSE(HasFailure()) << "kill " << kill << " of node " << kill % 2 << " after " << us << " us";
    for (int k = 0; k < 2; ++k) widened += node(k).HasEvent(args.Text("name"), "extend", ", as node ") ? 1 : 0;
  }
  RecordProperty("widened", widened);  // where a node died between what was decided and its hearing of it
  ExpectNothingLeft();
}

// Node 1 cannot hand its own to its custodian, which stands still: node 0 has two meanwhile.
TEST_P(NodesExtend, WhatIsMadeCountsBeforeItTakesThePlace) {
  WithCustodians();
  Start(2, 1);
  const Args args = Training().With({{"pause", "extending@0"}});
  std::vector<Child> ranks = StartRanks(args);
  for (int k = 0; k < 2; ++k) node(k).AwaitPause(args, "extending", 0);
  const int64_t before_bytes = QuotaBytes(0);
  EXPECT_GT(before_bytes, 0);
  custodian(1).Kill(SIGSTOP);
  for (int k = 0; k < 2; ++k) node(k).LetGo(args, "extending", 0);
  EXPECT_TRUE(testing::PollUntil([&] { return node(0).HasEvent("job", "extend", "it is made, and takes"); }));
  EXPECT_FALSE(node(0).HasEvent("job", "close", "it goes on with more to train"));
  const int64_t made_bytes = QuotaBytes(0);
  EXPECT_GT(made_bytes, before_bytes);
  custodian(1).Kill(SIGCONT);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(2 * testing::kLimit), 0);
  ExpectAllOk(Reports(args));
}

class NodesMissTheLastWord : public NodesExtend {
 protected:
  void Prepare() {
    WithCustodians();
    BehindProxies();
    Start(2, 1);
    want_ = RunAll(Large().With({{"name", "undisturbed"}}));
  }
  // Whose making takes a while.
  static Args Large() { return Training().With({{"numel", "4000037"}}); }
  using Meanwhile = std::function<void(const std::string& name)>;
  // Node 0 stands still while it makes its job, and node 1, which has said that it has made its own, loses the link
  // there: what node 0 says then, and has done, never comes. `cut_off` is called when it has done so, and `there_again`
  // when node 1 reaches it again. False: node 0 stood still too early or too late.
  bool Miss(const std::string& name, const Meanwhile& cut_off, const Meanwhile& there_again) {
    const Args args = Large().With({{"name", name}, {"pause", "extending@0"}});
    std::vector<Child> ranks = StartRanks(args);
    for (int k = 0; k < 2; ++k) node(k).AwaitPause(args, "extending", 0);
    for (int k = 0; k < 2; ++k) node(k).LetGo(args, "extending", 0);
    for (int k = 0; k < 2; ++k) {
      EXPECT_TRUE(testing::PollUntil([&] { return node(k).HasEvent(name, "extend", "block0.bias"); })) << k;
    }
    absl::SleepFor(absl::Milliseconds(20));  // both hear that the other one asks, too, and begin
    EXPECT_EQ(kill(node(0).daemon_pid(), SIGSTOP), 0);
    absl::SleepFor(absl::Seconds(1));  // and node 1 has made it
    for (int k = 0; k < 2; ++k) proxy(k).SetChoose([] { return testing::TcpProxy::Harm{Fault::kRefuse, 0, {}}; });
    proxy(0).HarmAll(Fault::kResetCaller);
    proxy(1).HarmAll(Fault::kResetTarget);
    EXPECT_EQ(kill(node(0).daemon_pid(), SIGCONT), 0);
    const bool decided = testing::PollUntil(
        [&] { return node(0).HasEvent(name, "close", "it goes on with more to train"); }, absl::Seconds(5));
    if (decided) cut_off(name);
    for (int k = 0; k < 2; ++k) proxy(k).SetChoose(nullptr);
    if (decided) there_again(name);
    ExpectUndisturbed(args, ranks, want_);
    return node(1).HasEvent(name, "extend", ", as node 0");
  }
  void ExpectOneMisses(const Meanwhile& cut_off, const Meanwhile& there_again) {
    bool missed = false;
    for (int once = 0; once < 10 && !missed; ++once) {
      missed = Miss(absl::StrCat("job", once), cut_off, there_again);
      ASSERT_FALSE(HasFailure()) << "try " << once;
    }
    EXPECT_TRUE(missed);
    for (int k = 0; k < 2; ++k) proxy(k).HarmAll(Fault::kReset);
    ExpectNothingLeft();
  }
  bool Node1Logged(const std::string& text) {
    return absl::StrContains(testing::ReadWholeFile(node(1).File("daemon.log")), text);
  }

 private:
  std::vector<TrainerReport> want_;
};

TEST_P(NodesMissTheLastWord, AndBecomeWhatTheOthersAre) {
  Prepare();
  ExpectOneMisses([](const std::string&) {}, [](const std::string&) {});
}

TEST_P(NodesMissTheLastWord, WhileTheirCustodianIsAwayTheyTryAgain) {
  Prepare();
  ExpectOneMisses([this](const std::string&) { custodian(1).Kill(SIGSTOP); },
                  [this](const std::string& name) {
                    EXPECT_TRUE(testing::PollUntil([&] {  // or nothing was missed
                      return Node1Logged("is tried again") || node(0).Job(name).name().empty();
                    }));
                    custodian(1).Kill(SIGCONT);
                  });
  EXPECT_TRUE(Node1Logged("is tried again"));
}

// Links of what has taken the job's place come later.
TEST_P(NodesExtend, AJobClosedBehindItEndsOnAllNodes) {
  Start(2, 1);
  for (int closer = 0; closer < 4; ++closer) {
    const Args args = Training().With(
        {{"name", absl::StrCat("job", closer)}, {"recover", "0"}, {"steps", "100000"}, {"timeout_ms", "3000"}});
    std::vector<Child> ranks = StartRanks(args);
    Node& closes = node(closer % 2);
    // A shorter way to the moment when all have it than to ask for the job's epoch.
    ASSERT_TRUE(testing::PollUntil(
        [&] { return closes.HasEvent(args.Text("name"), "close", "it goes on with more to train"); }));
    std::vector<std::thread> calls;  // they wait together
    for (int i = 0; i < 8; ++i) {
      calls.emplace_back([&] {
        grpc::ClientContext context;
        v1::JobRef ref;
        ref.set_job(args.Text("name"));
        v1::CloseJobByNameResponse closed;
        EXPECT_TRUE(closes.jobs().CloseJobByName(&context, ref, &closed).ok());
      });
    }
    for (std::thread& call : calls) call.join();
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    for (int k = 0; k < 2; ++k) {
      // Or a rank that had not attached to it yet has made another one.
      EXPECT_TRUE(testing::PollUntil([&] { return node(k).Job(args.Text("name")).committed_step() == 0; }))
          << "node " << k << " has the job that node " << closer % 2 << " has closed";
      EXPECT_NE(Report(k, 0, args).code, 0) << k;
    }
  }
}

TEST_P(NodesExtend, ARankKilledMeanwhileIsReplaced) {
  Start(2, 1);
  const std::vector<TrainerReport> want = RunAll(Training().With({{"name", "undisturbed"}}));
  for (int victim = 0; victim < 2; ++victim) {
    const Args args = Training().With({{"name", absl::StrCat("job", victim)}});
    Child other = StartRank(1 - victim, 0, args);
    EXPECT_EQ(StartRank(victim, 0, args.With({{"kill", "extending@0"}})).Wait(), kKilled);
    Child again = StartRank(victim, 0, args);
    std::vector<Child> ranks;
    ranks.push_back(std::move(victim == 0 ? again : other));
    ranks.push_back(std::move(victim == 0 ? other : again));
    ExpectUndisturbed(args, ranks, want);
  }
}

// Its program begins with the model as it was at first, and its daemon has nothing.
TEST_F(Nodes, ANodeThatHasLostAllBecomesWhatTheOthersTrain) {
  Start(2, 1);
  const Args args({{"model", "blocks"},
                   {"blocks", "2"},
                   {"numel", "2011"},
                   {"layout", "DIM0"},
                   {"bits", "1"},
                   {"extend", "3"},
                   {"optimizer", "adamw"},
                   {"recover", "1"},
                   {"steps", "300"},
                   {"await_daemon", "1"},
                   {"silence_ms", "60000"},
                   {"timeout_ms", "60000"}});
  const std::vector<TrainerReport> want = RunAll(args.With({{"name", "undisturbed"}}));
  Child stays = StartRank(0, 0, args);
  Child lost = StartRank(1, 0, args);
  ASSERT_TRUE(testing::PollUntil([&] { return node(1).Job().committed_step() >= 10; }));
  lost.Kill(SIGKILL);
  lost.Wait();
  ReplaceDaemon(1);
  Child again = StartRank(1, 0, args.With({{"adopt", "1"}}));  // as programs do that a launcher restarts
  EXPECT_EQ(stays.Wait(2 * testing::kLimit), 0);
  EXPECT_EQ(again.Wait(2 * testing::kLimit), 0);
  const std::vector<TrainerReport> got = Reports(args);
  ExpectAllOk(got);
  for (size_t k = 0; k < 2; ++k) EXPECT_EQ(got[k].bits, want[k].bits) << k;
  EXPECT_EQ(got[1].Note("extended at"), "") << "its rank did not ask";
  EXPECT_TRUE(node(1).HasEvent("job", "extend", ", as node 0"));
}

std::string NameOf(const ::testing::TestParamInfo<const char*>& info) {
  return info.param == std::string("FULL_SHARD") ? "Cut" : "Replicas";
}
INSTANTIATE_TEST_SUITE_P(Kinds, NodesExtend, ::testing::Values("HYBRID_SHARD", "FULL_SHARD"), NameOf);
INSTANTIATE_TEST_SUITE_P(Kinds, NodesMissTheLastWord, ::testing::Values("HYBRID_SHARD", "FULL_SHARD"), NameOf);

}  // namespace
}  // namespace shardd::e2e
