# tests/<layer>/<folder>/*.cc -> one binary <layer>_<folder>_test, one ctest entry per case. Labels: unit, service,
# multiproc (starts processes; see below which of them run beside others), torch, fuzz, bench_smoke.
# ctest starts first what costs most. In a checkout that has run nothing yet the order is given by chains of cases that run
# one after another: the longest begins first, and what runs by itself comes last.
enable_testing()
include(GoogleTest)

set(SHARDD_TEST_TIMEOUT_S 300)
if(SHARDD_SANITIZE)
  set(SHARDD_TEST_TIMEOUT_S 900)
endif()
# Helpers that several test folders share, tests/testing/*.cc.
file(GLOB testing_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/testing/*.cc)
if(testing_sources)
  add_library(shardd_testing STATIC ${testing_sources})
  target_link_libraries(shardd_testing PUBLIC shardd_common shardd_grpc GTest::gmock PRIVATE shardd_options shardd_nvidia shardd_programs)
  # Paths are in one object alone, so that ccache serves the others to any checkout.
  set_property(SOURCE ${CMAKE_CURRENT_SOURCE_DIR}/tests/testing/build_paths.cc APPEND PROPERTY COMPILE_DEFINITIONS
    SHARDD_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}" SHARDD_BINARY_DIR="${CMAKE_BINARY_DIR}")
endif()

# What tests start or load: built before them.
add_library(shardd_programs INTERFACE)
foreach(program shardd shardd-custodian shardd-metrics shardctl shardd_client)
  if(TARGET ${program})
    add_dependencies(shardd_programs ${program})
  endif()
endforeach()

# What nearly every test reads, compiled once, by the first test's target: a third of a test's compiler's run. Of the
# system alone, so that no change of ours makes all tests be compiled. Torch's have other options.
set(SHARDD_TEST_HEADERS <gmock/gmock.h> <gtest/gtest.h> <absl/container/flat_hash_map.h> <absl/status/statusor.h>
  <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/synchronization/mutex.h> <absl/synchronization/notification.h>
  <absl/time/clock.h> <google/protobuf/extension_set.h> <google/protobuf/generated_enum_reflection.h>
  <google/protobuf/generated_message_reflection.h> <google/protobuf/map_entry.h> <google/protobuf/map_field_inl.h>
  <google/protobuf/reflection_ops.h> <google/protobuf/repeated_field.h> <google/protobuf/wire_format.h>
  <algorithm> <atomic> <functional> <map> <memory> <optional> <random> <string> <thread> <utility> <variant> <vector>)
function(shardd_reads_test_headers target)
  get_property(first GLOBAL PROPERTY shardd_test_headers_of)
  if(first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    target_precompile_headers(${target} PRIVATE ${SHARDD_TEST_HEADERS})
    set_property(GLOBAL PROPERTY shardd_test_headers_of ${target})
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # -fpch-preprocess: for ccache. The others: GCC 12 forgets what of it is the system's, and warns of its own std::string.
    target_compile_options(${target} PRIVATE -Winvalid-pch -fpch-preprocess -Wno-array-bounds -Wno-stringop-overflow
      -Wno-psabi)
  endif()
endfunction()

# Of programs, in the chain of cases that runs beside that of e2e.
set(SHARDD_BESIDE_E2E RESOURCE_LOCK processes COST 500)
if(SHARDD_SANITIZE)
  set(SHARDD_BESIDE_E2E RUN_SERIAL ON)
endif()

# With SHARDD_FEW_OBJECTS: sets `sources` to sources that each stand for sixteen of them (test_batch.py). A third of the
# time: ten of e2e take 19 s of a core together, and 57 s by themselves.
function(shardd_test_batches name)
  if(NOT SHARDD_FEW_OBJECTS)
    return()
  endif()
  set(batches)
  while(sources)
    list(SUBLIST sources 0 16 batch)
    list(REMOVE_ITEM sources ${batch})
    list(LENGTH batches number)
    set(out ${CMAKE_BINARY_DIR}/gen/tests/${name}_${number}.cc)
    set(make ${CMAKE_CURRENT_SOURCE_DIR}/deploy/cmake/test_batch.py)
    add_custom_command(OUTPUT ${out} COMMAND ${make} ${out} ${batch} DEPENDS ${make} ${batch} VERBATIM)
    list(APPEND batches ${out})
  endwhile()
  set(sources ${batches} PARENT_SCOPE)
endfunction()

# More folders may follow the first, whose name is the binary's.
function(shardd_tests folders label)
  list(GET folders 0 folder)
  list(TRANSFORM folders REPLACE "(.+)" "${CMAKE_CURRENT_SOURCE_DIR}/tests/\\1/*.cc" OUTPUT_VARIABLE patterns)
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  list(FILTER sources EXCLUDE REGEX "_(fuzz|bench)\\.cc$")
  if(folder MATCHES "^faults") # its helpers are shardd_faults
    list(FILTER sources INCLUDE REGEX "_test\\.cc$")
  endif()
  if(NOT sources)
    return()
  endif()
  string(REPLACE "/" "_" name "${folder}_test")
  if(NOT folder STREQUAL "torch")
    shardd_test_batches(${name})
  endif()
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARGN} shardd_options shardd_programs GTest::gmock GTest::gtest_main)
  if(TARGET shardd_testing)
    target_link_libraries(${name} PRIVATE shardd_testing)
  endif()
  shardd_instrument(${name})
  if(folder STREQUAL "torch") # libtorch's headers take 20 s of a core each time that a source reads them
    shardd_few_objects(${name})
  else()
    shardd_reads_test_headers(${name})
  endif()
  set(properties LABELS ${label} TIMEOUT ${SHARDD_TEST_TIMEOUT_S})
  if(label STREQUAL "multiproc" AND ((SHARDD_SANITIZE AND NOT name STREQUAL "e2e_test") OR name MATCHES "^faults"))
    list(APPEND properties RUN_SERIAL ON) # a sanitizer makes processes slow, and faults are the machine's
  elseif(name STREQUAL "e2e_test")
    list(APPEND properties RESOURCE_LOCK e2e_processes COST 1000) # they mostly wait: other folders' cases run beside
  elseif(label STREQUAL "multiproc")
    list(APPEND properties ${SHARDD_BESIDE_E2E})
  endif()
  set(filter)
  if(name STREQUAL "e2e_test" AND NOT SHARDD_SANITIZE) # in three chains that take about as long
    set(beside "*Cuda*:*Offloaded*")
    set(nodes "*NodesDeath*:*NodesProxy*:*NodesMissTheLastWord*")
    gtest_discover_tests(${name} TEST_PREFIX "${folder}/" TEST_FILTER "${beside}" PROPERTIES LABELS ${label}
      TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ${SHARDD_BESIDE_E2E} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
    gtest_discover_tests(${name} TEST_PREFIX "${folder}/" TEST_FILTER "${nodes}" PROPERTIES LABELS ${label}
      TIMEOUT ${SHARDD_TEST_TIMEOUT_S} RESOURCE_LOCK e2e_nodes COST 700 DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
    set(filter TEST_FILTER "-${beside}:${nodes}")
  endif()
  gtest_discover_tests(${name} TEST_PREFIX "${folder}/" ${filter} PROPERTIES ${properties}
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
endfunction()

# shardd_tests_by_grpc(folder FILTER suites properties...): the same cases once more with control over gRPC alone, as
# "<folder>/grpc/...". Not with a sanitizer: what differs is a writer of words, and has tests of its own.
function(shardd_tests_by_grpc folder)
  cmake_parse_arguments(PARSE_ARGV 1 of "" "FILTER" "")
  if(NOT SHARDD_SANITIZE AND TARGET ${folder}_test)
    gtest_discover_tests(${folder}_test TEST_PREFIX "${folder}/grpc/" TEST_FILTER "${of_FILTER}" PROPERTIES LABELS multiproc
      TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ENVIRONMENT SHARDD_CONTROL=grpc ${of_UNPARSED_ARGUMENTS}
      DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
  endif()
endfunction()

# tests/bench/x_bench.cc -> bench_x. ctest runs each briefly, so that it cannot rot; figures come from running it.
function(shardd_benches)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench/*_bench.cc)
  file(GLOB helpers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench/*.cc)
  list(FILTER helpers EXCLUDE REGEX "_bench\\.cc$|hostile_neighbour\\.cc$")
  add_library(shardd_bench STATIC ${helpers})
  target_link_libraries(shardd_bench PUBLIC shardd_testing ${ARGN} benchmark::benchmark PRIVATE shardd_options)
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    string(REGEX REPLACE "_bench$" "" name ${name})
    add_executable(bench_${name} ${source})
    target_link_libraries(bench_${name} PRIVATE shardd_bench shardd_options shardd_programs)
    shardd_instrument(bench_${name})
    add_test(NAME bench/${name} COMMAND bench_${name} --benchmark_min_time=0.01)
    set_tests_properties(bench/${name} PROPERTIES LABELS bench_smoke TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ${SHARDD_BESIDE_E2E})
  endforeach()
  # Its neighbours are hostile to whatever runs. With the sizes that figures are taken with it would run for two minutes.
  set_tests_properties(bench/isolation PROPERTIES RUN_SERIAL ON ENVIRONMENT "SHARDD_BENCH_ACTS=2;SHARDD_BENCH_WIDE=2000")
  # Its hostile clients are those of tests/faults.
  target_link_libraries(bench_isolation PRIVATE shardd_nvidia)
  shardd_few_objects(bench_isolation)
  target_sources(bench_isolation PRIVATE tests/bench/hostile_neighbour.cc tests/faults/raw_client.cc
    tests/faults/commands.cc tests/faults/shared_with_e2e.cc tests/faults/hostile/http2_client.cc)
endfunction()

# tests/fuzz/x_fuzz.cc (LLVMFuzzerTestOneInput) -> fuzz_x, with clang's libFuzzer; ctest runs each for so many seconds.
set(SHARDD_FUZZ_S 30 CACHE STRING "seconds for each fuzzer")
function(shardd_fuzzers)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/*_fuzz.cc)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    return()
  endif()
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    string(REGEX REPLACE "_fuzz$" "" name ${name})
    add_executable(fuzz_${name} ${source})
    set(input_s 10)
    if(SHARDD_SANITIZE)
      target_sources(fuzz_${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/sanitizers/defaults.cc)
      set(input_s 60)
    endif()
    # Without SHARDD_FUZZ_COVERAGE inputs are led by what the target's own checks do with them, and by nothing else.
    target_compile_options(fuzz_${name} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_libraries(fuzz_${name} PRIVATE ${ARGN} shardd_options -fsanitize=fuzzer)
    # What it finds goes to the build's folder, beside the corpus that is kept.
    set(found ${CMAKE_BINARY_DIR}/fuzz/${name})
    set(kept ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/corpus/${name})
    file(MAKE_DIRECTORY ${found})
    if(NOT EXISTS ${kept})
      set(kept)
    endif()
    add_test(NAME fuzz/${name} COMMAND fuzz_${name} -max_total_time=${SHARDD_FUZZ_S} -timeout=${input_s} ${found} ${kept})
    set_tests_properties(fuzz/${name} PROPERTIES LABELS fuzz TIMEOUT ${SHARDD_TEST_TIMEOUT_S})
  endforeach()
endfunction()

# tests/next: the same programs and library, of other versions, in folders of their own. Their list of versions is found
# before that of the archive, which is then not taken.
if(TARGET shardd AND TARGET shardd_client)
  foreach(which next later)
    add_executable(shardd_${which} $<TARGET_OBJECTS:shardd>)
    add_executable(shardd_custodian_${which} $<TARGET_OBJECTS:shardd-custodian>)
    add_library(shardd_client_${which} SHARED $<TARGET_OBJECTS:shardd_client>)
    set(like shardd shardd-custodian shardd_client)
    set(name shardd shardd-custodian shardd)
    foreach(target shardd_${which} shardd_custodian_${which} shardd_client_${which})
      list(POP_FRONT like from)
      list(POP_FRONT name output)
      target_sources(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/next/${which}_versions.cc)
      target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
      get_target_property(libraries ${from} LINK_LIBRARIES)
      target_link_libraries(${target} PRIVATE ${libraries})
      get_target_property(flags ${from} LINK_OPTIONS)
      target_link_options(${target} PRIVATE ${flags})
      set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output} LINKER_LANGUAGE CXX
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${which}/bin LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${which}/lib)
      add_dependencies(shardd_programs ${target})
    endforeach()
    set_target_properties(shardd_client_${which} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  endforeach()
endif()

# Records of the next one have a field more.
if(TARGET shardd_next)
  target_sources(shardd_next PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/next/next_records.cc)
endif()

# tests/deadly: a daemon that dies where it writes what its successor goes by. As above, its own sources come first.
if(TARGET shardd)
  add_library(shardd_deadly_update STATIC common/tensor/adafactor.cc common/tensor/muon.cc common/tensor/update.cc
    common/tensor/update_rules.cc)
  target_include_directories(shardd_deadly_update BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/deadly)
  target_link_libraries(shardd_deadly_update PRIVATE shardd_tensor shardd_options)
  shardd_vectorise(shardd_deadly_update)
  add_executable(shardd_deadly $<TARGET_OBJECTS:shardd> $<TARGET_OBJECTS:shardd_deadly_update> tests/deadly/kept_write.cc)
  target_include_directories(shardd_deadly PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  get_target_property(libraries shardd LINK_LIBRARIES)
  target_link_libraries(shardd_deadly PRIVATE ${libraries})
  get_target_property(flags shardd LINK_OPTIONS)
  target_link_options(shardd_deadly PRIVATE ${flags})
  set_target_properties(shardd_deadly PROPERTIES OUTPUT_NAME shardd LINKER_LANGUAGE CXX
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/deadly/bin)
  add_dependencies(shardd_programs shardd_deadly)
endif()

shardd_tests(common/status unit shardd_status shardd_grpc)
shardd_tests(common/versions unit shardd_versions)
shardd_tests(common/fqn unit shardd_fqn)
shardd_tests(common/tensor unit shardd_tensor)
shardd_tests(common/plan unit shardd_plan)
shardd_tests(common/schedule unit shardd_schedule)
shardd_tests(common/handle unit shardd_handle)
shardd_tests(common/figures unit shardd_figures)
shardd_tests(common/wire unit shardd_wire shardd_proto)
shardd_tests(common/shm multiproc shardd_shm)
shardd_tests(common/clock unit shardd_clock)
shardd_tests(common/secret unit shardd_secret)
# A CUDA driver without a GPU, tests/fakes/cuda.
shardd_folder(shardd_fake_cuda tests/fakes/cuda shardd_device_cuda shardd_nvidia)
# The same as the library that programs look for: LD_LIBRARY_PATH=${build}/fakes. In a folder of its own, so that nothing
# finds it unasked.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fakes/cuda/libcuda/*.cc)
set(version_script ${CMAKE_CURRENT_SOURCE_DIR}/tests/fakes/cuda/libcuda/libcuda.map)
add_library(shardd_fake_libcuda SHARED ${sources})
target_link_libraries(shardd_fake_libcuda PRIVATE shardd_options "$<LINK_LIBRARY:WHOLE_ARCHIVE,shardd_pic>" shardd_fake_cuda)
target_link_options(shardd_fake_libcuda PRIVATE -Wl,--version-script=${version_script} -Wl,-z,nodelete -Wl,-Bsymbolic)
if(NOT SHARDD_SANITIZE)
  target_link_options(shardd_fake_libcuda PRIVATE -Wl,-z,defs)
endif()
set_target_properties(shardd_fake_libcuda PROPERTIES OUTPUT_NAME cuda VERSION 1 SOVERSION 1 LINK_DEPENDS ${version_script}
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fakes)
shardd_portable(shardd_fake_libcuda)
# Beside it NVML, of which the daemon asks one thing.
add_library(shardd_fake_libnvml SHARED tests/fakes/cuda/libnvml/nvml.cc)
target_link_libraries(shardd_fake_libnvml PRIVATE shardd_options)
set_target_properties(shardd_fake_libnvml PROPERTIES OUTPUT_NAME nvidia-ml VERSION 1 SOVERSION 1
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fakes)
# And NCCL, over that driver.
shardd_folder(shardd_fake_nccl tests/fakes/nccl shardd_fake_cuda)
add_library(shardd_fake_libnccl SHARED tests/fakes/nccl/nccl.cc tests/fakes/nccl/shared_clique.cc
  tests/fakes/nccl/windows.cc)
target_link_libraries(shardd_fake_libnccl PRIVATE shardd_options shardd_nvidia shardd_fake_libcuda)
set_target_properties(shardd_fake_libnccl PROPERTIES OUTPUT_NAME nccl VERSION 2 SOVERSION 2
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fakes)
# And a wall clock that is set at each look.
add_library(shardd_fake_clock SHARED tests/fakes/clock/set_clock.cc)
target_link_libraries(shardd_fake_clock PRIVATE shardd_options)
set_target_properties(shardd_fake_clock PROPERTIES OUTPUT_NAME set_clock LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fakes)
shardd_count_no_coverage(shardd_fake_clock)
shardd_count_no_coverage(shardd_fake_libnvml)
shardd_count_no_coverage(shardd_fake_libnccl)
add_dependencies(shardd_programs shardd_fake_libcuda shardd_fake_libnvml shardd_fake_libnccl shardd_fake_clock)
shardd_tests(server/device unit shardd_device shardd_fake_cuda)
shardd_tests("server/collective;server/collective/nccl;server/collective/nodes" unit shardd_collective_nodes shardd_peer shardd_collective_nccl shardd_collective_trainers shardd_fake_nccl)
shardd_tests(server/turns unit shardd_turns)
shardd_tests(server/custodian multiproc shardd_custodian)
shardd_tests(server/tenant unit shardd_tenant)
shardd_tests(server/optimizer unit shardd_optimizer)
shardd_tests(server/observe unit shardd_observe)
shardd_tests(server/history unit shardd_history)
if(TARGET shardd_metrics)
  shardd_tests(server/metrics unit shardd_metrics shardd_loop)
endif()
shardd_tests("server/peer;server/relay" multiproc shardd_peer)
shardd_tests("server/job;server/job/*;server/daemon;server/loop;server/multinode;server/session;server/storage" unit shardd_daemon shardd_fake_cuda)
shardd_tests(service service shardd_service shardd_health_proto)
shardd_tests("client;client/api;client/attachment;client/daemon;client/host;client/job;client/session" multiproc shardd_client_impl)
shardd_tests_by_grpc(client RESOURCE_LOCK processes
  # What the calls do, and what ends their waits. Not traces, which need shared words.
  FILTER "Attach.*:Commands.*:*Edits*:FullParams.*:GradientPresence.*:*Hybrid*:Interrupt.*:OptimizerState.*:PassCopies.*:Recovery.*:TrainersWrite.*:Training.*")
shardd_tests(client/gpu unit shardd_client_impl shardd_fake_cuda)
if(TARGET shardd_fsdp)
  shardd_tests(client/fsdp unit shardd_fsdp)
endif()
shardd_tests("ctl;ctl/predict" unit shardd_ctl)
if(TARGET shardd_client)
  shardd_tests("e2e;e2e/gpus;e2e/nodes;e2e/ranks;e2e/versions" multiproc shardd_cpp shardd_custodian shardd_common shardd_grpc shardd_nvidia)
  # In the chain beside that of e2e, which is the longer one without them.
  shardd_tests_by_grpc(e2e RESOURCE_LOCK processes COST 450
    # Parity and faults on CPUs. Left out: parities that differ in what devices compute alone, and deaths of daemons at many
    # moments (a minute each).
    FILTER "Ranks/Parity.*:Placements/Parity.*:Pooled/Parity.*:Gradients/Parity.*:Training.*:Lifecycle.*:*PassesOnCpus.*:Passes.*:Order.*:*Abandon.*:AbandonedStep.*:Agreement.*:Refused.*:DaemonDeath.WhereRanksLoad*:DaemonDeath.ASuccessor*:DaemonDeath.Ranks*")
  # tests/gpu/run.sh runs what is about GPUs; with the daemon and the library beside it, it can be carried.
  if(TARGET e2e_test AND NOT SHARDD_SANITIZE)
    target_link_options(e2e_test PRIVATE -static-libstdc++ -static-libgcc)
    set_property(TARGET e2e_test APPEND PROPERTY BUILD_RPATH "$ORIGIN")
  endif()
  # Two binaries of one set of helpers, so that CI builds the attacks alone with a sanitizer.
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/faults/*.cc
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/faults/hostile/*.cc)
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  add_library(shardd_faults OBJECT ${sources})
  target_link_libraries(shardd_faults PUBLIC shardd_nvidia shardd_cpp shardd_peer shardd_custodian shardd_common shardd_grpc shardd_testing GTest::gmock
    PRIVATE shardd_options)
  # As an executable's objects, or the headers' would not fit.
  set_target_properties(shardd_faults PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(shardd_faults PRIVATE ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
  shardd_few_objects(shardd_faults)
  shardd_reads_test_headers(shardd_faults)
  foreach(folder faults faults/hostile)
    shardd_tests(${folder} multiproc shardd_faults)
  endforeach()
  shardd_benches(shardd_job shardd_peer shardd_cpp shardd_common shardd_grpc)
  if(TARGET shardd_torch)
    shardd_tests(torch multiproc shardd_torch shardd_common)
  endif()
endif()
shardd_tests(fuzz unit shardd_common shardd_grpc)
shardd_fuzzers(shardd_service shardd_common shardd_grpc)

# What cmake --install gives, as a trainer's project meets it.
if(TARGET shardd AND TARGET shardctl AND TARGET shardd_client AND NOT SHARDD_SANITIZE)
  add_test(NAME install/consumer COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/install_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR} ${CMAKE_CXX_COMPILER})
  set_tests_properties(install/consumer PROPERTIES LABELS multiproc TIMEOUT 300 ${SHARDD_BESIDE_E2E})
endif()
if(TARGET shardd AND TARGET shardctl AND TARGET shardd_client AND NOT SHARDD_SANITIZE)
  add_test(NAME install/packages COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/packages_test.py
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR})
  set_tests_properties(install/packages PROPERTIES LABELS multiproc TIMEOUT 600 ${SHARDD_BESIDE_E2E} SKIP_RETURN_CODE 77)
endif()
if(NOT SHARDD_SANITIZE AND EXISTS ${SHARDD_NVIDIA_DIR}/stamp)
  add_test(NAME install/nvidia_headers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/nvidia_headers_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${SHARDD_NVIDIA_DIR})
  add_test(NAME install/no_gpus COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/no_gpus_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CXX_COMPILER} ${SHARDD_NVIDIA_DIR})
  set_tests_properties(install/nvidia_headers install/no_gpus PROPERTIES LABELS multiproc TIMEOUT 600 ${SHARDD_BESIDE_E2E})
endif()
if(TARGET shardd AND TARGET shardctl AND TARGET linear AND NOT SHARDD_SANITIZE)
  add_test(NAME deploy/containers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/deploy/containers_test.sh ${CMAKE_BINARY_DIR})
  set_tests_properties(deploy/containers PROPERTIES LABELS multiproc TIMEOUT 120 RUN_SERIAL ON SKIP_RETURN_CODE 77)
endif()
if(TARGET shardd-metrics AND TARGET gpt AND NOT SHARDD_SANITIZE)
  add_test(NAME page/browser COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/page/page_test.py ${CMAKE_BINARY_DIR}/bin)
  set_tests_properties(page/browser PROPERTIES LABELS multiproc TIMEOUT 400 ${SHARDD_BESIDE_E2E} SKIP_RETURN_CODE 77)
endif()
if(TARGET gpt AND TARGET shardctl AND NOT SHARDD_SANITIZE)
  add_test(NAME deploy/trainjob_progress COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/deploy/trainjob_progress_test.py ${CMAKE_BINARY_DIR}/bin)
  set_tests_properties(deploy/trainjob_progress PROPERTIES LABELS multiproc TIMEOUT 200 ${SHARDD_BESIDE_E2E} SKIP_RETURN_CODE 77)
endif()
if(TARGET shardd_torch AND TARGET shardd AND NOT SHARDD_SANITIZE)
  add_test(NAME install/torch_consumer COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/torch_consumer_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR} ${CMAKE_CXX_COMPILER})
  set_tests_properties(install/torch_consumer PROPERTIES LABELS multiproc TIMEOUT 600 ${SHARDD_BESIDE_E2E} SKIP_RETURN_CODE 77)
endif()
if(TARGET gpt AND NOT SHARDD_SANITIZE)
  add_test(NAME install/quickstart COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/quickstart_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR}/bin)
  set_tests_properties(install/quickstart PROPERTIES LABELS multiproc TIMEOUT 300 ${SHARDD_BESIDE_E2E})
endif()

# What needs a GPU: one binary that can be carried to a machine with a driver and nothing else. Skipped, with the reason,
# where there is none.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/*.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/tests/server/device/kernel_*_test.cc)
list(FILTER sources EXCLUDE REGEX "/gpu\\.cc$")
foreach(source server/device/device_conformance_test.cc server/device/driver_conformance_test.cc
    server/collective/all_gather_test.cc server/collective/local_collective_test.cc
    server/collective/nccl/nccl_node.cc server/collective/reduce_scatter_test.cc testing/process.cc)
  list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/tests/${source})
endforeach()
if(SHARDD_KERNEL_FATBIN)
  set(load_fatbin ${CMAKE_BINARY_DIR}/gen/shardd_test_load.fatbin) # what trainers compute, for tests alone
  add_custom_command(OUTPUT ${load_fatbin} DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/load.cu
    COMMAND ${SHARDD_NVCC} -std=c++20 -O3 -Werror all-warnings ${gencode} -fatbin -o ${load_fatbin}
            ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/load.cu
    COMMAND_EXPAND_LISTS)
  set_source_files_properties(tests/gpu/gpu.cc PROPERTIES OBJECT_DEPENDS ${load_fatbin}
    COMPILE_DEFINITIONS SHARDD_TEST_LOAD_FATBIN="${load_fatbin}")
  shardd_test_batches(gpu_test)
  add_executable(gpu_test ${sources} tests/gpu/gpu.cc)
  target_link_libraries(gpu_test PRIVATE shardd_nvidia shardd_collective_nodes shardd_device shardd_custodian shardd_options GTest::gmock)
  set_target_properties(gpu_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  shardd_portable(gpu_test)
  gtest_discover_tests(gpu_test TEST_PREFIX "gpu/" PROPERTIES LABELS gpu TIMEOUT ${SHARDD_TEST_TIMEOUT_S} RUN_SERIAL ON
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
endif()

# The Python package: the extension is built against this build, then one entry per file of cases below tests/python.
if(TARGET shardd AND TARGET shardctl AND TARGET shardd_client AND SHARDD_HAVE_TORCH AND NOT SHARDD_SANITIZE)
  set(python_tests ${CMAKE_CURRENT_SOURCE_DIR}/tests/python)
  add_test(NAME python/extension COMMAND ${python_tests}/run.sh ${CMAKE_BINARY_DIR} --build-only)
  set_tests_properties(python/extension PROPERTIES FIXTURES_SETUP python_extension)
  set(names python/extension)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${python_tests} ${python_tests}/test_*.py)
  foreach(file IN LISTS files)
    string(REGEX REPLACE "\\.py$" "" name ${file})
    add_test(NAME python/${name} COMMAND ${python_tests}/run.sh ${CMAKE_BINARY_DIR} ${python_tests}/${file})
    set_tests_properties(python/${name} PROPERTIES FIXTURES_REQUIRED python_extension)
    list(APPEND names python/${name})
  endforeach()
  set_tests_properties(${names} PROPERTIES LABELS "python;multiproc" TIMEOUT 900 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  set_tests_properties(python/extension PROPERTIES RUN_SERIAL OFF ${SHARDD_BESIDE_E2E}) # benchmarks wait for it
  # Each benchmark against PyTorch, briefly.
  function(shardd_torch_bench name)
    add_test(NAME bench/${name} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python
      ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench/${name}.py --bin ${CMAKE_BINARY_DIR}/bin --rounds 1 ${ARGN})
    set_tests_properties(bench/${name} PROPERTIES LABELS bench_smoke TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ${SHARDD_BESIDE_E2E}
      FIXTURES_REQUIRED python_extension)
  endfunction()
  shardd_torch_bench(torch_step --sizes S --steps 1 --implementations floor fsdp2 shardd)
  shardd_torch_bench(torch_modules --worlds 2 --modules 4 --implementations sharddf)
  shardd_torch_bench(torch_short --models 1 --modules 2 --implementations shardd)
  shardd_torch_bench(torch_memory --size S --steps 1 --implementations shardd)
  shardd_torch_bench(torch_state_dict --size S --implementations fsdp2 shardd fsdp1 shardd1)
  add_test(NAME bench/daemon_death COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench/daemon_death.py --bin ${CMAKE_BINARY_DIR}/bin --kills 1 -- --layers 1 --width 32 --heads 2)
  set_tests_properties(bench/daemon_death PROPERTIES LABELS bench_smoke TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ${SHARDD_BESIDE_E2E})
  add_test(NAME bench/operators_cost COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench/operators_cost.py --bin ${CMAKE_BINARY_DIR}/bin --rounds 1 --steps 8 -- --layers 1 --width 32 --heads 2)
  set_tests_properties(bench/operators_cost PROPERTIES LABELS bench_smoke TIMEOUT ${SHARDD_TEST_TIMEOUT_S} ${SHARDD_BESIDE_E2E}
    SKIP_RETURN_CODE 77)
  # pip install ./client/python, and a program that has nothing else.
  add_test(NAME install/python COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/python_test.sh
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR})
  set_tests_properties(install/python PROPERTIES LABELS multiproc TIMEOUT 600 ${SHARDD_BESIDE_E2E} SKIP_RETURN_CODE 77)
endif()
