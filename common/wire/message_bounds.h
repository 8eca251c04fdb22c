#ifndef SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_
#define SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_

// A decoded message may take a hundred times the memory of its bytes (two bytes make an empty submessage, or an unknown
// field), and time in proportion. So messages of others are scanned before they are decoded. The scan stores nothing
// and ends where the first limit is exceeded.

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace shardd {

// Policy for fields that the message's type lacks. If both ends have one protocol version there are none.
enum class UnknownFields { kCounted, kRefused };

// Limits for one message.
struct MessageLimits {
  int64_t wire_bytes;
  int64_t decoded_bytes;
  UnknownFields unknown = UnknownFields::kCounted;
  int64_t fields = std::numeric_limits<int64_t>::max();  // of it and all its submessages, counting each occurrence
};

// An upper estimate of the memory for decoding `size_bytes` bytes of `in` as a message of `type`. RESOURCE_EXHAUSTED:
// beyond `limits`; the scan ends there. INVALID_ARGUMENT: malformed, or an unknown field with kRefused. `operation`
// begins the text of errors. Takes at most the time of `limits.fields` fields.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, google::protobuf::io::ZeroCopyInputStream& in,
                                             int64_t size_bytes, const google::protobuf::Descriptor& type,
                                             const MessageLimits& limits);
// The same for contiguous bytes, which nobody else may write meanwhile.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, absl::string_view bytes,
                                             const google::protobuf::Descriptor& type, const MessageLimits& limits);

// INVALID_ARGUMENT: the message of `operation` is malformed.
absl::Status MalformedMessage(absl::string_view operation, const google::protobuf::Descriptor& type);

}  // namespace shardd

#endif  // SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_
