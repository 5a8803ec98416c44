#include "crc32c.h"

#include <algorithm>
#include <cstring>

#include "crc_table.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SWAP_CRC_HARDWARE 1
#define SWAP_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define SWAP_CRC_HARDWARE 1
#define SWAP_CRC_TARGET __attribute__((target("+crc")))
#else
#define SWAP_CRC_HARDWARE 0
#endif

namespace swap_native {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
constexpr std::size_t kLanes = 4;  // the instruction takes 3 cycles and one starts every cycle

std::uint32_t by_table(const unsigned char* data, std::size_t nbytes) {
    static const CrcTable table(kPolynomial);
    return ~table.advance(~0U, data, nbytes);
}

#if SWAP_CRC_HARDWARE

std::uint64_t word(const unsigned char* data) {
    std::uint64_t value;
    std::memcpy(&value, data, 8);
    return value;
}

#if defined(__x86_64__)
SWAP_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t value) { return _mm_crc32_u64(crc, value); }
SWAP_CRC_TARGET inline std::uint64_t step1(std::uint64_t crc, unsigned char value) {
    return _mm_crc32_u8(static_cast<std::uint32_t>(crc), value);
}
bool has_hardware() { return __builtin_cpu_supports("sse4.2"); }
#else
SWAP_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t value) {
    return __crc32cd(static_cast<std::uint32_t>(crc), value);
}
SWAP_CRC_TARGET inline std::uint64_t step1(std::uint64_t crc, unsigned char value) {
    return __crc32cb(static_cast<std::uint32_t>(crc), value);
}
bool has_hardware() { return getauxval(AT_HWCAP) & (1UL << 7); }
#endif

SWAP_CRC_TARGET std::uint32_t by_instruction(const unsigned char* data, std::size_t nbytes) {
    std::uint64_t crc = ~0U;
    for (; nbytes >= 8; nbytes -= 8, data += 8) crc = step8(crc, word(data));
    for (; nbytes; --nbytes, ++data) crc = step1(crc, *data);
    return ~static_cast<std::uint32_t>(crc);
}

SWAP_CRC_TARGET void four_pages(const unsigned char* data, std::size_t page, std::uint32_t* out) {
    std::uint64_t a = ~0U, b = ~0U, c = ~0U, d = ~0U;
    for (std::size_t at = 0; at < page; at += 8) {
        a = step8(a, word(data + at));
        b = step8(b, word(data + page + at));
        c = step8(c, word(data + 2 * page + at));
        d = step8(d, word(data + 3 * page + at));
    }
    out[0] = ~static_cast<std::uint32_t>(a);
    out[1] = ~static_cast<std::uint32_t>(b);
    out[2] = ~static_cast<std::uint32_t>(c);
    out[3] = ~static_cast<std::uint32_t>(d);
}

const bool kHardware = has_hardware();
#else
constexpr bool kHardware = false;
#endif

// Checksums of up to kLanes pages; returns how many pages it did.
std::size_t some_pages(const unsigned char* data, std::size_t nbytes, std::size_t page, std::uint32_t* out) {
#if SWAP_CRC_HARDWARE
    if (kHardware && nbytes >= kLanes * page && page % 8 == 0) {
        four_pages(data, page, out);
        return kLanes;
    }
#endif
    *out = crc32c(data, std::min(nbytes, page));
    return 1;
}

}  // namespace

const char* crc32c_method() {
#if defined(__x86_64__)
    return kHardware ? "sse4.2" : "table";
#elif defined(__aarch64__)
    return kHardware ? "armv8" : "table";
#else
    return "table";
#endif
}

std::uint32_t crc32c(const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
#if SWAP_CRC_HARDWARE
    if (kHardware) return by_instruction(bytes, nbytes);
#endif
    return by_table(bytes, nbytes);
}

void crc32c_pages(const void* data, std::size_t nbytes, std::size_t page, std::uint32_t* out) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (std::size_t at = 0; at < nbytes;) {
        const std::size_t count = some_pages(bytes + at, nbytes - at, page, out);
        out += count;
        at += count * page;
    }
}

std::int64_t crc32c_verify(const void* data, std::size_t nbytes, std::size_t page, const std::uint32_t* expected) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint32_t found[kLanes];
    std::int64_t first = 0;
    for (std::size_t at = 0; at < nbytes;) {
        const std::size_t count = some_pages(bytes + at, nbytes - at, page, found);
        for (std::size_t lane = 0; lane < count; ++lane)
            if (found[lane] != expected[lane]) return first + static_cast<std::int64_t>(lane);
        first += static_cast<std::int64_t>(count);
        expected += count;
        at += count * page;
    }
    return -1;
}

}  // namespace swap_native
