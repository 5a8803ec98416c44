// The one body of every kernel, compiled once per instruction set over that set's `Simd`.
#pragma once

#include "kernels_common.h"
#include "kernels_compact.h"

namespace optimizer_cpu {
namespace {

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

// ---- norm, accumulation, streaming -----------------------------------------------------------------------------------

// Sum of squares of one whole block: 64 lanes, rows in order, then halves of lanes. `kCopy`: the block also goes to `out`,
// past the caches.
template <class G, bool kCopy = false> inline double block_squares(const typename G::T* x, typename G::T* out = nullptr) {
    constexpr std::size_t kLanes = 64, kRows = kBlock / kLanes, kSide = Simd::kSumVectors;
    static_assert(kLanes % (kSide * N) == 0);
    double lanes[kLanes];
    for (std::size_t lane = 0; lane < kLanes; lane += kSide * N) {
        Simd::D low[kSide], high[kSide];
        for (std::size_t k = 0; k < kSide; ++k) low[k] = high[k] = Simd::zero_d();
        for (std::size_t row = 0; row < kRows; ++row) {
            for (std::size_t k = 0; k < kSide; ++k) {
                const std::size_t place = row * kLanes + lane + k * N;
                const F value = G::load(x + place);
                if constexpr (kCopy) Simd::stream_copy(out + place, x + place);
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

enum class Copy { kNone, kPlain, kStream };

template <class G, Copy kCopy>
inline std::size_t squares_of(const typename G::T* x, typename G::T* out, double* partials, std::size_t begin,
                              std::size_t end) {
    std::size_t bad = end;
    for (std::size_t i = begin; i < end; i += kBlock) {
        const std::size_t count = end - i < kBlock ? end - i : kBlock;
        double sum;
        if (kCopy == Copy::kPlain || (kCopy == Copy::kStream && count < kBlock))
            std::memcpy(out + i, x + i, count * sizeof(typename G::T));
        if (count == kBlock) {
            if constexpr (kCopy == Copy::kStream)
                sum = block_squares<G, true>(x + i, out + i);
            else
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
    if constexpr (kCopy == Copy::kStream) Simd::stream_end();
    return bad;
}

template <class G>
std::size_t square_sums_range(const void* grad, void* out, double* partials, std::size_t begin, std::size_t end) {
    const auto* x = at<typename G::T>(grad, 0);
    auto* target = at<typename G::T>(out, 0);
    if (out == nullptr) return squares_of<G, Copy::kNone>(x, target, partials, begin, end);
    constexpr std::size_t kLine = 64;
    if (Simd::kStreamAlign == 0 || end - begin < kStreamFrom || reinterpret_cast<std::uintptr_t>(out) % kLine != 0)
        return squares_of<G, Copy::kPlain>(x, target, partials, begin, end);
    return squares_of<G, Copy::kStream>(x, target, partials, begin, end);
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
