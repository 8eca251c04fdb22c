#ifndef SHARDD_TESTS_FAULTS_PEER_DAEMON_H_
#define SHARDD_TESTS_FAULTS_PEER_DAEMON_H_

// Node 1 of a job that is cut over two nodes, as no daemon is: it says the right hello, gives node 0 what that needs to
// begin to train, and then whatever a test likes.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/plan/plan.h"
#include "server/peer/peer_network.h"

namespace shardd::faults {

// Thread-safe.
class PeerDaemon final : private PeerLinks::Events {
 public:
  // Of the job `spec`, with node 0 at addresses[0].
  PeerDaemon(const v1::JobSpec& spec, const std::vector<std::string>& addresses);
  ~PeerDaemon() override;

  // Wait; false: nothing came.
  // What node 0's rank needs of this node, the first of so many bytes: what is smaller is given to it.
  bool WaitAsked(int64_t bytes, v1::PeerMessage* pull);
  // Of what this one has asked for: whether it was refused, and the words.
  bool Refused(uint64_t transfer, std::string* why) const;
  bool WaitRefused(uint64_t transfer, std::string* why);
  bool WaitData(uint64_t transfer, int64_t bytes);
  // Whether node 0 has said such a thing, or says it.
  bool WaitSaid(const std::function<bool(const v1::PeerMessage&)>& is_it);
  uint64_t generation() const;
  const ShardPlan& plan() const { return plan_; }
  // Bytes that node `node` holds of a group, unsharded.
  int64_t HeldBytes(int group, int node) const;

  void Send(v1::PeerMessage message) { links_->Send(0, std::move(message)); }
  // `bytes` zeros of what `pull` asks for, where `change` does not say otherwise.
  void SendData(const v1::PeerMessage& pull, int64_t offset, int64_t bytes,
                const std::function<void(v1::PeerData*)>& change = nullptr);
  v1::PeerMessage Pull(uint64_t transfer, int group, uint64_t version) const;

 private:
  absl::Status CheckHello(int, const v1::PeerHello&) override { return absl::OkStatus(); }
  void OnUp(int node) override;
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) override;
  void OnDown(int, absl::Status) override {}
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override;

  const ShardPlan plan_;
  const std::vector<char> zeros_;
  std::unique_ptr<PeerNetwork> network_;
  mutable absl::Mutex mutex_;
  std::vector<v1::PeerMessage> heard_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::PeerData> data_ ABSL_GUARDED_BY(mutex_);  // numel: bytes that came
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  PeerLinks* use_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of events: links_, also while it ends
  std::unique_ptr<PeerLinks> links_;                  // last: events come until it is gone
};

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_PEER_DAEMON_H_
