// Kernel interface shared by every instruction set, the thread pool and the Python binding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace optimizer_cpu {

constexpr std::size_t kBlock = 4096;  // elements; partial sums and thread partitions are whole blocks
constexpr std::size_t kGroup = 32;    // elements that share scales in `compact`

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, none = 3 };
constexpr int kGradTypes = 3;    // f32, bf16, f16
constexpr int kWeightTypes = 4;  // f32, bf16, f16, none (the master is the weight)

// The scalars of reference.AdamWScalars, each already rounded to fp32.
struct Scalars {
    float grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, step_size;
};

// Rounding offsets of `compact` for the 32 positions of a group, see docs/state_formats.md.
struct Dither {
    std::int32_t master[kGroup], exp_avg[kGroup], exp_avg_sq[kGroup];
    std::int32_t tie[kGroup];  // added where a rounded master is the tie that has no code: one step down or up
};

// Planes of a range. What each pointer holds depends on the kernel; unused ones are null.
struct Planes {
    void* weight = nullptr;
    void* master = nullptr;  // fp32 master, int16 remainder or int8 remainder
    void* exp_avg = nullptr;
    void* exp_avg_sq = nullptr;
    void* exp_avg_scale = nullptr;
    void* exp_avg_sq_scale = nullptr;
    const void* grad = nullptr;
};

// Decoded fp32 planes for the conversions.
struct Decoded {
    float* master = nullptr;
    float* exp_avg = nullptr;
    float* exp_avg_sq = nullptr;
};

// Every function works on elements [begin, end) of the planes; begin is a multiple of kBlock.
using StepFn = void (*)(const Planes&, const Scalars&, const Dither&, std::size_t begin, std::size_t end);
using ConvertFn = void (*)(const Planes&, const Decoded&, const Dither&, std::size_t begin, std::size_t end);
using RoundFn = void (*)(float* master, void* weight, std::size_t begin, std::size_t end);
// Writes one partial per block from partials[begin / kBlock]; returns the first non-finite element of the range or `end`.
// Copies the range to `out`, which does not overlap `grad`, unless that is null.
using SquareSumsFn = std::size_t (*)(const void* grad, void* out, double* partials, std::size_t begin, std::size_t end);
using AccumulateFn = void (*)(float* acc, const void* contribution, std::size_t begin, std::size_t end);
using StreamFn = void (*)(float* data, float factor, std::size_t begin, std::size_t end);

struct KernelTable {
    const char* name;
    StepFn adamw[kGradTypes][kWeightTypes];
    StepFn split[kGradTypes];
    StepFn compact[kGradTypes];
    RoundFn round_weight[kGradTypes];
    SquareSumsFn square_sums[kGradTypes];
    AccumulateFn accumulate[kGradTypes];
    ConvertFn split_encode, split_decode, compact_encode, compact_decode;
    StreamFn stream;
};

extern const KernelTable kScalarTable;
#if defined(OPTIMIZER_CPU_X86)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
#endif
#if defined(OPTIMIZER_CPU_NEON)
extern const KernelTable kNeonTable;
#endif

}  // namespace optimizer_cpu
