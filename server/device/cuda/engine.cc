#include "server/device/cuda/engine.h"

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/cuda/engine_internal.h"
#include "server/device/device_op.h"

namespace shardd {
namespace {

// Few works wait for one another's norms; one step has one norm per rank.
constexpr size_t kNormSlotCount = 1024;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaEngine>> CudaEngine::Create(const CudaDriver& driver, int ordinal,
                                                               absl::Span<const unsigned char> image) {
  auto engine = absl::WrapUnique(new CudaEngine(driver, ordinal));
  SHARDD_RETURN_IF_ERROR(engine->InitDevice());
  const ScopedCudaContext current(driver, engine->context_);
  SHARDD_RETURN_IF_ERROR(engine->CheckCall(current.result(), "cuCtxPushCurrent", ""));
  if (absl::Status status = engine->Init(image); !status.ok()) {
    engine = nullptr;
    return status;
  }
  return engine;
}

CudaEngine::CudaEngine(const CudaDriver& driver, int ordinal)
    : driver_(driver), ordinal_(ordinal), name_(absl::StrCat("cuda:", ordinal)) {}

absl::Status CudaEngine::InitDevice() {
  SHARDD_RETURN_IF_ERROR(CheckCall(driver_->DeviceGet(&device_, ordinal_), "cuDeviceGet", absl::StrCat(ordinal_)));
  char model[128] = {};
  SHARDD_RETURN_IF_ERROR(CheckCall(driver_->DeviceGetName(model, sizeof(model) - 1, device_), "cuDeviceGetName", ""));
  size_t memory_bytes = 0;
  SHARDD_RETURN_IF_ERROR(CheckCall(driver_->DeviceTotalMem(&memory_bytes, device_), "cuDeviceTotalMem", ""));
  int memops = 0;
  SHARDD_RETURN_IF_ERROR(
      CheckCall(driver_->DeviceGetAttribute(&memops, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device_),
                "cuDeviceGetAttribute", "64-bit stream memory operations"));
  SHARDD_RETURN_IF_ERROR(
      CheckCall(driver_->DeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
                "cuDeviceGetAttribute", "multiprocessors"));
  description_ = absl::StrCat(model, ", ", memory_bytes >> 30, " GiB, ", multiprocessors_, " multiprocessors");
  if (memops == 0) {
    return absl::UnimplementedError(
        absl::StrCat("use ", name_, ": the GPU has no 64-bit stream memory operations (got ", description_, ")"));
  }
  SHARDD_RETURN_IF_ERROR(
      CheckCall(driver_->DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain", description_));
  return absl::OkStatus();
}

absl::Status CudaEngine::Init(absl::Span<const unsigned char> image) {
  SHARDD_RETURN_IF_ERROR(InitStreams());
  SHARDD_RETURN_IF_ERROR(InitKernels(image));
  SHARDD_ASSIGN_OR_RETURN(
      scratch_, CudaSlab::Create(&driver_, device_, kCudaScratchBytes * kStreamCount, "scratch of the streams"));
  SHARDD_ASSIGN_OR_RETURN(norm_slots_, CudaNormSlots::Create(&driver_, kNormSlotCount, name_));
  return WarmUp();
}

absl::Status CudaEngine::InitStreams() {
  int least = 0, greatest = 0;  // greatest is the lower number
  SHARDD_RETURN_IF_ERROR(
      CheckCall(driver_->CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange", ""));
  for (int i = 0; i < kStreamCount; ++i) {
    // In the order of StreamId: what a trainer waits for soonest comes first.
    const int priority = std::min(greatest + i, least);
    SHARDD_RETURN_IF_ERROR(CheckCall(driver_->StreamCreateWithPriority(&streams_[i], CU_STREAM_NON_BLOCKING, priority),
                                     "cuStreamCreateWithPriority", StreamName(static_cast<StreamId>(i))));
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::InitKernels(absl::Span<const unsigned char> image) {
  SHARDD_RETURN_IF_ERROR(
      CheckCall(driver_->LibraryLoadData(&library_, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                "cuLibraryLoadData", absl::StrCat("kernels for ", description_)));
  const std::pair<const char*, CUkernel*> all[] = {
      {cuda::kCastKernel, &kernels_.cast},   {cuda::kReduceKernel, &kernels_.reduce},
      {cuda::kNormKernel, &kernels_.norm},   {cuda::kNormFinishKernel, &kernels_.norm_finish},
      {cuda::kAdamWKernel, &kernels_.adamw}, {cuda::kSgdKernel, &kernels_.sgd},
      {cuda::kRuleKernel, &kernels_.rule}};
  for (const auto& [name, kernel] : all) {
    SHARDD_RETURN_IF_ERROR(CheckCall(driver_->LibraryGetKernel(kernel, library_, name), "cuLibraryGetKernel", name));
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::WarmUp() {
  float* const x = static_cast<float*>(scratch_.data());
  const DType f32 = v1::DTYPE_FLOAT32;
  const auto at = [x](int i) { return x + i * 64; };
  const CudaNormSlots::Slot slot = norm_slots_->Take();
  *slot.host = Norm().state();
  AdamWOp adamw = {{}, at(0), f32, at(1), at(2), at(3), nullptr, f32, 1};
  adamw.params.step = 1;
  RuleOp rule = {{}, at(0), f32, at(1), at(2), nullptr, nullptr, f32, 1};
  Norm unused;
  // Uses the last stream, whose scratch does not overlap what they compute on.
  const StreamId stream = StreamId::kOptimizer;
  absl::Status status;
  for (const DeviceOp& op : std::initializer_list<DeviceOp>{
           ZeroOp{x, 4096}, CopyOp{at(0), at(1), 4}, CastOp{at(0), f32, at(1), v1::DTYPE_BFLOAT16, 1},
           ReduceOp{{at(0)}, f32, v1::DTYPE_UNSPECIFIED, 1, false, at(1), 1}, NormOp{at(0), 1, &unused}, adamw,
           SgdOp{{}, at(0), f32, at(1), nullptr, nullptr, f32, 1}, rule}) {
    status = Issue(stream, op, slot);
    if (!status.ok()) break;
  }
  const absl::Status drained = SynchroniseStream(stream);
  norm_slots_->GiveBack(slot);
  return status.ok() ? drained : status;
}

CudaEngine::~CudaEngine() {
  if (context_ == nullptr) return;
  {
    const ScopedCudaContext current(driver_, context_);
    for (CUstream stream : streams_) {
      if (stream != nullptr) (void)driver_->StreamDestroy(stream);
    }
    norm_slots_ = nullptr;
    scratch_ = CudaSlab();
    if (library_ != nullptr) (void)driver_->LibraryUnload(library_);
  }
  (void)driver_->DevicePrimaryCtxRelease(device_);
}

absl::Status CudaEngine::EnterThread() { return CheckCall(driver_->CtxSetCurrent(context_), "cuCtxSetCurrent", ""); }

absl::Status CudaEngine::IssueHostFunction(StreamId stream, CUhostFn function, void* user_data) {
  return CheckCall(driver_->LaunchHostFunc(streams_[static_cast<int>(stream)], function, user_data), "cuLaunchHostFunc",
                   StreamName(stream));
}

absl::Status CudaEngine::QueryStream(StreamId stream) {
  const CUresult result = driver_->StreamQuery(streams_[static_cast<int>(stream)]);
  if (result == CUDA_ERROR_NOT_READY) return absl::OkStatus();
  return CheckCall(result, "cuStreamQuery", StreamName(stream));
}

absl::Status CudaEngine::SynchroniseStream(StreamId stream) {
  return CheckCall(driver_->StreamSynchronize(streams_[static_cast<int>(stream)]), "cuStreamSynchronize",
                   StreamName(stream));
}

}  // namespace shardd
