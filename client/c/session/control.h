#ifndef SHARDD_CLIENT_C_SESSION_CONTROL_H_
#define SHARDD_CLIENT_C_SESSION_CONTROL_H_

namespace shardd {

// How a session's commands come to the daemon, and what it has completed to the client (SHARDD_CONTROL).
enum class Control {
  kAny,   // by the ring and the shared words; where they cannot be mapped, by gRPC alone
  kRing,  // by the ring and the shared words
  kGrpc,  // by the session stream alone
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_CONTROL_H_
