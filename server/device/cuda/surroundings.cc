#include "server/device/cuda/surroundings.h"

#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/process/environment.h"
#include "server/device/cuda/nvml.h"

namespace shardd {
namespace {

// With fewer hardware queues than the daemon has streams on a GPU, a waiting stream delays others.
constexpr int kMinConnections = 8;

std::optional<int> Attribute(const CudaDriver& driver, CUdevice_attribute attribute, int ordinal) {
  int value = 0;
  if (driver->DeviceGetAttribute(&value, attribute, ordinal) != CUDA_SUCCESS) return std::nullopt;
  return value;
}

std::string ComputeModeName(std::optional<int> mode) {
  if (!mode.has_value()) return "unknown: the driver does not say";
  if (*mode == CU_COMPUTEMODE_DEFAULT) return "default";
  if (*mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS) return "exclusive process";
  if (*mode == CU_COMPUTEMODE_PROHIBITED) return "prohibited";
  return absl::StrCat("unknown: ", *mode);
}

std::string PersistenceMode(const absl::StatusOr<Nvml>& nvml, const std::string& pci_bus_id) {
  const absl::StatusOr<bool> on = nvml.ok() ? nvml->PersistenceMode(pci_bus_id) : nvml.status();
  return on.ok() ? *on ? "on" : "off" : absl::StrCat("unknown: ", on.status().message());
}

// Warnings about the whole process.
void AddWarningsOfEnvironment(const CudaDriver& driver, std::vector<std::string>* warnings) {
  if (const std::string blocking = Environment("CUDA_LAUNCH_BLOCKING"); !blocking.empty() && blocking != "0") {
    warnings->push_back(
        absl::StrCat("environment: every kernel is waited for where it is launched (got "
                     "CUDA_LAUNCH_BLOCKING=",
                     blocking,
                     ", want none): nothing overlaps, and a stream that waits for a trainer can hang "
                     "its GPU; unset it and start the daemon again"));
  }
  const std::string connections = Environment("CUDA_DEVICE_MAX_CONNECTIONS");
  if (int count = 0; absl::SimpleAtoi(connections, &count) && count < kMinConnections) {
    warnings->push_back(
        absl::StrCat("environment: streams share hardware queues and hold each other up (got "
                     "CUDA_DEVICE_MAX_CONNECTIONS=",
                     connections, ", want none, or ", kMinConnections, " to 32); unset it and start the daemon again"));
  }
  if (CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
      driver->ModuleGetLoadingMode(&mode) == CUDA_SUCCESS && mode != CU_MODULE_EAGER_LOADING) {
    warnings->push_back(absl::StrCat(
        "environment: kernels are loaded when they are first used, which may wait for "
        "all work of the GPU (got CUDA_MODULE_LOADING=",
        Environment("CUDA_MODULE_LOADING"), ", want none, or EAGER); unset it and start the daemon again"));
  }
}

}  // namespace

CudaSurroundings ReadCudaSurroundings(const CudaDriver& driver, absl::Span<const int> ordinals) {
  CudaSurroundings result;
  const absl::StatusOr<Nvml> nvml = Nvml::Load();
  std::vector<std::string> with_mps, without_persistence, exclusive;
  for (const int ordinal : ordinals) {
    GpuFacts gpu;
    gpu.ordinal = ordinal;
    gpu.device = absl::StrCat("cuda:", ordinal);
    if (char id[32] = {}; driver->DeviceGetPCIBusId(id, sizeof(id) - 1, ordinal) == CUDA_SUCCESS) gpu.pci_bus_id = id;
    const std::optional<int> mps = Attribute(driver, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, ordinal);
    gpu.mps = !mps.has_value() ? "unknown: this driver does not say" : *mps != 0 ? "on" : "off";
    gpu.persistence_mode = PersistenceMode(nvml, gpu.pci_bus_id);
    gpu.compute_mode = ComputeModeName(Attribute(driver, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, ordinal));
    if (gpu.mps == "on") with_mps.push_back(gpu.device);
    if (gpu.persistence_mode == "off") without_persistence.push_back(gpu.device);
    // Under MPS the one process is its server.
    if (gpu.compute_mode == "exclusive process" && gpu.mps != "on") exclusive.push_back(gpu.device);
    result.gpus.push_back(std::move(gpu));
  }
  const auto warn = [&result](const std::vector<std::string>& devices, absl::string_view text) {
    if (!devices.empty()) result.warnings.push_back(absl::StrCat(absl::StrJoin(devices, ", "), ": ", text));
  };
  warn(
      with_mps,
      "MPS is on: a fault of one process, or its SIGKILL while a kernel of it runs, ends the work of all processes on "
      "the GPU, this daemon's included; keep it off where several owners share a GPU, or jobs are to outlive trainers");
  warn(without_persistence,
       "persistence mode is off: the driver unloads the GPU's state when its last process ends, and the next one takes "
       "seconds to start; enable nvidia-persistenced, or run nvidia-smi -pm 1");
  warn(exclusive,
       "compute mode is exclusive process: no trainer can use the GPU beside the daemon; run nvidia-smi -c DEFAULT");
  AddWarningsOfEnvironment(driver, &result.warnings);
  return result;
}

}  // namespace shardd
