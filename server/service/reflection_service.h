#ifndef SHARDD_SERVER_SERVICE_REFLECTION_SERVICE_H_
#define SHARDD_SERVER_SERVICE_REFLECTION_SERVICE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/service/fd_reply.h"
#include "server/service/peer_registry.h"

namespace shardd {

// Requests arrive as bytes (message.h).
using RawReflectionService = grpc::reflection::v1alpha::ServerReflection::WithRawCallbackMethod_ServerReflectionInfo<
    grpc::reflection::v1alpha::ServerReflection::Service>;

// gRPC server reflection of the named services, by which any gRPC command line lists, describes and calls them. In the
// place of the library's own, which decodes requests of any size: here a request is small, a stream has one of them at
// a time and its answer is what descriptors of this program are, and a user has so many streams. Thread-safe.
class ReflectionService final : public RawReflectionService {
 public:
  static constexpr size_t kMaxStreamsPerUid = 16;
  static constexpr size_t kMaxStreams = 256;

  // `services`: as listed. `peers` must outlive the server.
  ReflectionService(std::vector<std::string> services, const PeerRegistry* peers)
      : services_(std::move(services)), peers_(peers) {}

  // RESOURCE_EXHAUSTED: too many streams, or a request is too large. INVALID_ARGUMENT: it is malformed.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override;

 private:
  const std::vector<std::string> services_;
  const PeerRegistry* const peers_;
  const std::shared_ptr<PendingCount> streams_ = std::make_shared<PendingCount>();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_REFLECTION_SERVICE_H_
