#ifndef SHARDD_SERVER_PEER_PEER_SERVICE_H_
#define SHARDD_SERVER_PEER_PEER_SERVICE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/impl/server_builder_option.h"
#include "server/peer/link_loop.h"
#include "shardd/v1/peer.grpc.pb.h"

namespace shardd {

using RawPeerService =
    v1::PeerService::WithRawCallbackMethod_Link<v1::PeerService::WithRawCallbackMethod_Data<v1::PeerService::Service>>;

// shardd.v1.PeerService: reads the first message of each stream and hands the stream to the links of the job that it
// names. Thread-safe.
class PeerService final : public RawPeerService {
 public:
  // Returns null if the user has a job of that name.
  std::shared_ptr<LinkLoop> Add(const PeerJoin& join, PeerLinks::Events* events, LinkLoop::Transport transport)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the job: it gets no more streams.
  void Remove(const PeerJoin& join) ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Link(grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Data(grpc::CallbackServerContext* context) override;

 private:
  template <typename Message>
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Take(grpc::CallbackServerContext* context,
                                                                    int64_t max_bytes);
  void Place(const std::shared_ptr<PeerStream>& stream, v1::PeerHello hello, PeerIdentity caller, bool data)
      ABSL_LOCKS_EXCLUDED(mutex_);

  std::atomic<int> unnamed_ = 0;  // streams that have not named their job
  absl::Mutex mutex_;
  // By name and uid.
  std::map<std::pair<std::string, uint32_t>, std::shared_ptr<LinkLoop>> jobs_ ABSL_GUARDED_BY(mutex_);
};

// Keeps the library's reflection and channelz plugins out of a builder, because daemons do not need them.
std::unique_ptr<grpc::ServerBuilderOption> WithoutPlugins();

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_SERVICE_H_
