# The GPU kernels: xla_ffi/device/*.cu -> jf_kernels, a library with an image per source embedded.
#
# A .cu file has kernels only, so that neither CMake's CUDA language nor the CUDA runtime is needed:
# nvcc makes a cubin per source and architecture, and PTX of the newest for GPUs that come later;
# fatbinary makes one image of them. What ptxas says about a kernel's registers lies beside its cubin.
# A machine without nvcc builds the library too: it has no image, and knows why.

set(JAXFABRIC_CUDA AUTO CACHE STRING "GPU kernels: ON, OFF, or AUTO (where an nvcc is found that works)")
set_property(CACHE JAXFABRIC_CUDA PROPERTY STRINGS AUTO ON OFF)
set(JAXFABRIC_CUDA_ARCHITECTURES 80 90 100 CACHE STRING "Compute capabilities that kernels are built for")

set(jf_nvcc_flags
  -std=c++20 --expt-relaxed-constexpr -lineinfo -I${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi
  -fmad=false  # a fused multiply and add rounds once, and the CPU rounds twice
  -Werror=all-warnings -Wno-deprecated-gpu-targets
  -Xptxas=-v)
list(GET JAXFABRIC_CUDA_ARCHITECTURES -1 jf_newest_architecture)

# What an nvcc may be called here, the likeliest first.
function(jf_nvcc_candidates result)
  if(CMAKE_CUDA_COMPILER)
    set(${result} ${CMAKE_CUDA_COMPILER} PARENT_SCOPE)
    return()
  endif()
  if(DEFINED ENV{CUDACXX})
    set(${result} $ENV{CUDACXX} PARENT_SCOPE)
    return()
  endif()
  set(folders "$ENV{PATH}")
  string(REPLACE ":" ";" folders "${folders}")
  list(APPEND folders "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin")
  if(Python_EXECUTABLE)
    # The layout of the wheels nvidia-cuda-nvcc and its like.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import sys; print(*(f'{p}/nvidia/cu13/bin' for p in sys.path), sep=';')"
      OUTPUT_VARIABLE wheels OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND folders ${wheels})
  endif()
  list(APPEND folders /usr/local/cuda/bin)
  foreach(folder ${folders})
    if(EXISTS ${folder}/nvcc AND NOT IS_DIRECTORY ${folder}/nvcc)
      list(APPEND found ${folder}/nvcc)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Sets `nvcc`, `fatbinary` and `nvcc_version`, or else `jf_no_kernels`, the reason why there is none.
# Not cached: pip's build environment has another path each time.
function(jf_find_nvcc)
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/kernels/probe)
  file(WRITE ${probe}.cu "#include <bit>\nextern \"C\" __global__ void probe(int* x) { *x = std::bit_cast<int>(1.0f); }\n")
  jf_nvcc_candidates(candidates)
  if(NOT candidates)
    set(reasons "no nvcc on the PATH, in CUDA_HOME, in the Python environment or in /usr/local/cuda")
  endif()
  foreach(candidate ${candidates})
    foreach(architecture ${JAXFABRIC_CUDA_ARCHITECTURES})
      execute_process(
        COMMAND ${candidate} -ccbin ${CMAKE_CXX_COMPILER} ${jf_nvcc_flags} -cubin -arch=sm_${architecture}
          -o ${probe}.cubin ${probe}.cu
        RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
      if(failed)
        break()
      endif()
    endforeach()
    if(failed)
      string(APPEND output "${failed}")
      string(REGEX REPLACE "[\"\\\n].*" "" output "${output}")
      list(APPEND reasons "${candidate} does not work: ${output}")
      continue()
    endif()
    # It may be a link or a script, which would hide a newer nvcc from the build and from ccache; it
    # says itself where it lives.
    execute_process(COMMAND ${candidate} --dryrun -cubin ${probe}.cu ERROR_VARIABLE output)
    string(REGEX MATCH "_HERE_=([^\n]*)" here "${output}")
    set(here ${CMAKE_MATCH_1})
    if(NOT EXISTS ${here}/nvcc OR NOT EXISTS ${here}/fatbinary)
      list(APPEND reasons "${candidate} says it is in '${here}', which lacks nvcc or fatbinary")
      continue()
    endif()
    execute_process(COMMAND ${candidate} --version OUTPUT_VARIABLE output)
    string(REGEX MATCH "V([0-9.]+)" version "${output}")
    set(nvcc ${here}/nvcc PARENT_SCOPE)
    set(fatbinary ${here}/fatbinary PARENT_SCOPE)
    set(nvcc_version ${CMAKE_MATCH_1} PARENT_SCOPE)
    set(jf_no_kernels "" PARENT_SCOPE)
    return()
  endforeach()
  list(JOIN reasons ", " reasons)
  set(jf_no_kernels "${reasons}" PARENT_SCOPE)
endfunction()

# jf_kernel_image(source name): the rules for kernels/<name>.fatbin.
function(jf_kernel_image source name)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/kernels)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(launcher ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  foreach(architecture ${JAXFABRIC_CUDA_ARCHITECTURES} ptx)
    if(architecture STREQUAL "ptx")
      set(output ${folder}/${name}.ptx)
      set(comment "nvcc ${name}.cu, PTX")
      set(what -ptx -arch=compute_${jf_newest_architecture})
      list(APPEND images --image3=kind=ptx,sm=${jf_newest_architecture},file=${output})
    else()
      set(output ${folder}/${name}.sm_${architecture}.cubin)
      set(comment "nvcc ${name}.cu, sm_${architecture}")
      set(what -cubin -arch=sm_${architecture})
      list(APPEND images --image3=kind=elf,sm=${architecture},file=${output})
    endif()
    # -c changes nothing for nvcc; without it ccache takes the call for linking.
    add_custom_command(
      OUTPUT ${output}
      COMMAND sh ${CMAKE_CURRENT_SOURCE_DIR}/cmake/logged.sh ${output}.log
        ${launcher} ${nvcc} -ccbin ${CMAKE_CXX_COMPILER} ${jf_nvcc_flags} -c ${what}
        -MD -MF ${output}.d -MT ${output} -o ${output} ${source}
      DEPENDS ${source} ${nvcc}
      DEPFILE ${output}.d
      COMMENT ${comment}
      VERBATIM)
    list(APPEND outputs ${output})
  endforeach()
  add_custom_command(
    OUTPUT ${folder}/${name}.fatbin
    # What -lineinfo adds, above all, makes it a tenth.
    COMMAND ${fatbinary} -64 --compress-all --create=${folder}/${name}.fatbin ${images}
    DEPENDS ${outputs}
    COMMENT "fatbinary ${name}"
    VERBATIM)
endfunction()

file(GLOB jf_kernel_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/device/*.cu)
if(JAXFABRIC_CUDA STREQUAL "AUTO" OR JAXFABRIC_CUDA)
  jf_find_nvcc()
  if(jf_no_kernels AND NOT JAXFABRIC_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "JAXFABRIC_CUDA is ${JAXFABRIC_CUDA}, but ${jf_no_kernels}")
  endif()
else()
  set(jf_no_kernels "JAXFABRIC_CUDA was ${JAXFABRIC_CUDA}")
endif()

set(jf_kernel_rows "")
set(jf_kernel_files "")
set(jf_kernel_architectures "")
set(jf_kernel_compiler "")
set(jf_kernel_names "")
if(jf_no_kernels)
  set(jf_no_kernels "built without nvcc: ${jf_no_kernels}")
  message(STATUS "GPU kernels: none, ${jf_no_kernels}")
else()
  list(TRANSFORM JAXFABRIC_CUDA_ARCHITECTURES PREPEND sm_ OUTPUT_VARIABLE jf_kernel_architectures)
  list(JOIN jf_kernel_architectures " " jf_kernel_architectures)
  string(APPEND jf_kernel_architectures " compute_${jf_newest_architecture}")
  set(jf_kernel_compiler "nvcc ${nvcc_version}")
  message(STATUS "GPU kernels: ${jf_kernel_architectures} by ${nvcc} (${nvcc_version})")
  foreach(source ${jf_kernel_sources})
    get_filename_component(name ${source} NAME_WE)
    jf_kernel_image(${source} ${name})
    list(APPEND jf_kernel_names ${name})
    list(APPEND jf_kernel_files ${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.fatbin)
    string(APPEND jf_kernel_rows "JF_IMAGE(${name}, \"${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.fatbin\")\n")
  endforeach()
  list(JOIN jf_kernel_names " " jf_kernel_names)
endif()
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/image.cc.in ${CMAKE_CURRENT_BINARY_DIR}/kernels/image.cc @ONLY)
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/build.json.in ${CMAKE_CURRENT_BINARY_DIR}/kernels/build.json @ONLY)
set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/kernels/image.cc PROPERTIES OBJECT_DEPENDS "${jf_kernel_files}")

# Compiled only where something is linked with it.
add_library(jf_kernels STATIC EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/kernels/image.cc)
target_link_libraries(jf_kernels PUBLIC jf_options)
