#ifndef SHARDD_TESTS_SERVER_JOB_JOB_NODES_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_JOB_NODES_FIXTURE_H_

// A job over nodes of one rank each, in one process: a JobCore for each, and links in memory that come and go.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/collective/nodes/links/peer_gather.h"
#include "server/collective/nodes/node_collective.h"
#include "server/device/devices.h"
#include "server/multinode/node_events.h"
#include "server/storage/job_slab.h"
#include "server/storage/take_up_log.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {

// The links between nodes; events run on a thread of its own, in the order of all that was sent.
class Wire {
 public:
  explicit Wire(int nodes) : ends_(static_cast<size_t>(nodes)) {}
  class End final : public PeerLinks {
   public:
    End(Wire* wire, int node) : wire_(wire), node_(node) {}
    int node() const override { return node_; }
    int nodes() const override { return static_cast<int>(wire_->ends_.size()); }
    bool takes_writes_where_cut(int node) const override { return node != wire_->of_older_daemon_; }
    bool takes_extensions(int node) const override { return node != wire_->of_older_daemon_; }
    void Send(int node, v1::PeerMessage message) override {
      wire_->loop_.Post([wire = wire_, from = node_, node, message = std::move(message)]() mutable {
        const bool dropped = wire->drops_ != nullptr && wire->drops_(node, message);
        if (wire->Goes(from, node) && !dropped) {
          wire->ends_[static_cast<size_t>(node)]->OnMessage(from, std::move(message), nullptr);
        }
      });
    }
    void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                  std::function<void(absl::Status)> sent) override {
      wire_->loop_.Post([wire = wire_, from = node_, node, header, elements, sent = std::move(sent)] {
        const bool goes = wire->Goes(from, node);
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
    for (int a = 0; a < static_cast<int>(ends_.size()); ++a) {
      for (int b = 0; b < a; ++b) SetUp(a, b, up);
    }
  }
  void SetUp(int a, int b, bool up) {
    loop_.RunAndWait([&] {
      if (std::exchange(up_[{std::min(a, b), std::max(a, b)}], up) == up) return;
      for (const int node : {std::min(a, b), std::max(a, b)}) {
        const int other = a + b - node;
        PeerLinks::Events* events = ends_[static_cast<size_t>(node)];
        if (events == nullptr) continue;
        if (up) {
          events->OnUp(other);
        } else {
          events->OnDown(other, absl::UnavailableError("the link broke"));
        }
      }
    });
  }
  // The daemon has ended: nothing of it comes any more, and the others see that.
  void Lose(int node) {
    loop_.RunAndWait([&] {
      for (auto& [nodes, up] : up_) up = up && nodes.first != node && nodes.second != node;
      for (int other = 0; other < static_cast<int>(ends_.size()); ++other) {
        PeerLinks::Events* events = ends_[static_cast<size_t>(other)];
        if (other != node && events != nullptr) events->OnDown(node, absl::UnavailableError("the link broke"));
      }
    });
  }
  // Its end is no more.
  bool Gone(int node) {
    bool gone = false;
    loop_.RunAndWait([&] { gone = ends_[static_cast<size_t>(node)] == nullptr; });
    return gone;
  }
  // What `by` answers the calls of `node`.
  void Refuse(int node, int by, const absl::Status& why) {
    loop_.RunAndWait([&] { ends_[static_cast<size_t>(node)]->OnDown(by, why); });
  }
  // `by` does not take the call of `node`.
  void TurnAway(int node, int by, const absl::Status& why) {
    loop_.RunAndWait([&] { ends_[static_cast<size_t>(by)]->OnRefused(node, why); });
  }
  // Its daemon is of a release that takes no values after the initial ones where parameters are cut over nodes, and
  // trains no more than a job had at first. Before any session.
  void IsOfOlderDaemon(int node) { of_older_daemon_ = node; }
  // As if `from` said it.
  void Say(int from, int to, const v1::PeerMessage& message) {
    loop_.RunAndWait([&] { ends_[static_cast<size_t>(to)]->OnMessage(from, message, nullptr); });
  }
  // What is sent and does not come; null: nothing.
  void Drop(std::function<bool(int to, const v1::PeerMessage&)> drops) {
    loop_.RunAndWait([&] { drops_ = std::move(drops); });
  }

 private:
  bool Goes(int from, int to) {
    return up_[{std::min(from, to), std::max(from, to)}] && ends_[static_cast<size_t>(to)] != nullptr;
  }
  std::map<std::pair<int, int>, bool> up_;
  std::vector<PeerLinks::Events*> ends_;
  std::function<bool(int to, const v1::PeerMessage&)> drops_;
  std::atomic<int> of_older_daemon_ = -1;
  CoreLoop loop_;
};

class JobNodesTest : public JobLoopTest {
 protected:
  // `outlives`: a log of each job says what another daemon would find.
  // `in_trainers`: ranks store their steps themselves. `edits`: ranks edit parameters in place, beside the daemon's
  // optimizer. `frozen`: there are parameters that nobody trains, too. `several`: of "w" and "f", 32 elements each,
  // each has an optimizer of its own. `describe`: gives the job other parameters than these. `row`: nodes over
  // which shard groups span; 0: none.
  using Describe = std::function<void(SpecBuilder*)>;
  explicit JobNodesTest(int nodes = 2, v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD, bool outlives = false,
                        bool in_trainers = false, bool edits = false, bool frozen = false, bool several = false,
                        Describe describe = nullptr, int row = 0)
      : strategy_(strategy),
        describe_(std::move(describe)),
        outlives_(outlives),
        in_trainers_(in_trainers),
        edits_(edits),
        frozen_(frozen),
        several_(several),
        row_(row),
        wire_(nodes),
        nodes_(static_cast<size_t>(nodes)) {
    for (int node = 0; node < count(); ++node) Open(node);
    wire_.SetUp(true);
  }
  ~JobNodesTest() override {
    for (Node& node : nodes_) {
      OnLoop([&] {
        if (node.job != nullptr) node.job->Close("the test has ended");
      });
    }
    std::vector<std::weak_ptr<JobCore>> gone;
    for (Node& node : nodes_) {
      gone.push_back(node.job);
      OnLoop([&] { node.job.reset(); });
      node.device->Shutdown();
    }
    for (const auto& job : gone) EXPECT_TRUE(testing::PollUntil([&] { return job.expired(); }, kPatience));
    reaper_.Stop();
    copier_.Stop();
    worker_.Stop();
    loop_.Stop();
  }

  void Open(int number) {
    Node& node = nodes_[static_cast<size_t>(number)];
    SpecBuilder builder(1);
    builder.config().mutable_optimizer()->set_kind(in_trainers_ ? v1::OPTIMIZER_KIND_TRAINER : v1::OPTIMIZER_KIND_SGD);
    if (in_trainers_) {
      builder.config().mutable_optimizer()->set_trainer_states(1);
    }
    builder.config().set_trainers_never_write(!in_trainers_ && !edits_);
    builder.config().set_strategy(strategy_);
    builder.config().set_shard_group_size(row_);
    builder.config().set_compare_every(2);
    for (int node = 0; node < count(); ++node) {
      builder.config().mutable_nodes()->add_addresses(absl::StrCat("host", node, ":7000"));
    }
    if (describe_ != nullptr) {
      describe_(&builder);
    } else {
      builder.Param(0, "w", {several_ ? 32 : 64});
    }
    if (several_) builder.Param(0, "f", {32});
    for (const char* const fqn : {"w", "f"}) {
      if (!several_) continue;
      v1::OptimizerConfig::Group& group = *builder.config().mutable_optimizer()->add_groups();
      group.add_fqns(fqn);
      group.set_kind(v1::OPTIMIZER_KIND_SGD);
    }
    for (const char* const frozen : {"f", "g"}) {
      if (frozen_) builder.Param(0, frozen, {8}, {.requires_grad = false});
    }
    node.plan = std::make_shared<const ShardPlan>(*PlanShards(builder.spec(), number));
    JobCore::Init init;
    init.id = 1;
    init.owner = {getuid()};
    init.spec = builder.spec();
    init.plan = node.plan;
    auto memory = JobMemory::Create(*node.plan, "job");
    auto journal = Journal::Create(node.plan->memory.journal_bytes / 2);
    ASSERT_TRUE(memory.ok() && journal.ok()) << memory.status() << journal.status();
    init.memory = *std::move(memory);
    init.journal = *std::move(journal);
    init.reserved_by_all = [this, number] { return promised_bytes_[static_cast<size_t>(number)].load(); };
    if (outlives_) {
      auto log = TakeUpLog::Create(TakeUpLog::SizesFor(*node.plan));
      ASSERT_TRUE(log.ok()) << log.status();
      node.log_fd = UniqueFd(fcntl((*log)->fd(), F_DUPFD_CLOEXEC, 0));
      init.take_up_log = *std::move(log);
    }
    node.device = std::move(MakeDevices("cpu:1")->devices[0]);
    init.devices.by_rank = {node.device.get()};
    init.loop = &loop_;
    init.copier = &copier_;
    init.devices.memory_worker = CoreLoop::MakeQueue("job memory");
    init.events = &events_;
    auto nodes = std::make_unique<NodeParts>();
    nodes->node = number;
    nodes->worker = &worker_;
    nodes->events = std::make_shared<NodeEvents>(&loop_, [](const v1::PeerHello&, bool) { return absl::OkStatus(); });
    nodes->links = std::make_unique<Wire::End>(&wire_, number);
    std::shared_ptr<PeerExchange> peers =
        *PeerExchange::Make(nodes->links.get(), node.plan->node_slot_bytes / static_cast<int64_t>(sizeof(float)),
                            kNodeSlots, node.plan->node_piece_bytes / static_cast<int64_t>(sizeof(float)),
                            node.plan->cut_over_nodes ? NodesOfRow(*node.plan) : 0);
    if (node.plan->cut_over_nodes) {
      const JobSlab* const source = in_trainers_ ? init.memory->parameters() : init.memory->shards();
      nodes->gather = std::make_unique<PeerGather>(node.plan, nodes->links.get(), source->At(0));
    }
    nodes->events->SetExchange(peers.get(), nodes->gather.get());
    wire_.Listen(number, nodes->events.get());
    auto collective = std::make_unique<NodeCollective>(
        init.devices.by_rank, std::move(peers), init.memory->StagingByRank(*node.plan), node.plan->node_slot_bytes);
    nodes->collective = collective.get();
    init.devices.collective = std::move(collective);
    init.nodes = std::move(nodes);
    if (before_open_ != nullptr) before_open_(&init);
    OnLoop([&] {
      // As the daemon does: whoever lets go last may be a thread that the job joins.
      node.job = std::shared_ptr<JobCore>(new JobCore(std::move(init)),
                                          [this](JobCore* job) { reaper_.Post([job] { delete job; }); });
      node.job->StartNodes();
    });
  }

  // Its daemon is lost with all that it had.
  void Kill(int number) {
    Node& node = nodes_[static_cast<size_t>(number)];
    wire_.Lose(number);
    const std::weak_ptr<JobCore> gone = node.job;
    OnLoop([&] {
      node.job->Close("its daemon is killed");
      node.job.reset();
    });
    node.device->Shutdown();
    // Whoever held it last takes it down, and its links with it.
    ASSERT_TRUE(testing::PollUntil([&] { return gone.expired() && wire_.Gone(number); }, kPatience));
  }
  // With a new daemon's.
  void OpenAgain(int number) {
    Open(number);
    for (int other = 0; other < count(); ++other) {
      if (other != number && nodes_[static_cast<size_t>(other)].job != nullptr) wire_.SetUp(number, other, true);
    }
  }

  absl::Status TryAttach(int number) {
    Node& node = nodes_[static_cast<size_t>(number)];
    uint64_t epoch = 0;
    OnLoop([&] { epoch = node.job->committed().epoch(); });
    auto session = Session::Create(node.plan, ++sessions_made_, 0, epoch, {});
    if (session.ok()) (*session)->peer.pid = getpid();
    if (!session.ok()) return session.status();
    node.stream = std::make_shared<Events>();
    return AddLive(node.job.get(), *std::move(session), node.stream);
  }
  // Until what the last epoch left behind has ended.
  void Attach(int node) {
    ASSERT_TRUE(testing::PollUntil([&] { return TryAttach(node).ok(); }, kPatience));
  }
  void Send(int node, const v1::Command& command) {
    v1::CommandBatch batch;
    *batch.add_commands() = command;
    OnLoop([&] {
      if (Session* session = job(node).sessions()[0].get(); session != nullptr) {
        job(node).commands().ExecuteFromStream(session, batch);
      }
    });
  }
  // All 64 elements of the parameter, from `value` on: where they are cut a node keeps its half.
  void WriteWhole(int node, float value) {
    v1::Command command;
    command.mutable_write_parameters()->set_numel(64);
    OnLoop([&] {
      const Session& session = *job(node).sessions()[0].get();
      const int64_t at = session.layout().payload_offset_bytes;
      command.mutable_write_parameters()->set_staging_offset_bytes(at);
      auto* staging = reinterpret_cast<float*>(const_cast<char*>(session.Staging(at, 256)));
      for (int i = 0; i < 64; ++i) staging[i] = value + static_cast<float>(i);
    });
    Send(node, command);
    ASSERT_TRUE(Until([&] { return !job(node).sessions()[0].get()->held; }));
  }
  void CommitParameters(int node) {
    v1::Command command;
    command.mutable_commit_parameters();
    Send(node, command);
  }
  void Begin() {
    for (int node = 0; node < count(); ++node) {
      Attach(node);
      CommitParameters(node);
    }
    for (int node = 0; node < count(); ++node) {
      ASSERT_TRUE(Until([&] { return job(node).committed().version() == 1; }));
    }
  }
  void Submit(int node, float gradient) {
    OnLoop([&] {
      if (job(node).sessions()[0].get() == nullptr) return;
      auto* slot = reinterpret_cast<float*>(const_cast<char*>(job(node).sessions()[0].get()->slot(0)));
      std::fill(slot, slot + 64, gradient);
    });
    SubmitSlot(node);
  }
  // What its slot has.
  void SubmitSlot(int node) {
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_BACKWARD);
    Send(node, command);
    command.mutable_submit_gradients()->set_group(0);
    Send(node, command);
    command.mutable_reshard()->set_group(0);
    Send(node, command);
  }
  void EndBackward(int node) {
    v1::Command command;
    command.mutable_backward_done()->set_last(true);
    Send(node, command);
  }
  void Train(int node, float gradient) {
    Submit(node, gradient);
    EndBackward(node);
    v1::Command command;
    command.mutable_step()->add_groups()->set_lr(0.5);
    Send(node, command);
  }
  // All nodes, with gradients that average to 2.
  void TrainAll() {
    for (int node = 0; node < count(); ++node) Train(node, GradientOf(node));
  }
  static float GradientOf(int node) { return node == 0 ? 1 : node == 1 ? 3 : 2; }
  void TrainsTo(int64_t step) {
    TrainAll();
    for (int node = 0; node < count(); ++node) IsAt(node, step);
  }
  // TrainsTo where nodes may have yet to hear of what happened: a rank whose epoch ends then attaches again, as
  // trainers do, and gives its gradients anew.
  void GoesOnTo(int64_t step) {
    Given given;
    EXPECT_TRUE(testing::PollUntil(
        [&] {
          bool all = true;
          for (int node = 0; node < count(); ++node) all = !TrainsOn(node, step, &given) && all;
          return all;
        },
        kPatience));
    for (int node = 0; node < count(); ++node) IsAt(node, step);
  }
  void IsAt(int node, int64_t step) {
    EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == step; })) << "node " << node << Why(node);
    EXPECT_EQ(Value(node), -static_cast<float>(step)) << "node " << node;
  }
  // The first element that the node holds.
  float Value(int node) {
    const int64_t first = 32 * nodes_[static_cast<size_t>(node)].plan->node;  // 0, where it has a whole copy
    return *SlabAt<float>(job(node).memory().shards(), first * static_cast<int64_t>(sizeof(float)));
  }
  const Events& StreamOf(int node) { return *nodes_[static_cast<size_t>(node)].stream; }
  std::string Why(int node) { return nodes_[static_cast<size_t>(node)].stream->Aborted().message(); }
  void Lose(int node) {
    OnLoop([&] { job(node).SessionLost(0, "killed"); });
  }
  bool Gone(int node) {
    return Until([&] { return job(node).sessions()[0].get() == nullptr; });
  }
  int count() const { return static_cast<int>(nodes_.size()); }
  // By node: the epoch and version for which its rank has given gradients.
  using Given = std::map<int, std::pair<uint64_t, uint64_t>>;
  // Whether the node is behind `step`; then its rank does what comes next, as trainers do that attach again: it gives
  // its gradients once for each version and epoch.
  bool TrainsOn(int node, int64_t step, Given* given) {
    bool attached = false;
    bool behind = false;
    std::pair<uint64_t, uint64_t> now;
    OnLoop([&] {
      attached = job(node).sessions()[0].get() != nullptr;
      behind = job(node).view().committed_step() < step;
      now = {job(node).committed().epoch(), job(node).committed().version()};
      EXPECT_FALSE(job(node).closed());
    });
    if (!attached) {
      (void)TryAttach(node);
    } else if (behind && std::exchange((*given)[node], now) != now) {
      if (now.second == 0) {
        CommitParameters(node);
      } else {
        Train(node, GradientOf(node));
      }
    }
    return behind;
  }
  // What a schedule makes of a random number: its rank is lost (0), links that were `up` break (1) or, whatever it is,
  // come again.
  void Disturb(int node, uint64_t what, bool* up) {
    if (what == 0) {
      OnLoop([&] {
        if (job(node).sessions()[0].get() != nullptr) job(node).SessionLost(0, "killed");
      });
    } else if (what == 1 || !*up) {
      *up = !*up;
      wire_.SetUp(*up);
    }
  }
  // While ranks and links come and go.
  void RunSchedule(int seed, int64_t steps = 150) {
    std::mt19937_64 rng(static_cast<uint64_t>(seed));
    Given given;
    bool up = true;
    const absl::Time until = MonotonicNow() + absl::Seconds(60);
    std::vector<bool> behind(nodes_.size(), true);
    while (std::find(behind.begin(), behind.end(), true) != behind.end() && MonotonicNow() < until) {
      const int node = static_cast<int>(rng() % nodes_.size());
      const uint64_t what = rng() % static_cast<uint64_t>(8 * (1 + seed));
      Disturb(node, what, &up);
      behind[static_cast<size_t>(node)] = TrainsOn(node, steps, &given);
    }
    for (int node = 0; node < count(); ++node) {
      EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == steps; })) << "node " << node << Why(node);
      EXPECT_EQ(Value(node), -static_cast<float>(steps)) << "node " << node;
      EXPECT_GT(job(node).committed().epoch(), 3u) << "nothing happened";
    }
  }
  uint64_t Word(int node, TimelineWord DaemonPage::*word) { return WordOf(job(node), 0, word); }
  JobCore& job(int node) { return *nodes_[static_cast<size_t>(node)].job; }

  struct Node {
    std::shared_ptr<const ShardPlan> plan;
    std::unique_ptr<Device> device;
    std::shared_ptr<Events> stream;
    std::shared_ptr<JobCore> job;
    UniqueFd log_fd;
  };
  EventLog events_;
  const v1::Strategy strategy_;
  const Describe describe_;
  const bool outlives_;
  const bool in_trainers_;
  const bool edits_;
  const bool frozen_;
  const bool several_;
  const int row_;
  std::function<void(JobCore::Init*)> before_open_;          // what a daemon finds of its job's; null: nothing
  std::array<std::atomic<int64_t>, 6> promised_bytes_ = {};  // by node: memory of the host, to jobs
  uint64_t sessions_made_ = 0;
  Wire wire_;
  TurnQueue copier_{"copier"};
  CoreLoop worker_;
  CoreLoop reaper_;
  std::vector<Node> nodes_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_JOB_NODES_FIXTURE_H_
