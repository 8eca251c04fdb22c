#include "tests/gpu/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/cuda/kernel_image.h"

// load.cu, compiled (deploy/cmake/tests.cmake gives the path).
asm(R"(
  .section .rodata
  .balign 16
shardd_test_load_image:
  .incbin ")" SHARDD_TEST_LOAD_FATBIN R"("
  .previous
)");
extern "C" {
extern const char shardd_test_load_image[] __attribute__((visibility("hidden")));
}

namespace shardd::cuda {
namespace {

CUdeviceptr Address(const void* p) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(p)); }

const char* KernelOf(const CastArgs&) { return kCastKernel; }
const char* KernelOf(const ReduceArgs&) { return kReduceKernel; }
const char* KernelOf(const NormArgs&) { return kNormKernel; }
const char* KernelOf(const FiniteArgs&) { return kFiniteKernel; }
const char* KernelOf(const AdamWArgs&) { return kAdamWKernel; }
const char* KernelOf(const SgdArgs&) { return kSgdKernel; }
const char* KernelOf(const RuleArgs&) { return kRuleKernel; }

}  // namespace

Gpu* Gpu::Get(std::string* why) {
  static std::string reason;
  static Gpu* const gpu = []() -> Gpu* {
    const auto driver = CudaDriver::Load();
    if (!driver.ok()) {
      reason = std::string(driver.status().message());
      return nullptr;
    }
    Gpu* made = new Gpu(*driver);  // for the life of the process
    reason = made->Init();
    if (!reason.empty()) return nullptr;
    std::printf("[ GPU      ] %s\n", made->name().c_str());
    return made;
  }();
  *why = reason;
  return gpu;
}

std::string Gpu::Init() {
  if (kKernelImage == nullptr) return "this binary was built without nvcc and has no kernels";
  char name[256] = {};
  int version = 0;
  CUcontext context = nullptr;
  Check(driver_->DeviceGet(&device_, 0), "cuDeviceGet");
  Check(driver_->DeviceGetName(name, sizeof(name), device_), "cuDeviceGetName");
  Check(driver_->DriverGetVersion(&version), "cuDriverGetVersion");
  Check(driver_->DeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
        "cuDeviceGetAttribute");
  Check(driver_->DevicePrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain");
  Check(driver_->CtxSetCurrent(context), "cuCtxSetCurrent");
  Check(driver_->StreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  const CUresult loaded = driver_->LibraryLoadData(&library_, kKernelImage, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) return absl::StrCat(name, ": this binary has no kernels for it");
  Check(loaded, "cuLibraryLoadData");
  name_ = absl::StrCat(name, ", ", multiprocessors_, " multiprocessors, driver for CUDA ", version / 1000, ".",
                       version % 1000 / 10);
  return "";
}

void Gpu::Check(CUresult result, const char* operation) const {
  const absl::Status status = driver_.Check(result, operation, "");
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::abort();
}

CudaSlab Gpu::Allocate(int64_t size_bytes) {
  auto slab = CudaSlab::Create(&driver_, device_, size_bytes, "test");
  if (!slab.ok()) {
    std::fprintf(stderr, "%s\n", std::string(slab.status().message()).c_str());
    std::abort();
  }
  return *std::move(slab);
}

void Gpu::Copy(const void* src, void* dst, int64_t size_bytes) {
  Check(driver_->MemcpyAsync(Address(dst), Address(src), static_cast<size_t>(size_bytes), stream_), "cuMemcpyAsync");
}

void Gpu::Zero(void* dst, int64_t size_bytes) {
  Check(driver_->MemsetD8Async(Address(dst), 0, static_cast<size_t>(size_bytes), stream_), "cuMemsetD8Async");
}

void Gpu::LaunchOne(const char* kernel, Geometry at, const void* args, CUstream stream) {
  CUkernel function = nullptr;
  Check(driver_->LibraryGetKernel(&function, library_, kernel), kernel);
  void* params[] = {const_cast<void*>(args)};
  const CUstream on = stream == nullptr ? stream_ : stream;
  Check(driver_->LaunchKernel(cu::FunctionOf(function), at.grid, 1, 1, at.block, 1, 1, 0, on, params, nullptr), kernel);
}

void Gpu::Launch(const AnyArgs& any, uint32_t grid, CUstream stream) {
  std::visit(
      [&](const auto& args) {
        Geometry at = GeometryOf(args, multiprocessors_);
        if (grid != 0) at.grid = grid;
        LaunchOne(KernelOf(args), at, &args, stream);
        if constexpr (std::is_same_v<std::decay_t<decltype(args)>, NormArgs>) {
          LaunchOne(kNormFinishKernel, NormFinishGeometry(), &args, stream);
        }
      },
      any);
}

CUstream Gpu::NewStream() {
  CUstream stream = nullptr;
  Check(driver_->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  return stream;
}

CUkernel Gpu::LoadKernel(const char* name) {
  if (load_library_ == nullptr) {
    Check(driver_->LibraryLoadData(&load_library_, shardd_test_load_image, nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cuLibraryLoadData");
  }
  CUkernel kernel = nullptr;
  Check(driver_->LibraryGetKernel(&kernel, load_library_, name), name);
  return kernel;
}

void Gpu::Wait() { Check(driver_->StreamSynchronize(stream_), "cuStreamSynchronize"); }

}  // namespace shardd::cuda
