# The kernels of server/device/cuda/kernels as one fat binary inside the daemon. Only nvcc is needed, in PATH or as
# deploy/bootstrap.sh installs it: nothing of CUDA is linked, the driver is found when the daemon starts. Fixed
# architectures, never `native`: the binary goes to other machines. SASS for A100, H100 and B200 and those that take theirs,
# PTX for later ones.
set(SHARDD_KERNEL_FATBIN "" CACHE INTERNAL "")
if(NOT SHARDD_CUDA)
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 CACHE STRING "CUDA architectures")
file(GLOB installed ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13/bin)
find_program(SHARDD_NVCC nvcc HINTS ${installed})
if(NOT SHARDD_NVCC)
  message(STATUS "shardd: no nvcc was found; the daemon is built without kernels for GPUs")
  return()
endif()
execute_process(COMMAND ${SHARDD_NVCC} --version OUTPUT_VARIABLE version)
string(REGEX MATCH "V([0-9.]+)" version "${version}")
if(NOT CMAKE_MATCH_1 VERSION_GREATER_EQUAL 12.8) # the first that knows sm_100
  message(STATUS "shardd: nvcc is too old (${SHARDD_NVCC}: got ${version}, want V12.8 or later); the daemon is built without "
    "kernels for GPUs. deploy/bootstrap.sh installs one that is not")
  unset(SHARDD_NVCC CACHE)
  return()
endif()

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
  COMMAND ${SHARDD_NVCC} -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -Werror all-warnings --threads 2
          ${gencode} -I${CMAKE_CURRENT_SOURCE_DIR} -MD -MF ${SHARDD_KERNEL_FATBIN}.d -MT gen/shardd_kernels.fatbin
          -Xptxas -v -fatbin -o ${SHARDD_KERNEL_FATBIN} ${source} 2> ${SHARDD_KERNEL_FATBIN}.ptxas
          || (cat ${SHARDD_KERNEL_FATBIN}.ptxas && false)
  DEPENDS ${source}
  DEPFILE ${SHARDD_KERNEL_FATBIN}.d
  COMMENT "Building CUDA kernels"
  COMMAND_EXPAND_LISTS)
add_custom_target(shardd_kernels DEPENDS ${SHARDD_KERNEL_FATBIN})
message(STATUS "shardd: nvcc ${version}, kernels for ${CMAKE_CUDA_ARCHITECTURES}")
