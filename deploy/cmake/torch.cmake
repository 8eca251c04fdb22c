# libtorch from the pip wheel in .venv, as the imported target shardd_torch_deps. Named by hand: the wheel's own package
# file stops the configuration where a CUDA wheel meets a machine without the CUDA toolkit.
set(SHARDD_HAVE_TORCH OFF)
if(SHARDD_TORCH)
  file(GLOB torch_candidates ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  if(torch_candidates)
    list(GET torch_candidates 0 SHARDD_TORCH_DIR)
  endif()
  if(torch_candidates AND EXISTS ${SHARDD_TORCH_DIR}/lib/libtorch_cpu.so)
    set(SHARDD_HAVE_TORCH ON)
    add_library(shardd_torch_deps INTERFACE)
    target_include_directories(shardd_torch_deps SYSTEM INTERFACE ${SHARDD_TORCH_DIR}/include
      ${SHARDD_TORCH_DIR}/include/torch/csrc/api/include)
    target_link_libraries(shardd_torch_deps INTERFACE ${SHARDD_TORCH_DIR}/lib/libtorch.so
      ${SHARDD_TORCH_DIR}/lib/libtorch_cpu.so ${SHARDD_TORCH_DIR}/lib/libc10.so Threads::Threads)
  else()
    message(STATUS "shardd: no torch in .venv (deploy/bootstrap.sh installs it): no libtorch adaptor, example and their tests")
  endif()
endif()
