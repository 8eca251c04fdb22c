#include "server/device/cuda/nvml.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace shardd {

absl::StatusOr<Nvml> Nvml::Load(const std::string& library) {
  const auto refuse = [&library](absl::string_view fact) {
    return absl::FailedPreconditionError(absl::StrCat("load \"", library, "\": ", fact));
  };
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed, like the driver
  if (handle == nullptr) return refuse("no such library here");
  Table table;
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    void* const address = dlsym(handle, name);
    if (address == nullptr) absl::StrAppend(&missing, missing.empty() ? "" : ", ", name);
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(address);
  };
  resolve("nvmlInit_v2", &table.init);
  resolve("nvmlShutdown", &table.shutdown);
  resolve("nvmlErrorString", &table.error_string);
  resolve("nvmlDeviceGetHandleByPciBusId_v2", &table.device_by_pci_bus_id);
  resolve("nvmlDeviceGetPersistenceMode", &table.device_persistence_mode);
  if (!missing.empty()) return refuse(absl::StrCat("it has no ", missing));
  if (const int result = table.init(); result != 0) {
    return refuse(absl::StrCat("nvmlInit: ", table.error_string(result), " (result ", result, ")"));
  }
  return Nvml(table);
}

Nvml::~Nvml() {
  if (table_.shutdown != nullptr) (void)table_.shutdown();
}

absl::StatusOr<bool> Nvml::PersistenceMode(const std::string& pci_bus_id) const {
  void* device = nullptr;
  int on = 0;
  int result = table_.device_by_pci_bus_id(pci_bus_id.c_str(), &device);
  if (result == 0) result = table_.device_persistence_mode(device, &on);
  if (result == 0) return on != 0;
  return absl::InternalError(
      absl::StrCat("nvmlDeviceGetPersistenceMode: ", table_.error_string(result), " (result ", result, ")"));
}

}  // namespace shardd
