# What shardd links: Debian's static archives, named by hand (the CMake targets of gRPC and absl are the shared libraries).
# One target for all, shardd_deps: the linker takes from the archives what is used and nothing else, and the binaries
# then need only glibc.
find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED) # MODULE mode: Debian ships no protobuf-config.cmake
find_package(GTest CONFIG REQUIRED)
find_package(benchmark CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(CLI11 CONFIG QUIET)
if(NOT CLI11_FOUND)
  message(FATAL_ERROR "configure shardd: CLI11: not found; install libcli11-dev (deploy/bootstrap.sh does)")
endif()
# Headers alone, of one file: common/tensor/matmul.cc.
find_path(SHARDD_EIGEN_DIR Eigen/Core PATH_SUFFIXES eigen3)
if(NOT SHARDD_EIGEN_DIR)
  message(FATAL_ERROR "configure shardd: Eigen: not found; install libeigen3-dev (deploy/bootstrap.sh does)")
endif()
mark_as_advanced(SHARDD_EIGEN_DIR)
set_source_files_properties(common/tensor/matmul.cc PROPERTIES COMPILE_OPTIONS "-isystem;${SHARDD_EIGEN_DIR}"
  SKIP_UNITY_BUILD_INCLUSION ON)
# What shardd-metrics links, as shared libraries: no other program has them.
find_package(prometheus-cpp CONFIG QUIET)
if(NOT TARGET prometheus-cpp::core OR NOT TARGET civetweb::civetweb)
  message(STATUS "shardd: no prometheus-cpp (deploy/bootstrap.sh installs it): no shardd-metrics, which serves metrics over HTTP")
endif()
find_program(SHARDD_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)
find_path(SHARDD_GRPC_PROTO_DIR grpc/health/v1/health.proto PATHS /usr/share/grpc-proto NO_DEFAULT_PATH REQUIRED)

set(archives)
foreach(name grpcpp_channelz grpc++ grpc gpr upb address_sorting protobuf re2 cares z zstd ssl crypto)
  find_library(SHARDD_ARCHIVE_${name} lib${name}.a REQUIRED)
  mark_as_advanced(SHARDD_ARCHIVE_${name})
  list(APPEND archives ${SHARDD_ARCHIVE_${name}})
endforeach()
get_filename_component(archive_dir ${SHARDD_ARCHIVE_grpc++} DIRECTORY)
file(GLOB absl_archives ${archive_dir}/libabsl_*.a)
list(APPEND archives ${absl_archives})
string(REPLACE ";" "," archives "${archives}")

add_library(shardd_deps INTERFACE)
target_link_libraries(shardd_deps INTERFACE "$<LINK_GROUP:RESCAN,${archives}>" Threads::Threads ${CMAKE_DL_LIBS} m rt)
target_link_options(shardd_deps INTERFACE -Wl,--gc-sections)

# The few objects of those archives that cannot be part of a shared library, compiled with -fPIC (deploy/pic_archives.sh
# says why). They are linked whole, before the archives, so that the linker never looks for them there.
set(SHARDD_PIC_DIR ${CMAKE_CURRENT_SOURCE_DIR}/.cache/pic CACHE PATH "where deploy/pic_archives.sh left its output")
if(NOT EXISTS ${SHARDD_PIC_DIR}/stamp)
  message(FATAL_ERROR "configure shardd: ${SHARDD_PIC_DIR}/libshardd_pic.a: not built; run deploy/bootstrap.sh")
endif()
add_library(shardd_pic STATIC IMPORTED)
set_target_properties(shardd_pic PROPERTIES IMPORTED_LOCATION ${SHARDD_PIC_DIR}/libshardd_pic.a)

# ThreadSanitizer must see absl's mutexes, which the archives contain without instrumentation. These objects come first
# on the command line of every executable, gRPC then uses the instrumented ones too. With them whatever takes a SpinLock:
# taken without a word to ThreadSanitizer, the annotations in the instrumented slow path end the process where it is
# contended ("CHECK failed: ignore_sync").
if(SHARDD_SANITIZE STREQUAL "thread")
  set(absl ${SHARDD_PIC_DIR}/absl_source/absl)
  file(GLOB absl_tsan_sources ${absl}/synchronization/*.cc ${absl}/synchronization/internal/*.cc
    ${absl}/base/internal/*.cc ${absl}/base/*.cc ${absl}/time/clock.cc ${absl}/strings/internal/cordz_handle.cc
    ${absl}/strings/internal/cordz_info.cc ${absl}/debugging/symbolize.cc)
  list(FILTER absl_tsan_sources EXCLUDE REGEX "internal/sysinfo\\.cc$|_test|_testing|test_util") # sysinfo is in shardd_pic, as pool_urbg
  add_library(shardd_absl_tsan OBJECT ${absl_tsan_sources})
  target_compile_options(shardd_absl_tsan PRIVATE -w)
  target_include_directories(shardd_absl_tsan PRIVATE ${SHARDD_PIC_DIR}/absl_source)
endif()
