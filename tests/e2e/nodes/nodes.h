#ifndef SHARDD_TESTS_E2E_NODES_NODES_H_
#define SHARDD_TESTS_E2E_NODES_NODES_H_

// Several daemons of this machine, each a node with ranks of its own: their links are sockets.

#include <signal.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/ranks/step_limit.h"
#include "tests/testing/tcp_proxy.h"

namespace shardd::e2e {

inline constexpr int kKilled = 1000 + SIGKILL;  // as testing::Child::Wait tells it

// Of ranks that outlive daemons of their nodes and report all bits of what they hold.
inline const Args kOutlivesDaemons = {{"recover", "1"}, {"optimizer", "adamw"},  {"of_any_rank", "1"},
                                      {"bits", "1"},    {"silence_ms", "60000"}, {"timeout_ms", "60000"}};

// One daemon with its ranks.
class Node final : public Cluster {
 public:
  using Cluster::AwaitPause;
  using Cluster::daemon_pid;
  using Cluster::DaemonAlive;
  using Cluster::DaemonFootprint;
  using Cluster::DaemonStatus;
  using Cluster::Empty;
  using Cluster::EmptyWith;
  using Cluster::EndRanks;
  using Cluster::Events;
  using Cluster::ExpectNothingLeft;
  using Cluster::File;
  using Cluster::Folder;
  using Cluster::HasEvent;
  using Cluster::Job;
  using Cluster::jobs;
  using Cluster::LetGo;
  using Cluster::Ranks;
  using Cluster::RanksFind;
  using Cluster::Report;
  using Cluster::socket;
  using Cluster::StartDaemon;
  using Cluster::StartRank;
  using Cluster::StopDaemon;
  using Cluster::TimeOf;
  using Cluster::WaitForDaemon;
  void TestBody() override {}
};

class Nodes : public ::testing::Test {
 protected:
  // `flags`, for every node: behind those that make it one. Each has devices for `ranks` ranks.
  void Start(int nodes, int ranks = 2, const std::vector<std::string>& flags = {});
  // Before Start: every node has so many GPUs, of the fake driver where those are not real, and takes itself for a host
  // of its own.
  void OnGpus(int gpus) { gpus_ = gpus; }
  // Before Start: daemons on GPUs find this in their environment.
  void DaemonsFind(const std::vector<std::string>& environment) { daemons_find_ = environment; }
  // Before Start: that node has none of the GPUs of the others, by mistake.
  void WithoutGpus(int node) { without_gpus_ = node; }
  // Before Start: each node has a custodian of its own, which its daemons use one after the other.
  void WithCustodians() { with_custodians_ = true; }
  testing::Child& custodian(int node) { return custodians_[static_cast<size_t>(node)]; }
  // Before Start: others reach each node by a middlebox, which harms nothing until it is told to.
  void BehindProxies() { behind_proxies_ = true; }
  testing::TcpProxy& proxy(int node) { return *proxies_[static_cast<size_t>(node)]; }
  // The daemon of a node that has ended.
  void StartAgain(int node);
  // Its daemon is sent the signal and has ended; another one listens where it did, for the ranks that live on.
  void ReplaceDaemon(int node, int signal_number = SIGKILL);
  // On any node, as Cluster's. REQUIRES: WithCustodians.
  void ExpectNothingLeft();
  Node& node(int node) { return *nodes_[static_cast<size_t>(node)]; }
  int count() const { return static_cast<int>(nodes_.size()); }
  const std::vector<std::string>& addresses() const { return addresses_; }
  // An epoch of the job has ended at `node` because the link to `lost` was lost: a sum under way may be the first to
  // tell.
  bool HasLostLink(int node, int lost) {
    const std::string link = absl::StrCat("link to node ", lost, " (", addresses()[lost], ")");
    const auto ended = [&](const char* kind) {  // in the middle of a step, or outside of one
      return this->node(node).HasEvent("job", kind, link) ||
             this->node(node).HasEvent("job", kind, absl::StrCat("node ", lost, " cannot be sent gradients: "));
    };
    return ended("abort") || ended("epoch");
  }
  // What ranks of one node are told.
  Args Of(int node, const Args& args) const;
  testing::Child StartRank(int node, int rank, const Args& args) {
    return this->node(node).StartRank(rank, Of(node, args));
  }
  TrainerReport Report(int node, int rank, const Args& args) { return this->node(node).Report(Of(node, args), rank); }
  // All ranks of all nodes at once; their reports, node by node. `per_rank`, by (node, rank), adds to `args`. `at_end`:
  // all have trained, and are still attached.
  std::vector<TrainerReport> RunAll(const Args& args, const std::map<std::pair<int, int>, Args>& per_rank = {},
                                    const std::function<void()>& at_end = nullptr);
  // Of all ranks, node by node.
  std::vector<TrainerReport> Reports(const Args& args);
  // As SayEnough and UntilEnough, of this test's ranks.
  Args UntilEnough(const Args& args) const { return e2e::UntilEnough(args, folder_.File("enough")); }
  void SayEnough() const { e2e::SayEnough(folder_.File("enough")); }
  // All ranks have ended, with what they have in a run that nobody disturbs: all bits, where `args` ask for them.
  void ExpectNothingChanged(const Args& args);
  // Rank 0 of each node, as processes.
  std::vector<testing::Child> StartRanks(const Args& args);
  // All ranks of a job that is node 0's alone; as `args` say, whatever the others' are.
  std::vector<TrainerReport> RunOnNode0(const Args& args);
  // As RunAll, but rank `dies` of node `on` does so at `moment`, and another process comes in its place.
  std::vector<TrainerReport> RunWithADeath(const Args& args, const std::string& moment, int on, int dies);
  // What each node says of job "job".
  std::vector<v1::Job> Jobs();
  // The last step that any node has committed.
  int64_t LastStep();
  // Until all nodes have committed the step.
  bool AllTrained(int64_t step);
  // For Reference: of all ranks.
  Args World(const Args& args) const;

 private:
  void StartDaemon(int node);
  const testing::TempDir folder_;
  int ranks_ = 0;
  int GpusOf(int node) const { return node == without_gpus_ ? 0 : gpus_; }
  int gpus_ = 0;
  std::vector<std::string> daemons_find_;
  int without_gpus_ = -1;
  bool with_custodians_ = false;
  bool behind_proxies_ = false;
  std::vector<std::string> flags_;
  std::vector<std::string> listens_;    // where each daemon listens for others
  std::vector<std::string> addresses_;  // where others reach it
  std::vector<std::unique_ptr<testing::TcpProxy>> proxies_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<testing::Child> custodians_;
  std::vector<Node::Empty> empty_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_NODES_NODES_H_
