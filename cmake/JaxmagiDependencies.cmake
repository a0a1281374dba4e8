# nanobind and XLA's FFI headers, both from the Python that builds.

function(jaxmagi_ask_python OUT CODE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${CODE}"
    OUTPUT_VARIABLE answer
    ERROR_VARIABLE complaint
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} failed on `${CODE}`:\n${complaint}")
  endif()
  set(${OUT} "${answer}" PARENT_SCOPE)
endfunction()

jaxmagi_ask_python(nanobind_ROOT "import nanobind; print(nanobind.cmake_dir())")
find_package(nanobind CONFIG REQUIRED)

# jaxlib has the headers: jax, which has jax.ffi.include_dir(), is not needed to build.
jaxmagi_ask_python(
  jaxlib_dir
  "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('jaxlib').origin).parent)")
find_path(JAXMAGI_FFI_INCLUDE_DIR "xla/ffi/api/ffi.h" PATHS "${jaxlib_dir}/include" NO_DEFAULT_PATH REQUIRED)

add_library(jaxmagi_ffi_headers INTERFACE)
target_include_directories(jaxmagi_ffi_headers SYSTEM INTERFACE "${JAXMAGI_FFI_INCLUDE_DIR}")
