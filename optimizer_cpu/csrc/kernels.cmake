# The kernels as a static library: one translation unit per instruction set, each with its own flags and nothing
# library-wide, so code for one set cannot leak into another.
set(OPTIMIZER_CPU_CSRC "${CMAKE_CURRENT_LIST_DIR}")

add_library(optimizer_cpu_kernels STATIC
  "${OPTIMIZER_CPU_CSRC}/dispatch.cpp"
  "${OPTIMIZER_CPU_CSRC}/pool.cpp"
  "${OPTIMIZER_CPU_CSRC}/isa_scalar.cpp")
target_include_directories(optimizer_cpu_kernels PUBLIC "${OPTIMIZER_CPU_CSRC}")
target_link_libraries(optimizer_cpu_kernels PUBLIC Threads::Threads)

# No contraction: a fused multiply-add would change bits. No errno: sqrt stays one instruction.
target_compile_options(optimizer_cpu_kernels PRIVATE -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra)
if(OFFLOAD_WERROR)
  target_compile_options(optimizer_cpu_kernels PRIVATE -Werror)
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(optimizer_cpu_kernels PRIVATE
    "${OPTIMIZER_CPU_CSRC}/isa_avx2.cpp" "${OPTIMIZER_CPU_CSRC}/isa_avx512.cpp")
  target_compile_definitions(optimizer_cpu_kernels PUBLIC OPTIMIZER_CPU_X86)
  set_source_files_properties("${OPTIMIZER_CPU_CSRC}/isa_avx2.cpp" PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
  # GCC's own AVX-512 headers read an undefined register on purpose and trip its warning.
  set_source_files_properties("${OPTIMIZER_CPU_CSRC}/isa_avx512.cpp" PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>;$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized>")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  target_sources(optimizer_cpu_kernels PRIVATE "${OPTIMIZER_CPU_CSRC}/isa_neon.cpp")
  target_compile_definitions(optimizer_cpu_kernels PUBLIC OPTIMIZER_CPU_NEON)
endif()
