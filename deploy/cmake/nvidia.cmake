# NVIDIA's headers, as deploy/nvidia_headers.sh installs them, or of a toolkit that has nccl.h too. `shardd_nvidia` is
# linked by what includes driver_api.h or nccl_api.h, PRIVATE: few files, and nothing of CUDA is ever linked to a program.
# Without them (no PyPI, SHARDD_GPUS=OFF) the programs are built for CPUs: the GPU code and
# NCCL are left out, sources in folders named no_gpus stand in for them and say so, and there are no tests of this build,
# whose fakes are compiled against the same headers.
option(SHARDD_GPUS "code for GPUs and NCCL in the daemon and the client library, where NVIDIA's headers are found" ON)
set(SHARDD_NVIDIA_DIR ${CMAKE_CURRENT_SOURCE_DIR}/.cache/nvidia CACHE PATH "where deploy/nvidia_headers.sh leaves its output")
set(headers ${SHARDD_NVIDIA_DIR}/include $ENV{CUDA_HOME}/include /usr/local/cuda/include)
find_path(SHARDD_CUDA_HEADERS cudaTypedefs.h HINTS ${headers} NO_DEFAULT_PATH)
find_path(SHARDD_NCCL_HEADERS nccl.h HINTS ${headers} /usr/include NO_DEFAULT_PATH)
add_library(shardd_nvidia INTERFACE)
if(SHARDD_GPUS AND SHARDD_CUDA_HEADERS AND SHARDD_NCCL_HEADERS)
  target_include_directories(shardd_nvidia SYSTEM INTERFACE ${SHARDD_CUDA_HEADERS} ${SHARDD_NCCL_HEADERS})
  set(SHARDD_HAS_GPUS ON)
else()
  target_compile_definitions(shardd_nvidia INTERFACE SHARDD_NO_GPUS)
  set(SHARDD_HAS_GPUS OFF)
  if(SHARDD_GPUS)
    message(STATUS "shardd: NVIDIA's headers were not found (cuda.h: ${SHARDD_CUDA_HEADERS}, nccl.h: ${SHARDD_NCCL_HEADERS}; looked in "
      "${headers}); the daemon and the client library are built without GPUs, and no tests. deploy/nvidia_headers.sh installs them")
  endif()
endif()

# shardd_without_gpus(): of `sources`, leaves out the code for GPUs where there are no headers for it, and puts in what
# stands for it.
macro(shardd_without_gpus)
  if(NOT SHARDD_HAS_GPUS)
    set(of_gpus ${sources})
    list(FILTER of_gpus INCLUDE REGEX
      "/common/cuda/(driver|slab)\\.cc$|/client/c/gpu/(device_slabs|graph_words|stream_[a-z]+|trainer_sums)\\.cc$|/server/device/cuda/|/server/collective/(nodes/)?nccl/")
    list(REMOVE_ITEM sources ${of_gpus})
    if(of_gpus MATCHES "/common/cuda/|/client/c/gpu/")
      list(GET of_gpus 0 first)
      get_filename_component(folder ${first} DIRECTORY)
      list(APPEND sources ${folder}/no_gpus/no_gpus.cc)
    endif()
  endif()
endmacro()
