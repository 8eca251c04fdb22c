#ifndef SHARDD_TESTS_E2E_VERSIONS_REPLAYED_SESSION_H_
#define SHARDD_TESTS_E2E_VERSIONS_REPLAYED_SESSION_H_

// A client of which only its bytes are left: calls, the request of the fd channel, and what it writes where into the
// memory of its session. It knows no structure of this build, but for the two answers that it has to read.
//
//   open <hex>                             OpenJob
//   attach <hex> <offset of the job's number>
//   hello <hex> <offset of the session's number> <offset of the token>
//   fds <hex> <offset of the session's number> <offset of the token> <how many come>
//   map <bytes of the session memory> <bytes of the daemon's page>
//   write <offset> <hex>                   into the session memory
//   submit <offset> <number of records>    epoch << 40 | number into that word, and the doorbell
//   await <offset> <number>                until that word of the daemon's page says so
//   shards <hex>                           slab "shards" begins with these bytes

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/shm/slab.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/trainer.pb.h"
#include "tests/e2e/versions/records.h"

namespace shardd::e2e {

class ReplayedSession {
 public:
  explicit ReplayedSession(const std::string& socket_path);
  ~ReplayedSession();

  // One line; why it does not go on.
  absl::Status Run(const Line& line);
  // REQUIRES: after `fds`.
  std::string Shards(size_t size_bytes) const;

 private:
  // A unary call of the trainer service; its answer.
  absl::StatusOr<std::string> Call(const std::string& method, const std::string& bytes);
  // The bytes, with the numbers of this session in their places.
  std::string OfThisSession(std::string bytes, int64_t number_at, int64_t token_at) const;
  absl::Status Hello(const std::string& bytes);
  absl::Status FetchFds(const std::string& bytes, size_t count);
  // One operation of the stream, which has begun.
  bool Await();

  const std::string socket_path_;
  std::unique_ptr<grpc::GenericStub> stub_;
  uint64_t job_id_ = 0;
  v1::AttachRankResponse session_;
  std::vector<UniqueFd> fds_;
  MappedSlab memory_, page_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_VERSIONS_REPLAYED_SESSION_H_
