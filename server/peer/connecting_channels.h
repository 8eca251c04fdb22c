#ifndef SHARDD_SERVER_PEER_CONNECTING_CHANNELS_H_
#define SHARDD_SERVER_PEER_CONNECTING_CHANNELS_H_

#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Channels that nobody needs any more and that still connect. gRPC before 1.53 never closes the connection of a channel
// that is destroyed while the other side's first frame is under way (github.com/grpc/grpc/pull/32071): a socket, and
// what belongs to it, would stay for as long as the process lives. Thread-safe.
class ConnectingChannels {
 public:
  ConnectingChannels();
  // Destroys all.
  ~ConnectingChannels();
  ConnectingChannels(const ConnectingChannels&) = delete;
  ConnectingChannels& operator=(const ConnectingChannels&) = delete;

  // Destroys the channel when it has connected, or has failed to: at once, or later on a thread of this object's.
  void LetGo(std::shared_ptr<grpc::Channel> channel) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Waiting;
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Destroys it now, or has the queue tell of it again.
  void Await(std::unique_ptr<Waiting> waiting) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::CompletionQueue events_;
  std::thread thread_;  // last: starts when everything else exists
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_CONNECTING_CHANNELS_H_
