#include "dispatch.h"

#include <stdexcept>

namespace optimizer_cpu {

namespace {

struct Candidate {
    const KernelTable* table;
    bool supported;
};

// __builtin_cpu_supports asks CPUID and also whether the operating system saves the wide registers.
std::vector<Candidate> candidates() {
    std::vector<Candidate> all;
#if defined(OPTIMIZER_CPU_X86)
    __builtin_cpu_init();
    all.push_back({&kAvx512Table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")});
    // Every AVX2 processor so far has F16C, but a hypervisor can hide it: CPUID leaf 1, ECX bit 29.
    unsigned eax = 1, ebx = 0, ecx = 0, edx = 0;
    asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const bool f16c = (ecx >> 29) & 1u;
    all.push_back({&kAvx2Table, __builtin_cpu_supports("avx2") && f16c});
#endif
#if defined(OPTIMIZER_CPU_NEON)
    all.push_back({&kNeonTable, true});
#endif
    all.push_back({&kScalarTable, true});
    return all;
}

}  // namespace

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names;
    for (const auto& candidate : candidates()) names.emplace_back(candidate.table->name);
    return names;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const auto& candidate : candidates())
        if (candidate.supported) names.emplace_back(candidate.table->name);
    return names;
}

const KernelTable& table_of(const std::string& isa) {
    for (const auto& candidate : candidates())
        if (candidate.supported && isa == candidate.table->name) return *candidate.table;
    throw std::invalid_argument("instruction set '" + isa + "' is not supported here");
}

Dither dither_of_step(std::uint32_t step) {
    constexpr std::uint32_t a = 0x9E3779B9u, b = 0xC13FA9A9u, c = 0x91E10DA5u;
    Dither dither;
    for (std::uint32_t i = 0; i < kGroup; ++i) {
        dither.master[i] = static_cast<std::int32_t>((i * b + step * a) >> 24);
        dither.exp_avg[i] = static_cast<std::int32_t>((i * c + step * b) >> 13);
        dither.exp_avg_sq[i] = static_cast<std::int32_t>((i * a + step * c) >> 14);
        dither.tie[i] = dither.exp_avg[i] > (1 << 18) ? 0x100 : -0x100;
    }
    return dither;
}

Dither dither_nearest() {
    Dither dither;
    for (std::size_t i = 0; i < kGroup; ++i) {
        dither.master[i] = 1 << 7;
        dither.exp_avg[i] = 1 << 18;
        dither.exp_avg_sq[i] = 1 << 17;
        dither.tie[i] = -0x100;
    }
    return dither;
}

}  // namespace optimizer_cpu
