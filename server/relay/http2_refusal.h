#ifndef SHARDD_SERVER_RELAY_HTTP2_REFUSAL_H_
#define SHARDD_SERVER_RELAY_HTTP2_REFUSAL_H_

// Answers a gRPC call without gRPC, on connections that gRPC cannot get, so that a client learns the reason instead of
// "Socket closed".

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd::http2 {

// The trailers of a call that ends with `status`, as an HPACK block without tables.
std::string RefusalHeaders(const absl::Status& status);
// The server's first bytes, for which clients wait before they call.
std::string ServerSettings();
// The answer to the call on `stream`.
std::string RefusalOf(uint32_t stream, absl::string_view headers);

}  // namespace shardd::http2

#endif  // SHARDD_SERVER_RELAY_HTTP2_REFUSAL_H_
