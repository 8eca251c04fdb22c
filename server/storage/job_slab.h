#ifndef SHARDD_SERVER_STORAGE_JOB_SLAB_H_
#define SHARDD_SERVER_STORAGE_JOB_SLAB_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/slab.h"

namespace shardd {

class DeviceMemory;
class DeviceSlab;
class PinnedMemory;

// One slab of a job, on the host or on a device. Operations of devices name it by its addresses either way; threads of
// the daemon read and write it by the calls below alone. Immutable; the bytes are shared.
class JobSlab {
 public:
  explicit JobSlab(std::unique_ptr<Slab> host);
  // Of the host, for operations of GPUs too: copies and zeros alone, at the same addresses. All of it stays in memory.
  JobSlab(std::unique_ptr<Slab> host, std::unique_ptr<PinnedMemory> pinned);
  explicit JobSlab(std::unique_ptr<DeviceSlab> device);
  ~JobSlab();

  bool on_host() const { return host_ != nullptr; }
  // For operations of the job's devices.
  char* At(int64_t offset_bytes) const { return base() + offset_bytes; }
  int64_t size_bytes() const;
  // Of these, in memory: on the host clients may give pages of what they write back.
  int64_t allocated_bytes() const;
  bool huge_pages() const { return on_host() && host_->huge_pages(); }
  std::string backing() const;
  // REQUIRES: on_host().
  const std::string& name() const { return host_->name(); }
  // Where it lies on devices; null: on the host.
  const DeviceSlab* on_devices() const { return device_.get(); }

  // What clients map; on devices, of the first piece. A read-only descriptor is one where the slab is the host's: who
  // has a GPU's memory chooses.
  int fd() const;
  absl::StatusOr<UniqueFd> ReadOnlyFd() const;

  // By the calling thread, and there when the call returns. No work that is submitted may mean the same bytes. Fails
  // where a device does (DATA_LOSS), never on the host.
  absl::Status Write(int64_t offset_bytes, const void* from, int64_t size_bytes) const;
  absl::Status Read(int64_t offset_bytes, void* to, int64_t size_bytes) const;
  absl::Status Zero(int64_t offset_bytes, int64_t size_bytes) const;
  // On the host: gives the pages back, whoever still maps them; they then read zeros. Nothing on devices.
  void Discard() const {
    if (on_host()) host_->Discard();
  }

 private:
  absl::Status ByPiece(int64_t offset_bytes, int64_t size_bytes,
                       absl::FunctionRef<absl::Status(DeviceMemory*, int64_t, int64_t)> copy) const;
  char* base() const;

  const std::unique_ptr<Slab> host_;
  const std::unique_ptr<PinnedMemory> pinned_;  // goes before what it names
  const std::unique_ptr<DeviceSlab> device_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_JOB_SLAB_H_
