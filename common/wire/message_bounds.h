#ifndef SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_
#define SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_

// A message may take a hundred times as much memory as it has bytes (two bytes are an empty submessage, or an unknown
// field), and decoding takes as much time for each. So what others send is looked through before it is decoded: that
// keeps nothing, and ends where the first bound is passed.

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace shardd {

// Of a field that the message's type does not have. Where both ends are of one protocol version there is none.
enum class UnknownFields { kCounted, kRefused };

// Of one message.
struct MessageLimits {
  int64_t wire_bytes;
  int64_t decoded_bytes;
  UnknownFields unknown = UnknownFields::kCounted;
  int64_t fields = std::numeric_limits<int64_t>::max();  // of it and all its submessages, each time one occurs
};

// An upper estimate of the memory that `size_bytes` bytes of `in` take when decoded as a message of `type`.
// RESOURCE_EXHAUSTED: beyond `limits`, and no further than that looked at. INVALID_ARGUMENT: malformed, or an unknown
// field that is refused. `operation` begins the text of errors. The time is at most that of `limits.fields` fields.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, google::protobuf::io::ZeroCopyInputStream& in,
                                             int64_t size_bytes, const google::protobuf::Descriptor& type,
                                             const MessageLimits& limits);
// The same of contiguous bytes, which nobody else may write meanwhile.
absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, absl::string_view bytes,
                                             const google::protobuf::Descriptor& type, const MessageLimits& limits);

// INVALID_ARGUMENT: `operation`'s message is malformed.
absl::Status MalformedMessage(absl::string_view operation, const google::protobuf::Descriptor& type);

}  // namespace shardd

#endif  // SHARDD_COMMON_WIRE_MESSAGE_BOUNDS_H_
