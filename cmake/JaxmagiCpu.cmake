# The CPU module `jaxmagi._cpu`. Tile kernels are compiled once per instruction set and chosen at run time,
# everything else for the baseline, so that one wheel runs on every machine of its architecture.

set(kernel_source "${PROJECT_SOURCE_DIR}/csrc/attention/cpu/tile_kernels.cc")

function(jaxmagi_add_kernels ISA)
  add_library(jaxmagi_kernels_${ISA} OBJECT "${kernel_source}")
  target_include_directories(jaxmagi_kernels_${ISA} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(jaxmagi_kernels_${ISA} PRIVATE JAXMAGI_ISA=${ISA})
  target_compile_options(jaxmagi_kernels_${ISA} PRIVATE ${jaxmagi_warnings} ${jaxmagi_baseline} -ffp-contract=fast
                                                        ${ARGN})
  set_target_properties(jaxmagi_kernels_${ISA} PROPERTIES POSITION_INDEPENDENT_CODE ON
                                                          CXX_VISIBILITY_PRESET hidden)
  target_sources(_cpu PRIVATE $<TARGET_OBJECTS:jaxmagi_kernels_${ISA}>)
endfunction()

jaxmagi_add_module(
  _cpu
  csrc/attention/cpu/backward.cc
  csrc/attention/cpu/backward_schedule.cc
  csrc/attention/cpu/dispatch.cc
  csrc/attention/cpu/forward.cc
  csrc/common/parallel.cc
  csrc/mask/tile_count.cc
  csrc/mask/tile_index.cc
  csrc/planning/balance.cc
  csrc/planning/balancer.cc
  csrc/planning/first_assignment.cc
  csrc/planning/merge.cc
  csrc/planning/owners.cc
  csrc/planning/rank_chunks.cc
  csrc/planning/routing.cc
  csrc/planning/runs.cc
  csrc/planning/shard.cc
  csrc/planning/swap_search.cc
  csrc/planning/tile_work.cc
  csrc/planning/transfers.cc
  csrc/planning/units.cc
  xla_ffi/attention_cpu.cc
  xla_ffi/module_cpu.cc
  xla_ffi/planning.cc)

# Plans are made on every host, and have to be the same ones: no compiler may fuse a product into a sum.
target_compile_options(_cpu PRIVATE -ffp-contract=off)

jaxmagi_add_kernels(generic)
if(jaxmagi_baseline)
  target_compile_definitions(_cpu PRIVATE JAXMAGI_X86_DISPATCH)
  set(avx2_flags -mavx2 -mfma)
  jaxmagi_add_kernels(avx2 ${avx2_flags})
  jaxmagi_add_kernels(avx512 ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
endif()
