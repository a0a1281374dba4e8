# The CPU module `jaxmagi._cpu`. Tile kernels are compiled once per instruction set and chosen at run time,
# everything else for the baseline, so that one wheel runs on every machine of its architecture.

set(jaxmagi_warnings -Wall -Wextra)
set(kernel_source "${PROJECT_SOURCE_DIR}/csrc/attention/cpu/tile_kernels.cc")

function(jaxmagi_add_kernels ISA)
  add_library(jaxmagi_kernels_${ISA} OBJECT "${kernel_source}")
  target_include_directories(jaxmagi_kernels_${ISA} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(jaxmagi_kernels_${ISA} PRIVATE JAXMAGI_ISA=${ISA})
  target_compile_options(jaxmagi_kernels_${ISA} PRIVATE ${jaxmagi_warnings} -ffp-contract=fast ${ARGN})
  set_target_properties(jaxmagi_kernels_${ISA} PROPERTIES POSITION_INDEPENDENT_CODE ON
                                                          CXX_VISIBILITY_PRESET hidden)
  target_sources(_cpu PRIVATE $<TARGET_OBJECTS:jaxmagi_kernels_${ISA}>)
endfunction()

nanobind_add_module(
  _cpu STABLE_ABI NB_STATIC NOMINSIZE
  csrc/attention/cpu/backward.cc
  csrc/attention/cpu/backward_schedule.cc
  csrc/attention/cpu/dispatch.cc
  csrc/attention/cpu/forward.cc
  csrc/common/parallel.cc
  csrc/mask/tile_index.cc
  xla_ffi/attention_cpu.cc
  xla_ffi/module_cpu.cc)
target_include_directories(_cpu PRIVATE "${PROJECT_SOURCE_DIR}")
target_compile_options(_cpu PRIVATE ${jaxmagi_warnings})
target_link_libraries(_cpu PRIVATE jaxmagi_ffi_headers)
# libstdc++ and libgcc travel inside, so that their versions on the user's machine do not matter, and the version
# script keeps their symbols to the module: some (weak and unique ones) would otherwise be merged with another
# module's copy.
set(exports "${CMAKE_CURRENT_LIST_DIR}/exports.map")
target_link_options(_cpu PRIVATE -static-libstdc++ -static-libgcc "LINKER:--version-script=${exports}"
                    "LINKER:--gc-sections")
set_target_properties(_cpu PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                      LINK_DEPENDS "${exports}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  target_compile_options(_cpu PRIVATE -march=x86-64-v2)
  target_compile_definitions(_cpu PRIVATE JAXMAGI_X86_DISPATCH)
  set(avx2_flags -march=x86-64-v2 -mavx2 -mfma)
  jaxmagi_add_kernels(generic -march=x86-64-v2)
  jaxmagi_add_kernels(avx2 ${avx2_flags})
  jaxmagi_add_kernels(avx512 ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
else()
  jaxmagi_add_kernels(generic)
endif()

install(TARGETS _cpu LIBRARY DESTINATION jaxmagi)

# Running from the source tree: `cmake --build … --target develop` puts the module into the package.
add_custom_target(
  develop
  COMMAND "${CMAKE_COMMAND}" -E create_symlink "$<TARGET_FILE:_cpu>"
          "${PROJECT_SOURCE_DIR}/jaxmagi/$<TARGET_FILE_NAME:_cpu>"
  DEPENDS _cpu)
