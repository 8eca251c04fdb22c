#ifndef SHARDD_SERVER_STORAGE_RECORD_PLACE_H_
#define SHARDD_SERVER_STORAGE_RECORD_PLACE_H_

// One record in memory that outlives its writer, valid where its checksum fits, so that a torn one is none:
//
//   u32 length | u32 crc | serialized message

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"

namespace shardd {

inline constexpr int64_t kRecordHeadBytes = 8;

// The checksum of journals and take-up logs: CRC-32 as zlib's.
uint32_t RecordCrc(const void* data, int64_t size_bytes);

// The number behind this magic, before anything is mapped; nothing: there is no such magic.
std::optional<int> FormatAt(int fd, int64_t offset_bytes, const char (&magic)[4]);

// Of a place that the record fills.
int64_t RecordBytes(const google::protobuf::MessageLite& record);
// RESOURCE_EXHAUSTED: the record is larger than the place, which stays as it was.
absl::Status WriteRecord(char* place, int64_t place_bytes, const google::protobuf::MessageLite& record);
// False: there is none.
bool ReadRecord(const char* place, int64_t place_bytes, google::protobuf::MessageLite* record);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_RECORD_PLACE_H_
