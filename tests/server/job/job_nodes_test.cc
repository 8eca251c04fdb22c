// A job over two nodes of one rank each, in one process: two JobCores, and links in memory that come and go.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "server/collective/nodes/peer_exchange.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// The link between two nodes; events run on a thread of its own, in the order of all that was sent.
class Wire {
 public:
  class End final : public PeerLinks {
   public:
    End(Wire* wire, int node) : wire_(wire), node_(node) {}
    int node() const override { return node_; }
    int nodes() const override { return 2; }
    void Send(int node, v1::PeerMessage message) override {
      wire_->loop_.Post([wire = wire_, from = node_, node, message = std::move(message)]() mutable {
        if (wire->up_ && wire->ends_[static_cast<size_t>(node)] != nullptr) {
          wire->ends_[static_cast<size_t>(node)]->OnMessage(from, std::move(message));
        }
      });
    }
    void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                  std::function<void(absl::Status)> sent) override {
      wire_->loop_.Post([wire = wire_, from = node_, node, header, elements, sent = std::move(sent)] {
        const bool goes = wire->up_ && wire->ends_[static_cast<size_t>(node)] != nullptr;
        if (goes) wire->ends_[static_cast<size_t>(node)]->OnData(from, header, elements);
        sent(goes ? absl::OkStatus() : absl::UnavailableError("no link"));
      });
    }
    ~End() override {
      wire_->loop_.RunAndWait([this] { wire_->ends_[static_cast<size_t>(node_)] = nullptr; });
    }

   private:
    Wire* const wire_;
    const int node_;
  };
  void Listen(int node, PeerLinks::Events* events) {
    loop_.RunAndWait([&] { ends_[static_cast<size_t>(node)] = events; });
  }
  void SetUp(bool up) {
    loop_.RunAndWait([&] {
      up_ = up;
      for (int node = 0; node < 2; ++node) {
        PeerLinks::Events* events = ends_[static_cast<size_t>(node)];
        if (events == nullptr) continue;
        if (up) {
          events->OnUp(1 - node);
        } else {
          events->OnDown(1 - node, absl::UnavailableError("the link broke"));
        }
      }
    });
  }

 private:
  bool up_ = false;
  std::array<PeerLinks::Events*, 2> ends_ = {};
  CoreLoop loop_;
};

class JobNodesTest : public ::testing::Test {
 protected:
  JobNodesTest() {
    for (int node = 0; node < 2; ++node) Open(node);
    wire_.SetUp(true);
  }
  ~JobNodesTest() override {
    for (int node = 0; node < 2; ++node) OnLoop([&] { job(node).Close("the test has ended"); });
    for (Node& node : nodes_) {
      OnLoop([&] { node.job.reset(); });
      node.device->Shutdown();
    }
    worker_.Stop();
    loop_.Stop();
    reaper_.Stop();
  }

  void Open(int number) {
    Node& node = nodes_[static_cast<size_t>(number)];
    SpecBuilder builder(1);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
    for (const char* address : {"host0:7000", "host1:7000"}) {
      builder.config().mutable_nodes()->add_addresses(address);
    }
    builder.Param(0, "w", {64});
    node.plan = std::make_shared<const ShardPlan>(builder.Plan());
    JobCore::Init init;
    init.id = 1;
    init.uid = getuid();
    init.spec = builder.spec();
    init.plan = node.plan;
    auto memory = JobMemory::Create(*node.plan, "job", node.folder.path(), node.folder.path() + "/job", 0, {});
    auto journal = Journal::Create(node.folder.path() + "/journal", node.plan->memory.journal_bytes / 2);
    ASSERT_TRUE(memory.ok() && journal.ok()) << memory.status() << journal.status();
    init.memory = *std::move(memory);
    init.journal = *std::move(journal);
    node.device = std::move(MakeDevices("cpu:1")->devices[0]);
    init.devices = {node.device.get()};
    init.loop = &loop_;
    init.reaper = &reaper_;
    init.events = &events_;
    auto nodes = std::make_unique<JobCore::Init::Nodes>();
    nodes->node = number;
    nodes->worker = &worker_;
    nodes->events = std::make_shared<NodeEvents>(&loop_, [](const v1::PeerHello&) { return absl::OkStatus(); });
    nodes->links = std::make_unique<Wire::End>(&wire_, number);
    auto peers = std::make_shared<PeerExchange>(
        nodes->links.get(), node.plan->node_slot_bytes / static_cast<int64_t>(sizeof(float)), kNodeSlots);
    NodeEvents::Exchange hears;
    hears.exchange = peers.get();
    hears.on_data = [peers = peers.get()](int from, const v1::PeerData& header, absl::string_view elements) {
      peers->OnData(from, header, elements);
    };
    hears.on_down = [peers = peers.get()](int from, const absl::Status& why) { peers->OnDown(from, why); };
    nodes->events->SetExchange(std::move(hears));
    wire_.Listen(number, nodes->events.get());
    auto collective = std::make_unique<NodeCollective>(
        init.devices, std::move(peers), init.memory->StagingByRank(*node.plan), node.plan->node_slot_bytes);
    nodes->collective = collective.get();
    init.collective = std::move(collective);
    init.nodes = std::move(nodes);
    OnLoop([&] {
      node.job = std::make_shared<JobCore>(std::move(init));
      node.job->StartNodes();
    });
  }

  void OnLoop(const std::function<void()>& body) {
    loop_.RunAndWait([&] { body(); });
  }
  bool Until(const std::function<bool()>& condition) {
    return testing::PollUntil(
        [&] {
          bool result = false;
          OnLoop([&] { result = condition(); });
          return result;
        },
        kPatience);
  }
  absl::Status TryAttach(int number) {
    Node& node = nodes_[static_cast<size_t>(number)];
    uint64_t epoch = 0;
    OnLoop([&] { epoch = node.job->epoch(); });
    auto session = Session::Create(node.plan, ++sessions_made_, 0, epoch, {});
    if (!session.ok()) return session.status();
    absl::Status status;
    node.stream = std::make_shared<Events>();
    OnLoop([&] {
      Session* added = session->get();
      status = node.job->AddSession(*std::move(session));
      if (status.ok()) node.job->SessionLive(added, node.stream);
    });
    return status;
  }
  // Until what the last epoch left behind has ended.
  void Attach(int node) {
    ASSERT_TRUE(testing::PollUntil([&] { return TryAttach(node).ok(); }, kPatience));
  }
  void Send(int node, const v1::Command& command) {
    v1::CommandBatch batch;
    *batch.add_commands() = command;
    OnLoop([&] {
      if (Session* session = job(node).session(0); session != nullptr) {
        job(node).ExecuteFromStream(session, batch);
      }
    });
  }
  void CommitParameters(int node) {
    v1::Command command;
    command.mutable_commit_parameters();
    Send(node, command);
  }
  void Begin() {
    for (int node = 0; node < 2; ++node) {
      Attach(node);
      CommitParameters(node);
    }
    ASSERT_TRUE(Until([&] { return job(0).version() == 1 && job(1).version() == 1; }));
  }
  void Submit(int node, float gradient) {
    OnLoop([&] {
      if (job(node).session(0) == nullptr) return;
      auto* slot = reinterpret_cast<float*>(const_cast<char*>(job(node).session(0)->slot(0)));
      std::fill(slot, slot + 64, gradient);
    });
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_BACKWARD);
    Send(node, command);
    command.mutable_submit_gradients()->set_group(0);
    Send(node, command);
    command.mutable_reshard()->set_group(0);
    Send(node, command);
  }
  void Train(int node, float gradient) {
    Submit(node, gradient);
    v1::Command command;
    command.mutable_backward_done()->set_last(true);
    Send(node, command);
    command.mutable_step()->add_groups()->set_lr(0.5);
    Send(node, command);
  }
  // Both nodes, with gradients that average to 2.
  void TrainsTo(int64_t step) {
    Train(0, 1);
    Train(1, 3);
    for (int node = 0; node < 2; ++node) {
      EXPECT_TRUE(Until([&] { return job(node).committed_step() == step; })) << "node " << node << Why(node);
      EXPECT_EQ(*SlabAt<float>(job(node).memory().shards(), 0), -static_cast<float>(step)) << "node " << node;
    }
  }
  std::string Why(int node) { return nodes_[static_cast<size_t>(node)].stream->Aborted().message(); }
  void Lose(int node) {
    OnLoop([&] { job(node).SessionLost(0, "killed"); });
  }
  bool Gone(int node) {
    return Until([&] { return job(node).session(0) == nullptr; });
  }
  JobCore& job(int node) { return *nodes_[static_cast<size_t>(node)].job; }

  struct Node {
    testing::TempDir folder;
    std::shared_ptr<const ShardPlan> plan;
    std::unique_ptr<Device> device;
    std::shared_ptr<Events> stream;
    std::shared_ptr<JobCore> job;
  };
  EventLog events_;
  uint64_t sessions_made_ = 0;
  Wire wire_;
  CoreLoop reaper_;
  CoreLoop worker_;
  CoreLoop loop_;
  std::array<Node, 2> nodes_;
};

TEST_F(JobNodesTest, StepsAreTheMeanOfBothNodes) {
  Begin();
  for (int64_t step = 1; step <= 3; ++step) TrainsTo(step);
}

TEST_F(JobNodesTest, ARankIsLostWhileTheOtherNodeWaitsForItsPart) {
  Begin();
  TrainsTo(1);
  Train(0, 1);
  Lose(1);
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000): "));
  EXPECT_THAT(Why(0), HasSubstr("killed"));
  for (int node = 0; node < 2; ++node) Attach(node);
  TrainsTo(2);
}

TEST_F(JobNodesTest, ALinkThatBreaksEndsTheAttemptOnBothNodesAndNothingElse) {
  Begin();
  TrainsTo(1);
  Train(1, 3);
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000) is lost: the link broke"));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) is lost: the link broke"));
  for (int node = 0; node < 2; ++node) Attach(node);
  Train(0, 1);  // before there is a link
  wire_.SetUp(true);
  Train(1, 3);
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).committed_step() == 2; })) << node << Why(node);
  }
  TrainsTo(3);
}

TEST_F(JobNodesTest, NobodyAttachesWhileInitialValuesOfAnAttemptThatEndedAreRead) {
  absl::Notification go_on;
  worker_.Post([&] { go_on.WaitForNotification(); });
  for (int node = 0; node < 2; ++node) {
    Attach(node);
    CommitParameters(node);
  }
  Lose(0);
  ASSERT_TRUE(Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(std::string(TryAttach(node).message()), HasSubstr("are still being read; attach again"));
  }
  go_on.Notify();
  Begin();
  TrainsTo(1);
}

TEST_F(JobNodesTest, ABackwardThatIsAbandonedBehindWhatItGaveBeginsTheStepAnewOnBothNodes) {
  Begin();
  Submit(0, 10);
  v1::Command command;
  command.mutable_abandon_backward();
  Send(0, command);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000): "));
  EXPECT_THAT(Why(1), HasSubstr("were given to other nodes"));
  for (int node = 0; node < 2; ++node) Attach(node);
  TrainsTo(1);
}

TEST_F(JobNodesTest, ANodeWhoseRanksHaveFinishedLeavesTheOtherItsLastStep) {
  Begin();
  TrainsTo(1);
  const uint64_t epoch = job(1).epoch();
  OnLoop([&] { job(0).Detach(0, /*finished=*/true); });
  ASSERT_TRUE(Until([&] { return job(0).finished(); }));
  OnLoop([&] { job(0).Close("all its ranks have finished"); });
  wire_.SetUp(false);
  EXPECT_EQ(job(1).epoch(), epoch) << "nobody was troubled";
  OnLoop([&] { job(1).Detach(0, /*finished=*/true); });
  EXPECT_TRUE(Until([&] { return job(1).finished(); })) << Why(1);
  EXPECT_EQ(job(1).committed_step(), 1);
}

class JobNodesSchedules : public JobNodesTest, public ::testing::WithParamInterface<int> {};

// As trainers do that attach again: each node's rank gives its gradients once for each version and epoch.
TEST_P(JobNodesSchedules, RanksAndLinksThatComeAndGoAtAnyMomentLoseNothing) {
  constexpr int64_t kSteps = 150;
  std::mt19937_64 rng(static_cast<uint64_t>(GetParam()));
  std::array<std::pair<uint64_t, uint64_t>, 2> given;
  bool up = true;
  const absl::Time until = MonotonicNow() + absl::Seconds(60);
  const auto behind = [&](int node) {
    bool result = false;
    OnLoop([&] { result = job(node).committed_step() < kSteps; });
    return result;
  };
  while ((behind(0) || behind(1)) && MonotonicNow() < until) {
    const int node = static_cast<int>(rng() % 2);
    const uint64_t what = rng() % static_cast<uint64_t>(8 * (1 + GetParam()));
    if (what == 0) {
      OnLoop([&] {
        if (job(node).session(0) != nullptr) job(node).SessionLost(0, "killed");
      });
    } else if (what == 1 || !up) {
      up = !up;
      wire_.SetUp(up);
    }
    bool attached = false;
    std::pair<uint64_t, uint64_t> now;
    OnLoop([&] {
      attached = job(node).session(0) != nullptr;
      now = {job(node).epoch(), job(node).version()};
      EXPECT_FALSE(job(node).closed());
    });
    if (!attached) {
      (void)TryAttach(node);
    } else if (given[static_cast<size_t>(node)] != now && behind(node)) {
      given[static_cast<size_t>(node)] = now;
      if (now.second == 0) {
        CommitParameters(node);
      } else {
        Train(node, node == 0 ? 1 : 3);
      }
    }
  }
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).committed_step() == kSteps; })) << "node " << node << Why(node);
    EXPECT_EQ(*SlabAt<float>(job(node).memory().shards(), 0), -static_cast<float>(kSteps)) << "node " << node;
    EXPECT_GT(job(node).epoch(), 3u) << "nothing happened";
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, JobNodesSchedules, ::testing::Range(0, 8));

}  // namespace
}  // namespace shardd
