# httplib: cpp-httplib as a static library. Its one header (third_party/httplib, unchanged) is cut in two at the lines
# that upstream marks for it, declarations and code, so that the code is compiled once and not in every file that
# includes it.
set(_httplib_sha256 e9112546cbae828180f72c2ae6da4bfd8d15ae38138bd99b898e5e30128acc28)
set(_httplib_from "${CMAKE_SOURCE_DIR}/third_party/httplib/httplib.h")
set(_httplib_to "${CMAKE_BINARY_DIR}/httplib")
file(SHA256 "${_httplib_from}" _httplib_found)
if(NOT _httplib_found STREQUAL _httplib_sha256)
  message(FATAL_ERROR
    "third_party/httplib/httplib.h is not the file that its README names (SHA-256 ${_httplib_found}): restore it, "
    "or write the new sum into cmake/Httplib.cmake and the README when it was updated on purpose")
endif()
file(READ "${_httplib_from}" _httplib_text)
set(_httplib_border "// ----------------------------------------------------------------------------\n")
string(LENGTH "${_httplib_border}" _httplib_length)
string(FIND "${_httplib_text}" "${_httplib_border}" _httplib_first)
string(FIND "${_httplib_text}" "${_httplib_border}" _httplib_last REVERSE)
math(EXPR _httplib_code "${_httplib_first} + ${_httplib_length}")
math(EXPR _httplib_size "${_httplib_last} - ${_httplib_code}")
math(EXPR _httplib_rest "${_httplib_last} + ${_httplib_length}")
if(_httplib_first LESS 0 OR _httplib_size LESS 1)
  message(FATAL_ERROR "third_party/httplib/httplib.h has no two border lines around its code")
endif()
string(SUBSTRING "${_httplib_text}" 0 ${_httplib_first} _httplib_head)
string(SUBSTRING "${_httplib_text}" ${_httplib_rest} -1 _httplib_tail)
string(SUBSTRING "${_httplib_text}" ${_httplib_code} ${_httplib_size} _httplib_body)
string(REPLACE "inline " "" _httplib_body "${_httplib_body}")
# Only when it differs: what includes it is not to be compiled anew at every configuration.
file(CONFIGURE OUTPUT "${_httplib_to}/httplib.h" CONTENT "@_httplib_head@@_httplib_tail@" @ONLY)
file(CONFIGURE OUTPUT "${_httplib_to}/httplib.cpp"
  CONTENT "#include \"httplib.h\"\nnamespace httplib {\n@_httplib_body@}  // namespace httplib\n" @ONLY)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_httplib_from}")

add_library(httplib STATIC "${_httplib_to}/httplib.cpp")
target_include_directories(httplib SYSTEM PUBLIC "${_httplib_to}")
# TLS by OpenSSL. No zlib, brotli or zstd: nothing here reads or writes compressed bodies.
target_compile_definitions(httplib PUBLIC CPPHTTPLIB_OPENSSL_SUPPORT CPPHTTPLIB_LISTEN_BACKLOG=512)
target_compile_options(httplib PRIVATE -w)
if(TRIREME_SANITIZE)
  target_compile_options(httplib PRIVATE -fsanitize=${TRIREME_SANITIZE} -fno-omit-frame-pointer -g1)
endif()
target_link_libraries(httplib PUBLIC OpenSSL::SSL OpenSSL::Crypto Threads::Threads)
