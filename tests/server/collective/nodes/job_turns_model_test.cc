// Two jobs that take turns, on a model of nodes, links and GPUs, by schedules of chance: whatever dies, and whenever,
// all that lives comes to its end. The rules under test are the daemon's own (NodeTurns, JobTurns); what NcclExchange
// does around them is modelled. A GPU runs what was issued in order, and waits with it for all nodes.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/collective/nodes/nccl/job_turns.h"

namespace shardd {
namespace {

constexpr int kItems = 18;  // sums and moves of each job
constexpr int kMostSteps = 200000;

enum class Kind { kMake, kSum, kMove };

struct Op {
  int job = 0;
  uint64_t generation = 0;
  Kind kind = Kind::kMake;
  uint64_t sequence = 0;
  auto operator<=>(const Op&) const = default;
};

enum class Says { kBegin, kAsked, kDecided, kLimit, kReport };
struct Message {
  Says says = Says::kBegin;
  uint64_t generation = 0;
  TurnLimit limit;
  TurnReport report;
};

enum class Phase { kUnasked, kAsked, kMaking, kAgreed };
// A job's part on one node.
struct Member {
  uint64_t generation = 0;
  Phase phase = Phase::kUnasked;
  TurnLimit limit;
  TurnReport reported;
  int entered = 0;  // items that its ranks have come to
  TurnCounts issued, done;
  bool stopped = false;  // its ranks come to nothing more
};

struct Job {
  explicit Job(int nodes) : members(static_cast<size_t>(nodes)), to(members.size()), from(members.size()) {}
  std::vector<Member> members;
  std::vector<std::deque<Message>> to, from;  // links of node 0
  uint64_t generation = 0;                    // node 0's
  // Node 0's exchange.
  std::set<int> asked;
  JobTurns turns{static_cast<int>(members.size())};
  std::shared_ptr<NodeTurns::Seat> seat;
  NodeTurns::View view;
  bool wanted = false;
};

// Items alternate, so sums wait behind moves: two moves, a sum, and again.
bool IsMove(int item) { return item % 3 != 2; }
TurnCounts Before(int item) {
  TurnCounts counts;
  for (int i = 0; i < item; ++i) ++(IsMove(i) ? counts.moves : counts.sums);
  return counts;
}

class Model {
 public:
  // `turns`: without, both jobs are as if each were alone.
  Model(int nodes, uint32_t seed, bool turns) : nodes_(nodes), by_turns_(turns), random_(seed), gpus_(Index(nodes)) {
    for (int node = 0; node < nodes; ++node) ahead_.push_back(static_cast<int>(random_() % 2));
  }

  void Open(int job) {
    jobs_[Index(job)] = std::make_unique<Job>(nodes_);
    SeatNode0(job);
    Begin(job);
  }
  void Close(int job) {
    for (int node = 0; node < nodes_; ++node) Abort(node, job);
    jobs_[Index(job)].reset();
  }
  // Its ranks on the node come to nothing more.
  void Stop(int job, int node) { Of(job, node).stopped = true; }

  // A generation ends: node 0 aborts what it has at once, the others when they hear of it.
  void Begin(int job) {
    Job& of = *jobs_[Index(job)];
    of.generation = ++last_generation_;
    of.asked.clear();
    Renew(job, 0, of.generation);
    for (int node = 1; node < nodes_; ++node) {
      of.to[Index(node)].push_back({Says::kBegin, of.generation, {}, {}});
    }
  }
  // A daemon dies with all that it has, and another one comes. Its links' messages are lost.
  void Die(int node) {
    gpus_[Index(node)].clear();
    if (node == 0) daemon_ = std::make_shared<NodeTurns>();
    for (int job = 0; job < 2; ++job) {
      Job* const of = jobs_[Index(job)].get();
      if (of == nullptr) continue;
      const bool stopped = Of(job, node).stopped;
      of->members[Index(node)] = Member();
      Of(job, node).stopped = stopped;
      for (int other = 1; other < nodes_; ++other) {
        if (node != 0 && node != other) continue;
        of->to[Index(other)].clear();
        of->from[Index(other)].clear();
      }
      if (node == 0) SeatNode0(job);
      Begin(job);
    }
  }

  // Until nothing can happen any more; false: something always can. `chaos`: called before each event.
  bool Run(const std::function<void()>& chaos = nullptr) {
    for (int step = 0; step < kMostSteps; ++step) {
      if (chaos != nullptr) chaos();
      std::vector<std::function<void()>> events;
      Collect(&events);
      if (events.empty()) return true;
      events[random_() % events.size()]();
    }
    return false;
  }
  bool HasEnded(int job) {
    for (int node = 0; node < nodes_; ++node) {
      if (jobs_[Index(job)] != nullptr && Of(job, node).done != Before(kItems)) return false;
    }
    return true;
  }
  // And has ended what its nodes had issued before, which may wait for ranks once.
  bool IsLimited(int job) {
    if (jobs_[Index(job)]->turns.state() != JobTurns::State::kLimited) return false;
    for (int node = 0; node < nodes_; ++node) {
      const Member& member = Of(job, node);
      if (member.phase != Phase::kAgreed || !member.limit.limited || member.done != member.limit.below) return false;
    }
    return true;
  }
  bool IsOpen(int job) const { return jobs_[Index(job)] != nullptr; }
  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  int turn_messages() const { return turn_messages_; }

 private:
  static size_t Index(int k) { return static_cast<size_t>(k); }
  Member& Of(int job, int node) { return jobs_[Index(job)]->members[Index(node)]; }

  void SeatNode0(int job) {
    Job& of = *jobs_[Index(job)];
    of.seat = nullptr;
    of.seat = *(by_turns_ ? daemon_ : std::make_shared<NodeTurns>())->Enter(std::to_string(job), {});
    of.wanted = false;
    of.seat->Watch([&of](const NodeTurns::View& view) { of.view = view; });
  }
  void Abort(int node, int job) {
    auto& queue = gpus_[Index(node)];
    queue.erase(std::remove_if(queue.begin(), queue.end(), [job](const Op& op) { return op.job == job; }), queue.end());
  }
  void Renew(int job, int node, uint64_t generation) {
    Member& member = Of(job, node);
    if (generation <= member.generation) return;
    Abort(node, job);
    const bool stopped = member.stopped;
    member = Member();
    member.generation = generation;
    member.stopped = stopped;
  }
  void Issue(int job, int node, Kind kind, uint64_t sequence) {
    gpus_[Index(node)].push_back({job, Of(job, node).generation, kind, sequence});
  }

  // Sums and moves of one job run side by side; jobs, and what makes communicators, one after the other.
  bool Runs(int node, const Op& op) const {
    for (const Op& before : gpus_[Index(node)]) {
      if (before == op) return true;
      if (before.job != op.job || before.kind == Kind::kMake || before.kind == op.kind) return false;
    }
    return false;
  }
  void Ended(int node, const Op& op) {
    auto& queue = gpus_[Index(node)];
    queue.erase(std::find(queue.begin(), queue.end(), op));
    Member& member = Of(op.job, node);
    if (op.kind == Kind::kMake) {
      member.phase = Phase::kAgreed;
    } else {
      ++(op.kind == Kind::kMove ? member.done.moves : member.done.sums);
    }
  }

  TurnReport Report(const Member& member) const {
    return {member.limit.round, Before(member.entered), member.issued, member.done};
  }
  JobTurns::Step NextTurn(int job) {
    Job& of = *jobs_[Index(job)];
    const Member& own = of.members[0];
    if (own.phase == Phase::kAgreed) return of.turns.Next(of.view, Report(own));
    JobTurns::Step step;
    const auto is_ours = [job](const Op& op) { return op.job == job; };
    const bool decides = own.phase == Phase::kAsked && of.asked.size() == Index(nodes_);
    const bool under_way = std::any_of(gpus_[0].begin(), gpus_[0].end(), is_ours) || own.phase == Phase::kMaking;
    step.releases = of.view.mine && !of.view.alone && !decides && !under_way;
    step.wants = decides || (of.view.mine && !step.releases);
    return step;
  }

  void Collect(std::vector<std::function<void()>>* events) {
    for (int job = 0; job < 2; ++job) {
      if (jobs_[Index(job)] == nullptr) continue;
      for (int node = 0; node < nodes_; ++node) CollectOf(job, node, events);
      CollectTurns(job, events);
    }
    // What runs everywhere ends everywhere, on each node when it comes to it.
    for (int node = 0; node < nodes_; ++node) {
      for (const Op& op : gpus_[Index(node)]) {
        bool runs = Runs(node, op);
        for (int other = 0; runs && other < nodes_; ++other)
          runs = Runs(other, op) || finished_[Index(other)].count(op);
        if (!runs) continue;
        events->push_back([this, node, op] {
          finished_[Index(node)].insert(op);
          Ended(node, op);
        });
      }
    }
  }
  void CollectOf(int job, int node, std::vector<std::function<void()>>* events) {
    Job& of = *jobs_[Index(job)];
    Member& member = of.members[Index(node)];
    if (node != 0 && !of.to[Index(node)].empty()) events->push_back([this, job, node] { HearOf0(job, node); });
    if (node != 0 && !of.from[Index(node)].empty()) events->push_back([this, job, node] { Hear(job, node); });
    if (member.generation == 0) return;
    // Ranks wait for what they have come to, but for the last of it on some nodes.
    const TurnCounts needed = Before(std::max(0, member.entered - ahead_[Index(node)]));
    const bool has_it = member.done.sums >= needed.sums && member.done.moves >= needed.moves;
    if (member.entered < kItems && has_it && !member.stopped) {
      events->push_back([&member] { ++member.entered; });
    }
    if (member.phase == Phase::kUnasked && member.entered > 0) {
      events->push_back([&of, &member, node] {
        member.phase = Phase::kAsked;
        if (node == 0) {
          of.asked.insert(0);
        } else {
          of.from[Index(node)].push_back({Says::kAsked, member.generation, {}, {}});
        }
      });
    }
    if (member.phase != Phase::kAgreed) return;
    const TurnCounts ready = Before(member.entered);
    for (const bool moves : {true, false}) {
      uint64_t& next = moves ? member.issued.moves : member.issued.sums;
      const uint64_t below = moves ? member.limit.below.moves : member.limit.below.sums;
      if (next >= (moves ? ready.moves : ready.sums) || (member.limit.limited && next >= below)) continue;
      events->push_back(
          [this, job, node, moves, &next] { Issue(job, node, moves ? Kind::kMove : Kind::kSum, next++); });
    }
    TurnReport report = Report(member);
    report.issued = member.reported.issued;
    if (node != 0 && member.limit.limited && report != member.reported) {
      events->push_back([this, &of, &member, node] {
        member.reported = Report(member);
        Send(&of.from[Index(node)], {Says::kReport, member.generation, {}, member.reported});
      });
    }
  }
  void CollectTurns(int job, std::vector<std::function<void()>>* events) {
    Job& of = *jobs_[Index(job)];
    Member& own = of.members[0];
    const JobTurns::Step step = NextTurn(job);
    const bool changes = step.state != JobTurns::State::kFree && step.state != of.turns.state();
    if (step.releases || step.tells.has_value() || step.wants != of.wanted || changes) {
      events->push_back([this, &of, &own, step] {
        if (own.phase == Phase::kAgreed) of.turns.Take(step);
        if (step.tells.has_value()) {
          own.limit = *step.tells;
          for (int node = 1; node < nodes_; ++node) {
            Send(&of.to[Index(node)], {Says::kLimit, own.generation, own.limit, {}});
          }
        }
        const bool otherwise = std::exchange(of.wanted, step.wants) != step.wants;
        if (step.releases) {
          of.seat->Release();
        } else if (otherwise) {
          of.seat->Want(step.wants);
        }
      });
    }
    if (own.phase != Phase::kAsked || of.asked.size() < Index(nodes_) || !of.view.mine) return;
    events->push_back([this, job, &of, &own] {
      own.limit = of.turns.Begin(of.view.alone);
      own.phase = Phase::kMaking;
      for (int node = 1; node < nodes_; ++node) {
        of.to[Index(node)].push_back({Says::kDecided, own.generation, own.limit, {}});
      }
      Issue(job, 0, Kind::kMake, 0);
    });
  }
  void Send(std::deque<Message>* link, Message message) {
    ++turn_messages_;
    link->push_back(std::move(message));
  }
  void HearOf0(int job, int node) {
    auto& link = jobs_[Index(job)]->to[Index(node)];
    const Message message = link.front();
    link.pop_front();
    Member& member = Of(job, node);
    if (message.says == Says::kBegin) return Renew(job, node, message.generation);
    if (message.generation != member.generation) return;
    member.limit = message.limit;
    if (message.says != Says::kDecided) return;
    member.phase = Phase::kMaking;
    Issue(job, node, Kind::kMake, 0);
  }
  void Hear(int job, int node) {
    Job& of = *jobs_[Index(job)];
    const Message message = of.from[Index(node)].front();
    of.from[Index(node)].pop_front();
    if (message.generation != of.members[0].generation) return;
    if (message.says == Says::kAsked) {
      of.asked.insert(node);
    } else {
      ASSERT_TRUE(message.report.IsPossible());
      of.turns.OnReport(node, message.report);
    }
  }

  const int nodes_;
  const bool by_turns_;
  std::mt19937 random_;
  std::vector<int> ahead_;                                             // by node
  std::vector<std::deque<Op>> gpus_;                                   // by node: what is issued and has not ended
  std::array<std::set<Op>, 4> finished_;                               // by node
  std::shared_ptr<NodeTurns> daemon_ = std::make_shared<NodeTurns>();  // node 0's
  std::array<std::unique_ptr<Job>, 2> jobs_;
  uint64_t last_generation_ = 0;  // of all jobs, so that none comes again
  int turn_messages_ = 0;
};

// Nodes and seed.
class JobTurnsModel : public ::testing::TestWithParam<int> {
 protected:
  static constexpr uint32_t kSeeds = 150;
};
INSTANTIATE_TEST_SUITE_P(Nodes, JobTurnsModel, ::testing::Values(2, 3), ::testing::PrintToStringParamName());

TEST_P(JobTurnsModel, OneJobAloneEndsAndSaysNothing) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    Model model(GetParam(), seed, /*turns=*/true);
    model.Open(0);
    ASSERT_TRUE(model.Run() && model.HasEnded(0)) << "seed " << seed;
    EXPECT_EQ(model.turn_messages(), 0);
  }
}

TEST_P(JobTurnsModel, TwoJobsEndWhateverTheOrder) {
  int stuck = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool turns : {true, false}) {
      Model model(GetParam(), seed, turns);
      model.Open(0);
      int wait = static_cast<int>(model.Random(120));  // the other comes while it trains
      const auto open = [&] {
        if (wait-- == 0) model.Open(1);
      };
      ASSERT_TRUE(model.Run(open));
      const bool ended = model.HasEnded(0) && model.HasEnded(1);
      ASSERT_TRUE(ended || !turns) << "seed " << seed;
      stuck += ended ? 0 : 1;
    }
  }
  EXPECT_GT(stuck, 10) << "without turns they wait for each other";
}

TEST_P(JobTurnsModel, NothingThatDiesHoldsWhoLives) {
  for (uint32_t seed = 0; seed < 4 * kSeeds; ++seed) {
    Model model(GetParam(), seed, /*turns=*/true);
    model.Open(0);
    model.Open(1);
    int left = 8;
    const uint32_t seldom = 4 + model.Random(60);
    const auto chaos = [&] {
      if (left == 0 || model.Random(seldom) != 0) return;
      --left;
      const int job = static_cast<int>(model.Random(2));
      switch (model.Random(4)) {
        case 0:
          if (model.IsOpen(job)) model.Begin(job);
          return;
        case 1:
          return model.Die(static_cast<int>(model.Random(static_cast<uint32_t>(GetParam()))));
        case 2:
          return model.IsOpen(job) ? model.Close(job) : model.Open(job);
        default:
          return;
      }
    };
    ASSERT_TRUE(model.Run(chaos)) << "seed " << seed;
    for (const int job : {0, 1}) ASSERT_TRUE(model.HasEnded(job)) << "seed " << seed << ", job " << job;
  }
}

TEST_P(JobTurnsModel, RanksThatStopHoldNobodyElse) {
  uint32_t stops = 0;  // else the job has ended before the other came
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    Model model(GetParam(), seed, /*turns=*/true);
    model.Open(0);
    model.Open(1);
    bool stopped = false;
    const int node = static_cast<int>(model.Random(static_cast<uint32_t>(GetParam())));
    const auto stop = [&] {
      if (stopped || !model.IsLimited(0)) return;
      stopped = true;
      model.Stop(0, node);
    };
    ASSERT_TRUE(model.Run(stop)) << "seed " << seed;
    ASSERT_TRUE(model.HasEnded(1)) << "seed " << seed;
    stops += stopped ? 1 : 0;
  }
  EXPECT_GT(stops, kSeeds / 2);
}

}  // namespace
}  // namespace shardd
