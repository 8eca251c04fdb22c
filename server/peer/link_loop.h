#ifndef SHARDD_SERVER_PEER_LINK_LOOP_H_
#define SHARDD_SERVER_PEER_LINK_LOOP_H_

// The links of one job: the state machine behind the PeerLinks of PeerNetwork::Join.
//
// A link consists of two streams, Link and Data, and is up when both are. The node that calls sends hello on Link, gets
// an answer, sends hello on Data with the token of the first hello, and gets another answer. When either stream ends,
// the link ends, and the node with the larger number calls again.
//
// A node may call before its old link is known to be dead. The first half of its token is constant while its PeerLinks
// lives; the second half is new with each call. The same first half means the same daemon, which noticed the loss
// earlier: its new link replaces the old one. Another first half means a restarted daemon, or a second one that claims
// to be that node; it gets ALREADY_EXISTS, to be tried again, until the old link has ended, which takes a keepalive if
// nothing else reports its end.
//
// server/multinode/node_recovery.cc decides on node 0 what the loss of a link means for the job; on other nodes
// node_member_hears.cc does, for the link to node 0.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "grpcpp/grpcpp.h"
#include "server/peer/peer_backlog.h"
#include "server/peer/peer_greeting.h"
#include "server/peer/peer_identity.h"
#include "server/peer/peer_links.h"
#include "server/peer/peer_stream.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// Thread-safe. A shared_ptr, because streams that are ending still refer to it. Stop ends it.
class LinkLoop : public std::enable_shared_from_this<LinkLoop> {
 public:
  // The way to reach other daemons.
  struct Transport {
    std::function<std::shared_ptr<grpc::Channel>(const std::string& address)> make_channel;
    std::function<void(std::shared_ptr<grpc::Channel>)> let_go;  // of a channel whose stream is gone
    std::function<std::string()> own_problem;                    // LinkCredentials
    absl::Duration handshake_patience = absl::Seconds(10);       // from a call to the link
  };
  static std::shared_ptr<LinkLoop> Start(PeerJoin join, PeerLinks::Events* events, Transport transport);
  ~LinkLoop();

  const PeerJoin& join() const { return join_; }
  int protocol_version(int node) const ABSL_LOCKS_EXCLUDED(mutex_) {
    const LinkPtr link = UpLink(node);
    return link == nullptr ? 0 : link->protocol_version;
  }
  bool takes_writes_where_cut(int node) const ABSL_LOCKS_EXCLUDED(mutex_) {
    const LinkPtr link = UpLink(node);
    return link == nullptr || link->takes_writes_where_cut;
  }
  bool takes_extensions(int node) const ABSL_LOCKS_EXCLUDED(mutex_) {
    const LinkPtr link = UpLink(node);
    return link == nullptr || link->takes_extensions;
  }
  bool takes_fetch_ends(int node) const ABSL_LOCKS_EXCLUDED(mutex_) {
    const LinkPtr link = UpLink(node);
    return link == nullptr || link->takes_fetch_ends;
  }
  PeerTraffic traffic(int node) const { return {peers_[node]->sent_bytes, peers_[node]->received_bytes}; }
  // As in PeerLinks.
  void Send(int node, const v1::PeerMessage& message);
  void SendData(int node, const v1::PeerData& header, absl::string_view elements, PeerStream::Sent sent);
  void Renew(int node);
  // Takes a stream of another daemon, with its first hello, which names this job.
  void Accept(std::shared_ptr<PeerStream> control, v1::PeerHello hello, PeerIdentity caller);
  void AcceptData(std::shared_ptr<PeerStream> data, const v1::PeerHello& hello);
  // Ends all links. When it returns no event is running, every `sent` has run, and gRPC is done with every stream.
  void Stop();

 private:
  // One attempt to connect, and the link that results.
  struct Link {
    int node = 0;
    std::string token;
    int protocol_version = 0;             // constant once the link is up
    bool takes_writes_where_cut = false;  // likewise
    bool takes_extensions = false;        // likewise
    bool takes_fetch_ends = false;        // likewise
    bool calls = false;                   // this node is the caller
    absl::Time deadline;                  // of the handshake; all times here are MonotonicNow's
    std::shared_ptr<PeerStream> control;
    std::shared_ptr<PeerStream> data;
    std::shared_ptr<PeerBacklog> backlog;  // of messages from `control`
    size_t streams() const { return size_t{control != nullptr} + size_t{data != nullptr}; }
  };
  using LinkPtr = std::shared_ptr<Link>;
  struct Kept {
    std::shared_ptr<PeerStream> stream;
    std::shared_ptr<grpc::Channel> channel;  // of a stream that this node has called
  };
  struct Peer {
    // Loop-confined.
    LinkPtr link;          // null: no link, not even an attempt
    bool up = false;       // the link is complete
    bool refused = false;  // for good: no further calls
    absl::Time up_since;
    absl::Time down_since;
    absl::Time next_call;
    absl::Duration backoff;
    absl::Status last_error;
    std::optional<absl::StatusCode> told;                     // last OnDown of the current time without a link
    std::atomic<int64_t> sent_bytes = 0, received_bytes = 0;  // any thread
    // Serialises events.
    absl::Mutex events_mutex;
    const Link* told_up ABSL_GUARDED_BY(events_mutex) = nullptr;
  };

  LinkLoop(PeerJoin join, PeerLinks::Events* events, Transport transport);
  // Returns false if the loop has ended.
  bool Post(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Wake();
  // The methods below run on the loop, or in Stop after the loop has ended.
  absl::Time Tend();
  void Call(int node);
  void HandleAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes);
  void HandleDataAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes);
  void HandleCall(const std::shared_ptr<PeerStream>& control, const v1::PeerHello& hello, const PeerIdentity& caller);
  void HandleDataCall(const std::shared_ptr<PeerStream>& data, const v1::PeerHello& hello);
  // Refuses a call of which it is not known whose it is: the right daemon may still call.
  void RefuseCall(Peer& peer, int node, const absl::Status& why, const std::shared_ptr<PeerStream>& control);
  absl::Status AskEvents(const v1::PeerHello& hello);
  v1::PeerHello LinkHello(absl::string_view token, int to) const;
  // Sends `answer` first on the data stream; null: it was sent already.
  void Up(const LinkPtr& link, const grpc::ByteBuffer* answer);
  // True if neither the link nor the loop has ended.
  bool Current(const LinkPtr& link) const { return !stopped_ && peers_[link->node]->link == link; }
  // By value, because this resets the pointer by which callers name it.
  void End(LinkPtr link, const absl::Status& why);
  void TellDown(Peer& peer, int node, const absl::Status& why);
  void ReadControl(const LinkPtr& link);
  void ReadData(const LinkPtr& link);
  void Keep(std::shared_ptr<PeerStream> stream, std::shared_ptr<grpc::Channel> channel = nullptr);
  // Of streams that are gone.
  void LetGo();
  std::shared_ptr<PeerStream> CallNode(int node, const std::string& method);
  LinkPtr UpLink(int node) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Name(int node) const;

  const PeerJoin join_;
  const PeerGreeting greeting_{&join_};
  PeerLinks::Events* const events_;
  const Transport transport_;
  const std::string token_;                   // the first half of every token
  std::vector<std::unique_ptr<Peer>> peers_;  // by node
  std::vector<Kept> streams_;                 // loop-confined: all streams that may not be gone yet
  bool stopped_ = false;                      // loop-confined: no further events
  std::thread thread_;
  // The loop waits on this: Debian's absl::Mutex waits by the wall clock and would oversleep if that is set back.
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  bool woken_ = false;  // under wake_mutex_

  mutable absl::Mutex mutex_;
  std::vector<LinkPtr> up_ ABSL_GUARDED_BY(mutex_);  // by node
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  int64_t unsent_ ABSL_GUARDED_BY(mutex_) = 0;  // number of `sent` that have not run
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_LOOP_H_
