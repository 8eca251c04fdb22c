#ifndef SHARDD_CLIENT_CTL_FORMAT_H_
#define SHARDD_CLIENT_CTL_FORMAT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace shardd::ctl {

// "39.1 MiB": one unit everywhere, so that a column can be compared by eye.
std::string FormatMiB(int64_t bytes);
// "850 us", "12.3 ms", "4.5 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". Negative: "-".
std::string FormatMicros(int64_t us);
std::string FormatMillis(int64_t ms);
// "2026-11-21 05:31:07.123", local time.
std::string FormatTimeMicros(int64_t unix_us);
// "10 816 512" would not sort; "10816512" cannot be read: "10816512 (10.8 M)" from a million on.
std::string FormatNumel(int64_t numel);

// As proto3 JSON with every field, on one line or indented, with a newline at its end. INTERNAL: it cannot be printed.
absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message, bool one_line);

// The value's name without the enum's prefix, lower case: JOB_STATE_FORWARD_BACKWARD -> "forward_backward".
std::string ShortEnumName(const google::protobuf::EnumDescriptor& type, int value);
template <typename Enum>
std::string ShortEnumName(Enum value) {
  return ShortEnumName(*google::protobuf::GetEnumDescriptor<Enum>(), static_cast<int>(value));
}

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_FORMAT_H_
