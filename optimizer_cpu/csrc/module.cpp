// Python binding: raw addresses and sizes only. Python has checked every tensor before (optimizer_cpu/_checks.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace nb = nanobind;

namespace optimizer_cpu {
namespace {

using Address = std::uintptr_t;
using ScalarValues = std::array<float, 10>;  // in the order of reference.AdamWScalars

template <class T = void> T* pointer(Address address) { return reinterpret_cast<T*>(address); }

Scalars scalars_of(const ScalarValues& x) { return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9]}; }

void check_index(const char* what, int value, int limit) {
    if (value < 0 || value >= limit) throw std::invalid_argument(std::string("unknown code of ") + what);
}

// weight, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, grad
using PlaneAddresses = std::array<Address, 7>;

Planes planes_of(const PlaneAddresses& a) {
    Planes planes;
    planes.weight = pointer(a[0]);
    planes.master = pointer(a[1]);
    planes.exp_avg = pointer(a[2]);
    planes.exp_avg_sq = pointer(a[3]);
    planes.exp_avg_scale = pointer(a[4]);
    planes.exp_avg_sq_scale = pointer(a[5]);
    planes.grad = pointer(a[6]);
    return planes;
}

// Of a plane (in the order above, the gradient left out): address, 0 for none; bytes per entry; elements per entry.
using Place = std::array<std::uint64_t, 3>;
using Places = std::array<Place, 6>;
// First element, elements, address of the gradient, code of its dtype, index of the hyperparameters.
using Range = std::array<std::uint64_t, 5>;

// `format`: 0 fp32, 1 split, 2 compact. A range of fewer than two times `per_thread` elements is one thread's work.
void steps(const std::string& isa, int format, int weight_type, const Places& places, const std::vector<Range>& ranges,
           const std::vector<ScalarValues>& values, const std::vector<std::uint32_t>& step_numbers, int threads,
           std::size_t per_thread) {
    check_index("format", format, 3);
    check_index("weight dtype", weight_type, kWeightTypes);
    if (step_numbers.size() != values.size()) throw std::invalid_argument("a step number for each hyperparameters");
    if (per_thread == 0) throw std::invalid_argument("per_thread must be positive");
    for (const auto& range : ranges) {
        check_index("gradient dtype", static_cast<int>(std::min<std::uint64_t>(range[3], kGradTypes)), kGradTypes);
        if (range[4] >= values.size()) throw std::invalid_argument("unknown hyperparameters");
    }
    const KernelTable& table = table_of(isa);
    std::vector<Scalars> scalars;
    std::vector<Dither> dithers;
    for (std::size_t i = 0; i < values.size(); ++i) {
        scalars.push_back(scalars_of(values[i]));
        dithers.push_back(dither_of_step(step_numbers[i]));
    }
    for (const auto& [start, elements, gradient, grad_type, which] : ranges) {
        const StepFn kernel = format == 0   ? table.adamw[grad_type][weight_type]
                              : format == 1 ? table.split[grad_type]
                                            : table.compact[grad_type];
        PlaneAddresses addresses;
        for (std::size_t i = 0; i < places.size(); ++i) {
            const auto& [address, width, group] = places[i];
            addresses[i] = address ? static_cast<Address>(address + start / group * width) : 0;
        }
        addresses[6] = static_cast<Address>(gradient);
        const Planes planes = planes_of(addresses);
        const Scalars& scalar = scalars[which];
        const Dither& dither = dithers[which];
        const std::size_t useful = std::max<std::size_t>(1, elements / per_thread);
        const int parts = static_cast<int>(std::min<std::size_t>(useful, static_cast<std::size_t>(std::max(threads, 1))));
        parallel_ranges(process_pool(), elements, kBlock, parts, [&](int, std::size_t begin, std::size_t end) {
            kernel(planes, scalar, dither, begin, end);
        });
    }
}

void convert(const std::string& isa, int format, bool encode, const PlaneAddresses& addresses,
             const std::array<Address, 3>& decoded, std::size_t elements, int threads) {
    check_index("format", format - 1, 2);
    const KernelTable& table = table_of(isa);
    const ConvertFn kernel = format == 1 ? (encode ? table.split_encode : table.split_decode)
                                         : (encode ? table.compact_encode : table.compact_decode);
    const Planes planes = planes_of(addresses);
    const Decoded target{pointer<float>(decoded[0]), pointer<float>(decoded[1]), pointer<float>(decoded[2])};
    const Dither dither = dither_nearest();
    parallel_ranges(process_pool(), elements, kBlock, threads, [&](int, std::size_t begin, std::size_t end) {
        kernel(planes, target, dither, begin, end);
    });
}

void round_weight(const std::string& isa, int weight_type, Address master, Address weight, std::size_t elements,
                  int threads) {
    check_index("weight dtype", weight_type, kGradTypes);
    const RoundFn kernel = table_of(isa).round_weight[weight_type];
    parallel_ranges(process_pool(), elements, kBlock, threads, [&](int, std::size_t begin, std::size_t end) {
        kernel(pointer<float>(master), pointer(weight), begin, end);
    });
}

// Index of the first non-finite element, or -1. `out`: where to copy the gradient on the way, 0 for nowhere.
std::int64_t square_sums(const std::string& isa, int grad_type, Address grad, Address out, Address partials,
                         std::size_t elements, int threads) {
    check_index("gradient dtype", grad_type, kGradTypes);
    const SquareSumsFn kernel = table_of(isa).square_sums[grad_type];
    std::vector<std::size_t> first(static_cast<std::size_t>(std::max(threads, 1)), elements);
    parallel_ranges(process_pool(), elements, kBlock, threads, [&](int part, std::size_t begin, std::size_t end) {
        const std::size_t bad = kernel(pointer(grad), pointer(out), pointer<double>(partials), begin, end);
        if (bad != end) first[static_cast<std::size_t>(part)] = bad;
    });
    const std::size_t bad = *std::min_element(first.begin(), first.end());
    return bad == elements ? -1 : static_cast<std::int64_t>(bad);
}

// Address of the gradient, code of its dtype, elements.
using SumRange = std::array<std::uint64_t, 3>;

// The partials of each range, in order, one after the other.
void square_sums_of(const std::string& isa, const std::vector<SumRange>& ranges, Address partials, int threads,
                    std::size_t per_thread) {
    if (per_thread == 0) throw std::invalid_argument("per_thread must be positive");
    for (const auto& range : ranges) {
        check_index("gradient dtype", static_cast<int>(std::min<std::uint64_t>(range[1], kGradTypes)), kGradTypes);
    }
    const KernelTable& table = table_of(isa);
    double* out = pointer<double>(partials);
    for (const auto& [gradient, grad_type, elements] : ranges) {
        const SquareSumsFn kernel = table.square_sums[grad_type];
        const void* grad = pointer(static_cast<Address>(gradient));
        const std::size_t useful = std::max<std::size_t>(1, elements / per_thread);
        const int parts = static_cast<int>(std::min<std::size_t>(useful, static_cast<std::size_t>(std::max(threads, 1))));
        parallel_ranges(process_pool(), elements, kBlock, parts, [&](int, std::size_t begin, std::size_t end) {
            kernel(grad, nullptr, out, begin, end);
        });
        out += (elements + kBlock - 1) / kBlock;
    }
}

void accumulate(const std::string& isa, int grad_type, Address acc, Address contribution, std::size_t elements,
                int threads) {
    check_index("gradient dtype", grad_type, kGradTypes);
    const AccumulateFn kernel = table_of(isa).accumulate[grad_type];
    parallel_ranges(process_pool(), elements, kBlock, threads, [&](int, std::size_t begin, std::size_t end) {
        kernel(pointer<float>(acc), pointer(contribution), begin, end);
    });
}

void stream(const std::string& isa, Address data, float factor, std::size_t elements, int threads) {
    const StreamFn kernel = table_of(isa).stream;
    parallel_ranges(process_pool(), elements, kBlock, threads, [&](int, std::size_t begin, std::size_t end) {
        kernel(pointer<float>(data), factor, begin, end);
    });
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // an interpreter that exits on a signal may keep objects alive; that is no leak of ours
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.attr("interface") = 4;  // optimizer_cpu/native.py refuses another number
    m.def("compiled_isas", &compiled_isas);
    m.def("supported_isas", &supported_isas);
    m.def("workers", [] { return process_pool().workers(); });
    m.def("steps", &steps, Release());
    m.def("convert", &convert, Release());
    m.def("round_weight", &round_weight, Release());
    m.def("square_sums", &square_sums, Release());
    m.def("square_sums_of", &square_sums_of, Release());
    m.def("accumulate", &accumulate, Release());
    m.def("stream", &stream, Release());
}

}  // namespace optimizer_cpu
