// The one body of every kernel, compiled once per instruction set over that set's `Simd`.
//
// The operation order is reference.py's. Everything lives in an unnamed namespace and no standard template is used, so no
// code built with one translation unit's flags can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace optimizer_cpu {
namespace {

using F = Simd::F;
using I = Simd::I;
constexpr std::size_t N = Simd::N;
constexpr int kVectors = static_cast<int>(kGroup / N);  // vectors per group of `compact`
constexpr float kGradLimit = 1152921504606846976.0f;    // 2^60: squares and their sums stay finite in `compact`
constexpr int kMomentShift = 19;                        // 3 exponent and 4 fraction bits of |exp_avg|
constexpr int kRootShift = 18;                          // 3 exponent and 5 fraction bits of sqrt(exp_avg_sq)

// ---- element types -------------------------------------------------------------------------------------------------

struct F32 {
    using T = float;
    static F load(const T* p) { return Simd::load(p); }
};
struct BF16 {
    using T = std::uint16_t;
    static F load(const T* p) { return Simd::floats(Simd::template sll<16>(Simd::load_u16(p))); }
};
struct F16 {
    using T = std::uint16_t;
    static F load(const T* p) { return Simd::from_half(p); }
};

// Weight planes: `round` may move the master off a tie, then writes the weight.
struct WeightNone {
    using T = float;
    static F round(F p, T*) { return p; }
};
struct WeightF32 {
    using T = float;
    static F round(F p, T* out) {
        Simd::store(out, p);
        return p;
    }
};
struct WeightF16 {
    using T = std::uint16_t;
    static F round(F p, T* out) {
        Simd::store16(out, Simd::select(Simd::is_nan(p), Simd::seti(0x7E00), Simd::to_half(p)));
        return p;
    }
};

// Bits of fp32 -> bf16, to nearest even.
inline I bf16_code(I bits) {
    const I odd = Simd::andi(Simd::template srl<16>(bits), Simd::seti(1));
    return Simd::template srl<16>(Simd::addi(Simd::addi(bits, Simd::seti(0x7FFF)), odd));
}

// A tie under an even high half is lowered by one: see round_weight_ in reference.py.
inline I off_tie(I bits) {
    const auto tie = Simd::equal(Simd::andi(bits, Simd::seti(0x1FFFF)), Simd::seti(0x8000));
    return Simd::select(tie, Simd::subi(bits, Simd::seti(1)), bits);
}

struct WeightBF16 {
    using T = std::uint16_t;
    static F round(F p, T* out) {
        const I bits = off_tie(Simd::bits(p));
        Simd::store16(out, Simd::select(Simd::is_nan(p), Simd::seti(0x7FC0), bf16_code(bits)));
        return Simd::floats(bits);
    }
};

// The same, written past the caches: a long range's weights are not read again before they have left them, and an
// ordinary store would first read every line it overwrites.
struct WeightBF16Stream {
    using T = std::uint16_t;
    static F round(F p, T* out) {
        const I bits = off_tie(Simd::bits(p));
        Simd::stream16(out, Simd::select(Simd::is_nan(p), Simd::seti(0x7FC0), bf16_code(bits)));
        return Simd::floats(bits);
    }
};
constexpr std::size_t kStreamFrom = 256 * 1024;  // elements of one thread's range

// ---- the step of one vector ------------------------------------------------------------------------------------------

struct Constants {
    F grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, step_size;
    bool coupled;
    explicit Constants(const Scalars& s)
        : grad_scale(Simd::set(s.grad_scale)), l2(Simd::set(s.l2)), decay(Simd::set(s.decay)),
          beta1(Simd::set(s.beta1)), one_minus_beta1(Simd::set(s.one_minus_beta1)), beta2(Simd::set(s.beta2)),
          one_minus_beta2(Simd::set(s.one_minus_beta2)), root_scale(Simd::set(s.root_scale)), eps(Simd::set(s.eps)),
          step_size(Simd::set(s.step_size)), coupled(s.l2 != 0.0f) {}
};

// Returns sqrt of the new exp_avg_sq, which `compact` stores.
inline F adamw(F& p, F& m, F& v, F g, const Constants& c) {
    if (c.coupled) g = Simd::add(g, Simd::mul(p, c.l2));
    p = Simd::mul(p, c.decay);
    m = Simd::add(Simd::mul(m, c.beta1), Simd::mul(g, c.one_minus_beta1));
    v = Simd::add(Simd::mul(v, c.beta2), Simd::mul(Simd::mul(g, c.one_minus_beta2), g));
    const F root = Simd::sqrt(v);
    const F denominator = Simd::add(Simd::mul(root, c.root_scale), c.eps);
    p = Simd::sub(p, Simd::mul(Simd::div(m, denominator), c.step_size));
    return root;
}

// Hardware prefetchers stop at every page and share few slots among a step's streams: asking 512 bytes ahead raised the
// fp32 step from 0.84 to 0.93 of the streaming bandwidth (256 to 512 bytes are alike, 768 and more do not help).
inline void prefetch(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + 512); }

template <class T> inline T* at(void* base, std::size_t i) { return static_cast<T*>(base) + i; }
template <class T> inline const T* at(const void* base, std::size_t i) { return static_cast<const T*>(base) + i; }

// Copies the `count` (< capacity) last elements of a plane to a zero-filled buffer, and back.
template <class T, std::size_t Capacity> struct Tail {
    T data[Capacity];
    Tail(const void* base, std::size_t begin, std::size_t count) {
        std::memset(data, 0, sizeof data);
        if (base != nullptr && count != 0) std::memcpy(data, static_cast<const T*>(base) + begin, count * sizeof(T));
    }
    void back(void* base, std::size_t begin, std::size_t count) const {
        if (base != nullptr && count != 0) std::memcpy(static_cast<T*>(base) + begin, data, count * sizeof(T));
    }
};

// ---- fp32 ------------------------------------------------------------------------------------------------------------

template <class G, class W>
inline void adamw_vector(float* p, float* m, float* v, const typename G::T* g, typename W::T* w, const Constants& c) {
    F pv = Simd::load(p), mv = Simd::load(m), vv = Simd::load(v);
    adamw(pv, mv, vv, Simd::mul(G::load(g), c.grad_scale), c);
    Simd::store(p, W::round(pv, w));
    Simd::store(m, mv);
    Simd::store(v, vv);
}

template <class G, class W>
void adamw_range(const Planes& planes, const Scalars& scalars, const Dither&, std::size_t begin, std::size_t end) {
    const Constants c(scalars);
    float *p = at<float>(planes.master, 0), *m = at<float>(planes.exp_avg, 0), *v = at<float>(planes.exp_avg_sq, 0);
    const auto* g = at<typename G::T>(planes.grad, 0);
    auto* w = at<typename W::T>(planes.weight, 0);
    std::size_t i = begin;
    for (; i + N <= end; i += N) {
        prefetch(p + i);
        prefetch(m + i);
        prefetch(v + i);
        prefetch(g + i);
        adamw_vector<G, W>(p + i, m + i, v + i, g + i, w == nullptr ? nullptr : w + i, c);
    }
    if (i < end) {
        const std::size_t rest = end - i;
        Tail<float, N> tp(p, i, rest), tm(m, i, rest), tv(v, i, rest);
        const Tail<typename G::T, N> tg(g, i, rest);
        Tail<typename W::T, N> tw(nullptr, 0, 0);
        adamw_vector<G, W>(tp.data, tm.data, tv.data, tg.data, tw.data, c);
        tp.back(p, i, rest);
        tm.back(m, i, rest);
        tv.back(v, i, rest);
        tw.back(w, i, rest);
    }
}

template <class G>
void adamw_bf16_range(const Planes& planes, const Scalars& scalars, const Dither& dither, std::size_t begin, std::size_t end) {
    const auto where = reinterpret_cast<std::uintptr_t>(at<std::uint16_t>(planes.weight, begin));
    if (Simd::kStreamAlign == 0 || end - begin < kStreamFrom || (where & (Simd::kStreamAlign - 1)) != 0) {
        adamw_range<G, WeightBF16>(planes, scalars, dither, begin, end);
        return;
    }
    const std::size_t whole = end - (end - begin) % N;
    adamw_range<G, WeightBF16Stream>(planes, scalars, dither, begin, whole);
    Simd::stream_end();
    adamw_range<G, WeightBF16>(planes, scalars, dither, whole, end);
}

template <class W> void round_range(float* p, void* weight, std::size_t begin, std::size_t end) {
    auto* w = at<typename W::T>(weight, 0);
    std::size_t i = begin;
    for (; i + N <= end; i += N) Simd::store(p + i, W::round(Simd::load(p + i), w + i));
    if (i < end) {
        Tail<float, N> tp(p, i, end - i);
        Tail<typename W::T, N> tw(nullptr, 0, 0);
        Simd::store(tp.data, W::round(Simd::load(tp.data), tw.data));
        tp.back(p, i, end - i);
        tw.back(w, i, end - i);
    }
}

// ---- split -----------------------------------------------------------------------------------------------------------

inline F split_decode(const std::uint16_t* w, const std::int16_t* r) {
    return Simd::floats(Simd::addi(Simd::template sll<16>(Simd::load_u16(w)), Simd::load_s16(r)));
}

inline void split_encode(F p, std::uint16_t* w, std::uint16_t* r) {
    const auto nan = Simd::is_nan(p);
    const I bits = Simd::select(nan, Simd::seti(0x7FC00000), off_tie(Simd::bits(p)));
    Simd::store16(w, bf16_code(bits));
    Simd::store16(r, bits);  // the remainder bits - (code << 16) in 16-bit wrap-around: the low half itself
}

template <class G>
inline void split_vector(std::uint16_t* w, std::int16_t* r, float* m, float* v, const typename G::T* g, const Constants& c) {
    F p = split_decode(w, r), mv = Simd::load(m), vv = Simd::load(v);
    adamw(p, mv, vv, Simd::mul(G::load(g), c.grad_scale), c);
    split_encode(p, w, reinterpret_cast<std::uint16_t*>(r));
    Simd::store(m, mv);
    Simd::store(v, vv);
}

template <class G>
void split_range(const Planes& planes, const Scalars& scalars, const Dither&, std::size_t begin, std::size_t end) {
    const Constants c(scalars);
    auto* w = at<std::uint16_t>(planes.weight, 0);
    auto* r = at<std::int16_t>(planes.master, 0);
    float *m = at<float>(planes.exp_avg, 0), *v = at<float>(planes.exp_avg_sq, 0);
    const auto* g = at<typename G::T>(planes.grad, 0);
    std::size_t i = begin;
    for (; i + N <= end; i += N) {
        prefetch(w + i);
        prefetch(r + i);
        prefetch(m + i);
        prefetch(v + i);
        prefetch(g + i);
        split_vector<G>(w + i, r + i, m + i, v + i, g + i, c);
    }
    if (i < end) {
        const std::size_t rest = end - i;
        Tail<std::uint16_t, N> tw(w, i, rest);
        Tail<std::int16_t, N> tr(r, i, rest);
        Tail<float, N> tm(m, i, rest), tv(v, i, rest);
        const Tail<typename G::T, N> tg(g, i, rest);
        split_vector<G>(tw.data, tr.data, tm.data, tv.data, tg.data, c);
        tw.back(w, i, rest);
        tr.back(r, i, rest);
        tm.back(m, i, rest);
        tv.back(v, i, rest);
    }
}

void split_encode_range(const Planes& planes, const Decoded& d, const Dither&, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += N) {
        const std::size_t count = end - i < N ? end - i : N;
        const Tail<float, N> p(d.master, i, count);
        Tail<std::uint16_t, N> w(nullptr, 0, 0), r(nullptr, 0, 0);
        split_encode(Simd::load(p.data), w.data, r.data);
        w.back(planes.weight, i, count);
        r.back(planes.master, i, count);
    }
}

void split_decode_range(const Planes& planes, const Decoded& d, const Dither&, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += N) {
        const std::size_t count = end - i < N ? end - i : N;
        const Tail<std::uint16_t, N> w(planes.weight, i, count);
        const Tail<std::int16_t, N> r(planes.master, i, count);
        Tail<float, N> p(nullptr, 0, 0);
        Simd::store(p.data, split_decode(w.data, r.data));
        p.back(d.master, i, count);
    }
}

// ---- compact ---------------------------------------------------------------------------------------------------------

struct CompactPlanes {
    std::uint16_t* weight;
    std::int8_t* remainder;
    std::uint8_t *exp_avg, *exp_avg_sq;
    std::uint16_t *exp_avg_scale, *exp_avg_sq_scale;  // one entry: the group's
};

// First octave of a group, from the bf16 scale that names the last.
inline std::int32_t first_octave(std::uint16_t scale) {
    const std::int32_t octave = (scale >> 7) & 0xFF;
    return octave < 7 ? 0 : octave - 7;
}

inline F compact_master(const std::uint16_t* w, const std::int8_t* r) {
    return Simd::floats(
        Simd::addi(Simd::template sll<16>(Simd::load_u16(w)), Simd::template sll<8>(Simd::load_s8(r))));
}

inline F compact_moment(const std::uint8_t* code, I base) {
    const I x = Simd::load_s8(reinterpret_cast<const std::int8_t*>(code));
    const I magnitude = Simd::andi(x, Simd::seti(0x7F));
    const I bits = Simd::template sll<kMomentShift>(Simd::addi(magnitude, base));
    const I kept = Simd::select(Simd::equal(magnitude, Simd::seti(0)), magnitude, bits);
    return Simd::floats(Simd::ori(kept, Simd::andi(x, Simd::seti(INT32_MIN))));
}

inline F compact_root(const std::uint8_t* code, I base) {
    const I x = Simd::load_u8(code);
    const I bits = Simd::template sll<kRootShift>(Simd::addi(x, base));
    return Simd::floats(Simd::select(Simd::equal(x, Simd::seti(0)), x, bits));
}

// A tie under an even high half would need the remainder +128. Always moving it to one side would be a wall that small
// updates cannot cross; the dither moves it to either side.
inline void compact_store_master(F p, const Dither& dither, std::size_t i, std::uint16_t* w, std::uint8_t* r) {
    const I bits = Simd::andi(Simd::addi(Simd::bits(p), Simd::loadi(dither.master + i)), Simd::seti(~0xFF));
    const auto tie = Simd::equal(Simd::andi(bits, Simd::seti(0x1FFFF)), Simd::seti(0x8000));
    const I moved = Simd::select(tie, Simd::addi(bits, Simd::loadi(dither.tie + i)), bits);
    const I kept = Simd::select(Simd::is_nan(p), Simd::seti(0x7FC00000), moved);
    const I code = bf16_code(kept);
    Simd::store16(w, code);
    Simd::store8(r, Simd::template srl<8>(kept));  // kept - (code << 16) in units of 256, in 8-bit wrap-around
}

// Rounded magnitudes of one vector of moments, waiting for the group's maximum.
struct Rounded {
    I sign, moment, root;
};

inline Rounded compact_round(F m, F root, I moment_dither, I root_dither) {
    const I bits = Simd::bits(m);
    const I magnitude = Simd::andi(bits, Simd::seti(INT32_MAX));
    return {Simd::andi(Simd::template srl<24>(bits), Simd::seti(0x80)),
            Simd::template srl<kMomentShift>(Simd::addi(magnitude, moment_dither)),
            Simd::template srl<kRootShift>(Simd::addi(Simd::bits(root), root_dither))};
}

inline void compact_store_moments(const Rounded (&rounded)[kVectors], const CompactPlanes& x) {
    I most = Simd::ori(Simd::template sll<16>(rounded[0].moment), rounded[0].root);
    for (int k = 1; k < kVectors; ++k)
        most = Simd::max_halves(most, Simd::ori(Simd::template sll<16>(rounded[k].moment), rounded[k].root));
    const std::uint32_t maxima = Simd::reduce_max_halves(most);
    const std::int32_t moment_octave = static_cast<std::int32_t>(maxima >> 20);
    const std::int32_t root_octave = static_cast<std::int32_t>((maxima & 0xFFFF) >> 5);
    *x.exp_avg_scale = static_cast<std::uint16_t>(moment_octave << 7);
    *x.exp_avg_sq_scale = static_cast<std::uint16_t>(root_octave << 7);
    const I moment_base = Simd::seti((moment_octave < 7 ? 0 : moment_octave - 7) << 4);
    const I root_base = Simd::seti((root_octave < 7 ? 0 : root_octave - 7) << 5);
    const I zero = Simd::seti(0), one = Simd::seti(1);
    for (int k = 0; k < kVectors; ++k) {
        const I moment = Simd::maxi(Simd::subi(rounded[k].moment, moment_base), zero);
        Simd::store8(x.exp_avg + k * N, Simd::ori(moment, rounded[k].sign));
        const I root = Simd::maxi(Simd::subi(rounded[k].root, root_base), Simd::mini(rounded[k].root, one));
        Simd::store8(x.exp_avg_sq + k * N, root);
    }
}

template <class G>
inline void compact_group(const CompactPlanes& x, const typename G::T* g, const Constants& c, const Dither& dither) {
    const I moment_base = Simd::seti(first_octave(*x.exp_avg_scale) << 4);
    const I root_base = Simd::seti(first_octave(*x.exp_avg_sq_scale) << 5);
    const F low = Simd::set(-kGradLimit), high = Simd::set(kGradLimit), zero = Simd::set(0.0f);
    Rounded rounded[kVectors];
    for (int k = 0; k < kVectors; ++k) {
        const std::size_t i = static_cast<std::size_t>(k) * N;
        F p = compact_master(x.weight + i, x.remainder + i);
        F m = compact_moment(x.exp_avg + i, moment_base);
        const F old_root = compact_root(x.exp_avg_sq + i, root_base);
        F v = Simd::mul(old_root, old_root);
        const F raw = Simd::mul(G::load(g + i), c.grad_scale);
        const F bounded = Simd::min_number(Simd::max_number(raw, low), high);
        const F root = adamw(p, m, v, bounded, c);
        p = Simd::add(p, Simd::mul(raw, zero));  // a non-finite gradient marks the parameter
        compact_store_master(p, dither, i, x.weight + i, reinterpret_cast<std::uint8_t*>(x.remainder + i));
        rounded[k] = compact_round(m, root, Simd::loadi(dither.exp_avg + i), Simd::loadi(dither.exp_avg_sq + i));
    }
    compact_store_moments(rounded, x);
}

inline CompactPlanes compact_planes(const Planes& planes, std::size_t i) {
    return {at<std::uint16_t>(planes.weight, i),           at<std::int8_t>(planes.master, i),
            at<std::uint8_t>(planes.exp_avg, i),           at<std::uint8_t>(planes.exp_avg_sq, i),
            at<std::uint16_t>(planes.exp_avg_scale, i / kGroup), at<std::uint16_t>(planes.exp_avg_sq_scale, i / kGroup)};
}

// A partial group, with its planes copied to zero-filled buffers.
struct CompactTail {
    Tail<std::uint16_t, kGroup> weight;
    Tail<std::int8_t, kGroup> remainder;
    Tail<std::uint8_t, kGroup> exp_avg, exp_avg_sq;
    CompactPlanes planes;
    CompactTail(const CompactPlanes& x, std::size_t count)
        : weight(x.weight, 0, count), remainder(x.remainder, 0, count), exp_avg(x.exp_avg, 0, count),
          exp_avg_sq(x.exp_avg_sq, 0, count),
          planes{weight.data, remainder.data, exp_avg.data, exp_avg_sq.data, x.exp_avg_scale, x.exp_avg_sq_scale} {}
    void back(const CompactPlanes& x, std::size_t count) const {
        weight.back(x.weight, 0, count);
        remainder.back(x.remainder, 0, count);
        exp_avg.back(x.exp_avg, 0, count);
        exp_avg_sq.back(x.exp_avg_sq, 0, count);
    }
};

template <class G>
void compact_range(const Planes& planes, const Scalars& scalars, const Dither& dither, std::size_t begin, std::size_t end) {
    const Constants c(scalars);
    const auto* g = at<typename G::T>(planes.grad, 0);
    std::size_t i = begin;
    for (; i + kGroup <= end; i += kGroup) {
        const CompactPlanes x = compact_planes(planes, i);
        prefetch(x.weight);
        prefetch(x.remainder);
        prefetch(x.exp_avg);
        prefetch(x.exp_avg_sq);
        prefetch(g + i);
        compact_group<G>(x, g + i, c, dither);
    }
    if (i < end) {
        const CompactPlanes x = compact_planes(planes, i);
        const CompactTail tail(x, end - i);
        const Tail<typename G::T, kGroup> tg(g, i, end - i);
        compact_group<G>(tail.planes, tg.data, c, dither);
        tail.back(x, end - i);
    }
}

void compact_encode_range(const Planes& planes, const Decoded& d, const Dither& dither, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kGroup) {
        const std::size_t count = end - i < kGroup ? end - i : kGroup;
        const CompactPlanes x = compact_planes(planes, i);
        CompactTail codes(x, 0);
        const Tail<float, kGroup> p(d.master, i, count), m(d.exp_avg, i, count), v(d.exp_avg_sq, i, count);
        const F low = Simd::set(-kGradLimit), high = Simd::set(kGradLimit), zero = Simd::set(0.0f);
        Rounded rounded[kVectors];
        for (int k = 0; k < kVectors; ++k) {
            const std::size_t j = static_cast<std::size_t>(k) * N;
            compact_store_master(Simd::load(p.data + j), dither, j, codes.weight.data + j,
                                 reinterpret_cast<std::uint8_t*>(codes.remainder.data + j));
            const F moment = Simd::min_number(Simd::max_number(Simd::load(m.data + j), low), high);
            // In this order a NaN becomes the upper bound: it must not read as a small variance. -0 becomes +0.
            const F root = Simd::max_number(Simd::min_number(Simd::sqrt(Simd::load(v.data + j)), high), zero);
            rounded[k] = compact_round(moment, root, Simd::loadi(dither.exp_avg + j), Simd::loadi(dither.exp_avg_sq + j));
        }
        compact_store_moments(rounded, codes.planes);
        codes.back(x, count);
    }
}

void compact_decode_range(const Planes& planes, const Decoded& d, const Dither&, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kGroup) {
        const std::size_t count = end - i < kGroup ? end - i : kGroup;
        const CompactPlanes x = compact_planes(planes, i);
        const CompactTail codes(x, count);
        const I moment_base = Simd::seti(first_octave(*x.exp_avg_scale) << 4);
        const I root_base = Simd::seti(first_octave(*x.exp_avg_sq_scale) << 5);
        Tail<float, kGroup> p(nullptr, 0, 0), m(nullptr, 0, 0), v(nullptr, 0, 0);
        for (int k = 0; k < kVectors; ++k) {
            const std::size_t j = static_cast<std::size_t>(k) * N;
            Simd::store(p.data + j, compact_master(codes.weight.data + j, codes.remainder.data + j));
            Simd::store(m.data + j, compact_moment(codes.exp_avg.data + j, moment_base));
            const F root = compact_root(codes.exp_avg_sq.data + j, root_base);
            Simd::store(v.data + j, Simd::mul(root, root));
        }
        p.back(d.master, i, count);
        m.back(d.exp_avg, i, count);
        v.back(d.exp_avg_sq, i, count);
    }
}

// ---- norm, accumulation, streaming -----------------------------------------------------------------------------------

// Sum of squares of one whole block: 64 lanes, rows in order, then halves of lanes.
template <class G> inline double block_squares(const typename G::T* x) {
    constexpr std::size_t kLanes = 64, kRows = kBlock / kLanes, kSide = Simd::kSumVectors;
    static_assert(kLanes % (kSide * N) == 0);
    double lanes[kLanes];
    for (std::size_t lane = 0; lane < kLanes; lane += kSide * N) {
        Simd::D low[kSide], high[kSide];
        for (std::size_t k = 0; k < kSide; ++k) low[k] = high[k] = Simd::zero_d();
        for (std::size_t row = 0; row < kRows; ++row) {
            for (std::size_t k = 0; k < kSide; ++k) {
                const F value = G::load(x + row * kLanes + lane + k * N);
                low[k] = Simd::add_square(low[k], Simd::low_d(value));
                if (N > 1) high[k] = Simd::add_square(high[k], Simd::high_d(value));
            }
        }
        for (std::size_t k = 0; k < kSide; ++k) {
            Simd::store_d(lanes + lane + k * N, low[k]);
            if (N > 1) Simd::store_d(lanes + lane + k * N + Simd::ND, high[k]);
        }
    }
    for (std::size_t width = kLanes / 2; width != 0; width /= 2)
        for (std::size_t k = 0; k < width; ++k) lanes[k] += lanes[k + width];
    return lanes[0];
}

template <class G> inline bool bad_bits(typename G::T x);
template <> inline bool bad_bits<F32>(float x) { return !(x - x == 0.0f); }
template <> inline bool bad_bits<BF16>(std::uint16_t x) { return (x & 0x7F80) == 0x7F80; }
template <> inline bool bad_bits<F16>(std::uint16_t x) { return (x & 0x7C00) == 0x7C00; }

template <class G>
std::size_t square_sums_range(const void* grad, double* partials, std::size_t begin, std::size_t end) {
    const auto* x = at<typename G::T>(grad, 0);
    std::size_t bad = end;
    for (std::size_t i = begin; i < end; i += kBlock) {
        const std::size_t count = end - i < kBlock ? end - i : kBlock;
        double sum;
        if (count == kBlock) {
            sum = block_squares<G>(x + i);
        } else {
            const Tail<typename G::T, kBlock> tail(x, i, count);
            sum = block_squares<G>(tail.data);
        }
        partials[i / kBlock] = sum;
        if (bad == end && !(sum - sum == 0.0)) {
            for (std::size_t j = i; j < i + count && bad == end; ++j)
                if (bad_bits<G>(x[j])) bad = j;
        }
    }
    return bad;
}

template <class G> void accumulate_range(float* acc, const void* contribution, std::size_t begin, std::size_t end) {
    const auto* x = at<typename G::T>(contribution, 0);
    std::size_t i = begin;
    for (; i + N <= end; i += N) Simd::store(acc + i, Simd::add(Simd::load(acc + i), G::load(x + i)));
    if (i < end) {
        Tail<float, N> ta(acc, i, end - i);
        const Tail<typename G::T, N> tx(x, i, end - i);
        Simd::store(ta.data, Simd::add(Simd::load(ta.data), G::load(tx.data)));
        ta.back(acc, i, end - i);
    }
}

// The yardstick of the benchmark: read and write each element once.
void stream_range(float* data, float factor, std::size_t begin, std::size_t end) {
    const F f = Simd::set(factor);
    std::size_t i = begin;
    for (; i + N <= end; i += N) Simd::store(data + i, Simd::mul(Simd::load(data + i), f));
    for (; i < end; ++i) data[i] *= factor;
}

constexpr KernelTable make_table(const char* name) {
    return {
        name,
        {{adamw_range<F32, WeightF32>, adamw_bf16_range<F32>, adamw_range<F32, WeightF16>,
          adamw_range<F32, WeightNone>},
         {adamw_range<BF16, WeightF32>, adamw_bf16_range<BF16>, adamw_range<BF16, WeightF16>,
          adamw_range<BF16, WeightNone>},
         {adamw_range<F16, WeightF32>, adamw_bf16_range<F16>, adamw_range<F16, WeightF16>,
          adamw_range<F16, WeightNone>}},
        {split_range<F32>, split_range<BF16>, split_range<F16>},
        {compact_range<F32>, compact_range<BF16>, compact_range<F16>},
        {round_range<WeightF32>, round_range<WeightBF16>, round_range<WeightF16>},
        {square_sums_range<F32>, square_sums_range<BF16>, square_sums_range<F16>},
        {accumulate_range<F32>, accumulate_range<BF16>, accumulate_range<F16>},
        split_encode_range,
        split_decode_range,
        compact_encode_range,
        compact_decode_range,
        stream_range,
    };
}

}  // namespace
}  // namespace optimizer_cpu
