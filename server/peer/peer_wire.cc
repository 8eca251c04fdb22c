#include "server/peer/peer_wire.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "server/peer/peer_links.h"

namespace shardd {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kElementsTag =
    WireFormatLite::MakeTag(v1::PeerData::kElementsFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
// The unit of offsets and counts.
int64_t ElementBytes(v1::Slab slab) { return slab == v1::SLAB_UNSHARDED ? 1 : 4; }

constexpr uint32_t NumberTag(int field) { return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_VARINT); }

absl::Status NoPiece(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("read gradients of a node: ", why));
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodePeer(const google::protobuf::Message& message, int64_t max_bytes) {
  if (const size_t size_bytes = message.ByteSizeLong(); size_bytes > static_cast<size_t>(max_bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("send ", message.GetTypeName(), ": message is too large (got ",
                                                     size_bytes, " bytes, want at most ", max_bytes, ")"));
  }
  grpc::ByteBuffer bytes;
  bool own = false;
  grpc::SerializationTraits<google::protobuf::Message>::Serialize(message, &bytes, &own).IgnoreError();
  return bytes;
}

absl::Status DecodePeer(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::Message* message) {
  if (const size_t size_bytes = bytes.Length(); size_bytes > static_cast<size_t>(max_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("read ", message->GetTypeName(), ": message is too large (got ",
                                                   size_bytes, " bytes, want at most ", max_bytes, ")"));
  }
  if (!grpc::SerializationTraits<google::protobuf::Message>::Deserialize(&bytes, message).ok()) {
    return absl::InvalidArgumentError(absl::StrCat("read ", message->GetTypeName(), ": bytes are no such message"));
  }
  return absl::OkStatus();
}

std::string EncodeDataHeader(const v1::PeerData& header, int64_t elements_bytes) {
  std::string bytes = header.SerializeAsString();
  google::protobuf::io::StringOutputStream stream(&bytes);
  CodedOutputStream out(&stream);
  out.WriteTag(kElementsTag);
  out.WriteVarint32(static_cast<uint32_t>(elements_bytes));
  out.Trim();
  return bytes;
}

absl::Status DecodeData(const grpc::Slice& slice, v1::PeerData* header, absl::string_view* elements) {
  if (slice.size() > static_cast<size_t>(PeerLinks::kMaxDataBytes + kMaxPeerHeaderBytes)) {
    return NoPiece(absl::StrCat("message is too large (got ", slice.size(), " bytes, want at most ",
                                PeerLinks::kMaxDataBytes + kMaxPeerHeaderBytes, ")"));
  }
  CodedInputStream in(slice.begin(), static_cast<int>(slice.size()));
  header->Clear();
  *elements = {};
  while (const uint32_t tag = in.ReadTag()) {
    bool ok = true;
    uint64_t number = 0;
    switch (tag) {
      case NumberTag(v1::PeerData::kGenerationFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_generation(number);
        break;
      case NumberTag(v1::PeerData::kSequenceFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_sequence(number);
        break;
      case NumberTag(v1::PeerData::kIsSumFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_is_sum(number != 0);
        break;
      case NumberTag(v1::PeerData::kScatteredFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_scattered(number != 0);
        break;
      case NumberTag(v1::PeerData::kOffsetFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_offset(static_cast<int64_t>(number));
        break;
      case NumberTag(v1::PeerData::kNumelFieldNumber):
        ok = in.ReadVarint64(&number);
        header->set_numel(static_cast<int64_t>(number));
        break;
      case NumberTag(v1::PeerData::kSlabFieldNumber):
        ok = in.ReadVarint64(&number) && number <= v1::Slab_MAX;
        header->set_slab(static_cast<v1::Slab>(number));
        break;
      case kElementsTag: {
        uint32_t length = 0;
        ok = in.ReadVarint32(&length);
        const auto at = static_cast<size_t>(in.CurrentPosition());
        ok = ok && length <= slice.size() - at && in.Skip(static_cast<int>(length));
        if (ok) {
          *elements = absl::string_view(reinterpret_cast<const char*>(slice.begin()) + at, length);
        }
        break;
      }
      default:
        ok = WireFormatLite::SkipField(&in, tag);
    }
    if (!ok) {
      return NoPiece("bytes are no shardd.v1.PeerData");
    }
  }
  if (!in.ConsumedEntireMessage()) {
    return NoPiece("bytes are no shardd.v1.PeerData");
  }
  const auto size_bytes = static_cast<int64_t>(elements->size());
  const int64_t element_bytes = ElementBytes(header->slab());
  if (size_bytes == 0 || size_bytes % element_bytes != 0 || size_bytes > PeerLinks::kMaxDataBytes) {
    return NoPiece(absl::StrCat("elements are not whole (got ", size_bytes, " bytes, want a multiple of ",
                                element_bytes, ", at most ", PeerLinks::kMaxDataBytes, ")"));
  }
  if (header->offset() < 0 || header->numel() < size_bytes / element_bytes ||
      header->offset() > header->numel() - size_bytes / element_bytes) {
    return NoPiece(absl::StrCat("elements lie outside of the sum (got ", size_bytes / element_bytes, " at ",
                                header->offset(), " of ", header->numel(), ")"));
  }
  return absl::OkStatus();
}

}  // namespace shardd
