# The CUDA module `jaxmagi._cuda`. A custom command compiles each kernel file. CMake's CUDA language is not used: it
# aborts the configuration where a compiler is broken, keeps the first compiler that a build folder saw, and does not
# find the libraries of PyPI's wheels.

set(JAXMAGI_CUDA AUTO CACHE STRING "Build for CUDA: AUTO, ON or OFF")
set_property(CACHE JAXMAGI_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT JAXMAGI_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "JAXMAGI_CUDA must be AUTO, ON or OFF, got ${JAXMAGI_CUDA}")
elseif(JAXMAGI_CUDA STREQUAL "OFF")
  return()
endif()

include(JaxmagiNvcc)
if(NOT JAXMAGI_NVCC AND JAXMAGI_CUDA STREQUAL "ON")
  message(FATAL_ERROR "JAXMAGI_CUDA=ON needs nvcc >= ${JAXMAGI_MIN_NVCC}; found: ${JAXMAGI_NVCC_ERRORS}")
elseif(NOT JAXMAGI_NVCC)
  message(STATUS "CUDA: skipped, nvcc >= ${JAXMAGI_MIN_NVCC} is needed; found: ${JAXMAGI_NVCC_ERRORS}")
  return()
endif()

# Another Python, as in an isolated build, runs the generator again; an unchanged output is left untouched.
set(wgmma_generator "${PROJECT_SOURCE_DIR}/csrc/common/sm90/generate_wgmma.py")
set(wgmma_shapes "${PROJECT_BINARY_DIR}/generated/wgmma_shapes.inc")
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/generated")
add_custom_command(
  OUTPUT "${wgmma_shapes}"
  COMMAND "${Python_EXECUTABLE}" "${wgmma_generator}" "${wgmma_shapes}.new"
  COMMAND "${CMAKE_COMMAND}" -E copy_if_different "${wgmma_shapes}.new" "${wgmma_shapes}"
  DEPENDS "${wgmma_generator}"
  VERBATIM)

function(jaxmagi_compile_kernels OUT)
  foreach(source IN LISTS ARGN)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    set(object "${PROJECT_BINARY_DIR}/kernels/${name}.o")
    cmake_path(GET object PARENT_PATH folder)
    file(MAKE_DIRECTORY "${folder}")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${JAXMAGI_NVCC}" -c "${source}" -o "${object}" -MD -MF "${object}.d"
      DEPENDS "${source}" "${JAXMAGI_NVCC}" "${wgmma_shapes}"
      DEPFILE "${object}.d"
      COMMENT "Building CUDA object kernels/${name}.o"
      VERBATIM)
    list(APPEND objects "${object}")
  endforeach()
  set(${OUT} "${objects}" PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE kernels CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/*.cu")
set(xla_ffi "${PROJECT_SOURCE_DIR}/xla_ffi")
file(GLOB host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/collectives/*.cc" "${xla_ffi}/attention_cuda_*.cc"
     "${xla_ffi}/collectives_*.cc" "${xla_ffi}/communicator.cc" "${xla_ffi}/context_*.cc" "${xla_ffi}/device_memory.cc"
     "${xla_ffi}/module_cuda.cc" "${xla_ffi}/overlap_cuda.cc")
jaxmagi_compile_kernels(kernel_objects ${kernels})
jaxmagi_add_module(_cuda ${host_sources} ${kernel_objects})
target_include_directories(_cuda PRIVATE "${PROJECT_BINARY_DIR}/generated")
target_include_directories(_cuda SYSTEM PRIVATE ${JAXMAGI_CUDA_INCLUDE_DIRS})
target_link_libraries(_cuda PRIVATE "${JAXMAGI_CUDART}" dl rt pthread)

# Every build hashes the sources before it compiles, so that sources that change meanwhile have another hash.
set(sources_header "${PROJECT_BINARY_DIR}/generated/sources.h")
add_custom_target(
  sources_hash
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/sources_hash.py" "${sources_header}"
  BYPRODUCTS "${sources_header}"
  COMMENT "Hashing the sources"
  VERBATIM)
add_dependencies(_cuda sources_hash)
