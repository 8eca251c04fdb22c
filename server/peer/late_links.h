#ifndef SHARDD_SERVER_PEER_LATE_LINKS_H_
#define SHARDD_SERVER_PEER_LATE_LINKS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/clock/timed_condition.h"
#include "server/peer/peer_links.h"

namespace shardd {

// Links of a job that takes the place of another one, whose name they have until it is freed: made when that has
// happened. Before that there is no link to any node. Thread-safe.
class LateLinks final : public PeerLinks {
 public:
  // `join` makes the links; ALREADY_EXISTS: not yet, it is called again. Called on a thread of this object's from Start
  // on. `failed`: with any other error, once, on that thread.
  using Join = std::function<absl::StatusOr<std::unique_ptr<PeerLinks>>()>;
  LateLinks(int node, int nodes, Join join, std::function<void(const absl::Status&)> failed);
  ~LateLinks() override;

  int node() const override { return node_; }
  int nodes() const override { return nodes_; }
  PeerTraffic traffic(int node) const override;
  int protocol_version(int node) const override;
  bool takes_writes_where_cut(int node) const override;
  bool takes_extensions(int node) const override;
  bool takes_fetch_ends(int node) const override;
  void Start() override ABSL_LOCKS_EXCLUDED(mutex_);
  void Send(int node, v1::PeerMessage message) override;
  void Renew(int node) override;
  void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                std::function<void(absl::Status)> sent) override;

 private:
  void JoinWhenFree() ABSL_LOCKS_EXCLUDED(mutex_);
  PeerLinks* Links() const ABSL_LOCKS_EXCLUDED(mutex_);

  const int node_;
  const int nodes_;
  const Join join_;
  const std::function<void(const absl::Status&)> failed_;
  std::atomic<PeerLinks*> links_ = nullptr;  // null: there are none yet, or are being made
  // Held while they are made: whoever hears of a link finds it here.
  mutable absl::Mutex mutex_;
  TimedCondition changed_;  // stops_
  std::unique_ptr<PeerLinks> made_ ABSL_GUARDED_BY(mutex_);
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LATE_LINKS_H_
