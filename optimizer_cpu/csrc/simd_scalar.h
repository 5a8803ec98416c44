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
    template <int S> static I sll(I a) { return static_cast<I>(static_cast<std::uint32_t>(a) << S); }
    template <int S> static I srl(I a) { return static_cast<I>(static_cast<std::uint32_t>(a) >> S); }

    static M is_nan(F a) { return a != a; }
    static M equal(I a, I b) { return a == b; }
    static I select(M m, I a, I b) { return m ? a : b; }

    static I load_u16(const std::uint16_t* p) { return *p; }
    static I load_s16(const std::int16_t* p) { return *p; }
    static void store16(std::uint16_t* p, I a) { *p = static_cast<std::uint16_t>(a & 0xFFFF); }
    static constexpr std::size_t kStreamAlign = 0;  // no such store
    static void stream16(std::uint16_t* p, I a) { store16(p, a); }
    template <class T> static void stream_copy(T* p, const T* x) { std::memcpy(p, x, N * sizeof(T)); }
    static void stream_end() {}

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

    // Where a is no NaN: a's bits and an offset.
    static I add_unless_nan(F a, I offset, I nan) { return is_nan(a) ? nan : addi(bits(a), offset); }
    // a + b * c where b * c is exact.
    static F add_product(F a, F b, F c) { return a + b * c; }

    // Even and odd elements of (a, b), and back: they are that already.
    static void unzip(F&, F&) {}
    static void zip(F&, F&) {}

    // Two lanes of 16 bits, the even one in the low half, unsigned but for sra16.
    static std::uint32_t even16(I a) { return static_cast<std::uint32_t>(a) & 0xFFFFu; }
    static std::uint32_t odd16(I a) { return static_cast<std::uint32_t>(a) >> 16; }
    static I pair16(std::uint32_t even, std::uint32_t odd) { return static_cast<I>((even & 0xFFFFu) | odd << 16); }
    static I set16(int x) { return pair16(static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x)); }
    static I load_halves(const std::uint16_t* p) { return pair16(p[0], p[1]); }
    static void store_halves(std::uint16_t* p, I a) {
        p[0] = static_cast<std::uint16_t>(even16(a));
        p[1] = static_cast<std::uint16_t>(odd16(a));
    }
    static I load_bytes(const std::uint8_t* p) { return pair16(p[0], p[1]); }
    static I load_signed_bytes(const std::uint8_t* p) {
        return pair16((p[0] ^ 0x80u) - 0x80u, (p[1] ^ 0x80u) - 0x80u);
    }
    static void store_bytes(std::uint8_t* p, I a) {  // the low byte of each lane
        p[0] = static_cast<std::uint8_t>(even16(a) & 0xFFu);
        p[1] = static_cast<std::uint8_t>(odd16(a) & 0xFFu);
    }
    static std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
    static std::uint32_t smaller(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
    static I add16(I a, I b) { return pair16(even16(a) + even16(b), odd16(a) + odd16(b)); }
    static I sub16(I a, I b) { return pair16(even16(a) - even16(b), odd16(a) - odd16(b)); }
    static I subs16(I a, I b) { return sub16(max16(a, b), b); }  // not below 0
    static I max16(I a, I b) { return pair16(larger(even16(a), even16(b)), larger(odd16(a), odd16(b))); }
    static I min16(I a, I b) { return pair16(smaller(even16(a), even16(b)), smaller(odd16(a), odd16(b))); }
    template <int S> static I sll16(I a) { return pair16(even16(a) << S, odd16(a) << S); }
    template <int S> static I srl16(I a) { return pair16(even16(a) >> S, odd16(a) >> S); }
    template <int S> static I sra16(I a) {
        constexpr std::uint32_t sign = 1u << (15 - S);
        return pair16(((even16(a) >> S) ^ sign) - sign, ((odd16(a) >> S) ^ sign) - sign);
    }
    // Even lane of `even`, odd lane of `odd`.
    static I blend16(I even, I odd) { return pair16(even16(even), odd16(odd)); }
    static I add_where_nonzero16(I a, I b) {
        return pair16(even16(a) != 0 ? even16(a) + even16(b) : 0, odd16(a) != 0 ? odd16(a) + odd16(b) : 0);
    }
    static I add_where_equal16(I a, I b, I x, I y) {  // a + b where x is y, else a
        return pair16(even16(a) + (even16(x) == even16(y) ? even16(b) : 0),
                      odd16(a) + (odd16(x) == odd16(y) ? odd16(b) : 0));
    }

    // Eight lanes of 16 bits, unsigned, in two fours.
    struct Eight {
        std::uint16_t at[8];
    };
    template <class Each> static Eight eight(Each each) {
        Eight x;
        for (int k = 0; k < 8; ++k) x.at[k] = static_cast<std::uint16_t>(each(k));
        return x;
    }
    static Eight load_eight(const std::uint16_t* low, const std::uint16_t* high) {
        return eight([&](int k) { return k < 4 ? low[k] : high[k - 4]; });
    }
    static void store_eight(std::uint16_t* low, std::uint16_t* high, Eight a) {
        std::memcpy(low, a.at, 4 * sizeof a.at[0]);
        std::memcpy(high, a.at + 4, 4 * sizeof a.at[0]);
    }
    static Eight and_eight(Eight a, int mask) { return eight([&](int k) { return a.at[k] & mask; }); }
    static Eight subs_eight(Eight a, int x) { return eight([&](int k) { return a.at[k] > x ? a.at[k] - x : 0; }); }
    template <int S> static Eight srl_eight(Eight a) { return eight([&](int k) { return a.at[k] >> S; }); }
    static Eight double_high_four(Eight a) { return eight([&](int k) { return k < 4 ? a.at[k] : 2 * a.at[k]; }); }
    // Maxima of four vectors a and four vectors b.
    static Eight maxima16(const I (&a)[4], const I (&b)[4]) {
        return eight([&](int k) {
            const I x = k < 4 ? a[k] : b[k - 4];
            return larger(even16(x), odd16(x));
        });
    }

    static D zero_d() { return 0.0; }
    static D low_d(F a) { return a; }
    static D high_d(F) { return 0.0; }
    static D add_square(D sum, D x) { return sum + x * x; }
    static void store_d(double* p, D a) { *p = a; }
};

}  // namespace
