// Unary requests and session messages, between the wire and protobuf: what passes takes no more memory than was said.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/wire/message_bounds.h"
#include "google/protobuf/stubs/logging.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/trainer.pb.h"
#include "tests/fuzz/require.h"

namespace shardd {
namespace {

template <typename Message>
void Check(absl::string_view bytes, UnknownFields unknown) {
  const MessageLimits limits = {1 << 20, 1 << 20, unknown, 10'000};
  const absl::StatusOr<int64_t> estimate = EstimateDecodedBytes("fuzz", bytes, *Message::descriptor(), limits);
  Message message;
  const bool parses = message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (!estimate.ok()) {
    REQUIRE(!estimate.status().message().empty());
    return;
  }
  if (parses) REQUIRE(message.SpaceUsedLong() <= static_cast<size_t>(*estimate) + sizeof(Message));
  if (parses && unknown == UnknownFields::kRefused) {
    REQUIRE(message.GetReflection()->GetUnknownFields(message).empty());
  }
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using shardd::UnknownFields;
  const google::protobuf::LogSilencer quiet;
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const UnknownFields unknown = (data[0] & 128) != 0 ? UnknownFields::kRefused : UnknownFields::kCounted;
  switch (data[0] % 8) {
    case 0:
      shardd::Check<shardd::v1::OpenJobRequest>(bytes, unknown);
      break;
    case 1:
      shardd::Check<shardd::v1::ExtendJobRequest>(bytes, unknown);
      break;
    case 2:
      shardd::Check<shardd::v1::AttachRankRequest>(bytes, unknown);
      break;
    case 3:
      shardd::Check<shardd::v1::CloseJobRequest>(bytes, unknown);
      break;
    case 4:
      shardd::Check<shardd::v1::SessionRequest>(bytes, unknown);
      break;
    case 5:
      shardd::Check<shardd::v1::Step>(bytes, unknown);
      break;
    case 6:
      shardd::Check<shardd::v1::TraceJobRequest>(bytes, unknown);
      break;
    default:
      shardd::Check<shardd::v1::ListEventsRequest>(bytes, unknown);
      break;
  }
  return 0;
}
