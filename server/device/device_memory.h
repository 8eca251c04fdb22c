#ifndef SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_
#define SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_

// Memory of a device that the host cannot follow pointers into: a GPU's. Jobs on such devices have their slabs there,
// and the daemon's own threads read and write them through this interface.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"
#include "server/device/slab_place.h"

namespace shardd {

class DeviceMemory;

// One slab in device memory: a range of addresses made of adjacent pieces, each on one device. The memory lives until
// the slab and every client's mapping are gone. Immutable; the bytes are shared.
class DeviceSlab {
 public:
  struct Piece {
    DeviceMemory* on = nullptr;  // null: a hole, addresses without memory that nobody may follow; never the first
    int64_t size_bytes = 0;
    int fd = -1;  // for clients to map; owned by the slab. Its holder chooses whether to write. A hole has none
  };
  virtual ~DeviceSlab() = default;  // REQUIRES: no submitted operation uses it any more
  // For operations of devices; no thread of the host may follow it.
  virtual char* data() const = 0;
  virtual int64_t size_bytes() const = 0;                // what a client maps: at least the requested size
  virtual const std::vector<Piece>& pieces() const = 0;  // in address order; at least one
  int64_t allocated_bytes() const {                      // without holes
    int64_t bytes = 0;
    for (const Piece& piece : pieces()) bytes += piece.on == nullptr ? 0 : piece.size_bytes;
    return bytes;
  }
};

// Host memory that devices copy from and to by the host's own addresses while this object lives; its pages cannot move.
// REQUIRES at destruction: no submitted operation uses it any more.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
};

// Thread-safe. All calls block until the device has done them, but do not wait for work in the device's streams: work
// on the same bytes must have ended. DATA_LOSS: the device is lost.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual const std::string& device() const = 0;       // "cuda:0"
  virtual const std::string& device_uuid() const = 0;  // 16 bytes: other processes may number devices differently
  // "cuda:0": for status, the backing of its slabs.
  virtual std::string backing() const = 0;

  // Most sources of one ReduceOp.
  virtual int max_reduce_sources() const = 0;

  // Allocates zeroed memory that this device and `users` (of the same kind; may include this one) can read and write.
  // Errors call it `name`. RESOURCE_EXHAUSTED: the device is full (text: what is free). FAILED_PRECONDITION: a user
  // cannot access it.
  virtual absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSlab(const std::string& name, int64_t size_bytes,
                                                               const std::vector<DeviceMemory*>& users) = 0;
  // The same for several parts, in this order, each on a device of this kind and of whole pages. Errors name the full
  // device.
  struct Part {
    DeviceMemory* on = nullptr;  // null: a hole; never the first
    int64_t size_bytes = 0;
  };
  virtual absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSpreadSlab(const std::string& name,
                                                                     const std::vector<Part>& parts,
                                                                     const std::vector<DeviceMemory*>& users) = 0;
  // Maps memory that MakeSpreadSlab of another process has made of these parts and that has outlived it: the bytes are
  // what they were. `fds`: of each part but holes, in this order; the slab keeps them. INVALID_ARGUMENT: other numbers.
  virtual absl::StatusOr<std::unique_ptr<DeviceSlab>> TakeUpSlab(const std::string& name,
                                                                 const std::vector<Part>& parts,
                                                                 std::vector<UniqueFd> fds,
                                                                 const std::vector<DeviceMemory*>& users) = 0;
  // Pins host memory [p, p + size_bytes), mapped for reading and writing, for `users`, this device included. Takes as
  // long as pinning the pages. If a user hangs, they stay pinned after the object ends. RESOURCE_EXHAUSTED: they cannot
  // be pinned (text: what to raise). UNIMPLEMENTED: the device has other addresses for it than the host.
  virtual absl::StatusOr<std::unique_ptr<PinnedMemory>> RegisterHost(const std::string& name, void* p,
                                                                     int64_t size_bytes,
                                                                     const std::vector<DeviceMemory*>& users) = 0;
  struct Room {
    int64_t free_bytes = 0;
    int64_t total_bytes = 0;
    int64_t slab_bytes = 0;  // of all jobs
  };
  virtual absl::StatusOr<Room> GetRoom() = 0;
  // Sizes of parts on this device are multiples of this.
  virtual absl::StatusOr<int64_t> PageBytes() const = 0;
  // `device_*`: within slabs. Takes some 20 us plus the bytes' time; a thread that serves others should move little at
  // once.
  virtual absl::Status Write(char* device_to, const void* from, int64_t size_bytes) = 0;
  virtual absl::Status Read(void* to, const char* device_from, int64_t size_bytes) = 0;
  virtual absl::Status Zero(char* device_to, int64_t size_bytes) = 0;
  struct Copied {
    const char* from;
    char* to;
    int64_t size_bytes;
  };
  virtual absl::Status Copy(const std::vector<Copied>& copies) = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_
