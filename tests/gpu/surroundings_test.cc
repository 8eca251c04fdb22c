// That what the daemon says of the GPU's surroundings is so. What is so comes from who started this:
// SHARDD_GPU_MPS, on or off (tests/gpu/run.sh).

#include "server/device/cuda/surroundings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "server/device/devices.h"
#include "tests/gpu/gpu.h"

namespace shardd::cuda {
namespace {

TEST(Surroundings, SayWhetherMpsIsOn) {
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) GTEST_SKIP() << why;
  const CudaSurroundings found = ReadCudaSurroundings(gpu->driver(), {0});
  ASSERT_EQ(found.gpus.size(), 1u);
  const GpuFacts& facts = found.gpus[0];
  std::printf("[ GPU      ] %s at %s: MPS %s, persistence mode %s, compute mode %s\n", facts.device.c_str(),
              facts.pci_bus_id.c_str(), facts.mps.c_str(), facts.persistence_mode.c_str(), facts.compute_mode.c_str());
  for (const std::string& warning : found.warnings) std::printf("[ GPU      ] warning: %s\n", warning.c_str());
  const char* const mps = std::getenv("SHARDD_GPU_MPS");
  if (mps == nullptr) GTEST_SKIP() << "SHARDD_GPU_MPS does not say what is so";
  EXPECT_EQ(facts.mps, mps);
  EXPECT_THAT(facts.persistence_mode, ::testing::AnyOf("on", "off"));
  const bool warned = std::any_of(found.warnings.begin(), found.warnings.end(),
                                  [](const std::string& w) { return w.find("MPS is on") != std::string::npos; });
  EXPECT_EQ(warned, facts.mps == "on");
}

}  // namespace
}  // namespace shardd::cuda
