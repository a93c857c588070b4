# jf_windows: stages of calls that need the FFI headers of an XLA with windows (docs/cuda.md).
#
# They are in a module of their own, _windows, which loads only into the jaxlib it was built for, so
# that the core can be built against the oldest. Sets `jf_windows_problem`, empty if there is one.

set(JAXFABRIC_WINDOWS_HEADERS "" CACHE PATH
    "The folder `include` of a jaxlib with windows (default: the one that the core is built against)")

set(jf_windows_include ${JAXFABRIC_WINDOWS_HEADERS})
if(NOT jf_windows_include)
  set(jf_windows_include ${JAXLIB_INCLUDE_DIR})
endif()
set(jf_windows_header ${jf_windows_include}/xla/ffi/api/collectives_c_api.h)
set(jf_windows_problem "")
if(NOT jf_windows_include OR NOT EXISTS ${jf_windows_header})
  set(jf_windows_problem "no headers of an XLA with windows")
else()
  file(STRINGS ${jf_windows_header} version REGEX "Extension_Collectives_M(ajor|inor)Version [0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" version "${version}")
  if(NOT version MATCHES "^0;([2-9]|[1-9][0-9]+)$")
    string(REPLACE ";" "." version "${version}")
    set(jf_windows_problem "the FFI's extension for collectives is ${version} in ${jf_windows_include}")
  endif()
endif()

if(jf_windows_problem)
  if(JAXFABRIC_WINDOWS_HEADERS)
    message(FATAL_ERROR "JAXFABRIC_WINDOWS_HEADERS: ${jf_windows_problem}")
  endif()
  message(STATUS "Windows: none, ${jf_windows_problem}")
  return()
endif()
file(STRINGS ${jf_windows_include}/../version.py version REGEX "^_release_version")
string(REGEX MATCH "[0-9][0-9.]*" jf_windows_jaxlib "${version}")
message(STATUS "Windows: for jaxlib ${jf_windows_jaxlib}")
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/windows/*.cc)
add_library(jf_windows STATIC ${sources})
# Nothing above: a module with a core of its own would have other fabrics than the core.
target_link_libraries(jf_windows PUBLIC jf_options jf_base)
# SYSTEM: the FFI headers warn under -Wall -Wextra.
target_include_directories(jf_windows SYSTEM PUBLIC ${jf_windows_include})
