#include "client/c/gpu/trainer_sums.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/c/gpu/stream_context.h"
#include "client/c/host/quiet_thread.h"
#include "common/cuda/kernel_image.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(50);  // between looks whether it is to stop
constexpr absl::Duration kPoll = absl::Microseconds(50);   // of the host for the GPU

CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

bool CanAddGradients() {
  if (cuda::kKernelImageSizeBytes > 0) {
    return true;
  }
  const absl::StatusOr<CudaDriver> driver = CudaDriver::Load();
  return driver.ok() && !driver->kernels().empty();
}

absl::StatusOr<CUkernel> LoadReduceKernel(const CudaDriver& driver) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto& loaded = *new std::map<const CudaDriver*, CUkernel>;
  absl::MutexLock lock(&mutex);
  if (const auto found = loaded.find(&driver); found != loaded.end()) {
    return found->second;
  }
  const auto built_in =
      absl::MakeConstSpan(static_cast<const unsigned char*>(cuda::kKernelImage), cuda::kKernelImageSizeBytes);
  const absl::Span<const unsigned char> image = built_in.empty() ? driver.kernels() : built_in;
  if (image.empty()) {
    return absl::UnimplementedError(
        "trainer_sums: this libshardd has no kernels, it was built where there was no nvcc; use a build of the preset "
        "cuda, or leave JobConfig.trainer_sums false");
  }
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                   "cuLibraryLoadData", "kernels"));
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->LibraryGetKernel(&kernel, library, cuda::kReduceKernel),
                                      "cuLibraryGetKernel", cuda::kReduceKernel));
  loaded[&driver] = kernel;
  return kernel;
}

absl::StatusOr<std::unique_ptr<TrainerSums>> TrainerSums::Start(Options options) {
  auto sums = absl::WrapUnique(new TrainerSums(std::move(options)));
  SHARDD_RETURN_IF_ERROR(sums->Init());
  sums->runs_ = StartQuietThread(&sums->thread_, &TrainerSums::Main, sums.get()) == 0;
  if (!sums->runs_) {
    return absl::ResourceExhaustedError("attach: no thread for the sums of trainer_sums");
  }
  return sums;
}

absl::Status TrainerSums::Init() {
  SHARDD_RETURN_IF_ERROR(RetainRanksContext(driver_, options_.ordinal, &device_, &context_));
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->DeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
            "cuDeviceGetAttribute", "multiprocessors"));
  SHARDD_ASSIGN_OR_RETURN(stream_, CreateFirstStream(driver_, "sums"));
  SHARDD_RETURN_IF_ERROR(Check(driver_->EventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate", "sums"));
  SHARDD_ASSIGN_OR_RETURN(const bool has_memops, HasStreamMemoryOperations(driver_, device_));
  if (has_memops) {
    registered_ = driver_->MemHostRegister(options_.words, sizeof(SumWords),
                                           CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == CUDA_SUCCESS;
    by_stream_ = registered_ && driver_->MemHostGetDevicePointer(&summed_, &options_.words->summed, 0) == CUDA_SUCCESS;
  }
  peers_.resize(static_cast<size_t>(options_.memory.world_size));
  return WarmUp();
}

// So that nothing is loaded later, which may wait for the whole context: of the end of the rank's own slots, which
// nobody has written yet.
absl::Status TrainerSums::WarmUp() {
  constexpr int64_t kBytes = 256;
  char* const at = options_.memory.slots + options_.memory.slab_bytes - 2 * kBytes;
  cuda::ReduceArgs args = {};
  args.sources[0] = at;
  args.source_count = 1;
  args.source_dtype = cuda::kFloat32;
  args.scale = 1;
  args.dst = reinterpret_cast<float*>(at + kBytes);
  args.numel = 1;
  SHARDD_RETURN_IF_ERROR(Launch(args));
  return Check(driver_->StreamSynchronize(stream_), "cuStreamSynchronize", "sums");
}

TrainerSums::~TrainerSums() {
  if (runs_) {
    pthread_join(thread_, nullptr);
  }
  if (context_ == nullptr) {
    return;
  }
  {
    const ScopedCudaContext current(driver_, context_);
    if (stream_ != nullptr) (void)driver_->StreamDestroy(stream_);
    if (event_ != nullptr) (void)driver_->EventDestroy(event_);
    if (registered_) (void)driver_->MemHostUnregister(options_.words);
  }
  (void)driver_->DevicePrimaryCtxRelease(device_);
}

bool TrainerSums::Stop(absl::Duration limit) {
  stop_.store(true, std::memory_order_release);
  absl::MutexLock lock(&mutex_);
  const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_; };
  return changed_.Await(&mutex_, ended, Deadline::In(limit));
}

void* TrainerSums::Main(void* self) {
  pthread_setname_np(pthread_self(), "shardd-sums");
  static_cast<TrainerSums*>(self)->Run();
  return nullptr;
}

void TrainerSums::Run() {
  const ScopedCudaContext current(driver_, context_);
  absl::Status status = Check(current.result(), "cuCtxPushCurrent", "");
  while (status.ok() && !stop_.load(std::memory_order_acquire)) {
    const absl::StatusOr<bool> goes_on = TakeSome();
    status = goes_on.status();
    if (status.ok() && !*goes_on) {
      break;
    }
  }
  Drain();
  if (!status.ok()) {
    const std::string text(status.message());
    const size_t size = std::min(text.size(), sizeof(options_.words->error) - 1);
    std::memcpy(options_.words->error, text.data(), size);
    options_.words->error[size] = '\0';
  }
  options_.words->ended.store(status.ok() ? 1 : 2, std::memory_order_seq_cst);
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  changed_.NotifyAll();
}

// For as long as it takes: a GPU that hangs keeps this thread, and Stop says so.
void TrainerSums::Drain() {
  if (driver_->EventRecord(event_, stream_) != CUDA_SUCCESS) {
    return;  // a context that is lost runs nothing any more
  }
  while (driver_->EventQuery(event_) == CUDA_ERROR_NOT_READY) {
    absl::SleepFor(kPoll);
  }
}

absl::StatusOr<bool> TrainerSums::TakeSome() {
  const SumRing& ring = *options_.ring;
  (void)TimelineWait(ring.written, TimelineValue(options_.epoch, taken_ + 1), options_.words->waiting, kSlice);
  const uint64_t word = ring.written.load(std::memory_order_acquire);
  if (TimelineEpoch(word) != options_.epoch) {
    return false;
  }
  const uint64_t written = TimelineSequence(word);
  if (written < taken_ || written - taken_ > kSumRecords) {
    return absl::InternalError(absl::StrCat("sums: the daemon's count is out of range (got ", written, ", want ",
                                            taken_, " to ", taken_ + kSumRecords, "; rank=", options_.memory.rank,
                                            ")"));
  }
  if (written == taken_) {
    return true;
  }
  for (; taken_ < written; ++taken_) {
    SumRecord record;  // copied once
    std::memcpy(static_cast<void*>(&record), &ring.records[taken_ % kSumRecords], sizeof(record));
    if (record.sequence != taken_) {
      return absl::InternalError(absl::StrCat("sums: record has the wrong sequence (got ", record.sequence, ", want ",
                                              taken_, "; rank=", options_.memory.rank, ")"));
    }
    SHARDD_RETURN_IF_ERROR(CheckSumRecord(record, options_.memory));
    // Of an epoch that has ended nothing more is enqueued: what is gone with it, peers' slots, may be others' soon.
    if (TimelineEpoch(ring.written.load(std::memory_order_acquire)) != options_.epoch) {
      return false;
    }
    SHARDD_RETURN_IF_ERROR(Enqueue(record));
  }
  SHARDD_RETURN_IF_ERROR(Signal());
  return true;
}

absl::Status TrainerSums::Enqueue(const SumRecord& record) {
  char* const dst = options_.memory.gradients + record.dst_offset_bytes;
  if (record.kind == SumKind::kZero) {
    return Check(driver_->MemsetD8Async(Address(dst), 0, static_cast<size_t>(record.numel), stream_), "cuMemsetD8Async",
                 "gradient shards");
  }
  if (record.kind == SumKind::kCopy) {
    return Check(driver_->MemcpyAsync(Address(dst), Address(options_.memory.gradients + record.source_offset_bytes),
                                      static_cast<size_t>(record.numel), stream_),
                 "cuMemcpyAsync", "gradient shards");
  }
  cuda::ReduceArgs args = {};
  for (int rank = 0; rank < options_.memory.world_size; ++rank) {
    if (((record.ranks[rank / 64] >> (rank % 64)) & 1) == 0) {
      continue;
    }
    SHARDD_ASSIGN_OR_RETURN(const char* slots, SlotsOf(rank));
    args.sources[args.source_count++] = slots + record.source_offset_bytes;
  }
  args.source_dtype = record.source_dtype;
  args.reduce_dtype = record.reduce_dtype;
  args.keep = record.keep;
  args.scale = record.scale;
  args.accumulate = static_cast<int32_t>(record.accumulate);
  args.dst = reinterpret_cast<float*>(dst);
  args.numel = record.numel;
  return Launch(args);
}

absl::Status TrainerSums::Launch(cuda::ReduceArgs args) {
  const cuda::Geometry at = cuda::GeometryOf(args, multiprocessors_);
  void* params[] = {&args};
  return Check(driver_->LaunchKernel(cu::FunctionOf(options_.kernel), at.grid, 1, 1, at.block, 1, 1, 0, stream_, params,
                                     nullptr),
               "cuLaunchKernel", absl::StrCat(cuda::kReduceKernel, " on sums"));
}

absl::StatusOr<const char*> TrainerSums::SlotsOf(int rank) {
  if (rank == options_.memory.rank) {
    return options_.memory.slots;
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const uint64_t session_id = options_.ring->sessions[rank].load(std::memory_order_relaxed);
  if (peer.session_id != session_id || session_id == 0) {
    SHARDD_ASSIGN_OR_RETURN(const UniqueFd fd,
                            options_.fetch(rank, [this] { return stop_.load(std::memory_order_acquire); }));
    SHARDD_ASSIGN_OR_RETURN(CudaSlab slots, CudaSlab::Import(options_.driver, options_.ordinal, fd.get(),
                                                             options_.memory.slab_bytes, CudaSlab::Access::kReadOnly,
                                                             absl::StrCat("the gradient slots of rank ", rank)));
    former_.push_back(std::exchange(peer.slots, std::move(slots)));  // a kernel may still read it
    peer.session_id = session_id;
  }
  return static_cast<const char*>(peer.slots.data());
}

absl::Status TrainerSums::Signal() {
  const uint64_t value = TimelineValue(options_.epoch, taken_);
  if (by_stream_) {
    return Check(driver_->StreamWriteValue64(stream_, summed_, value, CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64", "summed");
  }
  SHARDD_RETURN_IF_ERROR(Check(driver_->EventRecord(event_, stream_), "cuEventRecord", "sums"));
  CUresult result = CUDA_ERROR_NOT_READY;
  while ((result = driver_->EventQuery(event_)) == CUDA_ERROR_NOT_READY && !stop_.load(std::memory_order_acquire)) {
    absl::SleepFor(kPoll);
  }
  if (result == CUDA_ERROR_NOT_READY) {
    return absl::OkStatus();  // Drain
  }
  SHARDD_RETURN_IF_ERROR(Check(result, "cuEventQuery", "sums"));
  options_.words->summed.store(value, std::memory_order_release);
  return absl::OkStatus();
}

}  // namespace shardd
