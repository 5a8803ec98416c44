// 8 fp32 lanes: AVX2 and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

struct Simd {
    using F = __m256;
    using I = __m256i;
    using M = __m256i;
    using D = __m256d;
    static constexpr int N = 8;
    static constexpr int ND = 4;
    static constexpr int kSumVectors = 4;

    static I bits(F x) { return _mm256_castps_si256(x); }
    static F floats(I i) { return _mm256_castsi256_ps(i); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static I seti(std::int32_t x) { return _mm256_set1_epi32(x); }
    static I loadi(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F max_number(F a, F b) { return _mm256_max_ps(a, b); }  // returns b where a is NaN
    static F min_number(F a, F b) { return _mm256_min_ps(a, b); }

    static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
    static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I andi(I a, I b) { return _mm256_and_si256(a, b); }
    static I ori(I a, I b) { return _mm256_or_si256(a, b); }
    template <int S> static I sll(I a) { return _mm256_slli_epi32(a, S); }
    template <int S> static I srl(I a) { return _mm256_srli_epi32(a, S); }

    static M is_nan(F a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
    static M equal(I a, I b) { return _mm256_cmpeq_epi32(a, b); }
    static I select(M m, I a, I b) { return _mm256_blendv_epi8(b, a, m); }

    static I load_u16(const std::uint16_t* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_s16(const std::int16_t* p) {
        return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static __m128i pack16(I a) {
        const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF));
        return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    }
    static void store16(std::uint16_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack16(a)); }
    // Past the caches; `p` must be a multiple of kStreamAlign.
    static constexpr std::size_t kStreamAlign = 16;
    static void stream16(std::uint16_t* p, I a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), pack16(a)); }
    static void stream_copy(std::uint16_t* p, const std::uint16_t* x) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    }
    static void stream_copy(float* p, const float* x) { _mm256_stream_ps(p, _mm256_loadu_ps(x)); }
    static void stream_end() { _mm_sfence(); }

    static F from_half(const std::uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I to_half(F x) {
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    // Where a is no NaN: a's bits and an offset.
    static I add_unless_nan(F a, I offset, I nan) { return select(is_nan(a), nan, addi(bits(a), offset)); }
    // a + b * c where b * c is exact.
    static F add_product(F a, F b, F c) { return add(a, mul(b, c)); }

    // Even and odd elements of (a, b), and back.
    static F permute64(F a) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), _MM_SHUFFLE(3, 1, 2, 0)));
    }
    static void unzip(F& a, F& b) {
        const F x = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0));
        b = permute64(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
        a = permute64(x);
    }
    static void zip(F& a, F& b) {
        const F low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
        a = _mm256_permute2f128_ps(low, high, 0x20);
        b = _mm256_permute2f128_ps(low, high, 0x31);
    }

    // 2 N lanes of 16 bits, unsigned but for sra16.
    static I set16(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
    static I load_halves(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_halves(std::uint16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
    static I load_bytes(const std::uint8_t* p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_signed_bytes(const std::uint8_t* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_bytes(std::uint8_t* p, I a) {  // the low byte of each lane
        const __m256i low = _mm256_and_si256(a, _mm256_set1_epi16(0xFF));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    }
    static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
    static I sub16(I a, I b) { return _mm256_sub_epi16(a, b); }
    static I subs16(I a, I b) { return _mm256_subs_epu16(a, b); }  // not below 0
    static I max16(I a, I b) { return _mm256_max_epu16(a, b); }
    static I min16(I a, I b) { return _mm256_min_epu16(a, b); }
    template <int S> static I sll16(I a) { return _mm256_slli_epi16(a, S); }
    template <int S> static I srl16(I a) { return _mm256_srli_epi16(a, S); }
    template <int S> static I sra16(I a) { return _mm256_srai_epi16(a, S); }
    // Even lanes of `even`, odd lanes of `odd`.
    static I blend16(I even, I odd) { return _mm256_blend_epi16(even, odd, 0xAA); }
    static I add_where_nonzero16(I a, I b) {
        return _mm256_andnot_si256(_mm256_cmpeq_epi16(a, _mm256_setzero_si256()), add16(a, b));
    }
    static I add_where_equal16(I a, I b, I x, I y) {  // a + b where x is y, else a
        return add16(a, andi(b, _mm256_cmpeq_epi16(x, y)));
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
    static I max_of_neighbours16(I a, I b) { return max16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)); }
    static I max_of_pairs16(I a, I b) { return max16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
    static Eight maxima16(const I (&a)[4], const I (&b)[4]) {
        const I x = max_of_pairs16(max_of_neighbours16(a[0], a[1]), max_of_neighbours16(a[2], a[3]));
        const I y = max_of_pairs16(max_of_neighbours16(b[0], b[1]), max_of_neighbours16(b[2], b[3]));
        const I z = max16(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
        return _mm_max_epu16(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    }

    static D zero_d() { return _mm256_setzero_pd(); }
    static D low_d(F a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
    static D high_d(F a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
    static D add_square(D sum, D x) { return _mm256_add_pd(sum, _mm256_mul_pd(x, x)); }
    static void store_d(double* p, D a) { _mm256_storeu_pd(p, a); }
};

}  // namespace
