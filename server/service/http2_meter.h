#ifndef SHARDD_SERVER_SERVICE_HTTP2_METER_H_
#define SHARDD_SERVER_SERVICE_HTTP2_METER_H_

// What a client's HTTP/2 frames cost whoever serves them. gRPC 1.51 bounds open streams, but not how fast a client
// opens and resets them, nor how many small frames it sends: a few bytes of the client's are milliseconds and kilobytes
// of the daemon's. So the relay (relay.h) lets a client's frames through as fast as its account allows, and the price
// of a frame is what stands here. Payloads are not looked at, and what is malformed is gRPC's to refuse.

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

// Of a core's time, rounded up from what was measured with gRPC 1.51.
inline constexpr absl::Duration kPriceOfCall = absl::Microseconds(100);     // HEADERS
inline constexpr absl::Duration kPriceOfReset = absl::Microseconds(1000);   // RST_STREAM: a call for nothing
inline constexpr absl::Duration kPriceOfControl = absl::Microseconds(100);  // PING, SETTINGS: answered
inline constexpr absl::Duration kPriceOfOther = absl::Microseconds(20);     // CONTINUATION, PRIORITY, what nobody knows
inline constexpr absl::Duration kPriceOfTransfer = absl::Microseconds(4);   // DATA, WINDOW_UPDATE
inline constexpr absl::Duration kPriceOfConnection = absl::Milliseconds(1);  // of its first byte

// Of one connection, from its first byte on. Thread-compatible.
class Http2Meter {
 public:
  struct Passed {
    size_t size_bytes = 0;
    absl::Duration price;
  };
  // Looks at the next bytes of the client, as long as `credit` is above zero when a frame begins; so at least one frame
  // passes. The bytes after those that have passed come again with the next call.
  Passed Pass(absl::string_view bytes, absl::Duration credit);
  // Of the last HEADERS frame; 0: none yet.
  uint32_t last_stream() const { return last_stream_; }

 private:
  static constexpr size_t kPrefaceBytes = 24;
  static constexpr size_t kHeaderBytes = 9;

  bool begun_ = false;
  size_t skip_bytes_ = kPrefaceBytes;  // of the preface, or of a payload
  char header_[kHeaderBytes] = {};
  size_t header_size_bytes_ = 0;
  uint32_t last_stream_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_HTTP2_METER_H_
