// The format `compact`: docs/state_formats.md is the text, codecs.py the reference.
//
// Codes are cut out of the bits of fp32 values within their upper halves, so everything but the update itself works on
// 16-bit lanes, 2 N of them to a vector. A 32-bit lane of such a vector holds two neighbouring elements; the update
// takes the even ones and the odd ones as two vectors of fp32: then both directions are shifts and blends, which never
// cross lanes.
#pragma once

#include "kernels_common.h"

namespace optimizer_cpu {
namespace {

constexpr int kPairs = static_cast<int>(kGroup / (2 * N));  // vectors of 16-bit lanes per group
constexpr std::size_t kPair = 2 * N;                        // elements of one of them
constexpr int kQuad = 4;                                    // groups whose maxima are found together
constexpr std::size_t kQuadElements = kQuad * kGroup;
constexpr float kGradLimit = 1152921504606846976.0f;  // 2^60: squares and their sums stay finite
constexpr int kMomentShift = 19 - 16;                 // in the upper half: 3 exponent and 4 fraction bits of |exp_avg|
constexpr int kRootShift = 18 - 16;                   // 3 exponent and 5 fraction bits of sqrt(exp_avg_sq)
constexpr int kMomentFraction = 4, kRootFraction = 5;
static_assert(kBlock % kQuadElements == 0);

struct Two {
    F even, odd;
};

inline Two two_of(I high) {
    return {Simd::floats(Simd::template sll<16>(high)), Simd::floats(Simd::andi(high, Simd::seti(-0x10000)))};
}
inline Two two_of(I high, I low) {
    return {Simd::floats(Simd::blend16(low, Simd::template sll<16>(high))),
            Simd::floats(Simd::blend16(Simd::template srl<16>(low), high))};
}
inline I high_of(I even, I odd) { return Simd::blend16(Simd::template srl<16>(even), odd); }
inline I low_of(I even, I odd) { return Simd::blend16(even, Simd::template sll<16>(odd)); }

inline Two load_two(const float* p) {
    Two x{Simd::load(p), Simd::load(p + N)};
    Simd::unzip(x.even, x.odd);
    return x;
}
inline void store_two(float* p, Two x) {
    Simd::zip(x.even, x.odd);
    Simd::store(p, x.even);
    Simd::store(p + N, x.odd);
}
template <class G> inline Two load_grad(const typename G::T* p) {
    Two x{G::load(p), G::load(p + N)};
    Simd::unzip(x.even, x.odd);
    return x;
}
template <> inline Two load_grad<F32>(const float* p) { return load_two(p); }
template <> inline Two load_grad<BF16>(const std::uint16_t* p) { return two_of(Simd::load_halves(p)); }

// The offsets of a group, even and odd elements apart.
struct Offsets {
    struct Each {
        std::int32_t even[N], odd[N];
    };
    Each master[kPairs], exp_avg[kPairs], exp_avg_sq[kPairs];
    std::uint16_t tie[kGroup];
    explicit Offsets(const Dither& dither) {
        for (std::size_t i = 0; i < kGroup; ++i) {
            put(master, dither.master, i);
            put(exp_avg, dither.exp_avg, i);
            put(exp_avg_sq, dither.exp_avg_sq, i);
            tie[i] = static_cast<std::uint16_t>(dither.tie[i]);
        }
    }
    static void put(Each (&to)[kPairs], const std::int32_t (&from)[kGroup], std::size_t i) {
        Each& each = to[i / kPair];
        std::int32_t* half = i % 2 == 0 ? each.even : each.odd;
        half[i % kPair / 2] = from[i];
    }
};

// Planes at a quad of groups: the scales have one entry per group.
struct CompactPlanes {
    std::uint16_t* weight;
    std::uint8_t *remainder, *exp_avg, *exp_avg_sq;
    std::uint16_t *exp_avg_scale, *exp_avg_sq_scale;
};

inline CompactPlanes compact_planes(const Planes& planes, std::size_t i) {
    return {at<std::uint16_t>(planes.weight, i),
            at<std::uint8_t>(planes.master, i),
            at<std::uint8_t>(planes.exp_avg, i),
            at<std::uint8_t>(planes.exp_avg_sq, i),
            at<std::uint16_t>(planes.exp_avg_scale, i / kGroup),
            at<std::uint16_t>(planes.exp_avg_sq_scale, i / kGroup)};
}

// ---- decode ----------------------------------------------------------------------------------------------------------

// What is added to the codes of each group, its first octave above the fraction: of exp_avg, then of exp_avg_sq.
struct Bases {
    std::uint16_t base[2 * kQuad];
    Bases() = default;
    explicit Bases(const CompactPlanes& x) {
        set(Simd::and_eight(Simd::load_eight(x.exp_avg_scale, x.exp_avg_sq_scale), 0x7F80));
    }
    // From the largest upper halves of each group, rounded and without sign; writes the scales.
    Bases(Simd::Eight most, const CompactPlanes& x) {
        static_assert(kMomentShift + kMomentFraction == 7 && kRootShift + kRootFraction == 7);  // bf16's exponent
        const Simd::Eight scale = Simd::and_eight(most, 0xFF80);
        Simd::store_eight(x.exp_avg_scale, x.exp_avg_sq_scale, scale);
        set(scale);
    }
    I moment(int group) const { return Simd::set16(base[group]); }
    I root(int group) const { return Simd::set16(base[kQuad + group]); }

private:
    void set(Simd::Eight scale) {
        constexpr int kFirst = 7 << 7;  // octaves below the one that the scale names
        static_assert(kRootFraction == kMomentFraction + 1);
        const Simd::Eight above = Simd::subs_eight(scale, kFirst);
        Simd::store_eight(base, base + kQuad, Simd::double_high_four(Simd::srl_eight<7 - kMomentFraction>(above)));
    }
};

inline Two compact_master(const std::uint16_t* w, const std::uint8_t* r) {
    const I rest = Simd::template sll16<8>(Simd::load_bytes(r));
    return two_of(Simd::add16(Simd::load_halves(w), Simd::template sra16<15>(rest)), rest);
}

inline Two compact_moment(const std::uint8_t* code, I base) {
    const I x = Simd::load_signed_bytes(code);
    const I magnitude = Simd::andi(x, Simd::set16(0x7F));
    const I kept = Simd::template sll16<kMomentShift>(Simd::add_where_nonzero16(magnitude, base));
    return two_of(Simd::ori(kept, Simd::andi(x, Simd::set16(0x8000))));
}

inline Two compact_root(const std::uint8_t* code, I base) {
    return two_of(Simd::template sll16<kRootShift>(Simd::add_where_nonzero16(Simd::load_bytes(code), base)));
}

// ---- encode ----------------------------------------------------------------------------------------------------------

// A tie under an even high half would need the remainder +128. Always moving it to one side would be a wall that small
// updates cannot cross; the dither moves it to either side.
inline void compact_store_master(Two p, const Offsets& offsets, int pair, std::uint16_t* w, std::uint8_t* r) {
    const I nan = Simd::seti(0x7FC00000);
    const I even = Simd::add_unless_nan(p.even, Simd::loadi(offsets.master[pair].even), nan);
    const I odd = Simd::add_unless_nan(p.odd, Simd::loadi(offsets.master[pair].odd), nan);
    const I high = high_of(even, odd);
    const I kept = Simd::andi(low_of(even, odd), Simd::set16(0xFF00));
    const I parity = Simd::andi(high, Simd::set16(1));
    const I tie = Simd::load_halves(offsets.tie + static_cast<std::size_t>(pair) * kPair);
    const I low = Simd::add_where_equal16(kept, tie, Simd::ori(kept, parity), Simd::set16(0x8000));
    Simd::store_halves(w, Simd::sub16(high, Simd::template sra16<15>(low)));  // nothing is left to round but this bit
    Simd::store_bytes(r, Simd::template srl16<8>(low));
}

// Upper halves of the rounded moments of a quad, waiting for their groups' maxima.
struct Rounded {
    I moment[kQuad][kPairs], root[kQuad][kPairs];  // exp_avg with its sign
    void put(int group, int pair, Two m, Two v_root, const Offsets& offsets) {
        const auto &mo = offsets.exp_avg[pair], &ro = offsets.exp_avg_sq[pair];
        moment[group][pair] = high_of(Simd::addi(Simd::bits(m.even), Simd::loadi(mo.even)),
                                      Simd::addi(Simd::bits(m.odd), Simd::loadi(mo.odd)));
        root[group][pair] = high_of(Simd::addi(Simd::bits(v_root.even), Simd::loadi(ro.even)),
                                    Simd::addi(Simd::bits(v_root.odd), Simd::loadi(ro.odd)));
    }
};

// Writes the scales.
[[gnu::always_inline]] inline Bases compact_bases(const Rounded& rounded, const CompactPlanes& x) {
    I moments[kQuad], roots[kQuad];
    const I no_sign = Simd::set16(0x7FFF);
    for (int k = 0; k < kQuad; ++k) {
        moments[k] = Simd::andi(rounded.moment[k][0], no_sign);
        roots[k] = rounded.root[k][0];
        for (int pair = 1; pair < kPairs; ++pair) {
            moments[k] = Simd::max16(moments[k], Simd::andi(rounded.moment[k][pair], no_sign));
            roots[k] = Simd::max16(roots[k], rounded.root[k][pair]);
        }
    }
    return Bases(Simd::maxima16(moments, roots), x);
}

[[gnu::always_inline]] inline void compact_store_moments(const Rounded& rounded, const Bases& bases, const CompactPlanes& x) {
    const I no_sign = Simd::set16(0x7FFF);
    for (int k = 0; k < kQuad; ++k) {
        const I moment_base = bases.moment(k), root_base = bases.root(k);
        for (int pair = 0; pair < kPairs; ++pair) {
            const std::size_t i = static_cast<std::size_t>(k) * kGroup + static_cast<std::size_t>(pair) * kPair;
            const I signed_moment = rounded.moment[k][pair];
            const I moment = Simd::template srl16<kMomentShift>(Simd::andi(signed_moment, no_sign));
            const I sign = Simd::andi(Simd::template srl16<8>(signed_moment), Simd::set16(0x80));
            Simd::store_bytes(x.exp_avg + i, Simd::ori(Simd::subs16(moment, moment_base), sign));
            const I root = Simd::template srl16<kRootShift>(rounded.root[k][pair]);
            const I least = Simd::min16(root, Simd::set16(1));  // a non-zero variance never encodes to zero
            Simd::store_bytes(x.exp_avg_sq + i, Simd::max16(Simd::subs16(root, root_base), least));
        }
    }
}

// ---- step ------------------------------------------------------------------------------------------------------------

template <class G> inline Two scaled_grad(const typename G::T* g, const Constants& c) {
    const Two x = load_grad<G>(g);
    return {Simd::mul(x.even, c.grad_scale), Simd::mul(x.odd, c.grad_scale)};
}

// `m` becomes the new exp_avg, `root` the square root of the new exp_avg_sq.
inline void compact_moments(F p, F& m, F& root, F raw, const Constants& c) {
    const F bounded = Simd::min_number(Simd::max_number(raw, Simd::set(-kGradLimit)), Simd::set(kGradLimit));
    F v = Simd::mul(root, root);
    root = adamw_moments(m, v, adamw_gradient(p, bounded, c), c);
}

// A non-finite gradient marks the parameter.
inline F compact_update(F p, F m, F root, F raw, const Constants& c) {
    return Simd::add_product(adamw_master(p, m, root, c), raw, Simd::set(0.0f));
}

// In two passes: the chain from codes to codes is so long that a processor could not hold enough of them at a time.
template <class G>
[[gnu::always_inline]] inline void compact_step_quad(const CompactPlanes& x, const typename G::T* g, const Constants& c,
                                                     const Offsets& offsets, Rounded& rounded) {
    const Bases bases(x);
    Two m[kQuad][kPairs], root[kQuad][kPairs];
    for (int k = 0; k < kQuad; ++k) {
        const I moment_base = bases.moment(k), root_base = bases.root(k);
        for (int pair = 0; pair < kPairs; ++pair) {
            const std::size_t i = static_cast<std::size_t>(k) * kGroup + static_cast<std::size_t>(pair) * kPair;
            Two new_m = compact_moment(x.exp_avg + i, moment_base);
            Two new_root = compact_root(x.exp_avg_sq + i, root_base);
            const Two raw = scaled_grad<G>(g + i, c);
            Two p{};
            if (c.coupled) p = compact_master(x.weight + i, x.remainder + i);
            compact_moments(p.even, new_m.even, new_root.even, raw.even, c);
            compact_moments(p.odd, new_m.odd, new_root.odd, raw.odd, c);
            m[k][pair] = new_m;
            root[k][pair] = new_root;
            rounded.put(k, pair, new_m, new_root, offsets);
        }
    }
    for (int k = 0; k < kQuad; ++k) {
        for (int pair = 0; pair < kPairs; ++pair) {
            const std::size_t i = static_cast<std::size_t>(k) * kGroup + static_cast<std::size_t>(pair) * kPair;
            Two p = compact_master(x.weight + i, x.remainder + i);
            const Two raw = scaled_grad<G>(g + i, c), new_m = m[k][pair], new_root = root[k][pair];
            p.even = compact_update(p.even, new_m.even, new_root.even, raw.even, c);
            p.odd = compact_update(p.odd, new_m.odd, new_root.odd, raw.odd, c);
            compact_store_master(p, offsets, pair, x.weight + i, x.remainder + i);
        }
    }
}

// The last, partial quad, with its planes copied to zero-filled buffers.
struct CompactTail {
    Tail<std::uint16_t, kQuadElements> weight;
    Tail<std::uint8_t, kQuadElements> remainder, exp_avg, exp_avg_sq;
    Tail<std::uint16_t, kQuad> exp_avg_scale, exp_avg_sq_scale;
    CompactPlanes planes;
    static std::size_t groups(std::size_t count) { return (count + kGroup - 1) / kGroup; }
    CompactTail(const CompactPlanes& x, std::size_t count)
        : weight(x.weight, 0, count), remainder(x.remainder, 0, count), exp_avg(x.exp_avg, 0, count),
          exp_avg_sq(x.exp_avg_sq, 0, count), exp_avg_scale(x.exp_avg_scale, 0, groups(count)),
          exp_avg_sq_scale(x.exp_avg_sq_scale, 0, groups(count)),
          planes{weight.data,     remainder.data,     exp_avg.data,
                 exp_avg_sq.data, exp_avg_scale.data, exp_avg_sq_scale.data} {}
    CompactTail(const CompactTail&) = delete;
    CompactTail& operator=(const CompactTail&) = delete;
    void back(const CompactPlanes& x, std::size_t count) const {
        weight.back(x.weight, 0, count);
        remainder.back(x.remainder, 0, count);
        exp_avg.back(x.exp_avg, 0, count);
        exp_avg_sq.back(x.exp_avg_sq, 0, count);
        exp_avg_scale.back(x.exp_avg_scale, 0, groups(count));
        exp_avg_sq_scale.back(x.exp_avg_sq_scale, 0, groups(count));
    }
};

template <class G>
void compact_range(const Planes& planes, const Scalars& scalars, const Dither& dither, std::size_t begin, std::size_t end) {
    const Constants c(scalars);
    const Offsets offsets(dither);
    const auto* g = at<typename G::T>(planes.grad, 0);
    // The maxima of a quad take long to find, so its moments are stored after the next quad has been stepped.
    Rounded rounded[2];
    Bases bases;
    CompactPlanes last{};
    std::size_t i = begin;
    int turn = 0;
    for (; i + kQuadElements <= end; i += kQuadElements, turn ^= 1) {
        const CompactPlanes x = compact_planes(planes, i);
        for (std::size_t k = 0; k < kQuadElements; k += kGroup) {
            prefetch(x.weight + k);
            prefetch(g + i + k);
        }
        for (std::size_t k = 0; k < kQuadElements; k += 64) {
            prefetch(x.remainder + k);
            prefetch(x.exp_avg + k);
            prefetch(x.exp_avg_sq + k);
        }
        compact_step_quad<G>(x, g + i, c, offsets, rounded[turn]);
        if (i != begin) compact_store_moments(rounded[turn ^ 1], bases, last);
        bases = compact_bases(rounded[turn], x);
        last = x;
    }
    if (i != begin) compact_store_moments(rounded[turn ^ 1], bases, last);
    if (i < end) {
        const CompactPlanes x = compact_planes(planes, i);
        const CompactTail tail(x, end - i);
        const Tail<typename G::T, kQuadElements> tg(g, i, end - i);
        compact_step_quad<G>(tail.planes, tg.data, c, offsets, rounded[0]);
        compact_store_moments(rounded[0], compact_bases(rounded[0], tail.planes), tail.planes);
        tail.back(x, end - i);
    }
}

// ---- conversions -----------------------------------------------------------------------------------------------------

void compact_encode_range(const Planes& planes, const Decoded& d, const Dither& dither, std::size_t begin, std::size_t end) {
    const Offsets offsets(dither);
    const F low = Simd::set(-kGradLimit), high = Simd::set(kGradLimit), zero = Simd::set(0.0f);
    // In this order a NaN becomes the upper bound: it must not read as a small variance. -0 becomes +0.
    const auto root_of = [&](F v) { return Simd::max_number(Simd::min_number(Simd::sqrt(v), high), zero); };
    const auto bounded = [&](F m) { return Simd::min_number(Simd::max_number(m, low), high); };
    for (std::size_t i = begin; i < end; i += kQuadElements) {
        const std::size_t count = end - i < kQuadElements ? end - i : kQuadElements;
        const CompactPlanes x = compact_planes(planes, i);
        CompactTail codes(x, 0);
        const Tail<float, kQuadElements> p(d.master, i, count), m(d.exp_avg, i, count), v(d.exp_avg_sq, i, count);
        Rounded rounded;
        for (int k = 0; k < kQuad; ++k) {
            for (int pair = 0; pair < kPairs; ++pair) {
                const std::size_t j = static_cast<std::size_t>(k) * kGroup + static_cast<std::size_t>(pair) * kPair;
                compact_store_master(load_two(p.data + j), offsets, pair, codes.weight.data + j, codes.remainder.data + j);
                const Two moment = load_two(m.data + j), variance = load_two(v.data + j);
                rounded.put(k, pair, {bounded(moment.even), bounded(moment.odd)},
                            {root_of(variance.even), root_of(variance.odd)}, offsets);
            }
        }
        compact_store_moments(rounded, compact_bases(rounded, codes.planes), codes.planes);
        codes.back(x, count);
    }
}

void compact_decode_range(const Planes& planes, const Decoded& d, const Dither&, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kQuadElements) {
        const std::size_t count = end - i < kQuadElements ? end - i : kQuadElements;
        const CompactTail codes(compact_planes(planes, i), count);
        const Bases bases(codes.planes);
        Tail<float, kQuadElements> p(nullptr, 0, 0), m(nullptr, 0, 0), v(nullptr, 0, 0);
        for (std::size_t j = 0; j < kQuadElements; j += kPair) {
            store_two(p.data + j, compact_master(codes.weight.data + j, codes.remainder.data + j));
            store_two(m.data + j, compact_moment(codes.exp_avg.data + j, bases.moment(static_cast<int>(j / kGroup))));
            const Two root = compact_root(codes.exp_avg_sq.data + j, bases.root(static_cast<int>(j / kGroup)));
            store_two(v.data + j, {Simd::mul(root.even, root.even), Simd::mul(root.odd, root.odd)});
        }
        p.back(d.master, i, count);
        m.back(d.exp_avg, i, count);
        v.back(d.exp_avg_sq, i, count);
    }
}

}  // namespace
}  // namespace optimizer_cpu
