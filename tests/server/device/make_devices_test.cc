#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/device/device.h"

namespace shardd {
namespace {

using testing::HasSubstr;

TEST(MakeDevicesTest, CpuDevicesAreNumberedFromZero) {
  const auto devices = MakeDevices("cpu:3");
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ((*devices)[i]->name(), "cpu:" + std::to_string(i));
}

TEST(MakeDevicesTest, SixtyFourAreTheMost) {
  EXPECT_TRUE(MakeDevices("cpu:64").ok());
  EXPECT_EQ(MakeDevices("cpu:65").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(MakeDevicesTest, EverythingElseIsRefusedWithWhatIsServed) {
  for (const char* spec :
       {"", "cpu", "cpu:", "cpu:0", "cpu:-1", "cpu: 2", "cpu:2x", "cpu:99999999999", "tpu:1", "CPU:2"}) {
    const absl::Status status = MakeDevices(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr("want cpu:N with N from 1 to 64"));
  }
}

TEST(MakeDevicesTest, CudaIsRefusedAsNotInThisBuild) {
  for (const char* spec : {"cuda", "cuda:0", "cuda:2"}) {
    EXPECT_THAT(std::string(MakeDevices(spec).status().message()), HasSubstr("this build has no CUDA device")) << spec;
  }
}

TEST(StreamNameTest, StreamsHaveTheNamesOfTheDesign) {
  EXPECT_EQ(StreamName(StreamId::kPreUnshard), "pre_unshard");
  EXPECT_EQ(StreamName(StreamId::kUnshard), "unshard");
  EXPECT_EQ(StreamName(StreamId::kPostBackward), "post_backward");
  EXPECT_EQ(StreamName(StreamId::kAllReduce), "all_reduce");
  EXPECT_EQ(StreamName(StreamId::kOptimizer), "optimizer");
}

}  // namespace
}  // namespace shardd
