#ifndef SHARDD_SERVER_SERVICE_HTTP2_REFUSAL_H_
#define SHARDD_SERVER_SERVICE_HTTP2_REFUSAL_H_

// A gRPC call's answer without gRPC: for connections that it cannot be given. So a client learns why, where it would
// see "Socket closed".

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd::http2 {

// The trailers of a call that ends with `status`, as an HPACK block without any table.
std::string RefusalHeaders(const absl::Status& status);
// What the server says first; clients wait for it before they call.
std::string ServerSettings();
// That answer to the call on `stream`.
std::string RefusalOf(uint32_t stream, absl::string_view headers);

}  // namespace shardd::http2

#endif  // SHARDD_SERVER_SERVICE_HTTP2_REFUSAL_H_
