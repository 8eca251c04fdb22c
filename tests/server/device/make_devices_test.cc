#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/device/device.h"
#include "server/device/devices.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

TEST(MakeDevicesTest, CpuDevicesAreNumberedFromZero) {
  const auto devices = MakeDevices("cpu:3");
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->devices.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(devices->devices[i]->name(), "cpu:" + std::to_string(i));
}

TEST(MakeDevicesTest, SixtyFourAreTheMost) {
  EXPECT_TRUE(MakeDevices("cpu:64").ok());
  EXPECT_EQ(MakeDevices("cpu:65").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(MakeDevicesTest, EverythingElseIsRefusedWithWhatIsServed) {
  for (const char* spec :
       {"", "cuda", "cpu", "cpu:", "cpu:0", "cpu:-1", "cpu: 2", "cpu:2x", "cpu:99999999999", "tpu:1", "CPU:2"}) {
    const absl::Status status = MakeDevices(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr("want cpu:N with N from 1 to 64"));
  }
}

TEST(MakeDevicesTest, WhatIsNoListOfGpusIsRefused) {
  for (const char* spec : {"cuda:", "cuda:x", "cuda:-1", "cuda:0,", "cuda:0,0", "cuda: 1", "cuda:all,1"}) {
    const absl::Status status = MakeDevices(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no list of GPUs")) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr(spec)) << spec;
  }
}

TEST(MakeDevicesTest, WithoutADriverTheErrorSaysWhatWasLookedFor) {
  if (void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); driver != nullptr) {
    dlclose(driver);
    GTEST_SKIP() << "this machine has a CUDA driver";
  }
  for (const char* spec : {"cuda:all", "cuda:0", "cuda:2,0"}) {
    const absl::Status status = MakeDevices(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr(spec));
    EXPECT_THAT(std::string(status.message()), HasSubstr("libcuda.so.1"));
  }
}

TEST(StreamNameTest, StreamsHaveTheNamesOfTheDesign) {
  EXPECT_EQ(StreamName(StreamId::kUnshard), "unshard");
  EXPECT_EQ(StreamName(StreamId::kPostBackward), "post_backward");
  EXPECT_EQ(StreamName(StreamId::kOptimizer), "optimizer");
}

}  // namespace
}  // namespace shardd
