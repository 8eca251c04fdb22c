#ifndef SHARDD_SERVER_SERVICE_MESSAGE_H_
#define SHARDD_SERVER_SERVICE_MESSAGE_H_

// Messages between the wire and protobuf. gRPC bounds what a message takes on the wire; what it takes decoded is looked
// up before (common/wire/message_bounds.h), else one client could take the daemon's memory.

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "common/wire/message_bounds.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// For requests that carry a name and a few numbers.
inline constexpr MessageLimits kSmallMessage = {64 << 10, 8 << 20};

// That of common/wire/message_bounds.h.
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
