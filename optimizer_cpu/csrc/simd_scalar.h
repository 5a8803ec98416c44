// One element at a time, in plain C++: the fallback and the yardstick of the other instruction sets.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct Simd {
    using F = float;
    using I = std::int32_t;
    using M = bool;
    using D = double;
    static constexpr int N = 1;   // fp32 lanes
    static constexpr int ND = 1;  // fp64 lanes
    static constexpr int kSumVectors = 16;  // fp32 vectors summed side by side in square_sums

    static I bits(F x) {
        I i;
        std::memcpy(&i, &x, sizeof i);
        return i;
    }
    static F floats(I i) {
        F x;
        std::memcpy(&x, &i, sizeof x);
        return x;
    }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static F set(float x) { return x; }
    static I seti(std::int32_t x) { return x; }
    static I loadi(const std::int32_t* p) { return *p; }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return std::sqrt(a); }
    // A NaN `a` gives `b`.
    static F max_number(F a, F b) { return a > b ? a : b; }
    static F min_number(F a, F b) { return a < b ? a : b; }

    static I addi(I a, I b) { return static_cast<I>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b)); }
    static I subi(I a, I b) { return static_cast<I>(static_cast<std::uint32_t>(a) - static_cast<std::uint32_t>(b)); }
    static I andi(I a, I b) { return a & b; }
    static I ori(I a, I b) { return a | b; }
    static I mini(I a, I b) { return a < b ? a : b; }
    static I maxi(I a, I b) { return a > b ? a : b; }
    template <int S> static I sll(I a) { return static_cast<I>(static_cast<std::uint32_t>(a) << S); }
    template <int S> static I srl(I a) { return static_cast<I>(static_cast<std::uint32_t>(a) >> S); }
    template <int S> static I sra(I a) { return a >> S; }

    static M is_nan(F a) { return a != a; }
    static M equal(I a, I b) { return a == b; }
    static I select(M m, I a, I b) { return m ? a : b; }

    static I load_u16(const std::uint16_t* p) { return *p; }
    static I load_s16(const std::int16_t* p) { return *p; }
    static I load_u8(const std::uint8_t* p) { return *p; }
    static I load_s8(const std::int8_t* p) { return *p; }
    static void store16(std::uint16_t* p, I a) { *p = static_cast<std::uint16_t>(a & 0xFFFF); }
    static constexpr std::size_t kStreamAlign = 0;  // no such store
    static void stream16(std::uint16_t* p, I a) { store16(p, a); }
    static void stream_end() {}
    static void store8(std::uint8_t* p, I a) { *p = static_cast<std::uint8_t>(a & 0xFF); }

    static F from_half(const std::uint16_t* p) {
        const std::uint32_t h = *p, sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3FFu;
        if (exponent == 31) return floats(static_cast<I>(sign | 0x7F800000u | (fraction << 13)));
        if (exponent != 0) return floats(static_cast<I>(sign | ((exponent + 112) << 23) | (fraction << 13)));
        const F magnitude = static_cast<F>(fraction) * 5.9604644775390625e-8f;  // 2^-24, exact
        return floats(static_cast<I>(sign | static_cast<std::uint32_t>(bits(magnitude))));
    }
    // Round to nearest even; NaN gives any NaN.
    static I to_half(F x) {
        const std::uint32_t u = static_cast<std::uint32_t>(bits(x)), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
        if (a >= 0x7F800000u) return static_cast<I>(sign | (a > 0x7F800000u ? 0x7E00u : 0x7C00u));
        if (a >= 0x477FF000u) return static_cast<I>(sign | 0x7C00u);  // 65520 and more round to infinity
        if (a >= 0x38800000u) {                                      // normal in fp16
            const std::uint32_t rounded = a + 0xFFFu + ((a >> 13) & 1u);
            return static_cast<I>(sign | ((rounded - 0x38000000u) >> 13));
        }
        // 0.5 has an ulp of 2^-24, fp16's smallest step: the addition rounds to it, to nearest even.
        const F shifted = floats(static_cast<I>(a)) + 0.5f;
        return static_cast<I>(sign | (static_cast<std::uint32_t>(bits(shifted)) - 0x3F000000u));
    }

    // Unsigned maximum of the two 16-bit halves of each lane, and of all lanes.
    static I max_halves(I a, I b) {
        const std::uint32_t x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
        const std::uint32_t high = (x >> 16) > (y >> 16) ? x >> 16 : y >> 16;
        const std::uint32_t low = (x & 0xFFFF) > (y & 0xFFFF) ? x & 0xFFFF : y & 0xFFFF;
        return static_cast<I>(high << 16 | low);
    }
    static std::uint32_t reduce_max_halves(I a) { return static_cast<std::uint32_t>(a); }

    static D zero_d() { return 0.0; }
    static D low_d(F a) { return a; }
    static D high_d(F) { return 0.0; }
    static D add_square(D sum, D x) { return sum + x * x; }
    static void store_d(double* p, D a) { *p = a; }
};

}  // namespace
