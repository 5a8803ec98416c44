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
    static I mini(I a, I b) { return _mm512_min_epi32(a, b); }
    static I maxi(I a, I b) { return _mm512_max_epi32(a, b); }
    template <int S> static I sll(I a) { return _mm512_slli_epi32(a, S); }
    template <int S> static I srl(I a) { return _mm512_srli_epi32(a, S); }
    template <int S> static I sra(I a) { return _mm512_srai_epi32(a, S); }

    static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
    static M equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static I select(M m, I a, I b) { return _mm512_mask_mov_epi32(b, m, a); }

    static I load_u16(const std::uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_s16(const std::int16_t* p) {
        return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_u8(const std::uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_s8(const std::int8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store16(std::uint16_t* p, I a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
    }
    // Past the caches; `p` must be a multiple of kStreamAlign.
    static constexpr std::size_t kStreamAlign = 32;
    static void stream16(std::uint16_t* p, I a) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
    }
    static void stream_end() { _mm_sfence(); }
    static void store8(std::uint8_t* p, I a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
    }

    static F from_half(const std::uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I to_half(F x) {
        return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    static I max_halves(I a, I b) { return _mm512_max_epu16(a, b); }
    static std::uint32_t reduce_max_halves(I a) {
        const __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
        __m128i q = _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
        q = _mm_max_epu16(q, _mm_shuffle_epi32(q, 0x4E));
        q = _mm_max_epu16(q, _mm_shuffle_epi32(q, 0xB1));
        return static_cast<std::uint32_t>(_mm_cvtsi128_si32(q));
    }

    static D zero_d() { return _mm512_setzero_pd(); }
    static D low_d(F a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
    static D high_d(F a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
    static D add_square(D sum, D x) { return _mm512_add_pd(sum, _mm512_mul_pd(x, x)); }
    static void store_d(double* p, D a) { _mm512_storeu_pd(p, a); }
};

}  // namespace
