#include "tests/fakes/cuda/libcuda/environment.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace shardd::fake_cuda {
namespace {

[[noreturn]] void Refuse(const char* name, const std::string& value, const char* want) {
  std::fprintf(stderr, "fake CUDA driver: %s: not understood (got \"%s\", want %s)\n", name, value.c_str(), want);
  std::_Exit(1);
}

uint64_t Number(const char* name, const std::string& text, uint64_t most) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  const bool plain = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  if (!plain || *end != '\0' || value > most) Refuse(name, text, "a number");
  return value;
}

template <typename T>
void Read(const char* name, uint64_t most, T* value) {
  const char* const text = std::getenv(name);
  if (text != nullptr) *value = static_cast<T>(Number(name, text, most));
}

// A line "GPU ERROR" loses that GPU, "GPU copy" hangs its next host copy. A file that is not whole yet does nothing.
// Returns how many lines there are; the first `seen` are passed over.
int LoseAsTheFileSays(Machine& machine, const std::string& path, int gpus, int seen) {
  std::ifstream file(path);
  std::string line;
  int lines = 0;
  while (std::getline(file, line) && !file.eof()) {
    std::istringstream words(line);
    int gpu = -1;
    std::string what;
    if (++lines <= seen || !(words >> gpu >> what) || gpu < 0 || gpu >= gpus) continue;
    if (what == "copy") {
      machine.HangNextHostCopy(gpu);
      std::ofstream(path + ".seen").flush();
    } else if (const int error = std::atoi(what.c_str()); error > 0) {
      machine.LoseGpu(gpu, static_cast<CUresult>(error));
    }
  }
  return std::max(lines, seen);
}

}  // namespace

MachineOptions OptionsFromEnvironment() {
  MachineOptions options;
  Read("FAKE_CUDA_DEVICES", 64, &options.gpus);
  Read("FAKE_CUDA_MEMORY_BYTES", uint64_t{1} << 46, &options.bytes_per_gpu);
  Read("FAKE_CUDA_PINNED_BYTES", uint64_t{1} << 46, &options.pinned_bytes);
  Read("FAKE_CUDA_DELAY_SEED", UINT64_MAX, &options.delay_seed);
  Read("FAKE_CUDA_QUEUE_LIMIT", 1 << 20, &options.queue_limit);
  Read("FAKE_CUDA_ONE_QUEUE", 1, &options.one_queue);
  Read("FAKE_CUDA_LATE_WRITES_US", 60'000'000, &options.late_writes.delay_us);
  if (const char* const file = std::getenv("FAKE_CUDA_HOLD_WRITES_FILE"); file != nullptr) {
    options.late_writes.hold_file = file;
  }
  if (const char* const file = std::getenv("FAKE_CUDA_HOLD_UNMAP_FILE"); file != nullptr) {
    options.unmap_hold_file = file;
  }
  if (const char* const text = std::getenv("FAKE_CUDA_DIE"); text != nullptr) {
    std::istringstream parts(text);
    std::string nth;
    if (!std::getline(parts, options.dies_in, ':') || !std::getline(parts, nth)) {
      Refuse("FAKE_CUDA_DIE", text, "NAME:NTH, like shardd_adamw:5");
    }
    options.dies_at = static_cast<int>(Number("FAKE_CUDA_DIE", nth, INT_MAX));
  }
  Read("FAKE_CUDA_POSIX_FD", 1, &options.posix_fd);
  Read("FAKE_CUDA_RDMA", 1, &options.rdma);
  Read("FAKE_CUDA_MEMOPS", 1, &options.memops);
  Read("FAKE_CUDA_PEERS", 1, &options.peers);
  Read("FAKE_CUDA_DRIVER_VERSION", 1 << 20, &options.driver_version);
  Read("FAKE_CUDA_COMPUTE_MODE", CU_COMPUTEMODE_EXCLUSIVE_PROCESS, &options.compute_mode);
  if (const char* const mps = std::getenv("FAKE_CUDA_MPS"); mps != nullptr && std::string(mps) == "unknown") {
    options.mps = -1;
  } else {
    Read("FAKE_CUDA_MPS", 1, &options.mps);
  }
  const char* const loading = std::getenv("CUDA_MODULE_LOADING");  // the driver's own
  options.eager_loading = loading != nullptr && std::string(loading) == "EAGER";
  return options;
}

void FailFromEnvironment(Machine& machine) {
  constexpr char kFail[] = "FAKE_CUDA_FAIL";
  if (const char* const text = std::getenv(kFail); text != nullptr) {
    std::istringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ',');) {
      std::istringstream parts(entry);
      std::string function, nth, error;
      const bool three = std::getline(parts, function, ':') && std::getline(parts, nth, ':') &&
                         std::getline(parts, error) && function.rfind("cu", 0) == 0;
      if (!three) Refuse(kFail, entry, "FUNCTION:NTH:ERROR, like cuMemCreate:1:2");
      machine.FailCall(function, static_cast<int>(Number(kFail, nth, INT_MAX)),
                       static_cast<CUresult>(Number(kFail, error, 999)));
    }
  }
  if (const char* const path = std::getenv("FAKE_CUDA_LOSE_FILE"); path != nullptr) {
    int gpus = MachineOptions().gpus;
    Read("FAKE_CUDA_DEVICES", 64, &gpus);
    std::thread([&machine, path = std::string(path), gpus] {
      for (int seen = 0;;) {
        seen = LoseAsTheFileSays(machine, path, gpus, seen);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }).detach();
  }
}

}  // namespace shardd::fake_cuda
