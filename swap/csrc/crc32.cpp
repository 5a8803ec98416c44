#include "crc32.h"

#include <cstring>

#include "crc_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace swap_native {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // reflected

std::uint32_t by_table(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    static const CrcTable table(kPolynomial);
    return table.advance(crc, data, nbytes);
}

#if defined(__x86_64__)

// x^exponent modulo the polynomial, reflected, one place up: the product of two reflected numbers lies one place low.
constexpr std::uint64_t power(unsigned exponent) {
    std::uint32_t value = 0x80000000;  // x^0
    for (; exponent; --exponent) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    return static_cast<std::uint64_t>(value) << 1;
}

constexpr std::size_t kVector = 16, kLanes = 4, kRow = kLanes * kVector;

// Moves 128 bits of the message by a distance, of which `constants` holds x^(distance + 32) and x^(distance - 32), onto
// `next`: both leave the same remainder (Gopal et al., Fast CRC Computation Using PCLMULQDQ Instruction, Intel 2009).
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i moved, __m128i constants, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(moved, constants, 0x00);
    const __m128i high = _mm_clmulepi64_si128(moved, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline __m128i load(const unsigned char* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_folding(
    std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    constexpr unsigned row = 8 * kRow, vector = 8 * kVector;
    const __m128i by_row = _mm_set_epi64x(power(row - 32), power(row + 32));
    const __m128i by_vector = _mm_set_epi64x(power(vector - 32), power(vector + 32));
    // What came before is the first 32 bits' business.
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(data + kVector), c = load(data + 2 * kVector), d = load(data + 3 * kVector);
    for (data += kRow, nbytes -= kRow; nbytes >= kRow; data += kRow, nbytes -= kRow) {
        a = fold(a, by_row, load(data));
        b = fold(b, by_row, load(data + kVector));
        c = fold(c, by_row, load(data + 2 * kVector));
        d = fold(d, by_row, load(data + 3 * kVector));
    }
    a = fold(fold(fold(a, by_vector, b), by_vector, c), by_vector, d);
    for (; nbytes >= kVector; data += kVector, nbytes -= kVector) a = fold(a, by_vector, load(data));
    unsigned char rest[kVector];
    std::memcpy(rest, &a, kVector);
    return by_table(by_table(0, rest, kVector), data, nbytes);
}

bool has_hardware() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
const bool kHardware = has_hardware();
constexpr std::size_t kLeast = kRow;
constexpr const char* kMethod = "pclmul";

#elif defined(__aarch64__)

__attribute__((target("+crc"))) std::uint32_t by_folding(
    std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        crc = __crc32d(crc, word);
    }
    for (; nbytes; ++data, --nbytes) crc = __crc32b(crc, *data);
    return crc;
}

const bool kHardware = getauxval(AT_HWCAP) & (1UL << 7);
constexpr std::size_t kLeast = 0;
constexpr const char* kMethod = "armv8";

#else

constexpr bool kHardware = false;
constexpr std::size_t kLeast = 0;
constexpr const char* kMethod = "table";
std::uint32_t by_folding(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    return by_table(crc, data, nbytes);
}

#endif

}  // namespace

const char* crc32_method() { return kHardware ? kMethod : "table"; }

std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    return ~(kHardware && nbytes >= kLeast ? by_folding : by_table)(~crc, bytes, nbytes);
}

}  // namespace swap_native
