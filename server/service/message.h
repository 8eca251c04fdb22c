#ifndef SHARDD_SERVER_SERVICE_MESSAGE_H_
#define SHARDD_SERVER_SERVICE_MESSAGE_H_

// Converts messages between the wire and protobuf. gRPC limits a message's size on the wire; its size in memory is
// estimated before decoding (common/wire/message_bounds.h), because one client could otherwise take the daemon's
// memory.

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

// For requests with a name and a few numbers.
inline constexpr MessageLimits kSmallMessage = {64 << 10, 8 << 20};

// As in common/wire/message_bounds.h.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                             const google::protobuf::Descriptor& type, const MessageLimits& limits);
// INVALID_ARGUMENT: malformed. REQUIRES: EstimateDecodedBytes has accepted it.
absl::Status Decode(absl::string_view operation, const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
// Estimates and decodes.
absl::Status DecodeWithin(absl::string_view operation, const grpc::ByteBuffer& bytes, const MessageLimits& limits,
                          google::protobuf::Message* message);

// RESOURCE_EXHAUSTED: larger than protobuf allows.
absl::StatusOr<grpc::ByteBuffer> Encode(const google::protobuf::Message& message);

// Counts by user the memory of decoded requests that wait to be served. Thread-safe.
class DecodedMemory : public std::enable_shared_from_this<DecodedMemory> {
 public:
  explicit DecodedMemory(int64_t max_bytes_per_uid) : max_bytes_per_uid_(max_bytes_per_uid) {}
  // Counted until the last copy goes. Null: the user has not so much left.
  using Hold = std::shared_ptr<const int64_t>;
  Hold Take(uint32_t uid, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t max_bytes_per_uid() const { return max_bytes_per_uid_; }

 private:
  void Release(uint32_t uid, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t max_bytes_per_uid_;
  absl::Mutex mutex_;
  absl::flat_hash_map<uint32_t, int64_t> of_uid_ ABSL_GUARDED_BY(mutex_);
};

// Decodes if it fits; the memory counts for the user until the hold is released.
absl::StatusOr<DecodedMemory::Hold> DecodeFor(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                              const MessageLimits& limits, uint32_t uid, DecodedMemory& memory,
                                              google::protobuf::Message* message);

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_MESSAGE_H_
