#ifndef SHARDD_SERVER_DEVICE_DEVICE_H_
#define SHARDD_SERVER_DEVICE_DEVICE_H_

// The first of the two seams (the other: collective/collective.h). A device runs typed operations in the order of named
// streams. Operations are data, not closures, so that each implementation can run them its own way (a thread with CPU
// kernels, CUDA streams, virtual time) and one conformance suite (tests/server/device) can check that all give the same
// results.

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/device/device_op.h"

namespace shardd {

// Moves bytes between devices without the host. Thread-safe.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // For status and logs: "nccl 2.28.9 over cuda:0, cuda:1".
  virtual const std::string& name() const = 0;
  // For status, after the name: how it was made.
  virtual const std::string& details() const = 0;
  virtual int members() const = 0;
  // Enqueues a member's part on its device's stream (a CUstream). Call it on a thread of that device, with its context
  // current. An error concerns this member only: the others may wait for it until Break.
  virtual absl::Status Enqueue(const SumOp& op, void* stream) = 0;
  virtual absl::Status Enqueue(const MoveOp& op, void* stream) = 0;
  // Ends whatever is under way on any member soon, with undefined bytes, and refuses everything later. Does not block.
  // The first reason is kept.
  virtual void Break(const absl::Status& why) = 0;
  virtual absl::Status broken() const = 0;  // OK: not broken
};

class DeviceMemory;

// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  // "cpu:0"
  // Memory for slabs of the device's jobs, valid while the device lives; null: operations use host memory.
  virtual DeviceMemory* memory() const { return nullptr; }
  // Never blocks. Work submitted after Shutdown ends with CANCELLED. Users with work take turns of a few
  // milliseconds, and so do the jobs of each user.
  virtual void Submit(StreamId stream, DeviceWork work) = 0;
  virtual std::vector<StreamStatus> Status() const = 0;
  // OK, or the error after which it runs nothing any more.
  virtual absl::Status lost() const { return absl::OkStatus(); }
  // Finishes what runs, cancels the rest, joins. Idempotent.
  virtual void Shutdown() = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICE_H_
