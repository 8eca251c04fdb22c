#include "tests/e2e/nodes/nodes.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/http_get.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
void Nodes::Start(int nodes, int ranks, const std::vector<std::string>& flags) {
  ranks_ = ranks;
  flags_ = flags;
  for (int node = 0; node < nodes; ++node) {
    const int port = testing::FreePort();  // nodes are named before their daemons run
    listens_.push_back(absl::StrCat("localhost:", port));
    if (behind_proxies_) proxies_.push_back(std::make_unique<testing::TcpProxy>(port));
    addresses_.push_back(behind_proxies_ ? proxies_.back()->address() : listens_.back());
    nodes_.push_back(std::make_unique<Node>());
  }
  for (int node = 0; node < nodes; ++node) {
    if (with_custodians_) {
      custodians_.push_back(testing::Spawn(
          {testing::ProgramPath("shardd-custodian"), "--listen=unix:" + this->node(node).File("custody.sock")},
          {.log = this->node(node).File("custodian.log")}));
    }
    ASSERT_NO_FATAL_FAILURE(StartDaemon(node));
    if (with_custodians_) empty_.push_back(this->node(node).EmptyWith(custodians_.back()));
  }
}

void Nodes::ExpectNothingLeft() {
  for (size_t node = 0; node < nodes_.size(); ++node) nodes_[node]->ExpectNothingLeft(empty_[node], custodians_[node]);
}

void Nodes::StartAgain(int node) {
  nodes_[static_cast<size_t>(node)] = std::make_unique<Node>();
  StartDaemon(node);
}

void Nodes::ReplaceDaemon(int node, int signal_number) {
  Node& ended = *nodes_[static_cast<size_t>(node)];
  ASSERT_EQ(kill(ended.daemon_pid(), signal_number), 0);
  ended.WaitForDaemon();
  StartDaemon(node);
}

void Nodes::StartDaemon(int node) {
  std::vector<std::string> flags = {"--peer_listen=" + listens_[static_cast<size_t>(node)]};
  if (behind_proxies_) flags.push_back("--peer_address=" + addresses_[static_cast<size_t>(node)]);
  flags.insert(flags.end(), flags_.begin(), flags_.end());
  Node& started = *nodes_[static_cast<size_t>(node)];
  if (with_custodians_) {
    const std::string custody = started.File("custody.sock");
    ASSERT_TRUE(testing::PollUntil([&] { return access(custody.c_str(), F_OK) == 0; }));
    flags.push_back("--custodian=unix:" + custody);
  }
  if (GpusOf(node) == 0) {
    started.StartDaemon(flags, absl::StrCat("cpu:", ranks_));
    return;
  }
  started.RanksFind(testing::FakeCudaEnvironment(gpus_));
  std::vector<std::string> environment =
      testing::FakeCudaEnvironment(gpus_, {absl::StrCat("FAKE_CUDA_DELAY_SEED=", 7 + node)});
  environment.push_back(
      absl::StrCat("NCCL_HOSTID=shardd-test-node-", node));  // NCCL takes no two members on one GPU of a host
  environment.insert(environment.end(), daemons_find_.begin(), daemons_find_.end());
  started.StartDaemon(flags, "cuda:all", environment);
}

Args Nodes::Of(int node, const Args& args) const {
  return Args({{"strategy", "HYBRID_SHARD"},
               {"world", absl::StrCat(ranks_)},
               {"device_memory", GpusOf(node) > 0 ? "1" : "0"}})
      .With(args)
      .With({{"node", absl::StrCat(node)},
             {"nodes", absl::StrJoin(addresses_, ",")},
             {"first_rank", absl::StrCat(node * ranks_)}});
}

Args Nodes::World(const Args& args) const { return args.With({{"world", absl::StrCat(count() * ranks_)}}); }

std::vector<TrainerReport> Nodes::RunAll(const Args& given, const std::map<std::pair<int, int>, Args>& per_rank,
                                         const std::function<void()>& at_end) {
  const std::string end = absl::StrCat("end@", given.Int("steps", 50));
  const Args args = at_end == nullptr ? given : given.With({{"pause", end}});
  std::vector<testing::Child> children;
  for (int node = 0; node < count(); ++node) {
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto own = per_rank.find({node, rank});
      children.push_back(StartRank(node, rank, own == per_rank.end() ? args : args.With(own->second)));
    }
  }
  if (at_end != nullptr) {
    for (int node = 0; node < count(); ++node) {
      for (int rank = 0; rank < ranks_; ++rank) this->node(node).AwaitPause(args, "end", rank);
    }
    at_end();
    for (int node = 0; node < count(); ++node) {
      for (int rank = 0; rank < ranks_; ++rank) this->node(node).LetGo(args, "end", rank);
    }
  }
  std::vector<TrainerReport> reports;
  for (int node = 0; node < count(); ++node) {
    for (int rank = 0; rank < ranks_; ++rank) {
      testing::Child& child = children[static_cast<size_t>(node * ranks_ + rank)];
      EXPECT_EQ(child.Wait(2 * testing::kLimit), 0)
          << "node " << node << " rank " << rank << ": "
          << testing::ReadWholeFile(absl::StrCat(this->node(node).Folder(args), "/log.", rank));
      reports.push_back(Report(node, rank, args));
    }
  }
  return reports;
}

std::vector<TrainerReport> Nodes::Reports(const Args& args) {
  std::vector<TrainerReport> reports;
  for (int node = 0; node < count(); ++node) {
    for (int rank = 0; rank < ranks_; ++rank) reports.push_back(Report(node, rank, args));
  }
  return reports;
}

void Nodes::ExpectNothingChanged(const Args& args) {
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  const std::vector<TrainerReport> want = RunAll(AsManySteps(args).With({{"name", "undisturbed"}}));
  for (const TrainerReport& report : want) EXPECT_EQ(report.bits.empty(), args.Int("bits") == 0);
  ExpectSame(reports, want);
}

std::vector<testing::Child> Nodes::StartRanks(const Args& args) {
  std::vector<testing::Child> ranks;
  for (int node = 0; node < count(); ++node) ranks.push_back(StartRank(node, 0, args));
  return ranks;
}

std::vector<TrainerReport> Nodes::RunOnNode0(const Args& args) {
  std::vector<testing::Child> ranks;
  for (int rank = 0; rank < args.Int("world", 2); ++rank) ranks.push_back(node(0).StartRank(rank, args));
  std::vector<TrainerReport> reports;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_EQ(ranks[rank].Wait(), 0);
    reports.push_back(node(0).Report(args, static_cast<int>(rank)));
  }
  ExpectAllOk(reports);
  return reports;
}

std::vector<v1::Job> Nodes::Jobs() {
  std::vector<v1::Job> jobs;
  for (const auto& node : nodes_) jobs.push_back(node->Job());
  return jobs;
}

int64_t Nodes::LastStep() {
  int64_t last = 0;
  for (const auto& node : nodes_) last = std::max<int64_t>(last, node->Job().committed_step());
  return last;
}

bool Nodes::AllTrained(int64_t step) {
  return testing::PollUntil([&] {
    return std::all_of(nodes_.begin(), nodes_.end(),
                       [&](const auto& node) { return node->Job().committed_step() >= step; });
  });
}

std::vector<TrainerReport> Nodes::RunWithADeath(const Args& args, const std::string& moment, int on, int dies) {
  std::vector<testing::Child> children;
  for (int node = 0; node < count(); ++node) {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (node != on || rank != dies) children.push_back(StartRank(node, rank, args));
    }
  }
  testing::Child victim = StartRank(on, dies, args.With({{"kill", moment}}));
  EXPECT_EQ(victim.Wait(), kKilled);
  children.push_back(StartRank(on, dies, args));
  for (testing::Child& child : children) EXPECT_EQ(child.Wait(), 0);
  std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  return reports;
}

}  // namespace shardd::e2e
