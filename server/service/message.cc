#include "server/service/message.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace shardd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// What one of these takes at most beside its bytes: the object, the pointer to it, and what malloc adds. Measured: a
// v1::Parameter, the largest that comes in great number, takes 92.
constexpr int64_t kMessageBytes = 128;
constexpr int64_t kStringBytes = 64;
constexpr int64_t kUnknownBytes = 64;
constexpr int64_t kNumberBytes = 16;  // of a repeated field, which grows by doubling
constexpr int kMostNested = 32;

enum class Finding { kFits, kTooLarge, kMalformed };

class Estimate {
 public:
  explicit Estimate(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  int64_t total_bytes() const { return total_bytes_; }

  // One message, up to the limit of `in`.
  Finding Walk(CodedInputStream& in, const Descriptor& type, int depth) {
    while (const uint32_t tag = in.ReadTag()) {
      const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (const Finding found = WalkField(in, tag, field, depth); found != Finding::kFits) {
        return found;
      }
      if (total_bytes_ > limit_bytes_) {
        return Finding::kTooLarge;
      }
    }
    return in.ConsumedEntireMessage() ? Finding::kFits : Finding::kMalformed;
  }

 private:
  Finding WalkField(CodedInputStream& in, uint32_t tag, const FieldDescriptor* field, int depth) {
    const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
    // A known number on another wire type than its own is kept as an unknown one.
    const bool known = field != nullptr && wire == WireFormatLite::WireTypeForFieldType(
                                                       static_cast<WireFormatLite::FieldType>(field->type()));
    switch (wire) {
      case WireFormatLite::WIRETYPE_VARINT:
      case WireFormatLite::WIRETYPE_FIXED32:
      case WireFormatLite::WIRETYPE_FIXED64:
        total_bytes_ += !known ? kUnknownBytes : field->is_repeated() ? kNumberBytes : 0;
        return WireFormatLite::SkipField(&in, tag) ? Finding::kFits : Finding::kMalformed;
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        break;
      default:  // groups: none of our messages has any
        return Finding::kMalformed;
    }
    uint32_t length = 0;
    if (!in.ReadVarint32(&length) || static_cast<int64_t>(length) > in.BytesUntilLimit()) {
      return Finding::kMalformed;
    }
    if (known && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      total_bytes_ += kMessageBytes;
      if (depth >= kMostNested) {
        return Finding::kMalformed;
      }
      const CodedInputStream::Limit limit = in.PushLimit(static_cast<int>(length));
      const Finding found = Walk(in, *field->message_type(), depth + 1);
      in.PopLimit(limit);
      return found;
    }
    const bool packed = field != nullptr && !known;
    total_bytes_ += kStringBytes + (packed ? kNumberBytes * length : length);
    return in.Skip(static_cast<int>(length)) ? Finding::kFits : Finding::kMalformed;
  }

  const int64_t limit_bytes_;
  int64_t total_bytes_ = 0;
};

absl::Status Malformed(absl::string_view operation, const Descriptor& type) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": message is not a ", type.full_name()));
}

}  // namespace

absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                             const Descriptor& type, const MessageLimits& limits) {
  const int64_t wire_bytes = static_cast<int64_t>(bytes.Length());
  if (wire_bytes > limits.wire_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(operation, ": message is too large (got ", wire_bytes,
                                                     " bytes, want at most ", limits.wire_bytes, ")"));
  }
  grpc::ByteBuffer copy = bytes;  // of references to its slices; reading takes them out
  grpc::ProtoBufferReader reader(&copy);
  CodedInputStream in(&reader);
  in.PushLimit(static_cast<int>(wire_bytes));
  Estimate estimate(limits.decoded_bytes);
  switch (estimate.Walk(in, type, 0)) {
    case Finding::kFits:
      return kMessageBytes + estimate.total_bytes();
    case Finding::kTooLarge:
      return absl::ResourceExhaustedError(absl::StrCat(operation, ": message has too many elements (its ", wire_bytes,
                                                       " bytes take more than ", limits.decoded_bytes,
                                                       " bytes of memory)"));
    case Finding::kMalformed:
      break;
  }
  return Malformed(operation, type);
}

absl::Status Decode(absl::string_view operation, const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer copy = bytes;
  grpc::ProtoBufferReader reader(&copy);
  return message->ParseFromZeroCopyStream(&reader) ? absl::OkStatus() : Malformed(operation, *message->GetDescriptor());
}

absl::Status DecodeWithin(absl::string_view operation, const grpc::ByteBuffer& bytes, const MessageLimits& limits,
                          google::protobuf::Message* message) {
  SHARDD_RETURN_IF_ERROR(EstimateDecodedBytes(operation, bytes, *message->GetDescriptor(), limits).status());
  return Decode(operation, bytes, message);
}

absl::StatusOr<grpc::ByteBuffer> Encode(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  if (!grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &bytes, &own).ok()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("answer with a ", message.GetDescriptor()->full_name(), ": it is too large for one message"));
  }
  return bytes;
}

DecodedMemory::Hold DecodedMemory::Take(uint32_t uid, int64_t size_bytes) {
  {
    absl::MutexLock lock(&mutex_);
    int64_t& taken = of_uid_[uid];
    if (size_bytes > max_bytes_per_uid_ - taken) {
      if (taken == 0) {
        of_uid_.erase(uid);
      }
      return nullptr;
    }
    taken += size_bytes;
  }
  return Hold(new int64_t(size_bytes), [self = shared_from_this(), uid](const int64_t* size) {
    self->Release(uid, *size);
    delete size;
  });
}

void DecodedMemory::Release(uint32_t uid, int64_t size_bytes) {
  absl::MutexLock lock(&mutex_);
  const auto it = of_uid_.find(uid);
  it->second -= size_bytes;
  if (it->second == 0) {
    of_uid_.erase(it);
  }
}

}  // namespace shardd
