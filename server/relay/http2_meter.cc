#include "server/relay/http2_meter.h"

#include <algorithm>
#include <cstring>

namespace shardd {
namespace {

enum FrameType : uint8_t {  // RFC 9113, 6
  kData = 0,
  kHeaders = 1,
  kRstStream = 3,
  kWindowUpdate = 8,
};

absl::Duration PriceOf(uint8_t type) {
  switch (type) {
    case kHeaders:
      return kPriceOfCall;
    case kRstStream:
      return kPriceOfReset;
    case kData:
    case kWindowUpdate:
      return kPriceOfTransfer;
    default:
      return kPriceOfControl;
  }
}

uint32_t BigEndian(const char* bytes, int count) {
  uint32_t value = 0;
  for (int i = 0; i < count; ++i) {
    value = value << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return value;
}

}  // namespace

Http2Meter::Passed Http2Meter::Pass(absl::string_view bytes, absl::Duration credit) {
  Passed passed;
  if (!begun_ && !bytes.empty()) {
    begun_ = true;
    passed.price += kPriceOfConnection;
  }
  while (passed.size_bytes < bytes.size()) {
    const absl::string_view rest = bytes.substr(passed.size_bytes);
    if (skip_bytes_ > 0) {
      const size_t skipped = std::min(skip_bytes_, rest.size());
      skip_bytes_ -= skipped;
      passed.size_bytes += skipped;
      continue;
    }
    if (header_size_bytes_ == 0 && passed.price >= credit) {
      break;
    }
    const size_t taken = std::min(kHeaderBytes - header_size_bytes_, rest.size());
    std::memcpy(header_ + header_size_bytes_, rest.data(), taken);
    header_size_bytes_ += taken;
    passed.size_bytes += taken;
    if (header_size_bytes_ == kHeaderBytes) {
      header_size_bytes_ = 0;
      skip_bytes_ = BigEndian(header_, 3);
      const uint8_t type = static_cast<uint8_t>(header_[3]);
      passed.price += PriceOf(type);
      if (type == kHeaders) {
        last_stream_ = BigEndian(header_ + 5, 4) & 0x7fffffff;
      }
    }
  }
  return passed;
}

}  // namespace shardd
