// What a program meets that looks for libnvidia-ml.so.1: the functions of server/device/cuda/nvml.h, of GPUs whose
// persistence mode is what FAKE_CUDA_PERSISTENCE says.

#include <cstdlib>
#include <cstring>

extern "C" {

constexpr int kSuccess = 0;
constexpr int kUninitialised = 1;
constexpr int kNotFound = 6;
constexpr int kDriverNotLoaded = 9;

static bool g_initialised = false;

static const char* Persistence() {
  const char* const text = std::getenv("FAKE_CUDA_PERSISTENCE");
  return text == nullptr ? "1" : text;
}

__attribute__((visibility("default"))) int nvmlInit_v2() {
  if (std::strcmp(Persistence(), "unknown") == 0) return kDriverNotLoaded;
  g_initialised = true;
  return kSuccess;
}
__attribute__((visibility("default"))) int nvmlShutdown() {
  const bool was = g_initialised;
  g_initialised = false;
  return was ? kSuccess : kUninitialised;
}
__attribute__((visibility("default"))) const char* nvmlErrorString(int result) {
  return result == kDriverNotLoaded ? "Driver Not Loaded" : "Fake Error";
}
__attribute__((visibility("default"))) int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  if (!g_initialised) return kUninitialised;
  *device = const_cast<char*>(id);
  return std::strncmp(id, "0000:4", 6) == 0 ? kSuccess : kNotFound;  // as calls_device.cc numbers them
}
__attribute__((visibility("default"))) int nvmlDeviceGetPersistenceMode(void*, int* on) {
  if (!g_initialised) return kUninitialised;
  *on = std::strcmp(Persistence(), "0") == 0 ? 0 : 1;
  return kSuccess;
}

}  // extern "C"
