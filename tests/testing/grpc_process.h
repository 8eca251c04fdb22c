#ifndef SHARDD_TESTS_TESTING_GRPC_PROCESS_H_
#define SHARDD_TESTS_TESTING_GRPC_PROCESS_H_

#include "grpc/grpc.h"

namespace shardd::testing {

// Keeps gRPC's threads for the life of the process, as the daemon and the client do. Otherwise the last object of gRPC
// joins them when it goes, and one of them sits in epoll for up to ten seconds. Any thread; does not block.
inline void KeepGrpc() {
  static const bool kept = [] {
    grpc_init();
    return true;
  }();
  (void)kept;
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_GRPC_PROCESS_H_
