#ifndef SHARDD_TESTS_SERVER_DEVICE_DEVICE_WORLD_H_
#define SHARDD_TESTS_SERVER_DEVICE_DEVICE_WORLD_H_

// What the conformance suites run on: devices of one kind, or one driver, and memory that they reach and the test does
// too. A binary that links a suite defines the kinds (device_kinds.cc here, tests/gpu/real_cuda_world.cc).

#include <memory>
#include <memory_resource>
#include <ostream>
#include <string>
#include <vector>

#include "server/device/cuda/cuda_device.h"
#include "server/device/device.h"

namespace shardd {

class DeviceWorld {
 public:
  virtual ~DeviceWorld() = default;
  // Empty, or why tests that want this world are skipped here; nothing else is called then.
  virtual std::string why_not() const { return ""; }
  virtual std::vector<std::unique_ptr<Device>> MakeAll() = 0;
  // For what operations name.
  virtual std::pmr::memory_resource* memory() = 0;
};

// GPUs behind a driver that is initialised. memory() is of the host and registered, at the same address on both sides.
class CudaWorld : public DeviceWorld {
 public:
  virtual const CudaDriver& driver() const = 0;
  virtual int gpus() const = 0;
  virtual std::unique_ptr<CudaDevice> Make(const CudaDeviceOptions& options) = 0;
  std::unique_ptr<CudaDevice> Make() { return Make({}); }
};

template <typename World>
struct WorldKind {
  friend void PrintTo(const WorldKind& kind, std::ostream* out) { *out << kind.name; }
  const char* name;
  std::unique_ptr<World> (*make)();
};
using DeviceKind = WorldKind<DeviceWorld>;
using CudaKind = WorldKind<CudaWorld>;
std::vector<DeviceKind> DeviceKinds();
std::vector<CudaKind> CudaKinds();

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_DEVICE_WORLD_H_
