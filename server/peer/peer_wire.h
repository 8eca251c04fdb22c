#ifndef SHARDD_SERVER_PEER_PEER_WIRE_H_
#define SHARDD_SERVER_PEER_PEER_WIRE_H_

// Messages between daemons and their bytes. What cannot be one of ours is refused here, whatever its meaning.

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// A hello carries a JobSpec; nothing else comes near.
inline constexpr int64_t kMaxPeerSpecBytes = int64_t{64} << 20;
inline constexpr int64_t kMaxPeerHelloBytes = kMaxPeerSpecBytes + (64 << 10);
inline constexpr int64_t kMaxPeerMessageBytes = int64_t{16} << 20;
// Of one that is not a spec: names, numbers, the header of a piece.
inline constexpr int64_t kMaxPeerHeaderBytes = 4 << 10;
// Generations are counted from the time in milliseconds: behind this one there is always a next.
inline constexpr uint64_t kMaxPeerGeneration = std::numeric_limits<uint64_t>::max() / 2;

// RESOURCE_EXHAUSTED: larger than the other side would take.
absl::StatusOr<grpc::ByteBuffer> EncodePeer(const google::protobuf::Message& message, int64_t max_bytes);
// INVALID_ARGUMENT: not a message of this type, or too large.
absl::Status DecodePeer(grpc::ByteBuffer& bytes, int64_t max_bytes, google::protobuf::Message* message);

// `header` with the beginning of `elements_bytes` of elements: these come behind it.
std::string EncodeDataHeader(const v1::PeerData& header, int64_t elements_bytes);
// A piece: whole elements of a plausible number at a plausible place. `header` gets everything but the elements, which
// stay in `slice`. INVALID_ARGUMENT: it is none.
absl::Status DecodeData(const grpc::Slice& slice, v1::PeerData* header, absl::string_view* elements);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_WIRE_H_
