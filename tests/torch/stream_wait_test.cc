#include "client/torch/stream_wait.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <string>

namespace shardd {
namespace {

using std::chrono::milliseconds;

// A device whose streams run nothing before they have been asked so often.
int queries_to_go = 0;
class SlowGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {type(), 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  bool queryStream(const c10::Stream&) const override { return queries_to_go-- <= 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SlowGuard);

const c10::Stream kStream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, 1), 7);

TEST(StreamWait, ReturnsWhenTheStreamHasRunAllThatItHas) {
  queries_to_go = 20;
  EXPECT_TRUE(WaitForStream(kStream, milliseconds(60000), 3, nullptr).ok());
  EXPECT_LE(queries_to_go, 0);
}

TEST(StreamWait, NamesAStreamThatHangs) {
  queries_to_go = 1 << 30;
  const Status status = WaitForStream(kStream, milliseconds(50), 3, [] { return false; });
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  for (const char* part : {"privateuseone:1", "within 50 ms", "a kernel hangs", "stream 7", "rank=3"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << ": " << status.message();
  }
}

TEST(StreamWait, EndsWhenTheHostWantsItTo) {
  queries_to_go = 1 << 30;
  int asked = 0;
  const Status status = WaitForStream(kStream, milliseconds(60000), 3, [&] { return ++asked == 3; });
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_EQ(asked, 3);
}

}  // namespace
}  // namespace shardd
