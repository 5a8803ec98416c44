// CRC32C (Castagnoli) of many pages: one independent checksum a page, several pages at once to fill the pipeline.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swap_native {

// "sse4.2", "armv8" or "table": what this processor and build use.
const char* crc32c_method();

std::uint32_t crc32c(const void* data, std::size_t nbytes);

// out[i] = checksum of bytes [i * page, min((i + 1) * page, nbytes)).
void crc32c_pages(const void* data, std::size_t nbytes, std::size_t page, std::uint32_t* out);

// Index of the first page whose checksum differs from `expected`, or -1.
std::int64_t crc32c_verify(const void* data, std::size_t nbytes, std::size_t page, const std::uint32_t* expected);

}  // namespace swap_native
