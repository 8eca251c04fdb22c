#ifndef SHARDD_SERVER_MULTINODE_NODE_EVENTS_H_
#define SHARDD_SERVER_MULTINODE_NODE_EVENTS_H_

// What the links of a job's nodes say, brought from the network's threads to the loop; and gradients and parameters,
// straight to those who send and receive them.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/peer/peer_links.h"

namespace shardd {

class CoreLoop;
class NodeExchange;
class NodeGather;

// Held by the links' owner and by what is posted to the loop. Thread-safe, but for what says "loop-confined".
class NodeEvents final : public PeerLinks::Events, public std::enable_shared_from_this<NodeEvents> {
 public:
  using SameJob = std::function<absl::Status(const v1::PeerHello&, bool has_parameters)>;
  // `same_job`: whether another node describes this job; `has_parameters`: this one's has some. Any thread.
  NodeEvents(CoreLoop* loop, SameJob same_job) : loop_(loop), same_job_(std::move(same_job)) {}

  // Who hears, on the network's threads, of gradients and of parameters that other nodes send or ask for; null: nobody.
  // To be called right after the links were asked for, which they need: what comes earlier waits. Also where none could
  // be made.
  void SetExchange(NodeExchange* exchange, NodeGather* gather = nullptr) ABSL_LOCKS_EXCLUDED(mutex_);
  // When it returns nothing reaches either any more, which may then go: before the links.
  void ForgetExchange() ABSL_LOCKS_EXCLUDED(mutex_);

  // Where bytes of the job's state go, on the network's threads too; null: nowhere. ForgetExchange forgets it as well.
  using TakeState = std::function<void(int node, const v1::PeerData&, absl::string_view elements)>;
  void SetState(TakeState take) ABSL_LOCKS_EXCLUDED(mutex_);

  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnUp(int node) = 0;
    virtual void OnMessage(int node, const v1::PeerMessage& message) = 0;
    virtual void OnDown(int node, const absl::Status& why) = 0;
    virtual void OnRefused(int node, const absl::Status& why) = 0;  // it wanted a link, for another job
  };
  // Loop-confined. What has come before comes now. Null: nothing comes any more.
  void SetListener(Listener* listener);

  // All nodes have agreed on parameters of the job, and so on what it trains: other nodes are told so from here on.
  void SetHasParameters() { has_parameters_ = true; }

  absl::Status CheckHello(int node, const v1::PeerHello& hello) override;
  bool HasParameters() const override { return has_parameters_; }
  void OnRefused(int node, const absl::Status& why) override;
  void OnUp(int node) override;
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) override;
  void OnDown(int node, absl::Status why) override;
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override;

 private:
  // Wait for SetExchange.
  void WithExchange(absl::FunctionRef<void(NodeExchange*)> call) ABSL_LOCKS_EXCLUDED(mutex_);
  void WithGather(absl::FunctionRef<void(NodeGather*)> call) ABSL_LOCKS_EXCLUDED(mutex_);
  void Deliver(std::function<void(Listener*)> event);

  CoreLoop* const loop_;
  const SameJob same_job_;
  std::atomic<bool> has_parameters_ = false;
  absl::Mutex mutex_;
  bool has_exchange_ ABSL_GUARDED_BY(mutex_) = false;
  NodeExchange* exchange_ ABSL_GUARDED_BY(mutex_) = nullptr;  // called with the lock shared
  NodeGather* gather_ ABSL_GUARDED_BY(mutex_) = nullptr;      // likewise
  TakeState take_state_ ABSL_GUARDED_BY(mutex_);              // likewise
  // Loop-confined.
  Listener* listener_ = nullptr;
  bool listened_ = false;  // somebody did
  std::vector<std::function<void(Listener*)>> early_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_EVENTS_H_
