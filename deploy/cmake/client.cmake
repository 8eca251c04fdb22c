# libshardd.so (the C ABI), the C++ API over it, the libtorch adaptor, shardctl, the example.

# Optimised, CLI11's templates cost 25 s of a core a file, for a dozen arguments that are read once.
set_source_files_properties(client/ctl/options.cc client/examples/gpt/flags.cc PROPERTIES
  COMPILE_OPTIONS "-O0;-g0" SKIP_UNITY_BUILD_INCLUSION ON)

# shardd_client_impl is the same code as a static library, for tests that look inside.
shardd_folder(shardd_client_impl "client/c/*" shardd_common shardd_grpc)
get_target_property(type shardd_client_impl TYPE)
target_link_libraries(shardd_client_impl PUBLIC shardd_nvidia) # tests look inside
if(type STREQUAL "STATIC_LIBRARY")
  # The library lives in other people's processes, beside other copies of gRPC and protobuf: it brings its own, exports
  # shardd_* and nothing else, and needs only glibc.
  set(version_script ${CMAKE_CURRENT_SOURCE_DIR}/deploy/cmake/libshardd.map)
  file(CONFIGURE OUTPUT ${SHARDD_GEN}/libshardd.cc CONTENT "// all code comes from shardd_client_impl\n")
  add_library(shardd_client SHARED ${SHARDD_GEN}/libshardd.cc)
  target_link_libraries(shardd_client PRIVATE "$<LINK_LIBRARY:WHOLE_ARCHIVE,shardd_pic,shardd_client_impl>")
  target_link_options(shardd_client PRIVATE -Wl,--version-script=${version_script})
  if(NOT SHARDD_SANITIZE)
    target_link_options(shardd_client PRIVATE -Wl,-z,defs)
  endif()
  set_target_properties(shardd_client PROPERTIES OUTPUT_NAME shardd LINKER_LANGUAGE CXX LINK_DEPENDS ${version_script}
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
  target_include_directories(shardd_client INTERFACE $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/shardd>)
  set_target_properties(shardd_client PROPERTIES EXPORT_NAME c)
  shardd_portable(shardd_client)
  add_library(shardd::c ALIAS shardd_client)

  # The C++ API is headers over the C ABI: whatever compiler and standard library the trainer has.
  add_library(shardd_cpp INTERFACE)
  target_link_libraries(shardd_cpp INTERFACE shardd_client)
  set_target_properties(shardd_cpp PROPERTIES EXPORT_NAME cpp)
  add_library(shardd::cpp ALIAS shardd_cpp)

  # The life of a parameter group, which the adaptor and the Python extension compile for themselves; here for its tests.
  shardd_folder(shardd_fsdp client/fsdp shardd_cpp)

  if(SHARDD_HAVE_TORCH)
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/client/torch/*.cc
      ${CMAKE_CURRENT_SOURCE_DIR}/client/fsdp/*.cc)
    if(sources)
      add_library(shardd_torch STATIC ${sources})
      target_link_libraries(shardd_torch PUBLIC shardd_cpp shardd_torch_deps PRIVATE shardd_options)
      shardd_few_objects(shardd_torch)
    endif()
  endif()

  # client/examples/x.cc is one program; other files of a program live in client/examples/x/. Those that include torch are
  # built where it is installed.
  file(GLOB examples CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/client/examples/*.cc)
  foreach(example IN LISTS examples)
    get_filename_component(name ${example} NAME_WE)
    file(GLOB parts CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/client/examples/${name}/*.cc)
    file(STRINGS ${example} torch_includes REGEX "#include [<\"](torch|ATen|client/torch)/")
    set(library shardd_cpp)
    if(torch_includes)
      set(library shardd_torch)
    endif()
    if(NOT TARGET ${library})
      continue()
    endif()
    add_executable(${name} ${example} ${parts})
    target_link_libraries(${name} PRIVATE ${library} shardd_options CLI11::CLI11)
    shardd_few_objects(${name})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
    shardd_instrument(${name})
  endforeach()
endif()

shardd_folder(shardd_ctl "client/ctl;client/ctl/*" shardd_common shardd_figures shardd_grpc shardd_schedule)
target_link_libraries(shardd_ctl PRIVATE CLI11::CLI11 nlohmann_json::nlohmann_json)
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/client/ctl/main.cc)
  add_executable(shardctl client/ctl/main.cc)
  target_link_libraries(shardctl PRIVATE shardd_ctl shardd_options)
  set_target_properties(shardctl PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  shardd_portable(shardctl)
endif()
