#include "server/relay/http2_refusal.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardd::http2 {
namespace {

constexpr uint8_t kHeaders = 1;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kEndOfStreamAndHeaders = 0x5;
constexpr size_t kMaxTextBytes = 1024;

void AppendLength(size_t length, std::string* out) {  // RFC 7541, 5.1, with a prefix of 7 bits
  if (length < 127) {
    out->push_back(static_cast<char>(length));
    return;
  }
  out->push_back(127);
  for (length -= 127; length >= 128; length >>= 7) {
    out->push_back(static_cast<char>((length & 127) | 128));
  }
  out->push_back(static_cast<char>(length));
}

void AppendField(absl::string_view name, absl::string_view value, std::string* out) {
  out->push_back(0);  // literal, without indexing, new name
  AppendLength(name.size(), out);
  absl::StrAppend(out, name);
  AppendLength(value.size(), out);
  absl::StrAppend(out, value);
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) {
    frame.push_back(static_cast<char>(payload.size() >> shift));
  }
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) {
    frame.push_back(static_cast<char>(stream >> shift));
  }
  absl::StrAppend(&frame, payload);
  return frame;
}

}  // namespace

std::string RefusalHeaders(const absl::Status& status) {
  std::string text;
  for (const char c : status.message().substr(0, kMaxTextBytes)) {
    if (c >= ' ' && c <= '~' && c != '%') {
      text.push_back(c);
    } else {
      absl::StrAppendFormat(&text, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  std::string headers = "\x88";  // ":status: 200", RFC 7541, appendix A
  AppendField("content-type", "application/grpc", &headers);
  AppendField("grpc-status", absl::StrCat(static_cast<int>(status.code())), &headers);
  AppendField("grpc-message", text, &headers);
  return headers;
}

std::string ServerSettings() { return Frame(kSettings, 0, 0, ""); }

std::string RefusalOf(uint32_t stream, absl::string_view headers) {
  return Frame(kHeaders, kEndOfStreamAndHeaders, stream, headers);
}

}  // namespace shardd::http2
