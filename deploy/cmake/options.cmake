# Compilers, warnings, sanitizers, ccache. Targets of the project link shardd_options PRIVATE.
set(SHARDD_SANITIZE "" CACHE STRING "empty, address (with undefined behaviour) or thread")
option(SHARDD_CUDA "kernels for GPUs in the daemon, where nvcc is found" ON)
option(SHARDD_FUZZ_COVERAGE "with clang: libraries count coverage, which leads the fuzzers (tests/fuzz)" OFF)
option(SHARDD_TORCH "build the libtorch adaptor and the example where torch is in .venv" ON)

# -ffp-contract=off: fused multiply-add changes the last bit of a quarter of all AdamW results, and ranks must agree.
# -fno-math-errno -fno-trapping-math: without them sqrt does not vectorise.
# -Wno-restrict: GCC 12 sees it in its own std::string at -O3 (GCC bug 105651). -Wno-maybe-uninitialized: it sees that in its
# own std::regex under a sanitizer (GCC bug 105562).
add_library(shardd_options INTERFACE)
target_compile_options(shardd_options INTERFACE -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fno-trapping-math
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety> $<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
  $<$<AND:$<BOOL:${SHARDD_SANITIZE}>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
target_include_directories(shardd_options INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
add_compile_options(-ffunction-sections -fdata-sections)

if(SHARDD_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(SHARDD_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(SHARDD_SANITIZE)
  message(FATAL_ERROR "configure shardd: SHARDD_SANITIZE is unknown (got ${SHARDD_SANITIZE}, want address or thread)")
endif()

if(SHARDD_FUZZ_COVERAGE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "configure shardd: SHARDD_FUZZ_COVERAGE needs clang (got ${CMAKE_CXX_COMPILER_ID}); use preset clang or asan")
  endif()
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

# ccache where it is installed. The settings let it share results between build folders; they go into the command, so that
# no one has to configure ccache. No precompiled headers for libraries: one with gRPC saves 1 s of the 2.9 s that a file
# takes, costs 6.6 s and 170 MB per target (torch: 890 MB), and ccache hashes and stores it. Tests share one (tests.cmake).
find_program(SHARDD_CCACHE ccache)
if(SHARDD_CCACHE AND (NOT CMAKE_CXX_COMPILER_LAUNCHER OR CMAKE_CXX_COMPILER_LAUNCHER STREQUAL "ccache"))
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=time_macros,pch_defines
    CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1 ${SHARDD_CCACHE})
endif()

# Where nobody waits for one object (sanitizers, release, a new checkout's CI), a compiler's run takes twenty sources of a
# library, reads gRPC's and protobuf's headers and instantiates their templates once (shardd_job: 10 s of a core where eight
# sources by themselves take 30). What two files of a folder both name in anonymous namespaces clashes here: rename it, or
# list the file. A file that lacks an include is found by dev and by clang's analysis, which take each by itself. Tests' helpers
# have the same short names everywhere, so their batches are made otherwise (shardd_test_batches in tests.cmake).
option(SHARDD_FEW_OBJECTS "compile many sources in one run of the compiler" OFF)
function(shardd_few_objects target)
  if(SHARDD_FEW_OBJECTS)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
  endif()
endfunction()
set_source_files_properties(client/c/gpu/graph_words.cc client/c/gpu/stream_graph.cc client/c/gpu/trainer_sums.cc
  server/device/cuda/engine_ops.cc server/service/listener.cc server/service/trainer_service.cc
  tests/fakes/cuda/calls_work.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# What the numeric kernels need to vectorise; the rest is built as its preset says.
function(shardd_vectorise target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "STATIC_LIBRARY" AND NOT SHARDD_SANITIZE)
    target_compile_options(${target} PRIVATE -O3)
  elseif(type STREQUAL "STATIC_LIBRARY" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(${target} PRIVATE -Wno-pass-failed) # loops that count each access are not vectorised
  endif()
endfunction()
