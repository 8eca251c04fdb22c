#include "tests/testing/fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/cuda/driver.h"
#include "tests/testing/build_paths.h"

namespace shardd::testing {
namespace {

absl::StatusOr<int> RealGpus() {
  static const auto& driver = *new absl::StatusOr<CudaDriver>(CudaDriver::Load());
  return driver.ok() ? driver->CountDevices() : driver.status();
}

}  // namespace

bool OnRealGpus() {
  const char* const gpu = getenv("SHARDD_TEST_GPU");
  if (gpu == nullptr || *gpu == '\0') return false;
  if (std::string(gpu) == "real") return true;
  (void)fprintf(stderr, "SHARDD_TEST_GPU: unknown (got \"%s\", want real or nothing)\n", gpu);
  abort();
}

std::vector<std::string> FakeCudaEnvironment(int gpus, const std::vector<std::string>& more) {
  if (OnRealGpus()) {
    for (const std::string& control : more) {
      if (absl::StartsWith(control, "FAKE_CUDA_DELAY_SEED=")) continue;
      (void)fprintf(stderr, "%s: a real GPU is not told so; SHARDD_NEEDS_FAKE_GPUS is missing\n", control.c_str());
      abort();
    }
    return {};
  }
  std::vector<std::string> environment = {absl::StrCat("LD_LIBRARY_PATH=", built::kFakesDir),
                                          absl::StrCat("FAKE_CUDA_DEVICES=", gpus)};
  environment.insert(environment.end(), more.begin(), more.end());
  return environment;
}

int GpusAtMost(int gpus) {
  if (!OnRealGpus()) return gpus;
  const absl::StatusOr<int> there = RealGpus();
  return there.ok() ? std::min(gpus, *there) : 0;
}

std::string MissingGpus(int gpus) {
  if (!OnRealGpus()) return "";
  const absl::StatusOr<int> there = RealGpus();
  if (!there.ok()) return std::string(there.status().message());
  return *there >= gpus ? "" : absl::StrCat("too few GPUs (got ", *there, ", want ", gpus, ")");
}

}  // namespace shardd::testing
