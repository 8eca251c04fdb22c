#include "server/device/device.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/device/cpu/cpu_device.h"

namespace shardd {
namespace {

constexpr int kMaxDevices = 64;

}  // namespace

absl::string_view StreamName(StreamId stream) {
  switch (stream) {
    case StreamId::kPreUnshard:
      return "pre_unshard";
    case StreamId::kUnshard:
      return "unshard";
    case StreamId::kPostBackward:
      return "post_backward";
    case StreamId::kAllReduce:
      return "all_reduce";
    case StreamId::kOptimizer:
      return "optimizer";
  }
  return "unknown";
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> MakeDevices(absl::string_view spec) {
  const auto refuse = [spec](absl::string_view fact) {
    return absl::InvalidArgumentError(
        absl::StrCat("make devices: ", fact, " (got \"", spec, "\", want cpu:N with N from 1 to ", kMaxDevices, ")"));
  };
  if (spec == "cuda" || absl::StartsWith(spec, "cuda:")) return refuse("this build has no CUDA device");
  if (!absl::StartsWith(spec, "cpu:")) return refuse("unknown kind of device");
  const absl::string_view digits = spec.substr(4);
  // SimpleAtoi also takes spaces and signs.
  const bool plain = !digits.empty() && digits.find_first_not_of("0123456789") == absl::string_view::npos;
  int count = 0;
  if (!plain || !absl::SimpleAtoi(digits, &count) || count < 1 || count > kMaxDevices) {
    return refuse("number of devices is out of range");
  }
  std::vector<std::unique_ptr<Device>> devices;
  devices.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) devices.push_back(std::make_unique<CpuDevice>(absl::StrCat("cpu:", i)));
  return devices;
}

}  // namespace shardd
