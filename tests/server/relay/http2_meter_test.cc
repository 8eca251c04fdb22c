#include "server/relay/http2_meter.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/job/writes/passes.h"
#include "server/session/session.h"

namespace shardd {
namespace {

enum : uint8_t { kData = 0, kHeaders = 1, kRst = 3, kPing = 6 };

std::string Frame(uint8_t type, uint32_t stream, size_t payload_bytes) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload_bytes >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(0);
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  return frame + std::string(payload_bytes, '\xff');
}

std::string Session() {
  return absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Frame(kHeaders, 1, 40), Frame(kData, 1, 20'000),
                      Frame(kRst, 1, 4), Frame(kPing, 0, 8), Frame(kHeaders, 7, 0));
}
const absl::Duration kPrice =
    kPriceOfConnection + 2 * kPriceOfCall + kPriceOfTransfer + kPriceOfReset + kPriceOfControl;

TEST(Http2Meter, FramesHaveTheirPriceHoweverTheyArrive) {
  const std::string bytes = Session();
  for (const size_t piece : {size_t{1}, size_t{2}, size_t{7}, size_t{100}, size_t{20'100}, bytes.size()}) {
    Http2Meter meter;
    absl::Duration price;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const absl::string_view next = absl::string_view(bytes).substr(at, piece);
      const Http2Meter::Passed passed = meter.Pass(next, absl::InfiniteDuration());
      EXPECT_EQ(passed.size_bytes, next.size());
      price += passed.price;
    }
    EXPECT_EQ(price, kPrice) << piece;
    EXPECT_EQ(meter.last_stream(), 7u);
  }
}

TEST(Http2Meter, WithoutCreditAFramePassesAtATime) {
  const std::string bytes = Session();
  Http2Meter meter;
  size_t at = 0;
  absl::Duration price;
  int calls = 0;
  for (; at < bytes.size(); ++calls) {
    const Http2Meter::Passed passed = meter.Pass(absl::string_view(bytes).substr(at), absl::Nanoseconds(1));
    ASSERT_GT(passed.size_bytes, 0u);
    at += passed.size_bytes;
    price += passed.price;
  }
  EXPECT_EQ(at, bytes.size());
  EXPECT_EQ(price, kPrice);
  EXPECT_EQ(calls, 6);  // the preface, and five frames
}

TEST(Http2Meter, CreditEndsBetweenFrames) {
  Http2Meter meter;
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  EXPECT_EQ(meter.Pass(preface, absl::InfiniteDuration()).size_bytes, preface.size());
  const std::string call = Frame(kHeaders, 1, 30) + Frame(kRst, 1, 4);
  std::string flood;
  for (int i = 0; i < 100; ++i) flood += call;
  const Http2Meter::Passed passed = meter.Pass(flood, 10 * (kPriceOfCall + kPriceOfReset));
  EXPECT_EQ(passed.size_bytes, 10 * call.size());
}

}  // namespace
}  // namespace shardd
