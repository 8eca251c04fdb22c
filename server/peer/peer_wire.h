#ifndef SHARDD_SERVER_PEER_PEER_WIRE_H_
#define SHARDD_SERVER_PEER_PEER_WIRE_H_

// Encodes and decodes messages between daemons. Decoding refuses whatever no daemon can have sent.

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "server/peer/peer_links.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// Limit for a hello, which carries a JobSpec; no other message is nearly as large.
inline constexpr int64_t kMaxPeerHelloBytes = kMaxPeerSpecBytes + (64 << 10);
inline constexpr int64_t kMaxPeerMessageBytes = int64_t{16} << 20;
// Limit for a message without a spec: names, numbers, the header of a piece.
inline constexpr int64_t kMaxPeerHeaderBytes = 4 << 10;
// Generations start at the time in milliseconds, so there is always a next one below this.
inline constexpr uint64_t kMaxPeerGeneration = std::numeric_limits<uint64_t>::max() / 2;

// RESOURCE_EXHAUSTED: larger than the other side would accept.
absl::StatusOr<grpc::ByteBuffer> EncodePeer(const google::protobuf::Message& message, int64_t max_bytes);
// INVALID_ARGUMENT: not a message of this type, or too large.
absl::Status DecodePeer(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::Message* message);

// `header` and the beginning of `elements_bytes` of elements, which must follow.
std::string EncodeDataHeader(const v1::PeerData& header, int64_t elements_bytes);
// Decodes a piece: a plausible number of whole elements at a plausible offset. `header` gets everything except the
// elements, which stay in `slice`. INVALID_ARGUMENT: it is no piece.
absl::Status DecodeData(const grpc::Slice& slice, v1::PeerData* header, absl::string_view* elements);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_WIRE_H_
