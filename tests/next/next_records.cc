// What the next release might write: records (of a job, of steps, of what is committed) with a field that this one does
// not know. In the place of server/storage/record_place.cc.

#define WriteRecord WriteRecordOfToday
#define RecordBytes RecordBytesOfToday
#include "server/storage/record_place.cc"  // NOLINT(bugprone-suspicious-include)
#undef WriteRecord
#undef RecordBytes

#include <memory>

namespace shardd {
namespace {

std::unique_ptr<google::protobuf::MessageLite> OfNext(const google::protobuf::MessageLite& record) {
  static constexpr char kField[] =
      "\xa2\x38\x19"
      "added by the next release";  // number 900, 25 bytes
  std::unique_ptr<google::protobuf::MessageLite> result(record.New());
  result->ParseFromString(record.SerializeAsString() + kField);  // what is unknown is kept
  return result;
}

}  // namespace

int64_t RecordBytes(const google::protobuf::MessageLite& record) { return RecordBytesOfToday(*OfNext(record)); }

absl::Status WriteRecord(char* place, int64_t place_bytes, const google::protobuf::MessageLite& record) {
  return WriteRecordOfToday(place, place_bytes, *OfNext(record));
}

}  // namespace shardd
