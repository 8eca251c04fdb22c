#include "tests/e2e/ranks/bits.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/e2e/ranks/device_values.h"

namespace shardd::e2e {
namespace {

// FNV-1a.
uint64_t Digest(const std::vector<unsigned char>& bytes) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const unsigned char byte : bytes) digest = (digest ^ byte) * 0x100000001b3;
  return digest;
}

}  // namespace

void ReportBits(const Job& job, TrainerReport* report) {
  const shardd_job_info info = job.info();
  DeviceValues memory;
  memory.Use(info.offloaded != 0 ? -1 : info.cuda_device);
  const auto add = [&](const std::string& what, const void* data, int64_t first, int64_t numel) {
    if (data == nullptr || numel == 0) return;
    std::vector<unsigned char> bytes(sizeof(float) * static_cast<size_t>(numel));  // all of it is fp32
    memory.Read(bytes.data(), static_cast<const float*>(data) + first, bytes.size());
    report->bits.push_back(what + ": " + std::to_string(numel) + " elements, " + std::to_string(Digest(bytes)));
  };
  for (int32_t param = 0; param < info.param_count; ++param) {
    const shardd_shard_range range = job.shard_range(param);
    const std::string name = "parameter " + std::to_string(param);
    add(name, job.shard_data(param), range.first, range.numel);
    for (int32_t state = 0; state < 2; ++state) {
      add("state " + std::to_string(state) + " of " + name, job.optimizer_state_data(param, state),
          range.optimizer_first, range.optimizer_numel);
    }
  }
}

}  // namespace shardd::e2e
