#include "server/device/cuda/cuda_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int64_t kStagingBytes = int64_t{1} << 20;
constexpr absl::Duration kSpin = absl::Microseconds(100);  // a piece of staging takes less

CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Create(const CudaDriver& driver, CUdevice device,
                                                               absl::Duration limit) {
  CUuuid uuid = {};
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->DeviceGetUuid(&uuid, device), "cuDeviceGetUuid", "", absl::StrCat("cuda:", device)));
  return absl::WrapUnique(new CudaMemory(
      driver, device, std::string(reinterpret_cast<const char*>(uuid.bytes), sizeof(uuid.bytes)), limit));
}

CudaMemory::CudaMemory(const CudaDriver& driver, CUdevice device, std::string uuid, absl::Duration limit)
    : driver_(driver), device_(device), name_(absl::StrCat("cuda:", device)), uuid_(std::move(uuid)), limit_(limit) {}

CudaMemory::~CudaMemory() {
  absl::MutexLock lock(&mutex_);
  if (context_ == nullptr || !lost_.ok()) return;  // releasing the staging would wait for the hung GPU
  {
    const ScopedCudaContext current(driver_, context_);
    if (stream_ != nullptr) (void)driver_->StreamDestroy(stream_);
    if (registered_) (void)driver_->MemHostUnregister(staging_);
  }
  if (staging_ != nullptr) munmap(staging_, kStagingBytes);
  (void)driver_->DevicePrimaryCtxRelease(device_);
}

absl::Status CudaMemory::Prepare() {
  int least = 0, greatest = 0;  // greatest is the lower number
  if (stream_ == nullptr) {
    SHARDD_RETURN_IF_ERROR(Check(driver_->CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange"));
    SHARDD_RETURN_IF_ERROR(Check(driver_->StreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, greatest),
                                 "cuStreamCreateWithPriority", "of the host's copies"));
  }
  if (staging_ == nullptr) {
    void* const mapped = mmap(nullptr, kStagingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("map staging of ", name_, ": ", strerror(errno), " (got ", kStagingBytes, " bytes)"));
    }
    staging_ = static_cast<char*>(mapped);
  }
  if (!registered_) {
    SHARDD_RETURN_IF_ERROR(Check(
        driver_->MemHostRegister(staging_, kStagingBytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister", "staging"));
    registered_ = true;
  }
  if (staging_address_ == 0) {
    SHARDD_RETURN_IF_ERROR(
        Check(driver_->MemHostGetDevicePointer(&staging_address_, staging_, 0), "cuMemHostGetDevicePointer"));
  }
  return absl::OkStatus();
}

absl::Status CudaMemory::Run(const std::function<absl::Status()>& body) {
  absl::MutexLock lock(&mutex_);
  SHARDD_RETURN_IF_ERROR(lost_);
  if (context_ == nullptr) {
    SHARDD_RETURN_IF_ERROR(Check(driver_->DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain"));
  }
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent"));
  SHARDD_RETURN_IF_ERROR(Prepare());
  return body();
}

absl::Status CudaMemory::CopyAndWait(CUdeviceptr to, CUdeviceptr from, int64_t size_bytes) {
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemcpyAsync(to, from, static_cast<size_t>(size_bytes), stream_),
                               "cuMemcpyAsync", absl::StrCat(size_bytes, " bytes")));
  return WaitForStream();
}

// Polls: a blocking wait would never return if the GPU hangs.
absl::Status CudaMemory::WaitForStream() {
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    // Before polling, so that a thread that was stopped meanwhile polls once more.
    const absl::Duration waited = absl::FromChrono(std::chrono::steady_clock::now() - begin);
    const CUresult result = driver_->StreamQuery(stream_);
    if (result != CUDA_ERROR_NOT_READY) return Check(result, "cuStreamQuery", "of the host's copies");
    if (waited > limit_) {
      lost_ = absl::DataLossError(absl::StrCat("copy between host and ", name_, ": the GPU hangs (not done after ",
                                               absl::FormatDuration(limit_),
                                               "); its memory is given up: restart the daemon"));
      hangs_.store(true, std::memory_order_release);
      return lost_;
    }
    if (waited > kSpin) absl::SleepFor(kSpin);
  }
}

class CudaMemory::Exported final : public DeviceSlab {
 public:
  Exported(CudaSlab slab, std::vector<UniqueFd> fds, std::vector<Piece> pieces)
      : slab_(std::move(slab)), fds_(std::move(fds)), pieces_(std::move(pieces)) {
    Count(+1);
  }
  ~Exported() override {
    for (const Piece& piece : pieces_) {
      if (piece.on == nullptr || !static_cast<const CudaMemory*>(piece.on)->hangs()) continue;
      LogWarning(absl::StrCat("memory of ", piece.on->device(), " is not given back: the GPU hangs (", size_bytes(),
                              " bytes)"));
      slab_.Abandon();
      return;
    }
    Count(-1);
  }
  char* data() const override { return static_cast<char*>(slab_.data()); }
  int64_t size_bytes() const override { return slab_.size_bytes(); }
  const std::vector<Piece>& pieces() const override { return pieces_; }

 private:
  void Count(int64_t sign) const {
    for (const Piece& piece : pieces_) {
      if (piece.on != nullptr) static_cast<CudaMemory*>(piece.on)->slab_bytes_ += sign * piece.size_bytes;
    }
  }

  CudaSlab slab_;
  const std::vector<UniqueFd> fds_;
  const std::vector<Piece> pieces_;
};

absl::StatusOr<DeviceMemory::Room> CudaMemory::GetRoom() {
  SHARDD_ASSIGN_OR_RETURN(const CUcontext context, Context());
  const ScopedCudaContext current(driver_, context);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent"));
  size_t free_bytes = 0, total_bytes = 0;
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo"));
  return Room{static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes), slab_bytes_};
}

std::string CudaMemory::RoomText(const std::vector<Part>& parts) {
  std::map<std::string, std::pair<DeviceMemory*, int64_t>> wanted;
  for (const Part& part : parts) {
    if (part.on == nullptr) continue;
    auto& [on, want_bytes] = wanted[part.on->device()];
    on = part.on;
    want_bytes += part.size_bytes;
  }
  std::string text;
  for (const auto& [device, of] : wanted) {
    const absl::StatusOr<Room> room = of.first->GetRoom();
    if (!room.ok()) continue;
    absl::StrAppend(&text, "; on ", device, " (got ", room->free_bytes, " bytes free of ", room->total_bytes, ", want ",
                    of.second, "; all slabs of the daemon there: ", room->slab_bytes, ")");
  }
  return text;
}

absl::StatusOr<std::unique_ptr<DeviceSlab>> CudaMemory::MakeSlab(const std::string& name, int64_t size_bytes,
                                                                 const std::vector<DeviceMemory*>& users) {
  if (size_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("create ", name, ": size is not positive (got ", size_bytes, " bytes)"));
  }
  SHARDD_ASSIGN_OR_RETURN(const int64_t page_bytes, PageBytes());
  return MakeSpreadSlab(name, {{this, (size_bytes + page_bytes - 1) / page_bytes * page_bytes}}, users);
}

absl::StatusOr<std::vector<CUdevice>> CudaMemory::OrdinalsOf(const std::vector<Part>& parts,
                                                             const std::vector<DeviceMemory*>& users) {
  std::vector<CUdevice> ordinals;
  const auto add = [&ordinals](const DeviceMemory* memory) {
    const CUdevice ordinal = static_cast<const CudaMemory*>(memory)->device_;
    if (std::find(ordinals.begin(), ordinals.end(), ordinal) == ordinals.end()) ordinals.push_back(ordinal);
  };
  for (const Part& part : parts) {
    if (part.on == nullptr) continue;
    SHARDD_RETURN_IF_ERROR(static_cast<CudaMemory*>(part.on)->Usable());
    add(part.on);
  }
  for (const DeviceMemory* user : users) add(user);
  return ordinals;
}

absl::StatusOr<std::unique_ptr<DeviceSlab>> CudaMemory::TakeUpSlab(const std::string& name,
                                                                   const std::vector<Part>& parts,
                                                                   std::vector<UniqueFd> fds,
                                                                   const std::vector<DeviceMemory*>& users) {
  const auto holes = std::count_if(parts.begin(), parts.end(), [](const Part& part) { return part.on == nullptr; });
  if (parts.empty() || parts.front().on == nullptr || fds.size() + static_cast<size_t>(holes) != parts.size()) {
    return absl::InvalidArgumentError(absl::StrCat("take up ", name, ": want a descriptor for each part (got ",
                                                   fds.size(), " for ", parts.size(), " parts, ", holes,
                                                   " of them without memory)"));
  }
  SHARDD_ASSIGN_OR_RETURN(const std::vector<CUdevice> ordinals, OrdinalsOf(parts, users));
  std::vector<int64_t> piece_bytes;
  std::vector<DeviceSlab::Piece> pieces;
  size_t next_fd = 0;
  for (const Part& part : parts) {
    piece_bytes.push_back(part.on == nullptr ? -part.size_bytes : part.size_bytes);
    pieces.push_back({part.on, part.size_bytes, part.on == nullptr ? -1 : fds[next_fd++].get()});
  }
  const auto next = [&fds, i = size_t{0}]() mutable -> absl::StatusOr<UniqueFd> {
    UniqueFd copy(fcntl(fds[i++].get(), F_DUPFD_CLOEXEC, 0));
    if (copy.valid()) return copy;
    return absl::ResourceExhaustedError(absl::StrCat("duplicate the descriptor of a piece: ", strerror(errno)));
  };
  SHARDD_ASSIGN_OR_RETURN(CudaSlab slab, CudaSlab::ImportSpread(&driver_, ordinals.front(), piece_bytes, next,
                                                                CudaSlab::Access::kReadWrite, name, ordinals));
  return std::make_unique<Exported>(std::move(slab), std::move(fds), std::move(pieces));
}

absl::StatusOr<std::unique_ptr<DeviceSlab>> CudaMemory::MakeSpreadSlab(const std::string& name,
                                                                       const std::vector<Part>& parts,
                                                                       const std::vector<DeviceMemory*>& users) {
  SHARDD_ASSIGN_OR_RETURN(const std::vector<CUdevice> ordinals, OrdinalsOf(parts, users));
  std::vector<CudaSlab::Piece> created;
  for (const Part& part : parts) {
    created.push_back(
        {part.on == nullptr ? CudaSlab::kHole : static_cast<const CudaMemory*>(part.on)->device_, part.size_bytes});
  }
  absl::StatusOr<CudaSlab> made = CudaSlab::CreateSpread(&driver_, created, name, ordinals);
  if (absl::IsResourceExhausted(made.status())) {
    return absl::ResourceExhaustedError(absl::StrCat(made.status().message(), RoomText(parts)));
  }
  SHARDD_RETURN_IF_ERROR(made.status());
  CudaSlab slab = *std::move(made);
  std::vector<UniqueFd> fds;
  std::vector<DeviceSlab::Piece> pieces;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].on == nullptr) {
      pieces.push_back({nullptr, parts[i].size_bytes, -1});
      continue;
    }
    SHARDD_ASSIGN_OR_RETURN(UniqueFd fd, slab.ExportFd(i));
    pieces.push_back({parts[i].on, parts[i].size_bytes, fd.get()});
    fds.push_back(std::move(fd));
  }
  auto exported = std::make_unique<Exported>(std::move(slab), std::move(fds), std::move(pieces));
  // New memory is undefined, but a plan expects zeros, and nobody may read what others left. Each GPU clears its own
  // part.
  char* at = exported->data();
  for (const Part& part : parts) {
    if (part.on != nullptr) SHARDD_RETURN_IF_ERROR(part.on->Zero(at, part.size_bytes));
    at += part.size_bytes;
  }
  return exported;
}

absl::Status CudaMemory::Usable() {
  absl::MutexLock lock(&mutex_);
  return lost_;
}

absl::StatusOr<CUcontext> CudaMemory::Context() {
  absl::MutexLock lock(&mutex_);
  SHARDD_RETURN_IF_ERROR(lost_);
  if (context_ == nullptr) {
    SHARDD_RETURN_IF_ERROR(Check(driver_->DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain"));
  }
  return context_;
}

class CudaMemory::Registered final : public PinnedMemory {
 public:
  Registered(const CudaMemory* on, std::vector<DeviceMemory*> users, CUcontext context, void* p)
      : on_(on), users_(std::move(users)), context_(context), p_(p) {}
  ~Registered() override {
    for (const DeviceMemory* user : users_) {
      // The call might wait for it; the pages stay pinned after anybody unmaps them.
      if (static_cast<const CudaMemory*>(user)->hangs()) return;
    }
    const ScopedCudaContext current(on_->driver_, context_);
    (void)on_->driver_->MemHostUnregister(p_);
  }

 private:
  const CudaMemory* const on_;
  const std::vector<DeviceMemory*> users_;
  const CUcontext context_;
  void* const p_;
};

// Without the mutex: pinning takes seconds, and must not delay copies of others.
absl::StatusOr<std::unique_ptr<PinnedMemory>> CudaMemory::RegisterHost(const std::string& name, void* p,
                                                                       int64_t size_bytes,
                                                                       const std::vector<DeviceMemory*>& users) {
  SHARDD_ASSIGN_OR_RETURN(const CUcontext context, Context());
  const ScopedCudaContext current(driver_, context);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent"));
  const std::string object = absl::StrCat(name, ", ", size_bytes, " bytes");
  const absl::Status pinned =
      Check(driver_->MemHostRegister(p, static_cast<size_t>(size_bytes),
                                     CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
            "cuMemHostRegister", object);
  if (absl::IsResourceExhausted(pinned)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        pinned.message(), "; the daemon may not pin so much memory: raise its limit of locked memory (RLIMIT_MEMLOCK: ",
        "ulimit -l, LimitMEMLOCK= of systemd, --ulimit memlock=-1 of a container), give it more memory, or leave ",
        "JobConfig.offload at OFFLOAD_NONE"));
  }
  SHARDD_RETURN_IF_ERROR(pinned);
  auto registered = std::make_unique<Registered>(this, users, context, p);
  CUdeviceptr address = 0;
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemHostGetDevicePointer(&address, p, 0), "cuMemHostGetDevicePointer", object));
  if (address != Address(p)) {
    return absl::UnimplementedError(absl::StrCat(
        "register ", object, ": ", name_, " reaches memory of the host by other addresses than the host ", "(got ",
        absl::Hex(address), ", want ", absl::Hex(Address(p)), "); JobConfig.offload OFFLOAD_HOST is not served there"));
  }
  return registered;
}

absl::Status CudaMemory::Write(char* device_to, const void* from, int64_t size_bytes) {
  return Run([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    for (int64_t done = 0; done < size_bytes; done += kStagingBytes) {
      const int64_t count = std::min(kStagingBytes, size_bytes - done);
      memcpy(staging_, static_cast<const char*>(from) + done, static_cast<size_t>(count));
      SHARDD_RETURN_IF_ERROR(CopyAndWait(Address(device_to + done), staging_address_, count));
    }
    return absl::OkStatus();
  });
}

absl::Status CudaMemory::Read(void* to, const char* device_from, int64_t size_bytes) {
  return Run([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    for (int64_t done = 0; done < size_bytes; done += kStagingBytes) {
      const int64_t count = std::min(kStagingBytes, size_bytes - done);
      SHARDD_RETURN_IF_ERROR(CopyAndWait(staging_address_, Address(device_from + done), count));
      memcpy(static_cast<char*>(to) + done, staging_, static_cast<size_t>(count));
    }
    return absl::OkStatus();
  });
}

absl::Status CudaMemory::Zero(char* device_to, int64_t size_bytes) {
  return Run([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    SHARDD_RETURN_IF_ERROR(
        Check(driver_->MemsetD8Async(Address(device_to), 0, static_cast<size_t>(size_bytes), stream_),
              "cuMemsetD8Async", absl::StrCat(size_bytes, " bytes")));
    return WaitForStream();
  });
}

absl::Status CudaMemory::Copy(const std::vector<Copied>& copies) {
  return Run([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    for (const Copied& copy : copies) {
      if (copy.size_bytes == 0) continue;
      SHARDD_RETURN_IF_ERROR(Check(
          driver_->MemcpyAsync(Address(copy.to), Address(copy.from), static_cast<size_t>(copy.size_bytes), stream_),
          "cuMemcpyAsync", absl::StrCat(copy.size_bytes, " bytes")));
    }
    return WaitForStream();
  });
}

}  // namespace shardd
