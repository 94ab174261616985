# rust_bridge: the static library of the crate in trainer/tokenizer/rust (tokenizers, minijinja, parquet behind a C
# ABI).
# Cargo keeps its own incremental state: the command always runs (0.1 s when nothing changed).
find_program(CARGO_EXECUTABLE cargo HINTS "$ENV{HOME}/.cargo/bin" REQUIRED)
set(_rb_dir "${CMAKE_SOURCE_DIR}/trainer/tokenizer/rust")
set(_rb_target "$ENV{TRIREME_CARGO_TARGET}")
if(NOT _rb_target)
  set(_rb_target "${CMAKE_SOURCE_DIR}/build/cargo")  # one for all presets
endif()
set(_rb_lib "${_rb_target}/release/librust_bridge.a")
add_custom_target(rust_bridge_build
  COMMAND ${CMAKE_COMMAND} -E env CARGO_TERM_COLOR=never
          ${CARGO_EXECUTABLE} build --release --locked --quiet
          --manifest-path "${_rb_dir}/Cargo.toml" --target-dir "${_rb_target}"
  BYPRODUCTS "${_rb_lib}" USES_TERMINAL COMMENT "cargo build rust_bridge")
add_library(rust_bridge STATIC IMPORTED GLOBAL)
set_target_properties(rust_bridge PROPERTIES IMPORTED_LOCATION "${_rb_lib}"
  INTERFACE_INCLUDE_DIRECTORIES "${_rb_dir}/include" INTERFACE_LINK_LIBRARIES "pthread;dl;m")
add_dependencies(rust_bridge rust_bridge_build)
