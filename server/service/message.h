#ifndef SHARDD_SERVER_SERVICE_MESSAGE_H_
#define SHARDD_SERVER_SERVICE_MESSAGE_H_

// Messages between the wire and protobuf. gRPC bounds what a message takes on the wire; decoded it may take a hundred
// times as much (two bytes are an empty submessage), which would let one client take the daemon's memory. So requests
// are looked through before they are decoded.

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Of one request.
struct MessageLimits {
  int64_t wire_bytes;
  int64_t decoded_bytes;
};
// For requests that carry a name and a few numbers.
inline constexpr MessageLimits kSmallMessage = {64 << 10, 8 << 20};

// An upper estimate of the memory that `bytes` take when decoded as a message of `type`; looks at each field once and
// keeps nothing. RESOURCE_EXHAUSTED: beyond `limits`, and no further than that looked at. INVALID_ARGUMENT: malformed.
// `operation` begins the text of errors.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                             const google::protobuf::Descriptor& type, const MessageLimits& limits);
// INVALID_ARGUMENT: malformed. REQUIRES: EstimateDecodedBytes has let it pass.
absl::Status Decode(absl::string_view operation, const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
// Both.
absl::Status DecodeWithin(absl::string_view operation, const grpc::ByteBuffer& bytes, const MessageLimits& limits,
                          google::protobuf::Message* message);

// RESOURCE_EXHAUSTED: larger than protobuf allows.
absl::StatusOr<grpc::ByteBuffer> Encode(const google::protobuf::Message& message);

// What the decoded requests of each user take together while they wait to be served. Thread-safe.
class DecodedMemory : public std::enable_shared_from_this<DecodedMemory> {
 public:
  explicit DecodedMemory(int64_t max_bytes_per_uid) : max_bytes_per_uid_(max_bytes_per_uid) {}
  // Taken until the last copy goes. Null: it is more than the user has left.
  using Hold = std::shared_ptr<const int64_t>;
  Hold Take(uint32_t uid, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t max_bytes_per_uid() const { return max_bytes_per_uid_; }

 private:
  void Release(uint32_t uid, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t max_bytes_per_uid_;
  absl::Mutex mutex_;
  absl::flat_hash_map<uint32_t, int64_t> of_uid_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_MESSAGE_H_
