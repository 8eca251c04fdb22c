#include "server/storage/record_place.h"

#include <unistd.h>
#include <zlib.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/process/kept_write.h"

namespace shardd {

uint32_t RecordCrc(const void* data, int64_t size_bytes) {
  return static_cast<uint32_t>(crc32(0, static_cast<const Bytef*>(data), static_cast<uInt>(size_bytes)));
}

std::optional<int> FormatAt(int fd, int64_t offset_bytes, const char (&magic)[4]) {
  struct {
    char magic[4];
    uint32_t format;
  } head{};
  const bool is_it = pread(fd, &head, sizeof(head), offset_bytes) == static_cast<ssize_t>(sizeof(head)) &&
                     std::memcmp(head.magic, magic, sizeof(magic)) == 0;
  return is_it ? std::optional(static_cast<int>(head.format)) : std::nullopt;
}

int64_t RecordBytes(const google::protobuf::MessageLite& record) {
  return kRecordHeadBytes + static_cast<int64_t>(record.ByteSizeLong());
}

absl::Status WriteRecord(char* place, int64_t place_bytes, const google::protobuf::MessageLite& record) {
  std::string bytes(kRecordHeadBytes, '\0');
  if (!record.AppendToString(&bytes) || static_cast<int64_t>(bytes.size()) > place_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it is too large (got ", bytes.size(), ", want at most ", place_bytes, " bytes)"));
  }
  const auto length = static_cast<uint32_t>(bytes.size() - kRecordHeadBytes);
  const uint32_t crc = RecordCrc(bytes.data() + kRecordHeadBytes, length);
  std::memcpy(bytes.data(), &length, sizeof(length));
  std::memcpy(bytes.data() + sizeof(length), &crc, sizeof(crc));
  AtKeptWrite();
  std::memcpy(place, bytes.data(), kRecordHeadBytes);
  AtKeptWrite();
  std::memcpy(place + kRecordHeadBytes, bytes.data() + kRecordHeadBytes, length);
  AtKeptWrite();
  return absl::OkStatus();
}

bool ReadRecord(const char* place, int64_t place_bytes, google::protobuf::MessageLite* record) {
  uint32_t head[2] = {0, 0};
  static_assert(sizeof(head) == kRecordHeadBytes);
  std::memcpy(head, place, sizeof(head));
  return head[0] <= place_bytes - kRecordHeadBytes && RecordCrc(place + kRecordHeadBytes, head[0]) == head[1] &&
         record->ParseFromArray(place + kRecordHeadBytes, static_cast<int>(head[0]));
}

}  // namespace shardd
