#include "tests/fakes/cuda/machine.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace shardd::fake_cuda {
namespace {

std::atomic<Machine*> g_machine{nullptr};
std::atomic<int> g_machine_pid{0};
std::atomic<uint64_t> g_machines{0};

}  // namespace

Machine::Machine(const MachineOptions& options)
    : options_(options),
      pid_(getpid()),
      number_(++g_machines),
      memory_({options.gpus, options.bytes_per_gpu, options.posix_fd, options.rdma, options.pinned_bytes}),
      late_writes_(options.late_writes.any() ? LateWrites::Start(options.late_writes) : nullptr),
      gpus_(static_cast<size_t>(options.gpus)) {
  // A child of fork has its parent's pointer, and may have a machine of its own instead.
  if (g_machine.load() != nullptr && g_machine_pid.load() == pid_) {
    std::fprintf(stderr, "fake CUDA machine: there is one already in this process\n");
    std::abort();
  }
  if (options.late_writes.any() && late_writes_ == nullptr) {
    std::fprintf(stderr, "fake CUDA machine: no process for late writes\n");
    std::abort();
  }
  g_machine = this;
  g_machine_pid = pid_;
}

Machine::~Machine() {
  g_machine = nullptr;
  std::map<CUstream, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> destroyed;
  {
    std::lock_guard lock(mutex_);
    streams.swap(streams_);
    destroyed.swap(destroyed_streams_);
    for (auto& [gpu, stream] : legacy_streams_) destroyed.push_back(std::move(stream));
    legacy_streams_.clear();
  }
  for (auto& [handle, stream] : streams) stream->Stop();
  for (auto& stream : destroyed) stream->Stop();
  // Their threads, before what they use.
  streams.clear();
  destroyed.clear();
}

bool Machine::Inherited() { return g_machine_pid.load() != 0 && g_machine_pid.load() != getpid(); }

Machine* Machine::Get() { return g_machine_pid.load() == getpid() ? g_machine.load() : nullptr; }

void Machine::AddKernel(const std::string& name, size_t args_bytes, KernelFunction function) {
  std::lock_guard lock(mutex_);
  kernels_[name] = std::make_unique<Kernel>(Kernel{name, args_bytes, std::move(function)});
}

void Machine::FailCall(const std::string& function, int nth, CUresult error) {
  std::lock_guard lock(mutex_);
  failures_[function] = {nth, error};
}

void Machine::LoseGpu(int gpu, CUresult error) {
  std::lock_guard lock(mutex_);
  LoseLocked(gpu, error);
}

void Machine::LoseLocked(int gpu, CUresult error) {
  Gpu& lost = gpus_[static_cast<size_t>(gpu)];
  if (lost.lost == CUDA_SUCCESS) lost.lost = error;
  for (const auto& stream : StreamsOfLocked(gpu)) stream->Stop();
}

std::shared_ptr<Stream> Machine::NewStreamLocked(int gpu, int priority, uint64_t seed) {
  Stream::Options options;
  options.gpu = gpu;
  options.priority = priority;
  options.delay_seed = options_.delay_seed == 0 ? 0 : options_.delay_seed * 1000003 + seed;
  options.queue_limit = options_.queue_limit;
  if (std::shared_ptr<SharedQueue>& queue = gpus_[static_cast<size_t>(gpu)].queue; options_.one_queue) {
    if (queue == nullptr) queue = std::make_shared<SharedQueue>();
    options.shared = queue;
  }
  options.lose = [this, gpu](CUresult error) { LoseGpu(gpu, error); };
  return std::make_shared<Stream>(options);
}

std::vector<std::shared_ptr<Stream>> Machine::StreamsOfLocked(int gpu) const {
  std::vector<std::shared_ptr<Stream>> result;
  for (const auto& [handle, stream] : streams_) {
    if (stream->gpu() == gpu) result.push_back(stream);
  }
  if (const auto it = legacy_streams_.find(gpu); it != legacy_streams_.end()) result.push_back(it->second);
  return result;
}

void Machine::HangGpu(int gpu, bool hang) {
  std::lock_guard lock(mutex_);
  for (const auto& stream : StreamsOfLocked(gpu)) stream->Hang(hang);
}

void Machine::HangNextHostCopy(int gpu) {
  std::lock_guard lock(mutex_);
  gpus_[static_cast<size_t>(gpu)].hangs_host_copy = true;
}

bool Machine::DiesIn(const std::string& name) {
  if (options_.dies_at == 0 || name != options_.dies_in) return false;
  std::lock_guard lock(mutex_);
  return ++came_to_ == options_.dies_at;
}

void Machine::Die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

void Machine::AwaitUnmapping() const {
  const std::string& file = options_.unmap_hold_file;
  while (!file.empty() && std::filesystem::exists(file)) {
    std::ofstream(file + ".seen").flush();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

int64_t Machine::Calls(const std::string& function) const {
  std::lock_guard lock(mutex_);
  const auto it = calls_.find(function);
  return it == calls_.end() ? 0 : it->second;
}

int64_t Machine::PageableCopies() const {
  std::lock_guard lock(mutex_);
  return pageable_copies_;
}

size_t Machine::LongestQueue() const {
  std::lock_guard lock(mutex_);
  return longest_queue_;
}

std::vector<int> Machine::StreamPriorities() const {
  std::lock_guard lock(mutex_);
  std::vector<int> priorities;
  for (const auto& [handle, stream] : streams_) priorities.push_back(stream->priority());
  return priorities;
}

Machine::Live Machine::live() const {
  std::lock_guard lock(mutex_);
  Live live;
  live.memory = memory_.live();
  for (const Gpu& gpu : gpus_) live.contexts += static_cast<size_t>(gpu.context_users);
  live.streams = streams_.size();
  live.events = events_.size();
  live.libraries = libraries_.size();
  return live;
}

}  // namespace shardd::fake_cuda
