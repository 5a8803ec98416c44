// CRC-32 as in zlib and PNG (polynomial 0x04C11DB7, reflected): one checksum over any number of bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swap_native {

// "pclmul", "armv8" or "table": what this processor and build use.
const char* crc32_method();

// Goes on from `crc`, the checksum of what came before (0: nothing), as zlib's function of that name.
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes);

}  // namespace swap_native
