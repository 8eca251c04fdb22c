#ifndef SHARDD_SERVER_DEVICE_DEVICE_OP_H_
#define SHARDD_SERVER_DEVICE_DEVICE_OP_H_

// What a device is asked to do, as plain types: operations, the work that they make up, and the streams that order it.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/tensor/adafactor.h"
#include "common/tensor/kernels.h"
#include "common/tensor/muon.h"
#include "common/tensor/norm.h"
#include "server/turns/work_owner.h"

namespace shardd {

class UpdateLog;

// Ordered queues of a device. Work of one job in one stream runs in order. Between streams, and between jobs, the only
// order is what the caller makes by submitting after a completion.
enum class StreamId { kUnshard = 0, kPostBackward, kOptimizer };
inline constexpr int kStreamCount = 3;
absl::string_view StreamName(StreamId stream);  // "unshard", "post_backward", "optimizer"

// Memory that an operation names must stay valid until its `done` runs. common/tensor/kernels.h has the kernels'
// contracts.
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
  // CPUs alone: RoundToFloat8Blocks (common/tensor/float8_blocks.h); the first element begins a block.
  bool float8 = false;
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
  // File and offset of `dst`, if it is a mapping of a memory file. Absent pages are then written through the file, at
  // half the cost of faults by stores. A hint; -1: nobody gives pages of `dst` back.
  int dst_file = -1;
  int64_t dst_file_offset_bytes = 0;
};
// Adds to *result, whose order applies. No two NormOps may add to the same result at a time.
struct NormOp {
  const float* src;
  int64_t numel;
  Norm* result;
};
// Where an update writes what it is about to change, so that another process can complete it
// (common/tensor/update_log.h; ops/rest_of_update.h).
struct Logged {
  // Old values of one piece of an update by a GPU: memory of that GPU, kMaxElementBytes for each element of each array.
  // The log, which lies in pinned memory then, has no room for them.
  struct Place {
    char* old = nullptr;  // null: the log itself
    int64_t numel = 0;    // of a piece, at most
  };
  UpdateLog* log = nullptr;  // null: nowhere
  int64_t first = 0;         // number of the operation's first element
  Place place = {};
};
struct AdamWOp {
  AdamWParams params;
  void* p;
  DType param_dtype;
  const float* g;
  float* m;
  float* v;
  void* cast_dst;  // nullptr: none
  DType cast_dtype;
  int64_t numel;
  Logged logged = {};
};
struct SgdOp {
  SgdParams params;
  void* p;
  DType param_dtype;
  const float* g;
  float* buf;      // nullptr: none
  void* cast_dst;  // nullptr: none
  DType cast_dtype;
  int64_t numel;
  Logged logged = {};
};
// An update by one of the other rules (UpdateRule).
struct RuleOp {
  RuleParams params;
  void* p;
  DType param_dtype;
  const float* g;
  float* a;
  float* b;        // nullptr iff the rule has one state
  void* cast_dst;  // nullptr: none
  DType cast_dtype;
  int64_t numel;
  Logged logged = {};
  float* c = nullptr;  // of a rule with three states, which GPUs do not have
};
// An update of one whole matrix (common/tensor/muon.h), of all ranks' elements. Never cut: its extent is a number of
// items, and slices are items in their order. `logged` has 2 * rows * cols elements of it.
struct MuonOp {
  MuonMatrix matrix;  // workspace nullptr: only CompleteCpuOp, which makes one
  int64_t items;      // MuonItems
  Logged logged = {};
};
// An update of one whole parameter (common/tensor/adafactor.h); as MuonOp. `logged` has its states' elements, and then
// its own.
struct AdafactorOp {
  AdafactorTensor tensor;  // workspace nullptr: only CompleteCpuOp, which makes one
  int64_t items;           // AdafactorItems
  Logged logged = {};
};
// One device's part in fp32 sums over the devices of a communicator. All of them run an operation with the same parts,
// and all their operations of this kind in the same order.
class Communicator;
struct SumPart {
  const float* src;  // this device's addend
  float* dst;        // destination of the sum on the root, may equal its src; ignored on the others
  int64_t numel;
  int root;  // a member; or kAllMembers
};
inline constexpr int kAllMembers = -1;  // every member is a root
struct SumOp {
  Communicator* communicator;
  int member;  // this device's index in the communicator
  std::vector<SumPart> parts;
  // There are as many parts as members, of equal size; part i has root i, and sources are adjacent.
  bool scatter = false;
  int64_t numel = 0;  // of all parts
};
// One device's part in copies between the devices of a communicator. For each move the device of `peer` runs its other
// half, in an operation of its own; all devices run such operations in one common order.
struct MoveOp {
  struct Move {
    int peer = 0;               // a member, another one
    const char* src = nullptr;  // what is sent to it, or
    char* dst = nullptr;        // where what it sends goes; the other one is null
    int64_t size_bytes = 0;     // > 0
  };
  Communicator* communicator;
  int member;  // this device's index in the communicator
  std::vector<Move> moves;
  int64_t size_bytes = 0;  // of all moves
};
using DeviceOp =
    std::variant<CopyOp, ZeroOp, CastOp, ReduceOp, NormOp, AdamWOp, SgdOp, RuleOp, MuonOp, AdafactorOp, SumOp, MoveOp>;

// When a work ran, CLOCK_MONOTONIC in nanoseconds; written before `done`. 0: none of it ran.
struct WorkTiming {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// A batch that runs as one entry of a stream.
struct DeviceWork {
  std::string label;  // "reduce layers.3 step 12": shown in status, errors and traces
  std::vector<DeviceOp> ops;
  // Runs on a thread of the device after all ops, also when the device shuts down (then ops were skipped and the status
  // is CANCELLED). Must be short and must not block; may Submit.
  std::function<void(absl::Status)> done;
  std::shared_ptr<WorkTiming> timing = nullptr;  // null: not measured
  WorkOwner owner = {};                          // whose turn it takes; TracedDevice sets it
};

// For status: never waits for the work.
struct StreamStatus {
  StreamId stream;
  uint64_t submitted = 0;
  uint64_t done = 0;
  std::string current;  // label of the running work; empty when idle
  int64_t busy_us = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICE_OP_H_
