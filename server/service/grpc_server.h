#ifndef SHARDD_SERVER_SERVICE_GRPC_SERVER_H_
#define SHARDD_SERVER_SERVICE_GRPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/impl/codegen/service_type.h"
#include "server/service/peer_registry.h"

namespace grpc {
class Server;
}

namespace shardd {

struct GrpcServerOptions {
  // One OpenJob has the module tree of the whole model.
  int max_message_bytes = 256 << 20;
  // Of all connections together, for messages being received.
  size_t max_buffer_bytes = size_t{1} << 30;
  int max_concurrent_streams = 256;  // per connection
  // Not null: reflection, for the callers that are registered there, which outlives the server.
  const PeerRegistry* reflection = nullptr;
  // gRPC decodes requests of channelz itself, each up to max_message_bytes, which may take many times as much memory.
  bool channelz = false;
};

// A gRPC server without a port: Listener provides the connections. Serves the given services and grpc.health.v1 (for ""
// and for each service), and reflection, so that any reflection client can list, describe and call them.
//
// Owns the services. Thread-safe.
class GrpcServer {
 public:
  struct NamedService {
    std::string name;  // "shardd.v1.JobsService": Service::service_full_name()
    std::unique_ptr<grpc::Service> service;
  };

  // All services are SERVING when this returns. INTERNAL: gRPC does not start.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Create(std::vector<NamedService> services,
                                                            const GrpcServerOptions& options = {});
  // Calls Shutdown(0) if it was not called.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  grpc::Server* server() { return server_.get(); }

  // Sets the health of all services, until Shutdown.
  void SetServing(bool serving);

  // Reports NOT_SERVING, refuses new calls, waits up to `grace` for running calls, and cancels the rest. Returns when
  // every handler has finished its reactor, so what finishes them (the core's loop) must still run. Idempotent.
  // REQUIRES: Listener::Stop() was called, else it passes connections to a server that is gone.
  void Shutdown(absl::Duration grace) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  GrpcServer(std::vector<NamedService> services, std::unique_ptr<grpc::Server> server);

  const std::vector<NamedService> services_;  // outlive server_
  const std::unique_ptr<grpc::Server> server_;

  absl::Mutex mutex_;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_GRPC_SERVER_H_
