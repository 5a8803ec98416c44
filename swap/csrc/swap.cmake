# Checksums everywhere; io_uring where the system has its header. No external library.
set(SWAP_CSRC "${CMAKE_CURRENT_LIST_DIR}")

include(CheckIncludeFileCXX)
check_include_file_cxx("linux/io_uring.h" SWAP_HAVE_IO_URING_HEADER)

add_library(swap_core STATIC "${SWAP_CSRC}/crc32.cpp" "${SWAP_CSRC}/crc32c.cpp")
target_include_directories(swap_core PUBLIC "${SWAP_CSRC}")
target_link_libraries(swap_core PUBLIC Threads::Threads)
target_compile_options(swap_core PRIVATE -O2 -Wall -Wextra)
if(OFFLOAD_WERROR)
  target_compile_options(swap_core PRIVATE -Werror)
endif()
if(SWAP_HAVE_IO_URING_HEADER)
  target_sources(swap_core PRIVATE "${SWAP_CSRC}/ring.cpp" "${SWAP_CSRC}/transfers.cpp")
  target_compile_definitions(swap_core PUBLIC SWAP_IO_URING=1)
else()
  target_compile_definitions(swap_core PUBLIC SWAP_IO_URING=0)
endif()
