// What the kernels of every format share, over an instruction set's `Simd`.
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
inline F adamw_moments(F& m, F& v, F g, const Constants& c) {
    m = Simd::add(Simd::mul(m, c.beta1), Simd::mul(g, c.one_minus_beta1));
    v = Simd::add(Simd::mul(v, c.beta2), Simd::mul(Simd::mul(g, c.one_minus_beta2), g));
    return Simd::sqrt(v);
}

inline F adamw_master(F p, F m, F root, const Constants& c) {
    const F denominator = Simd::add(Simd::mul(root, c.root_scale), c.eps);
    return Simd::sub(Simd::mul(p, c.decay), Simd::mul(Simd::div(m, denominator), c.step_size));
}

inline F adamw_gradient(F p, F g, const Constants& c) { return c.coupled ? Simd::add(g, Simd::mul(p, c.l2)) : g; }

inline void adamw(F& p, F& m, F& v, F g, const Constants& c) {
    const F root = adamw_moments(m, v, adamw_gradient(p, g, c), c);
    p = adamw_master(p, m, root, c);
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

}  // namespace
}  // namespace optimizer_cpu
