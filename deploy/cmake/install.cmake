# cmake --install: bin/shardd, bin/shardd-custodian, bin/shardd-metrics, bin/shardctl with manual pages and completions, units,
# lib/libshardd.so, headers, protos and the package file. A trainer then says
#   find_package(shardd REQUIRED)
#   target_link_libraries(trainer PRIVATE shardd::cpp)            # or shardd::c
# and includes the headers as the project itself does: #include "client/cpp/shardd.h".
# Each component is a Debian package (packages.cmake); without --component all are installed.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/shardd)

foreach(program shardd shardd-custodian shardd-metrics)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
  endif()
endforeach()
# Units name the programs where they are installed. systemd looks below /usr/local, too.
file(GLOB units CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/deploy/systemd/shardd*.service)
install(CODE "foreach(unit ${units})
  cmake_path(GET unit FILENAME name)
  file(READ \${unit} text)
  string(REPLACE /usr/local/bin \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\" text \"\${text}\")
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/units/\${name} \"\${text}\")
  file(INSTALL ${CMAKE_CURRENT_BINARY_DIR}/units/\${name} DESTINATION \${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
endforeach()" COMPONENT daemon)
install(FILES deploy/systemd/shardd.sysusers DESTINATION lib/sysusers.d RENAME shardd.conf COMPONENT daemon)
install(FILES deploy/systemd/shardd.tmpfiles DESTINATION lib/tmpfiles.d RENAME shardd.conf COMPONENT daemon)
# Drop-ins, for /etc/systemd/system/shardd.service.d.
file(GLOB drop_ins CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/deploy/systemd/*.conf)
install(FILES ${drop_ins} DESTINATION ${CMAKE_INSTALL_DATADIR}/shardd/systemd COMPONENT daemon)
# What Prometheus, a collector and Grafana take.
install(FILES deploy/prometheus/prometheus.yml deploy/prometheus/shardd.rules.yml deploy/prometheus/otel-collector.yml
  DESTINATION ${CMAKE_INSTALL_DATADIR}/shardd/prometheus COMPONENT daemon)
install(FILES deploy/grafana/shardd.json DESTINATION ${CMAKE_INSTALL_DATADIR}/shardd/grafana COMPONENT daemon)

if(TARGET shardctl)
  install(TARGETS shardctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT ctl)
endif()
install(FILES client/ctl/shardctl.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME shardctl
  COMPONENT ctl)
install(FILES client/ctl/shardctl.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions RENAME _shardctl
  COMPONENT ctl)

# Manual pages, of the programs that are built; the target is part of `all`, and by itself: shardd_man.
find_program(SHARDD_PYTHON python3)
if(SHARDD_PYTHON AND TARGET shardd AND TARGET shardctl AND NOT SHARDD_SANITIZE)
  set(man ${CMAKE_BINARY_DIR}/man)
  set(programs shardd shardd-custodian shardctl)
  if(TARGET shardd-metrics)
    list(APPEND programs shardd-metrics)
  endif()
  add_custom_command(OUTPUT ${man}/stamp DEPENDS ${programs} ${CMAKE_CURRENT_SOURCE_DIR}/deploy/man/make_pages.py
    COMMAND ${SHARDD_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/deploy/man/make_pages.py ${CMAKE_BINARY_DIR}/bin ${man} > ${man}/stamp VERBATIM)
  file(MAKE_DIRECTORY ${man})
  add_custom_target(shardd_man ALL DEPENDS ${man}/stamp)
  foreach(page shardd.8 shardd-custodian.8 shardd-metrics.8)
    install(FILES ${man}/${page}.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man8 COMPONENT daemon OPTIONAL)
  endforeach()
  install(FILES ${man}/shardctl.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT ctl OPTIONAL)
endif()

if(TARGET shardd_client)
  install(TARGETS shardd_client shardd_cpp EXPORT shardd
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT devel)
  install(FILES client/c/shardd.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/c COMPONENT devel)
  install(DIRECTORY client/cpp/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/cpp COMPONENT devel
    FILES_MATCHING PATTERN "*.h")
  install(EXPORT shardd NAMESPACE shardd:: FILE shardd-targets.cmake DESTINATION ${package_dir} COMPONENT devel)
endif()
# The adaptor is installed as source: it has to match the trainer's own libtorch, compiler and C++ library.
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/client/torch)
  foreach(folder torch fsdp)
    install(DIRECTORY client/${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardd/client/${folder} COMPONENT devel
      FILES_MATCHING PATTERN "*.h" PATTERN "*.cc")
  endforeach()
endif()
# The services and what a job's JSON may say, as include/shardd/client/c/shardd.h refers to them; for clients of other languages, too.
install(DIRECTORY proto/ DESTINATION ${CMAKE_INSTALL_DATADIR}/shardd/proto COMPONENT devel FILES_MATCHING PATTERN "*.proto")
configure_package_config_file(deploy/cmake/shardd-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/shardd-config.cmake
  INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/shardd-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/shardd-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/shardd-config-version.cmake
  DESTINATION ${package_dir} COMPONENT devel)
