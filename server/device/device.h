#ifndef SHARDD_SERVER_DEVICE_DEVICE_H_
#define SHARDD_SERVER_DEVICE_DEVICE_H_

// The first of the two seams (the other: collective/collective.h). A device runs typed operations in the order of named
// streams. Operations are data, not closures, so that each implementation can run them its own way (a thread with CPU
// kernels, CUDA streams, virtual time) and one conformance suite (tests/server/device) can hold them all to the same
// results.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tensor/kernels.h"
#include "common/tensor/norm.h"

namespace shardd {

// Ordered queues of a device. Work of one job in one stream runs in order; between streams, and between jobs, there is
// no order but what the caller makes by submitting after a completion.
enum class StreamId { kPreUnshard = 0, kUnshard, kPostBackward, kAllReduce, kOptimizer };
inline constexpr int kStreamCount = 5;
absl::string_view StreamName(StreamId stream);  // "pre_unshard", "unshard", "post_backward", "all_reduce", "optimizer"

// Memory named by an operation must stay valid until its `done` runs. Kernels' contracts: common/tensor/kernels.h.
struct CopyOp {
  const void* src;
  void* dst;
  int64_t size_bytes;
};
struct ZeroOp {
  void* dst;
  int64_t size_bytes;
};
struct CastOp {
  const void* src;
  DType from;
  void* dst;
  DType to;
  int64_t numel;
};
struct ReduceOp {
  std::vector<const void*> sources;  // in rank order
  DType source_dtype;
  DType reduce_dtype;
  float scale;
  bool accumulate;
  float* dst;
  int64_t numel;
  DType keep = v1::DTYPE_UNSPECIFIED;
  // Where `dst` is a mapping of a file of memory, and what is at `dst` in it: pages that are not there are written
  // through the file, which costs half of what a fault at a store does. A hint; -1: nobody gives pages of `dst` back.
  int dst_file = -1;
  int64_t dst_file_offset_bytes = 0;
};
// Added to *result, which says of which order. One NormOp at a time may name the same result.
struct NormOp {
  const float* src;
  int64_t numel;
  Norm* result;
};
struct AdamWOp {
  AdamWParams params;
  void* p;
  DType param_dtype;
  const float* g;
  float* m;
  float* v;
  void* cast_dst;  // or nullptr
  DType cast_dtype;
  int64_t numel;
};
struct SgdOp {
  SgdParams params;
  void* p;
  DType param_dtype;
  const float* g;
  float* buf;      // or nullptr
  void* cast_dst;  // or nullptr
  DType cast_dtype;
  int64_t numel;
};
// One device's part in sums over the devices of a communicator, of fp32. All of them run an operation with the same
// parts, and all their operations of this kind in the same order.
class Communicator;
struct SumPart {
  const float* src;  // this device's addend
  float* dst;        // where the sum goes on the root, which may be its src; of no meaning on the others
  int64_t numel;
  int root;  // a member
};
struct SumOp {
  Communicator* communicator;
  int member;  // this device, among the communicator's
  std::vector<SumPart> parts;
  // The parts are as many as members and of equal size, each one's root is its index, and their sources follow each
  // other.
  bool scatter = false;
  int64_t numel = 0;  // of all parts
};
using DeviceOp = std::variant<CopyOp, ZeroOp, CastOp, ReduceOp, NormOp, AdamWOp, SgdOp, SumOp>;

// What moves bytes between devices without the host. Thread-safe.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // What status and logs call it: "nccl 2.28.9 over cuda:0, cuda:1".
  virtual const std::string& name() const = 0;
  // What status says behind that: how it was made.
  virtual const std::string& details() const = 0;
  virtual int members() const = 0;
  // Enqueues a member's part on its device's stream (a CUstream); on a thread of that device, with its context current.
  // An error is of the member alone: the others may wait for it until Break.
  virtual absl::Status Enqueue(const SumOp& op, void* stream) = 0;
  // Whatever is under way on any member ends soon, with bytes that mean nothing, and nothing is enqueued any more. Does
  // not block. The first reason counts.
  virtual void Break(const absl::Status& why) = 0;
  virtual absl::Status broken() const = 0;  // OK: it is not
};

// When a work ran, CLOCK_MONOTONIC in nanoseconds: written before `done`. 0: nothing of it has run.
struct WorkTiming {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// A batch that runs as one entry of a stream.
struct DeviceWork {
  std::string label;  // "reduce layers.3 step 12": shown in status, errors and traces
  std::vector<DeviceOp> ops;
  // Runs on a thread of the device after all ops, also when the device is being shut down (then ops were skipped and
  // the status is CANCELLED). Short; may Submit; must not block.
  std::function<void(absl::Status)> done;
  std::shared_ptr<WorkTiming> timing = nullptr;  // nobody wants to know
  uint64_t job = 0;                              // whose it is; TracedDevice says so
};

// For status: never waits for the work itself.
struct StreamStatus {
  StreamId stream;
  uint64_t submitted = 0;
  uint64_t done = 0;
  std::string current;  // label of the running work; empty when idle
  int64_t busy_us = 0;
};

class DeviceMemory;

// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  // "cpu:0"
  // What slabs of its jobs are made of, as long as the device is there; null: operations name memory of the host.
  virtual DeviceMemory* memory() const { return nullptr; }
  // Never blocks. Work submitted after Shutdown is done with CANCELLED. No job's work keeps another's from the device
  // for longer than a few milliseconds at a time.
  virtual void Submit(StreamId stream, DeviceWork work) = 0;
  virtual std::vector<StreamStatus> Status() const = 0;
  // Finishes what runs, cancels the rest, joins. Idempotent.
  virtual void Shutdown() = 0;
};

// A GPU's settings as they were when the device was made, in words; what is unknown says why.
struct GpuFacts {
  int ordinal = 0;               // as the driver numbers them
  std::string device;            // "cuda:0"
  std::string description;       // "NVIDIA H200, 139 GiB, 132 multiprocessors"
  std::string pci_bus_id;        // "0000:65:00.0": as nvidia-smi knows it, however the driver numbers GPUs
  std::string mps;               // "on", "off", "unknown: ..."
  std::string persistence_mode;  // "on", "off", "unknown: ..."
  std::string compute_mode;      // "default", "exclusive process", "prohibited", "unknown: ..."
};

class CudaDriver;

struct Devices {
  std::shared_ptr<const CudaDriver> driver;  // of GPUs; else null
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<GpuFacts> gpus;  // one per device, or none
  // What was found around them that makes work slower, less safe, or hang, each with its remedy.
  std::vector<std::string> warnings;
};

// "cpu:4" -> cpu:0 .. cpu:3; "cuda:all", "cuda:0,2" -> cuda:0, cuda:2: GPUs by the driver's numbers. INVALID_ARGUMENT
// for anything else, with what there is. A GPU that cannot be had: FAILED_PRECONDITION where the driver or the GPU is
// not there, with what was looked for; UNIMPLEMENTED where this build, or that GPU, has not what it takes.
// CUDA_MODULE_LOADING=EAGER is set before the driver is loaded, unless it has a value. REQUIRES: no other thread reads
// the environment.
absl::StatusOr<Devices> MakeDevices(absl::string_view spec);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICE_H_
