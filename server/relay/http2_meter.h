#ifndef SHARDD_SERVER_RELAY_HTTP2_METER_H_
#define SHARDD_SERVER_RELAY_HTTP2_METER_H_

// Measures what a client's HTTP/2 frames cost the daemon. gRPC 1.51 limits open streams, but not how fast a client
// opens and resets them, nor how many small frames it sends: a few bytes of the client cost the daemon milliseconds and
// kilobytes. So the relay (relay.h) passes a client's frames as fast as its account allows, and this file has the price
// of each frame. It ignores payloads and leaves malformed frames to gRPC.

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

// Processor time, rounded up from measurements with gRPC 1.51.
inline constexpr absl::Duration kPriceOfCall = absl::Microseconds(100);      // HEADERS
inline constexpr absl::Duration kPriceOfReset = absl::Microseconds(1000);    // RST_STREAM: a wasted call
inline constexpr absl::Duration kPriceOfControl = absl::Microseconds(100);   // PING, SETTINGS: answered; all others
inline constexpr absl::Duration kPriceOfTransfer = absl::Microseconds(4);    // DATA, WINDOW_UPDATE
inline constexpr absl::Duration kPriceOfConnection = absl::Milliseconds(1);  // for the first byte

// Meter of one connection, from its first byte on. Thread-compatible.
class Http2Meter {
 public:
  struct Passed {
    size_t size_bytes = 0;
    absl::Duration price;
  };
  // Passes the client's next bytes while `credit` is above zero at the start of a frame, so at least one frame passes.
  // The caller presents the remaining bytes again in the next call.
  Passed Pass(absl::string_view bytes, absl::Duration credit);
  // Stream of the last HEADERS frame; 0: none yet.
  uint32_t last_stream() const { return last_stream_; }

 private:
  static constexpr size_t kPrefaceBytes = 24;
  static constexpr size_t kHeaderBytes = 9;

  bool begun_ = false;
  size_t skip_bytes_ = kPrefaceBytes;  // of the preface or a payload
  char header_[kHeaderBytes] = {};
  size_t header_size_bytes_ = 0;
  uint32_t last_stream_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_RELAY_HTTP2_METER_H_
