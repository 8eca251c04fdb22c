#include "common/cuda/kernel_image.h"

// The build defines the path of the fat binary if it has nvcc (deploy/cmake/cuda.cmake).
#if defined(SHARDD_KERNEL_FATBIN)
asm(R"(
  .section .rodata
  .balign 16
shardd_kernel_image_begin:
  .incbin ")" SHARDD_KERNEL_FATBIN R"("
shardd_kernel_image_end:
  .previous
)");
extern "C" {
extern const char shardd_kernel_image_begin[] __attribute__((visibility("hidden")));
extern const char shardd_kernel_image_end[] __attribute__((visibility("hidden")));
}
#endif

namespace shardd::cuda {

#if defined(SHARDD_KERNEL_FATBIN)
const void* const kKernelImage = shardd_kernel_image_begin;
const size_t kKernelImageSizeBytes = static_cast<size_t>(shardd_kernel_image_end - shardd_kernel_image_begin);
#else
const void* const kKernelImage = nullptr;
const size_t kKernelImageSizeBytes = 0;
#endif

}  // namespace shardd::cuda
