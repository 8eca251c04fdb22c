#include "common/wire/message_bounds.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"

namespace shardd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Of a message beside its object: pointers to it, of which there are four at least, and what malloc adds.
constexpr int64_t kBesideMessageBytes = 64;
constexpr int64_t kLeastMessageBytes = 128;
constexpr int64_t kStringBytes = 64;
constexpr int64_t kUnknownBytes = 64;
// An entry in a vector that doubles, a string that has room for thirty bytes at least, and what malloc adds.
constexpr int64_t kUnknownStringBytes = 112;
constexpr int64_t kNumberBytes = 16;  // per element of a repeated field, which grows by doubling
constexpr int kMostNested = 32;

// The size of the object is the type's own: types grow with the protocol.
int64_t MessageBytes(const Descriptor& type) {
  const google::protobuf::Message* prototype =
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type);
  const auto object_bytes = prototype == nullptr ? 0 : static_cast<int64_t>(prototype->SpaceUsedLong());
  return std::max(kLeastMessageBytes, object_bytes + kBesideMessageBytes);
}

enum class Finding { kFits, kTooLarge, kTooManyFields, kUnknownField, kMalformed };

class Estimate {
 public:
  explicit Estimate(const MessageLimits& limits) : limits_(limits) {}
  int64_t total_bytes() const { return total_bytes_; }
  int unknown_number() const { return unknown_number_; }

  // Scans one message, up to the limit of `in`.
  Finding Walk(CodedInputStream& in, const Descriptor& type, int depth) {
    while (const uint32_t tag = in.ReadTag()) {
      const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (const Finding found = WalkField(in, tag, field, depth); found != Finding::kFits) {
        return found;
      }
      if (total_bytes_ > limits_.decoded_bytes) {
        return Finding::kTooLarge;
      }
      if (++fields_ > limits_.fields) {
        return Finding::kTooManyFields;
      }
    }
    return in.ConsumedEntireMessage() ? Finding::kFits : Finding::kMalformed;
  }

 private:
  Finding WalkField(CodedInputStream& in, uint32_t tag, const FieldDescriptor* field, int depth) {
    const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
    // Decoding keeps a known number with another wire type as an unknown field.
    const bool known = field != nullptr && wire == WireFormatLite::WireTypeForFieldType(
                                                       static_cast<WireFormatLite::FieldType>(field->type()));
    // Repeated numbers may be packed.
    const bool packs = field != nullptr && wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED && field->is_packable();
    if (!known && !packs && limits_.unknown == UnknownFields::kRefused) {
      unknown_number_ = WireFormatLite::GetTagFieldNumber(tag);
      return Finding::kUnknownField;
    }
    switch (wire) {
      case WireFormatLite::WIRETYPE_VARINT:
      case WireFormatLite::WIRETYPE_FIXED32:
      case WireFormatLite::WIRETYPE_FIXED64:
        total_bytes_ += !known ? kUnknownBytes : field->is_repeated() ? kNumberBytes : 0;
        return WireFormatLite::SkipField(&in, tag) ? Finding::kFits : Finding::kMalformed;
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        break;
      default:  // groups: none of our messages has one
        return Finding::kMalformed;
    }
    uint32_t length = 0;
    if (!in.ReadVarint32(&length) || static_cast<int64_t>(length) > in.BytesUntilLimit()) {
      return Finding::kMalformed;
    }
    if (known && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      total_bytes_ += BytesOf(*field->message_type());
      if (depth >= kMostNested) {
        return Finding::kMalformed;
      }
      const CodedInputStream::Limit limit = in.PushLimit(static_cast<int>(length));
      const Finding found = Walk(in, *field->message_type(), depth + 1);
      in.PopLimit(limit);
      return found;
    }
    const bool packed = field != nullptr && !known;
    total_bytes_ += (known ? kStringBytes : kUnknownStringBytes) + (packed ? kNumberBytes * length : length);
    return in.Skip(static_cast<int>(length)) ? Finding::kFits : Finding::kMalformed;
  }

  // The same type mostly comes again and again, and looking it up takes a lock.
  int64_t BytesOf(const Descriptor& type) {
    if (&type != last_type_) {
      last_type_ = &type;
      last_type_bytes_ = MessageBytes(type);
    }
    return last_type_bytes_;
  }

  const MessageLimits& limits_;
  const Descriptor* last_type_ = nullptr;
  int64_t last_type_bytes_ = 0;
  int64_t total_bytes_ = 0;
  int64_t fields_ = 0;
  int unknown_number_ = 0;
};

}  // namespace

absl::Status MalformedMessage(absl::string_view operation, const Descriptor& type) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": message is not a ", type.full_name()));
}

absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, google::protobuf::io::ZeroCopyInputStream& in,
                                             int64_t size_bytes, const Descriptor& type, const MessageLimits& limits) {
  if (size_bytes > limits.wire_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(operation, ": message is too large (got ", size_bytes,
                                                     " bytes, want at most ", limits.wire_bytes, ")"));
  }
  CodedInputStream coded(&in);
  coded.PushLimit(static_cast<int>(size_bytes));
  Estimate estimate(limits);
  switch (estimate.Walk(coded, type, 0)) {
    case Finding::kFits:
      return MessageBytes(type) + estimate.total_bytes();
    case Finding::kTooLarge:
      return absl::ResourceExhaustedError(absl::StrCat(operation, ": message has too many elements (its ", size_bytes,
                                                       " bytes take more than ", limits.decoded_bytes,
                                                       " bytes of memory)"));
    case Finding::kTooManyFields:
      return absl::ResourceExhaustedError(absl::StrCat(operation, ": message has too many fields (its ", size_bytes,
                                                       " bytes are more than ", limits.fields, ")"));
    case Finding::kUnknownField:
      return absl::InvalidArgumentError(absl::StrCat(operation, ": message is no ", type.full_name(),
                                                     " of the daemon's version: it has an unknown field (number ",
                                                     estimate.unknown_number(), ")"));
    case Finding::kMalformed:
      break;
  }
  return MalformedMessage(operation, type);
}

absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, absl::string_view bytes,
                                             const Descriptor& type, const MessageLimits& limits) {
  if (static_cast<int64_t>(bytes.size()) > limits.wire_bytes) {  // before the size becomes an int
    return absl::ResourceExhaustedError(absl::StrCat(operation, ": message is too large (got ", bytes.size(),
                                                     " bytes, want at most ", limits.wire_bytes, ")"));
  }
  google::protobuf::io::ArrayInputStream in(bytes.data(), static_cast<int>(bytes.size()));
  return EstimateDecodedBytes(operation, in, static_cast<int64_t>(bytes.size()), type, limits);
}

}  // namespace shardd
