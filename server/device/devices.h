#ifndef SHARDD_SERVER_DEVICE_DEVICES_H_
#define SHARDD_SERVER_DEVICE_DEVICES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/device/device.h"

namespace shardd {

// A GPU's settings when the device was made, in words; an unknown one has its reason.
struct GpuFacts {
  int ordinal = 0;               // in the driver's numbering
  std::string device;            // "cuda:0"
  std::string description;       // "NVIDIA H200, 139 GiB, 132 multiprocessors"
  std::string pci_bus_id;        // "0000:65:00.0": as nvidia-smi shows it, whatever number the driver gives the GPU
  std::string mps;               // "on", "off", "unknown: ..."
  std::string persistence_mode;  // "on", "off", "unknown: ..."
  std::string compute_mode;      // "default", "exclusive process", "prohibited", "unknown: ..."
};

class CudaDriver;

struct Devices {
  std::shared_ptr<const CudaDriver> driver;  // of GPUs; otherwise null
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<GpuFacts> gpus;  // one per device, or none
  // Problems of the devices' environment (slow, less safe, may hang), each with its remedy.
  std::vector<std::string> warnings;
};

// Makes the devices of "cpu:4" (cpu:0 .. cpu:3), "cuda:all", or "cuda:0,2" (GPUs by the driver's numbers).
// INVALID_ARGUMENT for anything else, with what there is. FAILED_PRECONDITION: there is no driver or no such GPU, with
// what was looked for. UNIMPLEMENTED: this build, or that GPU, lacks what is needed.
// Sets CUDA_MODULE_LOADING=EAGER before it loads the driver, unless the variable has a value. REQUIRES: no other thread
// reads the environment.
absl::StatusOr<Devices> MakeDevices(absl::string_view spec);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICES_H_
