# TandemDeps.cmake: every library that Tandem links, as one target each.
#
#   td::mbedtls  td::lws                                                   built by deploy/deps.sh, static
#   td::zstd  td::sqlite  td::protobuf_c  td::jansson  td::pcre2  td::utf8proc  td::curl  td::hiredis   the system's, through pkg-config
#
# Imported targets' headers are system headers, so the project's warnings stay about the project. deps.sh alone knows where its
# libraries are; TANDEM_DEPS (a cache variable, -DTANDEM_DEPS=PREFIX) overrides it.

include_guard(GLOBAL)

find_package(PkgConfig REQUIRED)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# The answer of deps.sh is asked for at every configure and not cached: a changed recipe must never meet an old library.
set(TANDEM_DEPS "" CACHE PATH "Prefix of mbedTLS and libwebsockets; empty: ask deploy/deps.sh")
set(_td_prefix "${TANDEM_DEPS}")
if(NOT _td_prefix)
  execute_process(COMMAND "${CMAKE_CURRENT_LIST_DIR}/deps.sh" --prefix OUTPUT_VARIABLE _td_prefix RESULT_VARIABLE _td_result
                  ERROR_VARIABLE _td_error OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT _td_result EQUAL 0)
    message(FATAL_ERROR "deploy/deps.sh --prefix failed: ${_td_error}")
  endif()
endif()
if(NOT EXISTS "${_td_prefix}/.complete")
  message(FATAL_ERROR "mbedTLS and libwebsockets are not in ${_td_prefix}: run ./deploy/deps.sh first (or set -DTANDEM_DEPS=PREFIX)")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/deps.sh")

# _td_archive NAME USES…: one static library as a target that names what it uses, so that CMake puts users before what they use,
# also where several targets of the project bring in the same libraries.
function(_td_archive name)
  add_library(td::archive_${name} STATIC IMPORTED GLOBAL)
  set_target_properties(td::archive_${name} PROPERTIES IMPORTED_LOCATION "${_td_prefix}/lib/lib${name}.a")
  target_include_directories(td::archive_${name} SYSTEM INTERFACE "${_td_prefix}/include")
  foreach(used IN LISTS ARGN)
    target_link_libraries(td::archive_${name} INTERFACE td::archive_${used})
  endforeach()
endfunction()
_td_archive(everest)
_td_archive(p256m)
_td_archive(mbedcrypto everest p256m)
_td_archive(mbedx509 mbedcrypto)
_td_archive(mbedtls mbedx509)
_td_archive(websockets mbedtls)

add_library(td::mbedtls INTERFACE IMPORTED GLOBAL)
target_link_libraries(td::mbedtls INTERFACE td::archive_mbedtls Threads::Threads)
add_library(td::lws INTERFACE IMPORTED GLOBAL)
target_link_libraries(td::lws INTERFACE td::archive_websockets td::mbedtls)

# _td_system TARGET MODULE: the system library that pkg-config calls MODULE.
function(_td_system target module)
  string(TOUPPER "TD_${target}" prefix)
  pkg_check_modules(${prefix} IMPORTED_TARGET GLOBAL ${module})
  if(NOT ${prefix}_FOUND)
    message(FATAL_ERROR "The library ${module} is missing: run ./deploy/deps.sh first")
  endif()
  add_library(td::${target} ALIAS PkgConfig::${prefix})
endfunction()

_td_system(zstd libzstd)
_td_system(sqlite sqlite3)
_td_system(protobuf_c libprotobuf-c)
_td_system(jansson jansson)
_td_system(pcre2 libpcre2-8)
_td_system(utf8proc libutf8proc)
_td_system(curl libcurl)
_td_system(hiredis hiredis)
# Faster AES-GCM; without it mbedTLS's is used.
pkg_check_modules(TD_SODIUM IMPORTED_TARGET GLOBAL libsodium)
if(TD_SODIUM_FOUND)
  add_library(td::sodium ALIAS PkgConfig::TD_SODIUM)
endif()

message(STATUS "Tandem's libraries: ${_td_prefix}")
unset(_td_prefix)
