# FindLibTorch: imported targets over the PyPI torch wheel, with no CUDA toolkit needed for the CPU part.
#   LIBTORCH_ROOT  the wheel's "torch" folder (…/site-packages/torch). Default: asked from
#                  ${Python3_EXECUTABLE}/python3.
#   CUDA_WHEEL_ROOT  the "nvidia" folder beside it (default ${LIBTORCH_ROOT}/../nvidia); a toolkit prefix works too,
#                    through CMAKE_CUDA_COMPILER / CUDAToolkit_ROOT.
# Targets: LibTorch::cpu  LibTorch::gloo (adds the header shim)  LibTorch::cuda (GPU; only if headers are there)
include(FindPackageHandleStandardArgs)
if(NOT LIBTORCH_ROOT)
  if(DEFINED ENV{LIBTORCH_ROOT})
    set(LIBTORCH_ROOT "$ENV{LIBTORCH_ROOT}")
  else()
    find_program(LIBTORCH_PYTHON NAMES python3 python)
    execute_process(  # locates the package without importing it (an import costs seconds)
      COMMAND ${LIBTORCH_PYTHON} -c "import importlib.util as u,os;s=u.find_spec('torch');\
print(os.path.dirname(s.origin) if s else '')"
      OUTPUT_VARIABLE LIBTORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
set(LIBTORCH_ROOT "${LIBTORCH_ROOT}" CACHE PATH "torch folder of the wheel")
if(NOT CUDA_WHEEL_ROOT)
  get_filename_component(CUDA_WHEEL_ROOT "${LIBTORCH_ROOT}/../nvidia" ABSOLUTE)
endif()
find_library(LIBTORCH_CPU_LIB torch_cpu PATHS "${LIBTORCH_ROOT}/lib" NO_DEFAULT_PATH)
find_library(LIBTORCH_C10_LIB c10 PATHS "${LIBTORCH_ROOT}/lib" NO_DEFAULT_PATH)
find_library(LIBTORCH_CUDA_LIB torch_cuda PATHS "${LIBTORCH_ROOT}/lib" NO_DEFAULT_PATH)
find_library(LIBTORCH_C10_CUDA_LIB c10_cuda PATHS "${LIBTORCH_ROOT}/lib" NO_DEFAULT_PATH)
if(EXISTS "${LIBTORCH_ROOT}/version.py")
  file(STRINGS "${LIBTORCH_ROOT}/version.py" _v REGEX "^__version__")
  string(REGEX REPLACE ".*'([^']+)'.*" "\\1" LibTorch_VERSION "${_v}")
endif()
find_package_handle_standard_args(LibTorch REQUIRED_VARS LIBTORCH_CPU_LIB LIBTORCH_C10_LIB VERSION_VAR LibTorch_VERSION)
if(NOT LibTorch_FOUND OR TARGET LibTorch::cpu)
  return()
endif()
set(_inc "${LIBTORCH_ROOT}/include" "${LIBTORCH_ROOT}/include/torch/csrc/api/include")

add_library(LibTorch::c10 SHARED IMPORTED)
set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LIBTORCH_C10_LIB}" IMPORTED_SONAME libc10.so
  INTERFACE_INCLUDE_DIRECTORIES "${_inc}" INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_inc}")
add_library(LibTorch::cpu SHARED IMPORTED)
set_target_properties(LibTorch::cpu PROPERTIES IMPORTED_LOCATION "${LIBTORCH_CPU_LIB}" IMPORTED_SONAME libtorch_cpu.so
  INTERFACE_LINK_LIBRARIES LibTorch::c10
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED")
# libtorch_cpu.so needs libcudart.so.13 and libcupti.so.13; ld finds them by its DT_RPATH
# ($ORIGIN/../../nvidia/cu13/lib).
# Where the wheels are laid out otherwise, still let the link pass (the loader gets LD_LIBRARY_PATH at run time):
set_property(TARGET LibTorch::cpu APPEND PROPERTY INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")

add_library(LibTorch::gloo INTERFACE IMPORTED)
set_target_properties(LibTorch::gloo PROPERTIES INTERFACE_LINK_LIBRARIES LibTorch::cpu
  INTERFACE_COMPILE_DEFINITIONS USE_C10D_GLOO
  INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_SOURCE_DIR}/third_party/gloo_shim")

if(LIBTORCH_CUDA_LIB)
  set(_cuinc "")
  foreach(d cu13 nccl cudnn)
    if(EXISTS "${CUDA_WHEEL_ROOT}/${d}/include")
      list(APPEND _cuinc "${CUDA_WHEEL_ROOT}/${d}/include")
    endif()
  endforeach()
  find_path(LIBTORCH_CUDART_INC cuda_runtime_api.h
    PATHS "${CUDA_WHEEL_ROOT}/cu13/include" ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
  find_path(LIBTORCH_CUBLAS_INC cublas_v2.h
    PATHS "${CUDA_WHEEL_ROOT}/cu13/include" ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
  find_library(LIBTORCH_CUDART_LIB NAMES cudart libcudart.so.13
    PATHS "${CUDA_WHEEL_ROOT}/cu13/lib" ${CUDAToolkit_LIBRARY_DIR} NO_DEFAULT_PATH)
  find_library(LIBTORCH_CUBLASLT_LIB NAMES cublasLt libcublasLt.so.13
    PATHS "${CUDA_WHEEL_ROOT}/cu13/lib" ${CUDAToolkit_LIBRARY_DIR} NO_DEFAULT_PATH)
  if(LIBTORCH_CUDART_INC AND LIBTORCH_CUBLAS_INC AND LIBTORCH_CUDART_LIB AND LIBTORCH_CUBLASLT_LIB)
    add_library(LibTorch::cudart SHARED IMPORTED)
    set_target_properties(LibTorch::cudart PROPERTIES
      IMPORTED_LOCATION "${LIBTORCH_CUDART_LIB}" IMPORTED_SONAME libcudart.so.13
      INTERFACE_INCLUDE_DIRECTORIES "${LIBTORCH_CUDART_INC};${_cuinc}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${LIBTORCH_CUDART_INC};${_cuinc}")
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    # --no-as-needed: nothing in our objects may reference libtorch_cuda.so, yet its static registrations must load
    set_target_properties(LibTorch::cuda PROPERTIES
      INTERFACE_LINK_LIBRARIES "LibTorch::cpu;LibTorch::cudart;-Wl,--push-state,--no-as-needed;\
${LIBTORCH_CUDA_LIB};${LIBTORCH_C10_CUDA_LIB};-Wl,--pop-state;${LIBTORCH_CUBLASLT_LIB}"
      INTERFACE_COMPILE_DEFINITIONS "USE_C10D_NCCL")
  endif()
endif()
