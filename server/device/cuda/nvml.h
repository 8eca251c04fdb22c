#ifndef SHARDD_SERVER_DEVICE_CUDA_NVML_H_
#define SHARDD_SERVER_DEVICE_CUDA_NVML_H_

#include <string>

#include "absl/status/statusor.h"

namespace shardd {

// The part of NVIDIA's management library that is used, for facts that neither the driver's API nor a file has: a
// socket of nvidia-persistenced shows that the service runs, not that it holds any GPU. The library comes with the
// driver, is found at run time, and is declared here as NVIDIA documents it. Loop-confined.
class Nvml {
 public:
  // Loads the library and every function, and calls nvmlInit. FAILED_PRECONDITION: absent, or nvmlInit fails (with its
  // answer).
  static absl::StatusOr<Nvml> Load(const std::string& library = "libnvidia-ml.so.1");
  Nvml(Nvml&& other) noexcept : table_(other.table_) { other.table_.shutdown = nullptr; }
  Nvml& operator=(Nvml&&) = delete;
  ~Nvml();  // the library stays loaded

  // INTERNAL: NVML's error text.
  absl::StatusOr<bool> PersistenceMode(const std::string& pci_bus_id) const;

 private:
  struct Table {
    int (*init)() = nullptr;
    int (*shutdown)() = nullptr;
    const char* (*error_string)(int result) = nullptr;
    int (*device_by_pci_bus_id)(const char* pci_bus_id, void** device) = nullptr;
    int (*device_persistence_mode)(void* device, int* on) = nullptr;
  };
  explicit Nvml(const Table& table) : table_(table) {}

  Table table_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_NVML_H_
