# Finds an nvcc that compiles for Hopper, in a system's toolkit or in the wheels of PyPI. Sets
#   JAXMAGI_NVCC              a script in the build folder: that nvcc with the flags of all kernels
#   JAXMAGI_CUDA_INCLUDE_DIRS headers of the CUDA runtime, for the host compiler
#   JAXMAGI_CUDART            libcudart_static.a
# or JAXMAGI_NVCC_ERRORS, which describes why the candidates cannot be used.

set(JAXMAGI_MIN_NVCC 12.8)
set(jaxmagi_nvcc_template "${CMAKE_CURRENT_LIST_DIR}/nvcc_sm90a.in")
set(jaxmagi_nvcc_trial "${CMAKE_CURRENT_LIST_DIR}/nvcc_trial.cu")

# Returns candidates in order of preference. If CUDACXX is set, it is the only candidate. pip's isolated builds hide the
# packages of the environment that is installed into, whose wheels purelib finds.
function(jaxmagi_nvcc_candidates OUT)
  if(NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(chosen NAMES "$ENV{CUDACXX}" NO_CACHE)  # a path, or a name in PATH
    set(${OUT} "${chosen}" PARENT_SCOPE)
    return()
  endif()
  find_program(nvcc_in_path nvcc NO_CACHE)
  string(CONCAT question "import importlib.util, sysconfig; found = importlib.util.find_spec('nvidia'); "
         "folders = list(found.submodule_search_locations) if found else []; "
         "print(*folders, sysconfig.get_path('purelib') + '/nvidia', sep=';')")
  jaxmagi_ask_python(wheels "${question}")
  set(found ${nvcc_in_path})
  foreach(root IN LISTS wheels)
    list(APPEND found "${root}/cu13/bin/nvcc")
  endforeach()
  if(NOT "$ENV{CUDA_HOME}" STREQUAL "")
    list(APPEND found "$ENV{CUDA_HOME}/bin/nvcc")
  endif()
  list(APPEND found /usr/local/cuda/bin/nvcc)
  list(REMOVE_DUPLICATES found)
  set(${OUT} "${found}" PARENT_SCOPE)
endfunction()

# Returns the folders that nvcc passes to its host compiler and linker; `nvcc` itself may be a script or a link.
function(jaxmagi_nvcc_folders NVCC INCLUDE_DIRS CUDART)
  execute_process(COMMAND "${NVCC}" --dryrun -x cu -c /dev/null ERROR_VARIABLE plan OUTPUT_QUIET)
  string(REGEX MATCHALL "\"-I[^\"]+" include_dirs "${plan}")
  list(TRANSFORM include_dirs REPLACE "^\"-I" "")
  list(REMOVE_DUPLICATES include_dirs)
  string(REGEX MATCHALL "\"-L[^\"]+" library_dirs "${plan}")
  list(TRANSFORM library_dirs REPLACE "^\"-L" "")
  if(plan MATCHES "TOP=([^\n]+)")
    list(APPEND library_dirs "${CMAKE_MATCH_1}/lib")  # the wheels have lib, but their nvcc looks in lib64
  endif()
  find_library(cudart libcudart_static.a PATHS ${library_dirs} NO_DEFAULT_PATH NO_CACHE)
  set(${INCLUDE_DIRS} "${include_dirs}" PARENT_SCOPE)
  set(${CUDART} "${cudart}" PARENT_SCOPE)
endfunction()

# Sets ERROR to the reason if `nvcc` cannot be used; otherwise sets JAXMAGI_NVCC and the other variables of this file.
function(jaxmagi_try_nvcc nvcc ERROR)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE banner ERROR_QUIET)
  if(NOT banner MATCHES "release [0-9.]+, V([0-9.]+)")
    set(${ERROR} "does not run" PARENT_SCOPE)
    return()
  endif()
  set(version "${CMAKE_MATCH_1}")
  if(version VERSION_LESS JAXMAGI_MIN_NVCC)
    set(${ERROR} "version ${version}" PARENT_SCOPE)
    return()
  endif()
  jaxmagi_nvcc_folders("${nvcc}" include_dirs cudart)
  if(NOT cudart)
    set(${ERROR} "version ${version}, without libcudart_static.a" PARENT_SCOPE)
    return()
  endif()
  cmake_path(GET cudart PARENT_PATH cudart_dir)
  set(script "${PROJECT_BINARY_DIR}/nvcc_sm90a")
  configure_file("${jaxmagi_nvcc_template}" "${script}" @ONLY FILE_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  execute_process(
    COMMAND "${script}" "${jaxmagi_nvcc_trial}" -o "${PROJECT_BINARY_DIR}/nvcc_trial"
    OUTPUT_VARIABLE complaint
    ERROR_VARIABLE complaint
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${ERROR} "version ${version}, does not compile ${jaxmagi_nvcc_trial}:\n${complaint}" PARENT_SCOPE)
    return()
  endif()
  message(STATUS "CUDA: nvcc ${version} at ${nvcc}")
  set(JAXMAGI_NVCC "${script}" PARENT_SCOPE)
  set(JAXMAGI_CUDA_INCLUDE_DIRS "${include_dirs}" PARENT_SCOPE)
  set(JAXMAGI_CUDART "${cudart}" PARENT_SCOPE)
  set(${ERROR} "" PARENT_SCOPE)
endfunction()

jaxmagi_nvcc_candidates(candidates)
set(JAXMAGI_NVCC_ERRORS "")
foreach(candidate IN LISTS candidates)
  if(NOT EXISTS "${candidate}")
    continue()
  endif()
  jaxmagi_try_nvcc("${candidate}" error)
  if(NOT error)
    return()
  endif()
  list(APPEND JAXMAGI_NVCC_ERRORS "${candidate} (${error})")
endforeach()
list(JOIN JAXMAGI_NVCC_ERRORS ", " JAXMAGI_NVCC_ERRORS)
if(NOT JAXMAGI_NVCC_ERRORS AND NOT "$ENV{CUDACXX}" STREQUAL "")
  set(JAXMAGI_NVCC_ERRORS "CUDACXX=$ENV{CUDACXX} (no such program)")
elseif(NOT JAXMAGI_NVCC_ERRORS)
  set(JAXMAGI_NVCC_ERRORS "no nvcc in PATH, the nvidia wheels of ${Python_EXECUTABLE}, CUDA_HOME or /usr/local/cuda")
endif()
