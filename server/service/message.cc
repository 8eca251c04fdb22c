#include "server/service/message.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace shardd {

absl::StatusOr<int64_t> EstimateDecodedBytes(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                             const google::protobuf::Descriptor& type, const MessageLimits& limits) {
  grpc::ByteBuffer copy = bytes;  // copies references to its slices, because reading takes them out
  grpc::ProtoBufferReader reader(&copy);
  return EstimateDecodedBytes(operation, reader, static_cast<int64_t>(bytes.Length()), type, limits);
}

absl::Status Decode(absl::string_view operation, const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer copy = bytes;
  grpc::ProtoBufferReader reader(&copy);
  return message->ParseFromZeroCopyStream(&reader) ? absl::OkStatus()
                                                   : MalformedMessage(operation, *message->GetDescriptor());
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

absl::StatusOr<DecodedMemory::Hold> DecodeFor(absl::string_view operation, const grpc::ByteBuffer& bytes,
                                              const MessageLimits& limits, uint32_t uid, DecodedMemory& memory,
                                              google::protobuf::Message* message) {
  SHARDD_ASSIGN_OR_RETURN(const int64_t size_bytes,
                          EstimateDecodedBytes(operation, bytes, *message->GetDescriptor(), limits));
  DecodedMemory::Hold hold = memory.Take(uid, size_bytes);
  if (hold == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat(operation, ": requests of uid ", uid, " that are under way take too much memory (got ", size_bytes,
                     " more bytes, want at most ", memory.max_bytes_per_uid(), " together); try again"));
  }
  SHARDD_RETURN_IF_ERROR(Decode(operation, bytes, message));
  return hold;
}

}  // namespace shardd
