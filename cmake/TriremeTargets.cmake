# Helpers that every folder uses, so that a folder's CMakeLists.txt only says what it depends on.

add_library(trireme_flags INTERFACE)
target_include_directories(trireme_flags INTERFACE "${CMAKE_SOURCE_DIR}")
set(_cxx "$<COMPILE_LANGUAGE:CXX>")
target_compile_options(trireme_flags INTERFACE
  "$<${_cxx}:-Wall;-Wextra;-Wno-unused-parameter;-Wno-missing-field-initializers>")
# GCC 13 takes any function that gets a temporary and returns a reference for a dangling one; 14 looks closer.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13
   AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  target_compile_options(trireme_flags INTERFACE "$<${_cxx}:-Wno-dangling-reference>")
endif()
# Says of a class that it has a member from an unnamed namespace where the file is included, as a unity build includes
# all.
if(TRIREME_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(trireme_flags INTERFACE "$<${_cxx}:-Wno-subobject-linkage>")
endif()
if(TRIREME_WERROR)
  target_compile_options(trireme_flags INTERFACE "$<${_cxx}:-Werror>")
endif()
if(TRIREME_SANITIZE)
  target_compile_options(trireme_flags INTERFACE -fsanitize=${TRIREME_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(trireme_flags INTERFACE -fsanitize=${TRIREME_SANITIZE})
  if(TRIREME_SANITIZE MATCHES "thread")
    target_compile_options(trireme_flags INTERFACE -Wno-tsan)
  endif()
endif()
if(TRIREME_FUZZ)
  target_compile_options(trireme_flags INTERFACE -fsanitize=fuzzer-no-link -Wno-unknown-warning-option)
endif()

# trireme_device_sources(OUT): the sources of this folder that differ with and without CUDA: all below cuda/, or all
# below no_cuda/, which has the same functions and says that there is no device. This is the only place where that is
# chosen.
function(trireme_device_sources out)
  if(TRIREME_TORCH STREQUAL "cuda")
    set(_side "${CMAKE_CURRENT_SOURCE_DIR}/cuda")
  else()
    set(_side "${CMAKE_CURRENT_SOURCE_DIR}/no_cuda")
  endif()
  file(GLOB_RECURSE _found CONFIGURE_DEPENDS "${_side}/*.cpp" "${_side}/*.cu")
  set(${out} ${_found} PARENT_SCOPE)
endfunction()

# trireme_library(NAME [TORCH] DEPS ...): a static library of all *.cpp in this folder (not below it).
# TORCH: sources that include ATen; they share one precompiled header, and those of this build's device are among them.
function(trireme_library name)
  cmake_parse_arguments(A "TORCH" "" "DEPS;SOURCES" ${ARGN})
  if(A_SOURCES)
    set(sources ${A_SOURCES})
  else()
    file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cpp")
    if(A_TORCH)
      trireme_device_sources(device_sources)
      list(APPEND sources ${device_sources})
    endif()
  endif()
  list(FILTER sources EXCLUDE REGEX "/main\\.cpp$")
  if(NOT sources)
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE trireme_flags ${A_DEPS})
    return()
  endif()
  add_library(${name} STATIC ${sources})
  set_target_properties(${name} PROPERTIES UNITY_BUILD ${TRIREME_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  set(kernels ${sources})
  list(FILTER kernels INCLUDE REGEX "\\.cu$")  # newer CMakes would put these together, too
  set_source_files_properties(${kernels} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_link_libraries(${name} PUBLIC trireme_flags ${A_DEPS})
  if(A_TORCH)
    target_link_libraries(${name} PUBLIC trireme_torch)
    target_precompile_headers(${name} REUSE_FROM trireme_torch_pch)
  endif()
endfunction()

# trireme_test(NAME [TORCH] SOURCES ... DEPS ... [TIMEOUT s]): one GoogleTest program, one ctest entry.
function(trireme_test name)
  cmake_parse_arguments(A "TORCH" "TIMEOUT" "DEPS;SOURCES" ${ARGN})
  if(NOT A_SOURCES)
    return()
  endif()
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE trireme_flags ${A_DEPS} GTest::gmock GTest::gtest_main)
  if(A_TORCH)
    target_link_libraries(${name} PRIVATE trireme_torch)
    # The precompiled header was made with -fPIC; a program would get -fPIE.
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM trireme_torch_pch)
  endif()
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}")
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 900)  # for a test that hangs, not for a slow machine
  endif()
  if(TRIREME_SANITIZE)
    math(EXPR A_TIMEOUT "${A_TIMEOUT} * 3")
  endif()
  # LibTorch's flight recorder is one map of the process that no lock guards when several Gloo groups record: tests
  # whose ranks are threads would crash in it now and then. A rank of a run is a process of its own.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT}
    ENVIRONMENT "OMP_WAIT_POLICY=passive;TORCH_FR_BUFFER_SIZE=0;TORCH_NCCL_TRACE_BUFFER_SIZE=0;\
TRIREME_BUILD_DIR=${CMAKE_BINARY_DIR};TRIREME_SOURCE_DIR=${CMAKE_SOURCE_DIR}")
endfunction()
