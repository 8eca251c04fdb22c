#include "client/ctl/format.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "google/protobuf/util/json_util.h"

namespace shardd::ctl {
namespace {

// "JOB_STATE_": what the zero value, ..._UNSPECIFIED, begins with. (The type's name does not give it: DType, "DTYPE_".)
std::string PrefixOf(const google::protobuf::EnumDescriptor& type) {
  std::string prefix(type.value(0)->name());
  constexpr absl::string_view kZero = "UNSPECIFIED";
  if (absl::string_view(prefix).size() >= kZero.size()) {
    prefix.resize(prefix.size() - kZero.size());
  }
  return prefix;
}

}  // namespace

std::string FormatMiB(int64_t bytes) { return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20)); }

std::string FormatMicros(int64_t us) {
  if (us < 0) {
    return "-";
  }
  if (us < 1000) {
    return absl::StrFormat("%d us", us);
  }
  if (us < 1'000'000) {
    return absl::StrFormat("%.1f ms", static_cast<double>(us) / 1e3);
  }
  const int64_t seconds = us / 1'000'000;
  if (seconds < 60) {
    return absl::StrFormat("%.1f s", static_cast<double>(us) / 1e6);
  }
  if (seconds < 3600) {
    return absl::StrFormat("%d min %d s", seconds / 60, seconds % 60);
  }
  if (seconds < 86400) {
    return absl::StrFormat("%d h %d min", seconds / 3600, seconds / 60 % 60);
  }
  return absl::StrFormat("%d d %d h", seconds / 86400, seconds / 3600 % 24);
}

std::string FormatMillis(int64_t ms) { return ms < 0 ? "-" : ms == 0 ? "0 ms" : FormatMicros(ms * 1000); }

std::string FormatTimeMicros(int64_t unix_us) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%E3S", absl::FromUnixMicros(unix_us), absl::LocalTimeZone());
}

std::string FormatNumel(int64_t numel) {
  if (numel < 1'000'000) {
    return absl::StrCat(numel);
  }
  return numel < 1'000'000'000 ? absl::StrFormat("%d (%.1f M)", numel, static_cast<double>(numel) / 1e6)
                               : absl::StrFormat("%d (%.2f G)", numel, static_cast<double>(numel) / 1e9);
}

std::string ShortEnumName(const google::protobuf::EnumDescriptor& type, int value) {
  const google::protobuf::EnumValueDescriptor* found = type.FindValueByNumber(value);
  if (found == nullptr) {
    return absl::StrCat("unknown (", value, ")");  // of a newer daemon
  }
  const std::string prefix = PrefixOf(type);
  const std::string name(found->name());
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message, bool one_line) {
  google::protobuf::util::JsonPrintOptions print;
  print.add_whitespace = !one_line;
  print.always_print_primitive_fields = true;
  print.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, print);
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat("print answer: ", status.ToString()));
  }
  // Whitespace mode ends with a newline by itself.
  if (text.empty() || text.back() != '\n') {
    text.push_back('\n');
  }
  return text;
}

}  // namespace shardd::ctl
