# NVIDIA's headers, as deploy/nvidia_headers.sh installs them, or of a toolkit that has nccl.h too. `shardd_nvidia` is
# linked by what includes driver_api.h or nccl_api.h, PRIVATE: few files, and nothing of CUDA is ever linked to a program.
# Without them (no PyPI, a toolkit's of another version, SHARDD_GPUS=OFF) the programs are built for CPUs: the GPU code and
# NCCL are left out, sources in folders named no_gpus stand in for them and say so. Of the tests, whose fakes are compiled
# against the same headers, such a build has one, tests/install/no_gpus_test.sh.
option(SHARDD_GPUS "code for GPUs and NCCL in the daemon and the client library, where NVIDIA's headers are found" ON)
set(SHARDD_NVIDIA_DIR ${CMAKE_CURRENT_SOURCE_DIR}/.cache/nvidia CACHE PATH "where deploy/nvidia_headers.sh leaves its output")
set(headers ${SHARDD_NVIDIA_DIR}/include $ENV{CUDA_HOME}/include /usr/local/cuda/include)
# Looked for each time: what was found may be gone, and what was not may have come.
unset(SHARDD_CUDA_HEADERS CACHE)
unset(SHARDD_NCCL_HEADERS CACHE)
find_path(SHARDD_CUDA_HEADERS cudaTypedefs.h HINTS ${headers} NO_DEFAULT_PATH)
find_path(SHARDD_NCCL_HEADERS nccl.h HINTS ${headers} /usr/include NO_DEFAULT_PATH)
add_library(shardd_nvidia INTERFACE)
set(SHARDD_HAS_GPUS OFF)
if(SHARDD_GPUS AND SHARDD_CUDA_HEADERS AND SHARDD_NCCL_HEADERS)
  # Whether they are what the source wants is what the source says. Once for each folder and time of its headers.
  file(TIMESTAMP ${SHARDD_CUDA_HEADERS}/cuda.h cuda_time)
  file(TIMESTAMP ${SHARDD_NCCL_HEADERS}/nccl.h nccl_time)
  set(tried "${SHARDD_CUDA_HEADERS} ${cuda_time} ${SHARDD_NCCL_HEADERS} ${nccl_time}")
  if(NOT tried STREQUAL SHARDD_HEADERS_TRIED)
    unset(SHARDD_HEADERS_FIT CACHE)
    try_compile(SHARDD_HEADERS_FIT ${CMAKE_CURRENT_BINARY_DIR}/nvidia_headers ${CMAKE_CURRENT_SOURCE_DIR}/deploy/cmake/nvidia_headers.cc
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_SOURCE_DIR};${SHARDD_CUDA_HEADERS};${SHARDD_NCCL_HEADERS}"
      CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON OUTPUT_VARIABLE output)
    file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/nvidia_headers.log "${output}")
    set(SHARDD_HEADERS_TRIED "${tried}" CACHE INTERNAL "what SHARDD_HEADERS_FIT is of")
  endif()
  set(SHARDD_HAS_GPUS ${SHARDD_HEADERS_FIT})
endif()
if(SHARDD_HAS_GPUS)
  target_include_directories(shardd_nvidia SYSTEM INTERFACE ${SHARDD_CUDA_HEADERS} ${SHARDD_NCCL_HEADERS})
else()
  target_compile_definitions(shardd_nvidia INTERFACE SHARDD_NO_GPUS)
  set(why "as SHARDD_GPUS=OFF asks for")
  if(SHARDD_GPUS AND SHARDD_CUDA_HEADERS AND SHARDD_NCCL_HEADERS)
    string(CONCAT why "because NVIDIA's headers do not fit (cuda.h: ${SHARDD_CUDA_HEADERS}, nccl.h: ${SHARDD_NCCL_HEADERS}, "
      "the compiler's words: ${CMAKE_CURRENT_BINARY_DIR}/nvidia_headers.log); deploy/nvidia_headers.sh installs those that do")
  elseif(SHARDD_GPUS)
    list(JOIN headers " " looked)
    string(CONCAT why "because NVIDIA's headers were not found (cuda.h: ${SHARDD_CUDA_HEADERS}, nccl.h: ${SHARDD_NCCL_HEADERS}; "
      "looked in ${looked}); deploy/nvidia_headers.sh installs them")
  endif()
  message(STATUS "shardd: the daemon and the client library are built without GPUs, and without tests, ${why}")
endif()

# shardd_without_gpus(): of `sources`, leaves out the code for GPUs where there are no headers for it, and puts in what
# stands for it.
macro(shardd_without_gpus)
  if(NOT SHARDD_HAS_GPUS)
    set(of_gpus ${sources})
    list(FILTER of_gpus INCLUDE REGEX
      "/common/cuda/(driver|slab)\\.cc$|/client/c/gpu/(device_slabs|graph_words|stream_[a-z]+|trainer_sums)\\.cc$|/server/daemon/collective_trial\\.cc$|/server/device/cuda/|/server/collective/(nodes/)?nccl/")
    list(REMOVE_ITEM sources ${of_gpus})
    if(of_gpus MATCHES "/common/cuda/|/client/c/gpu/")
      list(GET of_gpus 0 first)
      get_filename_component(folder ${first} DIRECTORY)
      list(APPEND sources ${folder}/no_gpus/no_gpus.cc)
    endif()
  endif()
endmacro()
