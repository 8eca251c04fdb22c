// Work that several devices share: when it is done, and with which error.

#include "server/collective/local/fan_out.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/optional.h"
#include "server/device/device.h"

namespace shardd {
namespace {

// Its work ends when the test says so.
class DeviceByHand final : public Device {
 public:
  const std::string& name() const override { return name_; }
  void Submit(StreamId, DeviceWork work) override { done_ = std::move(work.done); }
  std::vector<StreamStatus> Status() const override { return {}; }
  void Shutdown() override {}
  void End(absl::Status status) { std::exchange(done_, nullptr)(std::move(status)); }

 private:
  const std::string name_ = "by hand";
  std::function<void(absl::Status)> done_;
};

class FanOutTest : public ::testing::Test {
 protected:
  void Start(std::function<void(const absl::Status&)> failed = nullptr) {
    const DeviceOp op = ZeroOp{};
    FanOut(
        {{&first_, {op}}, {&second_, {op}}}, StreamId::kPostBackward, "sum", &first_, absl::OkStatus(),
        [this](absl::Status status) { done_ = std::move(status); }, std::move(failed));
  }
  DeviceByHand first_, second_;
  absl::optional<absl::Status> done_;
};

TEST_F(FanOutTest, IsDoneWithTheLastPart) {
  Start();
  second_.End(absl::OkStatus());
  EXPECT_FALSE(done_.has_value());
  first_.End(absl::OkStatus());
  ASSERT_TRUE(done_.has_value());
  EXPECT_TRUE(done_->ok());
}

// What the second ends with because the first has failed is no news, however soon it comes.
TEST_F(FanOutTest, TheErrorIsTheFirstCauseNotItsConsequence) {
  int failures = 0;
  Start([&](const absl::Status&) {
    if (++failures == 1) second_.End(absl::AbortedError("the others' sum is given up"));
  });
  first_.End(absl::UnavailableError("no work today"));
  ASSERT_TRUE(done_.has_value());
  EXPECT_EQ(*done_, absl::UnavailableError("no work today"));
  EXPECT_EQ(failures, 2);
}

}  // namespace
}  // namespace shardd
