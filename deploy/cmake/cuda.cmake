# The kernels of server/device/cuda/kernels as one fat binary inside the daemon. Only nvcc is needed, and only with the
# preset cuda: nothing of CUDA is linked, the driver is found when the daemon starts. Fixed architectures, never `native`:
# the binary goes to other machines. SASS for A100, H100 and B200 and those that take theirs, PTX for later ones.
set(SHARDD_KERNEL_FATBIN "" CACHE INTERNAL "")
if(NOT SHARDD_CUDA)
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 CACHE STRING "CUDA architectures")
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "shardd: SHARDD_CUDA is on and no nvcc was found; building without CUDA")
  return()
endif()
enable_language(CUDA)

set(gencode)
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "-.*" "" number ${architecture})
  if(architecture MATCHES "-real$")
    list(APPEND gencode -gencode=arch=compute_${number},code=sm_${number})
  elseif(architecture MATCHES "-virtual$")
    list(APPEND gencode -gencode=arch=compute_${number},code=compute_${number})
  else()
    list(APPEND gencode -gencode=arch=compute_${number},code=[sm_${number},compute_${number}])
  endif()
endforeach()
set(SHARDD_KERNEL_FATBIN ${CMAKE_BINARY_DIR}/gen/shardd_kernels.fatbin CACHE INTERNAL "")
# -fmad=false: as -ffp-contract=off on the host, so that GPU and CPU agree. What ptxas says of registers, stack and
# spills goes to ${SHARDD_KERNEL_FATBIN}.ptxas, for .ci/kernel_resources.py.
set(source ${CMAKE_CURRENT_SOURCE_DIR}/server/device/cuda/kernels/all.cu)
add_custom_command(
  OUTPUT ${SHARDD_KERNEL_FATBIN}
  BYPRODUCTS ${SHARDD_KERNEL_FATBIN}.ptxas
  COMMAND ${CMAKE_CUDA_COMPILER} -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -Werror all-warnings --threads 2
          ${gencode} -I${CMAKE_CURRENT_SOURCE_DIR} -MD -MF ${SHARDD_KERNEL_FATBIN}.d -MT gen/shardd_kernels.fatbin
          -Xptxas -v -fatbin -o ${SHARDD_KERNEL_FATBIN} ${source} 2> ${SHARDD_KERNEL_FATBIN}.ptxas
          || (cat ${SHARDD_KERNEL_FATBIN}.ptxas && false)
  DEPENDS ${source}
  DEPFILE ${SHARDD_KERNEL_FATBIN}.d
  COMMENT "Building CUDA kernels"
  COMMAND_EXPAND_LISTS)
add_custom_target(shardd_kernels DEPENDS ${SHARDD_KERNEL_FATBIN})
message(STATUS "shardd: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, kernels for ${CMAKE_CUDA_ARCHITECTURES}")
