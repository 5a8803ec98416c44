// 4 fp32 lanes: AArch64 Advanced SIMD, which every such processor has.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

namespace {

struct Simd {
    using F = float32x4_t;
    using I = int32x4_t;
    using M = uint32x4_t;
    using D = float64x2_t;
    static constexpr int N = 4;
    static constexpr int ND = 2;
    static constexpr int kSumVectors = 8;

    static I bits(F x) { return vreinterpretq_s32_f32(x); }
    static F floats(I i) { return vreinterpretq_f32_s32(i); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static F set(float x) { return vdupq_n_f32(x); }
    static I seti(std::int32_t x) { return vdupq_n_s32(x); }
    static I loadi(const std::int32_t* p) { return vld1q_s32(p); }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F max_number(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where a is NaN
    static F min_number(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

    static I addi(I a, I b) { return vaddq_s32(a, b); }
    static I subi(I a, I b) { return vsubq_s32(a, b); }
    static I andi(I a, I b) { return vandq_s32(a, b); }
    static I ori(I a, I b) { return vorrq_s32(a, b); }
    template <int S> static I sll(I a) { return vshlq_n_s32(a, S); }
    template <int S> static I srl(I a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), S)); }

    static M is_nan(F a) { return vmvnq_u32(vceqq_f32(a, a)); }
    static M equal(I a, I b) { return vceqq_s32(a, b); }
    static I select(M m, I a, I b) { return vbslq_s32(m, a, b); }

    static I load_u16(const std::uint16_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))); }
    static I load_s16(const std::int16_t* p) { return vmovl_s16(vld1_s16(p)); }
    static void store16(std::uint16_t* p, I a) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(a))); }
    static constexpr std::size_t kStreamAlign = 0;  // no such store
    static void stream16(std::uint16_t* p, I a) { store16(p, a); }
    template <class T> static void stream_copy(T* p, const T* x) { std::memcpy(p, x, N * sizeof(T)); }
    static void stream_end() {}

    static F from_half(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static I to_half(F x) { return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(x)))); }

    // Where a is no NaN: a's bits and an offset.
    static I add_unless_nan(F a, I offset, I nan) { return select(is_nan(a), nan, addi(bits(a), offset)); }
    // a + b * c where b * c is exact.
    static F add_product(F a, F b, F c) { return add(a, mul(b, c)); }

    // Even and odd elements of (a, b), and back.
    static void unzip(F& a, F& b) {
        const F x = vuzp1q_f32(a, b);
        b = vuzp2q_f32(a, b);
        a = x;
    }
    static void zip(F& a, F& b) {
        const F x = vzip1q_f32(a, b);
        b = vzip2q_f32(a, b);
        a = x;
    }

    // 2 N lanes of 16 bits, unsigned but for sra16.
    static uint16x8_t halves(I a) { return vreinterpretq_u16_s32(a); }
    static I lanes(uint16x8_t a) { return vreinterpretq_s32_u16(a); }
    static I set16(int x) { return lanes(vdupq_n_u16(static_cast<std::uint16_t>(x))); }
    static I load_halves(const std::uint16_t* p) { return lanes(vld1q_u16(p)); }
    static void store_halves(std::uint16_t* p, I a) { vst1q_u16(p, halves(a)); }
    static I load_bytes(const std::uint8_t* p) { return lanes(vmovl_u8(vld1_u8(p))); }
    static I load_signed_bytes(const std::uint8_t* p) {
        return vreinterpretq_s32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
    }
    static void store_bytes(std::uint8_t* p, I a) { vst1_u8(p, vmovn_u16(halves(a))); }  // the low byte of each lane
    static I add16(I a, I b) { return lanes(vaddq_u16(halves(a), halves(b))); }
    static I sub16(I a, I b) { return lanes(vsubq_u16(halves(a), halves(b))); }
    static I subs16(I a, I b) { return lanes(vqsubq_u16(halves(a), halves(b))); }  // not below 0
    static I max16(I a, I b) { return lanes(vmaxq_u16(halves(a), halves(b))); }
    static I min16(I a, I b) { return lanes(vminq_u16(halves(a), halves(b))); }
    template <int S> static I sll16(I a) { return lanes(vshlq_n_u16(halves(a), S)); }
    template <int S> static I srl16(I a) { return lanes(vshrq_n_u16(halves(a), S)); }
    template <int S> static I sra16(I a) { return vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(a), S)); }
    // Even lanes of `even`, odd lanes of `odd`.
    static I blend16(I even, I odd) { return vbslq_s32(vdupq_n_u32(0xFFFF), even, odd); }
    static I add_where_nonzero16(I a, I b) {
        return lanes(vandq_u16(vtstq_u16(halves(a), halves(a)), vaddq_u16(halves(a), halves(b))));
    }
    static I add_where_equal16(I a, I b, I x, I y) {  // a + b where x is y, else a
        return lanes(vaddq_u16(halves(a), vandq_u16(halves(b), vceqq_u16(halves(x), halves(y)))));
    }
    // Eight lanes of 16 bits, unsigned, in two fours.
    using Eight = uint16x8_t;
    static Eight load_eight(const std::uint16_t* low, const std::uint16_t* high) {
        return vcombine_u16(vld1_u16(low), vld1_u16(high));
    }
    static void store_eight(std::uint16_t* low, std::uint16_t* high, Eight a) {
        vst1_u16(low, vget_low_u16(a));
        vst1_u16(high, vget_high_u16(a));
    }
    static Eight and_eight(Eight a, int mask) { return vandq_u16(a, vdupq_n_u16(static_cast<std::uint16_t>(mask))); }
    static Eight subs_eight(Eight a, int x) { return vqsubq_u16(a, vdupq_n_u16(static_cast<std::uint16_t>(x))); }
    template <int S> static Eight srl_eight(Eight a) { return vshrq_n_u16(a, S); }
    static Eight double_high_four(Eight a) {
        return vcombine_u16(vget_low_u16(a), vadd_u16(vget_high_u16(a), vget_high_u16(a)));
    }
    // Maxima of four vectors a and four vectors b.
    static uint16x8_t max_of_four16(const I (&a)[4]) {
        return vpmaxq_u16(vpmaxq_u16(halves(a[0]), halves(a[1])), vpmaxq_u16(halves(a[2]), halves(a[3])));
    }
    static Eight maxima16(const I (&a)[4], const I (&b)[4]) {
        return vpmaxq_u16(max_of_four16(a), max_of_four16(b));
    }

    static D zero_d() { return vdupq_n_f64(0.0); }
    static D low_d(F a) { return vcvt_f64_f32(vget_low_f32(a)); }
    static D high_d(F a) { return vcvt_high_f64_f32(a); }
    static D add_square(D sum, D x) { return vaddq_f64(sum, vmulq_f64(x, x)); }
    static void store_d(double* p, D a) { vst1q_f64(p, a); }
};

}  // namespace
