// Any bytes as a shardd.v1.JobSpec.

#include <cstddef>
#include <cstdint>

#include "tests/fuzz/spec_input.cc"  // NOLINT(bugprone-suspicious-include): a fuzzer is one file

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  shardd::v1::JobSpec spec;
  if (spec.ParseFromArray(data, static_cast<int>(size))) {
    shardd::fuzz::CheckPlanOf(spec);
  }
  return 0;
}
