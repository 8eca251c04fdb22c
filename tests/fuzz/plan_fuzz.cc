// Specs made out of the fuzzer's bytes, and the bytes themselves as a shardd.v1.JobSpec.

#include <cstddef>
#include <cstdint>

#include "google/protobuf/stubs/logging.h"
#include "tests/fuzz/spec_input.cc"  // NOLINT(bugprone-suspicious-include): a fuzzer is one file

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const google::protobuf::LogSilencer quiet;  // names that are no UTF-8
  size_t at = 0;
  shardd::fuzz::SpecMaker maker([&]() -> uint32_t { return at < size ? data[at++] : 0; });
  shardd::v1::JobSpec spec = maker.Make();
  for (int changes = maker.Below(4); changes > 0; --changes) maker.Change(spec);
  shardd::fuzz::CheckPlanOf(spec);
  if (spec.ParseFromArray(data, static_cast<int>(size))) {
    shardd::fuzz::CheckPlanOf(spec);
  }
  return 0;
}
