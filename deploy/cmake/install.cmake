# cmake --install: bin/shardd, bin/shardd-custodian, bin/shardd-metrics, bin/shardctl and its completion, lib/libshardd.so, headers, protos and the package
# file. A trainer then says
#   find_package(shardd REQUIRED)
#   target_link_libraries(trainer PRIVATE shardd::cpp)            # or shardd::c
# and includes the headers as the project itself does: #include "client/cpp/shardd.h".
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/shardd)

foreach(program shardd shardd-custodian shardd-metrics shardctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(FILES client/ctl/shardctl.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME shardctl)
if(TARGET shardd_client)
  install(TARGETS shardd_client shardd_cpp EXPORT shardd LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES client/c/shardd.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/c)
  install(DIRECTORY client/cpp/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/cpp FILES_MATCHING PATTERN "*.h")
  install(EXPORT shardd NAMESPACE shardd:: FILE shardd-targets.cmake DESTINATION ${package_dir})
endif()
# The adaptor is installed as source: it has to match the trainer's own libtorch, compiler and C++ library.
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/client/torch)
  foreach(folder torch fsdp)
    install(DIRECTORY client/${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/${folder}
      FILES_MATCHING PATTERN "*.h" PATTERN "*.cc")
  endforeach()
endif()
# The services and what a job's JSON may say, as include/shardd/client/c/shardd.h refers to them; for clients of other languages, too.
install(DIRECTORY proto/ DESTINATION ${CMAKE_INSTALL_DATADIR}/shardd/proto FILES_MATCHING PATTERN "*.proto")
configure_package_config_file(deploy/cmake/shardd-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/shardd-config.cmake
  INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/shardd-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/shardd-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/shardd-config-version.cmake
  DESTINATION ${package_dir})
