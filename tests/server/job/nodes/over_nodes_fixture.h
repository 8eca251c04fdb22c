#ifndef SHARDD_TESTS_SERVER_JOB_NODES_OVER_NODES_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_NODES_OVER_NODES_FIXTURE_H_

// The member of node 1 of two, whose node 0 is the test, and a job of one rank that has version 1, without the job: for
// components that say and hear. What is sent is kept.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/job/gradients/pairing.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/job_work.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "server/storage/journal.h"
#include "tests/server/job/fake_job.h"
#include "tests/server/multinode/member_listener.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {

class OverNodesTest : public ::testing::Test, protected testing::MemberListener {
 protected:
  // `row`: nodes over which shard groups span, in two rows; 0: the job is over two nodes.
  explicit OverNodesTest(bool cut = false, int row = 0)
      : plan_(testing::NodesPlan(row > 0 ? 2 * row : 2, /*allow_missing=*/false, cut, row)) {
    committed_.CommitVersion();
  }
  ~OverNodesTest() override {
    worker_.Stop();
    loop_.RunAndWait([this] { member_.Stop(); });
    loop_.Stop();
  }

  // Node 0 is there, and begins with what the job has.
  void Begin(NodeListeners listeners) {
    loop_.RunAndWait([&] {
      member_.Start(listeners);
      member_.OnUp(0);
    });
    Hear(BeginMessage(NodeStep()));
  }
  NodeListeners Nobody() { return {this, this, this, this}; }
  v1::PeerMessage BeginMessage(int64_t step) const {
    v1::PeerMessage message;
    message.mutable_begin()->set_generation(1);
    message.mutable_begin()->set_initialized(true);
    message.mutable_begin()->set_decided_step(step);
    return message;
  }
  void Hear(const v1::PeerMessage& message) {
    loop_.RunAndWait([&] { member_.OnMessage(0, message); });
  }
  // What the worker was asked for has come back to the loop.
  void Drain() {
    worker_.RunAndWait([] {});
    loop_.RunAndWait([] {});
  }
  // Messages to node 0 of this kind, in order.
  std::vector<v1::PeerMessage> Sent(v1::PeerMessage::KindCase kind) {
    std::vector<v1::PeerMessage> sent;
    loop_.RunAndWait([&] {
      for (const v1::PeerMessage& message : links_.sent) {
        if (message.kind_case() == kind) sent.push_back(message);
      }
    });
    return sent;
  }
  static std::unique_ptr<Journal> NewJournal() {
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(/*place_bytes=*/4096);
    EXPECT_TRUE(journal.ok()) << journal.status();
    return *std::move(journal);
  }

  int64_t NodeStep() const override { return committed_.step(); }
  bool NodeInitialized() const override { return committed_.version() > 0; }
  uint64_t NodeVersion() const override { return committed_.version(); }
  void NodeAbort(const absl::Status& cause) override { member_.AttemptEnded(cause); }
  void NodeClose(const std::string& why) override { ADD_FAILURE() << why; }
  void Advance() override { job_.Advance(); }

  const std::shared_ptr<const ShardPlan> plan_;
  const int params_ = static_cast<int>(plan_->params.size());
  CoreLoop loop_;
  CoreLoop worker_;
  testing::KeptLinks links_{/*node=*/1, /*nodes=*/2};
  const std::shared_ptr<NodeEvents> events_ =
      std::make_shared<NodeEvents>(&loop_, [](const v1::PeerHello&, bool) { return absl::OkStatus(); });
  Committed committed_{"job", params_, 1, NewJournal()};
  StepDecision decision_;
  AskedSteps steps_{1, &committed_};
  Pairing pairing_{plan_, &committed_};
  FakeJob job_;
  JobWork work_{&loop_, &job_};
  NodeMember member_{plan_, /*node=*/1, &loop_, &links_, events_, this};
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_NODES_OVER_NODES_FIXTURE_H_
