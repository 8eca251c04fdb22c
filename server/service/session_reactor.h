#ifndef SHARDD_SERVER_SERVICE_SESSION_REACTOR_H_
#define SHARDD_SERVER_SERVICE_SESSION_REACTOR_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/daemon/core.h"
#include "server/service/message.h"

namespace shardd {

using SessionStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The reactor of one session's stream, which deletes itself: takes hello and commands to the core, and events from
// there. `ends` begins to send the last words of sessions. All but `decoded` outlive the server.
SessionStreamReactor* ServeSession(Core* core, grpc::CallbackServerContext* context, PeerCredentials peer,
                                   std::shared_ptr<DecodedMemory> decoded, CoreLoop* ends);
// Blocks until the last words of all sessions have been sent, at most for `limit`. Returns whether they have.
bool AwaitSessionStreams(absl::Duration limit);
// That of a stream that cannot be served.
SessionStreamReactor* RefuseSession(const absl::Status& status);

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_SESSION_REACTOR_H_
