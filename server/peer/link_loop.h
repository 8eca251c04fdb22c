#ifndef SHARDD_SERVER_PEER_LINK_LOOP_H_
#define SHARDD_SERVER_PEER_LINK_LOOP_H_

// The links of one job: the state machine behind the PeerLinks that PeerNetwork::Join gives.
//
// A link is two streams, Link and Data, and is there when both are: the node that calls says hello on Link, is
// answered, says hello on Data with the token of the first, and is answered again. Whatever ends one of them ends the
// link, and the node with the larger number calls again.
//
// Who calls while its old link is not known to be dead: the first half of the token is the caller's for as long as its
// PeerLinks lives, the second half is new with each call. The same first half is the same daemon, which has seen the
// loss earlier: its new link replaces the old one. Another is a daemon that was started anew, or a second one that
// believes to be that node; it gets ALREADY_EXISTS, to be tried again, until the old link has ended, which takes as
// long as a keepalive where no word of its end has come.

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/peer/peer_links.h"
#include "server/peer/peer_stream.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// Thread-safe. A shared_ptr, because streams that are on their way out still refer to it; Stop is its end.
class LinkLoop : public std::enable_shared_from_this<LinkLoop> {
 public:
  using MakeChannel = std::function<std::shared_ptr<grpc::Channel>(const std::string& address)>;
  static std::shared_ptr<LinkLoop> Start(PeerJoin join, PeerLinks::Events* events, MakeChannel make_channel);
  ~LinkLoop();

  const PeerJoin& join() const { return join_; }
  PeerTraffic traffic(int node) const { return {peers_[node]->sent_bytes, peers_[node]->received_bytes}; }
  // PeerLinks.
  void Send(int node, const v1::PeerMessage& message);
  void SendData(int node, const v1::PeerData& header, absl::string_view elements, PeerStream::Sent sent);
  // A stream of another daemon, with the hello that it has begun with, which names this job.
  void Accept(std::shared_ptr<PeerStream> control, v1::PeerHello hello);
  void AcceptData(std::shared_ptr<PeerStream> data, const v1::PeerHello& hello);
  // The end: no event runs when it returns, every `sent` has run, and gRPC is done with every stream.
  void Stop();

 private:
  // One attempt, and what comes of it.
  struct Link {
    int node = 0;
    std::string token;
    bool calls = false;   // this node has called
    absl::Time deadline;  // for the handshake
    std::shared_ptr<PeerStream> control;
    std::shared_ptr<PeerStream> data;
  };
  using LinkPtr = std::shared_ptr<Link>;
  struct Peer {
    // Of the loop.
    LinkPtr link;          // null: none, not even an attempt
    bool up = false;       // it is there
    bool refused = false;  // for good: not called again
    absl::Time up_since;
    absl::Time down_since;
    absl::Time next_call;
    absl::Duration backoff;
    absl::Status last_error;
    std::optional<absl::StatusCode> told;                     // of this time without a link
    std::atomic<int64_t> sent_bytes = 0, received_bytes = 0;  // any thread
    // One event at a time.
    absl::Mutex events_mutex;
    const Link* told_up ABSL_GUARDED_BY(events_mutex) = nullptr;
  };

  LinkLoop(PeerJoin join, PeerLinks::Events* events, MakeChannel make_channel);
  // False: the loop has ended.
  bool Post(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // The rest is run by the loop, or by Stop behind it.
  absl::Time Tend();
  void Call(int node);
  void HandleAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes);
  void HandleDataAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes);
  void HandleCall(const std::shared_ptr<PeerStream>& control, const v1::PeerHello& hello);
  void HandleDataCall(const std::shared_ptr<PeerStream>& data, const v1::PeerHello& hello);
  absl::Status CheckHello(const v1::PeerHello& hello) const;
  absl::Status AskEvents(const v1::PeerHello& hello);
  // `answer` goes first on its data stream; null: it is there already.
  void Up(const LinkPtr& link, const grpc::ByteBuffer* answer);
  // Not ended, nor everything else.
  bool Current(const LinkPtr& link) const { return !stopped_ && peers_[link->node]->link == link; }
  // By value: callers name it by the pointer that this resets.
  void End(LinkPtr link, const absl::Status& why);
  void TellDown(Peer& peer, int node, const absl::Status& why);
  void ReadControl(const LinkPtr& link);
  void ReadData(const LinkPtr& link);
  v1::PeerHello Hello(absl::string_view token) const;
  void Keep(std::shared_ptr<PeerStream> stream);
  LinkPtr UpLink(int node) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Name(int node) const;

  const PeerJoin join_;
  PeerLinks::Events* const events_;
  const MakeChannel make_channel_;
  const std::string token_;                           // the first half of each
  std::vector<std::unique_ptr<Peer>> peers_;          // by node
  std::vector<std::shared_ptr<PeerStream>> streams_;  // of the loop: all that may not be gone yet
  bool stopped_ = false;                              // of the loop: no event any more
  std::thread thread_;

  mutable absl::Mutex mutex_;
  std::vector<LinkPtr> up_ ABSL_GUARDED_BY(mutex_);  // by node
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  int64_t unsent_ ABSL_GUARDED_BY(mutex_) = 0;  // `sent` that have not run
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_LOOP_H_
