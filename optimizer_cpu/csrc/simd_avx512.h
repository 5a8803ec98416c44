// 16 fp32 lanes: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

struct Simd {
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;
    using D = __m512d;
    static constexpr int N = 16;
    static constexpr int ND = 8;
    static constexpr int kSumVectors = 4;

    static I bits(F x) { return _mm512_castps_si512(x); }
    static F floats(I i) { return _mm512_castsi512_ps(i); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static I seti(std::int32_t x) { return _mm512_set1_epi32(x); }
    static I loadi(const std::int32_t* p) { return _mm512_loadu_si512(p); }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F max_number(F a, F b) { return _mm512_max_ps(a, b); }  // returns b where a is NaN
    static F min_number(F a, F b) { return _mm512_min_ps(a, b); }

    static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
    static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I andi(I a, I b) { return _mm512_and_si512(a, b); }
    static I ori(I a, I b) { return _mm512_or_si512(a, b); }
    template <int S> static I sll(I a) { return _mm512_slli_epi32(a, S); }
    template <int S> static I srl(I a) { return _mm512_srli_epi32(a, S); }

    static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
    static M equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static I select(M m, I a, I b) { return _mm512_mask_mov_epi32(b, m, a); }

    static I load_u16(const std::uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_s16(const std::int16_t* p) {
        return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store16(std::uint16_t* p, I a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
    }
    // Past the caches; `p` must be a multiple of kStreamAlign.
    static constexpr std::size_t kStreamAlign = 32;
    static void stream16(std::uint16_t* p, I a) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
    }
    static void stream_copy(std::uint16_t* p, const std::uint16_t* x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    }
    static void stream_copy(float* p, const float* x) { _mm512_stream_ps(p, _mm512_loadu_ps(x)); }
    static void stream_end() { _mm_sfence(); }

    static F from_half(const std::uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I to_half(F x) {
        return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    // Where a is no NaN: a's bits and an offset.
    static I add_unless_nan(F a, I offset, I nan) {
        return _mm512_mask_add_epi32(nan, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), bits(a), offset);
    }
    // a + b * c where b * c is exact: one rounding either way.
    static F add_product(F a, F b, F c) { return _mm512_fmadd_ps(b, c, a); }

    // Even and odd elements of (a, b), and back.
    static void unzip(F& a, F& b) {
        const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const F x = _mm512_permutex2var_ps(a, even, b);
        b = _mm512_permutex2var_ps(a, addi(even, seti(1)), b);
        a = x;
    }
    static void zip(F& a, F& b) {
        const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const F x = _mm512_permutex2var_ps(a, low, b);
        b = _mm512_permutex2var_ps(a, addi(low, seti(8)), b);
        a = x;
    }

    // 2 N lanes of 16 bits, unsigned but for sra16.
    static I set16(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }
    static I load_halves(const std::uint16_t* p) { return _mm512_loadu_si512(p); }
    static void store_halves(std::uint16_t* p, I a) { _mm512_storeu_si512(p, a); }
    static I load_bytes(const std::uint8_t* p) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_signed_bytes(const std::uint8_t* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_bytes(std::uint8_t* p, I a) {  // the low byte of each lane
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(a));
    }
    static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
    static I sub16(I a, I b) { return _mm512_sub_epi16(a, b); }
    static I subs16(I a, I b) { return _mm512_subs_epu16(a, b); }  // not below 0
    static I max16(I a, I b) { return _mm512_max_epu16(a, b); }
    static I min16(I a, I b) { return _mm512_min_epu16(a, b); }
    template <int S> static I sll16(I a) { return _mm512_slli_epi16(a, S); }
    template <int S> static I srl16(I a) { return _mm512_srli_epi16(a, S); }
    template <int S> static I sra16(I a) { return _mm512_srai_epi16(a, S); }
    // Even lanes of `even`, odd lanes of `odd`.
    static I blend16(I even, I odd) { return _mm512_mask_blend_epi16(0xAAAAAAAAu, even, odd); }
    static I add_where_nonzero16(I a, I b) { return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(a, a), a, b); }
    static I add_where_equal16(I a, I b, I x, I y) {  // a + b where x is y, else a
        return _mm512_mask_add_epi16(a, _mm512_cmpeq_epi16_mask(x, y), a, b);
    }
    // Eight lanes of 16 bits, unsigned, in two fours.
    using Eight = __m128i;
    static Eight load_eight(const std::uint16_t* low, const std::uint16_t* high) {
        return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                  _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
    }
    static void store_eight(std::uint16_t* low, std::uint16_t* high, Eight a) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(low), a);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(high), _mm_unpackhi_epi64(a, a));
    }
    static Eight and_eight(Eight a, int mask) { return _mm_and_si128(a, _mm_set1_epi16(static_cast<short>(mask))); }
    static Eight subs_eight(Eight a, int x) { return _mm_subs_epu16(a, _mm_set1_epi16(static_cast<short>(x))); }
    template <int S> static Eight srl_eight(Eight a) { return _mm_srli_epi16(a, S); }
    static Eight double_high_four(Eight a) { return _mm_add_epi16(a, _mm_and_si128(a, _mm_set_epi64x(-1, 0))); }
    // Maxima of four vectors a and four vectors b.
    static I max_of_neighbours16(I a, I b) { return max16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)); }
    static I max_of_pairs16(I a, I b) { return max16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }
    static Eight maxima16(const I (&a)[4], const I (&b)[4]) {
        const I x = max_of_pairs16(max_of_neighbours16(a[0], a[1]), max_of_neighbours16(a[2], a[3]));
        const I y = max_of_pairs16(max_of_neighbours16(b[0], b[1]), max_of_neighbours16(b[2], b[3]));
        const I z = max16(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
        const __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(z), _mm512_extracti64x4_epi64(z, 1));
        return _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    }

    static D zero_d() { return _mm512_setzero_pd(); }
    static D low_d(F a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
    static D high_d(F a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
    static D add_square(D sum, D x) { return _mm512_add_pd(sum, _mm512_mul_pd(x, x)); }
    static void store_d(double* p, D a) { _mm512_storeu_pd(p, a); }
};

}  // namespace
