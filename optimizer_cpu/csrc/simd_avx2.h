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
    static I mini(I a, I b) { return _mm256_min_epi32(a, b); }
    static I maxi(I a, I b) { return _mm256_max_epi32(a, b); }
    template <int S> static I sll(I a) { return _mm256_slli_epi32(a, S); }
    template <int S> static I srl(I a) { return _mm256_srli_epi32(a, S); }
    template <int S> static I sra(I a) { return _mm256_srai_epi32(a, S); }

    static M is_nan(F a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
    static M equal(I a, I b) { return _mm256_cmpeq_epi32(a, b); }
    static I select(M m, I a, I b) { return _mm256_blendv_epi8(b, a, m); }

    static I load_u16(const std::uint16_t* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_s16(const std::int16_t* p) {
        return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_u8(const std::uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_s8(const std::int8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static __m128i pack16(I a) {
        const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF));
        return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    }
    static void store16(std::uint16_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack16(a)); }
    // Past the caches; `p` must be a multiple of kStreamAlign.
    static constexpr std::size_t kStreamAlign = 16;
    static void stream16(std::uint16_t* p, I a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), pack16(a)); }
    static void stream_end() { _mm_sfence(); }
    static void store8(std::uint8_t* p, I a) {
        const __m128i words = pack16(_mm256_and_si256(a, _mm256_set1_epi32(0xFF)));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
    }

    static F from_half(const std::uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I to_half(F x) {
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    static I max_halves(I a, I b) { return _mm256_max_epu16(a, b); }
    static std::uint32_t reduce_max_halves(I a) {
        __m128i q = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        q = _mm_max_epu16(q, _mm_shuffle_epi32(q, 0x4E));
        q = _mm_max_epu16(q, _mm_shuffle_epi32(q, 0xB1));
        return static_cast<std::uint32_t>(_mm_cvtsi128_si32(q));
    }

    static D zero_d() { return _mm256_setzero_pd(); }
    static D low_d(F a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
    static D high_d(F a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
    static D add_square(D sum, D x) { return _mm256_add_pd(sum, _mm256_mul_pd(x, x)); }
    static void store_d(double* p, D a) { _mm256_storeu_pd(p, a); }
};

}  // namespace
