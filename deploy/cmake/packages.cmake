# Debian packages of what is built: cpack -G DEB --config build/release/CPackConfig.cmake -B packages. One for each component of
# install.cmake; dpkg-shlibdeps finds what each needs. Programs are for the Debian that they were built on.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR shardd)
set(CPACK_PACKAGE_CONTACT "shardd <root@localhost>" CACHE STRING "Maintainer of the packages: name <address>")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_STRIP_FILES ON)
# Whatever prefix the build was configured with; as DESTDIR, because units name the programs' folder.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL daemon ctl library devel)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  set(CPACK_COMPONENT_${component}_GROUP ${component})
endforeach()

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(same "(= ${PROJECT_VERSION}-1)")

# shardd_package(component name section depends summary text)
macro(shardd_package component name section depends summary text)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${upper}_PACKAGE_DEPENDS "${depends}")
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${text}")
  install(FILES deploy/debian/copyright DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} COMPONENT ${component})
endmacro()
# The unit's ExecReload is shardctl's; the scripts below make users.
shardd_package(daemon shardd admin "shardctl ${same}, systemd | systemd-standalone-sysusers"
  "daemon that owns the shards of training jobs"
  "One daemon per node owns parameter shards, gradient shards and optimizer
state of that node's training jobs, whose trainers may die and be replaced.
With its custodian, which holds the memory while the daemon is restarted,
shardd-metrics, and units, which are not started unasked:
systemctl enable --now shardd.service")
shardd_package(ctl shardctl admin "" "operator's view of a node's shardd"
  "Shows jobs, ranks, memory, streams, events and history of a shardd, records
traces, and closes jobs.")
shardd_package(library libshardd${PROJECT_VERSION_MAJOR} libs "" "client library of shardd"
  "The C interface that trainers link. It needs nothing but glibc.")
shardd_package(devel libshardd-dev libdevel "libshardd${PROJECT_VERSION_MAJOR} ${same}" "headers of shardd's client library"
  "The C and C++ interfaces, find_package(shardd), the sources of the adaptor for
libtorch, and the protos of the services, for clients of other languages.")
set(CPACK_DEBIAN_CTL_PACKAGE_SUGGESTS "bash-completion, zsh")
set(CPACK_DEBIAN_DAEMON_PACKAGE_SUGGESTS "prometheus")
set(scripts ${CMAKE_CURRENT_SOURCE_DIR}/deploy/debian)
set(CPACK_DEBIAN_DAEMON_PACKAGE_CONTROL_EXTRA ${scripts}/postinst ${scripts}/prerm ${scripts}/postrm)
include(CPack)
