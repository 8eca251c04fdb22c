#ifndef SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_
#define SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_

// Memory of a device that the host does not reach by pointers: a GPU's. Jobs on such devices have their slabs there,
// and what the daemon's own threads read and write of them goes through here.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd {

class DeviceMemory;

// One slab there: one range of addresses, of pieces side by side, each on one device. The memory lives until it and
// every client's mapping are gone. Immutable; the bytes are shared.
class DeviceSlab {
 public:
  struct Piece {
    DeviceMemory* on = nullptr;
    int64_t size_bytes = 0;
    int fd = -1;  // for clients to map; the slab's. Whoever has it chooses whether to write.
  };
  virtual ~DeviceSlab() = default;  // REQUIRES: no operation that was submitted still names it
  // As operations of devices name it; no thread of the host may follow it.
  virtual char* data() const = 0;
  virtual int64_t size_bytes() const = 0;                // what a client maps: at least what was asked for
  virtual const std::vector<Piece>& pieces() const = 0;  // in the order of addresses; at least one
};

// Memory of the host that devices copy from and to by the host's own addresses, as long as this is there; its pages
// stay where they are. REQUIRES at its end: no operation that was submitted still names it.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
};

// Thread-safe. All calls block until the device has done them; what was submitted to streams of the device is not
// waited for, so it must have ended where the same bytes are meant. DATA_LOSS: the device is lost.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual const std::string& device() const = 0;       // "cuda:0"
  virtual const std::string& device_uuid() const = 0;  // 16 bytes: other processes may number devices otherwise
  // "cuda:0": what status calls the backing of its slabs.
  virtual std::string backing() const = 0;

  // Sources of one ReduceOp, at most.
  virtual int max_reduce_sources() const = 0;

  // Zeroed, for this device and `users` (of the same kind; this one may be among them) to read and write. `name` is
  // what errors call it. RESOURCE_EXHAUSTED: it is full, with what is free; FAILED_PRECONDITION: out of reach of one.
  virtual absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSlab(const std::string& name, int64_t size_bytes,
                                                               const std::vector<DeviceMemory*>& users) = 0;
  // Likewise of several parts, in this order, each on a device of this kind: whole pages of it. What is full is named.
  struct Part {
    DeviceMemory* on = nullptr;
    int64_t size_bytes = 0;
  };
  virtual absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSpreadSlab(const std::string& name,
                                                                     const std::vector<Part>& parts,
                                                                     const std::vector<DeviceMemory*>& users) = 0;
  // Of the host: [p, p + size_bytes), which is mapped to read and write, for `users`, this one among them. Takes as
  // long as pinning the pages does. They stay pinned at its end where one of the users hangs. RESOURCE_EXHAUSTED: they
  // cannot be pinned, with what to raise; UNIMPLEMENTED: the device has other addresses for it than the host.
  virtual absl::StatusOr<std::unique_ptr<PinnedMemory>> RegisterHost(const std::string& name, void* p,
                                                                     int64_t size_bytes,
                                                                     const std::vector<DeviceMemory*>& users) = 0;
  struct Room {
    int64_t free_bytes = 0;
    int64_t total_bytes = 0;
    int64_t slab_bytes = 0;  // of all jobs together
  };
  virtual absl::StatusOr<Room> GetRoom() = 0;
  // What sizes of parts on this device are multiples of.
  virtual absl::StatusOr<int64_t> PageBytes() const = 0;
  // `device_*`: within slabs. Some 20 us and the bytes' time; a thread that serves others moves little at once.
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

// Where memory of a rank lies. Null: on the host.
struct SlabPlace {
  DeviceMemory* memory = nullptr;
  // Devices of all the job's ranks, each once: rank r's is users[r mod users.size()]. Slabs of the job are spread over
  // them.
  std::vector<DeviceMemory*> users;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_DEVICE_MEMORY_H_
