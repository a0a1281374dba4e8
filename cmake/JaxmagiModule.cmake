# Defines how extension modules are built. `cmake --build … --target develop` links them into the package of the
# source tree.

set(jaxmagi_warnings -Wall -Wextra)
set(jaxmagi_exports "${CMAKE_CURRENT_LIST_DIR}/exports.map")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(jaxmagi_baseline -march=x86-64-v2)
endif()
add_custom_target(develop)

function(jaxmagi_add_module MODULE)
  nanobind_add_module(${MODULE} STABLE_ABI NB_STATIC NOMINSIZE ${ARGN})
  target_include_directories(${MODULE} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${MODULE} PRIVATE ${jaxmagi_warnings} ${jaxmagi_baseline})
  target_link_libraries(${MODULE} PRIVATE jaxmagi_ffi_headers)
  # libstdc++ and libgcc are linked statically, so that their versions on the user's machine do not matter. The version
  # script hides their symbols: weak and unique ones would otherwise be merged with another module's copy.
  target_link_options(${MODULE} PRIVATE -static-libstdc++ -static-libgcc
                      "LINKER:--version-script=${jaxmagi_exports}" "LINKER:--gc-sections")
  set_target_properties(${MODULE} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                             LINK_DEPENDS "${jaxmagi_exports}")
  install(TARGETS ${MODULE} LIBRARY DESTINATION jaxmagi)
  add_custom_target(
    develop${MODULE}
    COMMAND "${CMAKE_COMMAND}" -E create_symlink "$<TARGET_FILE:${MODULE}>"
            "${PROJECT_SOURCE_DIR}/jaxmagi/$<TARGET_FILE_NAME:${MODULE}>"
    DEPENDS ${MODULE})
  add_dependencies(develop develop${MODULE})
endfunction()
