// Stand-alone test of kernels and pool, for sanitizers and for emulated processors, where Python and torch are not at hand:
// every supported instruction set against the scalar one, bit for bit, over many lengths, offsets and thread counts.
// Prints a digest of all results, which must be the same on every architecture.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace {

using namespace optimizer_cpu;

int failures = 0;
std::uint64_t digest = 1469598103934665603ull;

void mix(const void* data, std::size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) digest = (digest ^ p[i]) * 1099511628211ull;
}

struct Buffers {
    std::vector<std::uint16_t> weight, average_scale, square_scale;
    std::vector<float> master, average, square;
    std::vector<std::int16_t> remainder;
    std::vector<std::int8_t> small;
    std::vector<std::uint8_t> average_code, square_code;
    std::vector<unsigned char> grad;

    Buffers(std::size_t n, unsigned seed, int grad_type) {
        std::mt19937 random(seed);
        const auto value = [&random] {
            const float fraction = 1.0f + static_cast<float>(random() % 65536) / 65536.0f;
            const float magnitude = std::ldexp(fraction, static_cast<int>(random() % 40) - 30);
            switch (random() % 16) {
                case 0: return 0.0f;
                case 1: return -0.0f;
                case 2: return 1e-42f;
                default: return random() % 2 ? magnitude : -magnitude;
            }
        };
        for (std::size_t i = 0; i < n; ++i) {
            const auto magnitude = 0x3C00 + random() % 512;
            weight.push_back(static_cast<std::uint16_t>(magnitude + (random() % 2 ? 0x8000 : 0)));
            master.push_back(value());
            average.push_back(value());
            square.push_back(std::fabs(value()));
            remainder.push_back(static_cast<std::int16_t>(random()));
            small.push_back(static_cast<std::int8_t>(random() % 255 - 127));
            average_code.push_back(static_cast<std::uint8_t>(random()));
            square_code.push_back(static_cast<std::uint8_t>(random()));
            if (i % kGroup == 0) {
                average_scale.push_back(static_cast<std::uint16_t>((100 + random() % 20) << 7));
                square_scale.push_back(static_cast<std::uint16_t>((100 + random() % 20) << 7));
            }
        }
        for (std::size_t i = 0; i < n; ++i) {
            if (grad_type == 0) {
                const float g = i % 97 == 96 ? INFINITY : value();
                const auto* bytes = reinterpret_cast<const unsigned char*>(&g);
                grad.insert(grad.end(), bytes, bytes + 4);
            } else {
                const auto g = static_cast<std::uint16_t>(random());
                grad.push_back(static_cast<unsigned char>(g & 0xFF));
                grad.push_back(static_cast<unsigned char>(g >> 8));
            }
        }
    }
};

float canonical(float x) { return x == x ? x : std::nanf(""); }

template <class T> void compare(const char* what, const std::vector<T>& a, const std::vector<T>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
            std::printf("%s differs at %zu of %zu\n", what, i, a.size());
            ++failures;
            return;
        }
    }
    mix(a.data(), a.size() * sizeof(T));
}

void compare(const char* what, std::vector<float> a, std::vector<float> b) {
    for (auto* values : {&a, &b})
        for (auto& x : *values) x = canonical(x);
    compare<float>(what, a, b);
}

Planes planes_of(Buffers& b, int format, int weight_type) {
    Planes p;
    p.weight = weight_type == 3 ? nullptr : static_cast<void*>(b.weight.data());
    p.grad = b.grad.data();
    if (format == 0) p.master = b.master.data();
    if (format == 1) p.master = b.remainder.data();
    if (format == 2) p.master = b.small.data();
    p.exp_avg = format == 2 ? static_cast<void*>(b.average_code.data()) : b.average.data();
    p.exp_avg_sq = format == 2 ? static_cast<void*>(b.square_code.data()) : b.square.data();
    p.exp_avg_scale = b.average_scale.data();
    p.exp_avg_sq_scale = b.square_scale.data();
    return p;
}

void compare_all(const std::string& what, const Buffers& a, const Buffers& b) {
    compare((what + " weight").c_str(), a.weight, b.weight);
    compare((what + " master").c_str(), a.master, b.master);
    compare((what + " average").c_str(), a.average, b.average);
    compare((what + " square").c_str(), a.square, b.square);
    compare((what + " remainder").c_str(), a.remainder, b.remainder);
    compare((what + " small remainder").c_str(), a.small, b.small);
    compare((what + " average code").c_str(), a.average_code, b.average_code);
    compare((what + " square code").c_str(), a.square_code, b.square_code);
    compare((what + " average scale").c_str(), a.average_scale, b.average_scale);
    compare((what + " square scale").c_str(), a.square_scale, b.square_scale);
}

void steps(const KernelTable& table, const KernelTable& scalar, std::size_t n, int threads) {
    const Scalars s{0.7f, n % 2 ? 0.0f : 0.01f, 0.9999f, 0.9f, 0.1f, 0.999f, 0.001f, 5.0f, 1e-8f, 1e-3f};
    const Dither dither = dither_of_step(static_cast<std::uint32_t>(n));
    for (int format = 0; format < 3; ++format) {
        for (int g = 0; g < kGradTypes; ++g) {
            for (int w = 0; w < kWeightTypes; ++w) {
                if (w == 0 || (format != 0 && w != 1)) continue;  // fp32 weights: the same code with another store
                const auto seed = static_cast<unsigned>(n * 31 + static_cast<unsigned>(g));
                Buffers ours(n, seed, g), want(n, seed, g);
                const auto kernel = [&](const KernelTable& t) {
                    return format == 0 ? t.adamw[g][w] : format == 1 ? t.split[g] : t.compact[g];
                };
                const Planes a = planes_of(ours, format, w), b = planes_of(want, format, w);
                parallel_ranges(process_pool(), n, kBlock, threads, [&](int, std::size_t begin, std::size_t end) {
                    kernel(table)(a, s, dither, begin, end);
                });
                if (n != 0) kernel(scalar)(b, s, dither, 0, n);
                compare_all(std::string(table.name) + " step of format " + std::to_string(format), ours, want);
            }
        }
    }
}

void conversions(const KernelTable& table, const KernelTable& scalar, std::size_t n) {
    const Dither nearest = dither_nearest();
    const auto seed = static_cast<unsigned>(n);
    for (int format = 1; format < 3; ++format) {
        Buffers ours(n, seed, 0), want(n, seed, 0);
        const auto run = [&](const KernelTable& t, Buffers& b) {
            const Decoded d{b.master.data(), b.average.data(), b.square.data()};
            const Planes p = planes_of(b, format, 1);
            (format == 1 ? t.split_encode : t.compact_encode)(p, d, nearest, 0, n);
            for (auto* values : {&b.master, &b.average, &b.square}) std::fill(values->begin(), values->end(), 0.0f);
            (format == 1 ? t.split_decode : t.compact_decode)(p, d, nearest, 0, n);
        };
        run(table, ours);
        run(scalar, want);
        compare_all(std::string(table.name) + " conversion " + std::to_string(format), ours, want);
    }
    for (int type = 0; type < kGradTypes; ++type) {
        Buffers ours(n, seed, type), want(n, seed, type);
        std::vector<double> a(n / kBlock + 1, 0.0), b(n / kBlock + 1, 0.0);
        const auto bad = table.square_sums[type](ours.grad.data(), nullptr, a.data(), 0, n);
        if (bad != scalar.square_sums[type](want.grad.data(), nullptr, b.data(), 0, n)) {
            std::printf("%s: first bad element differs\n", table.name);
            ++failures;
        }
        for (auto* values : {&a, &b})
            for (auto& x : *values)
                if (!(x == x)) x = 0.0;
        compare("square sums", a, b);
        std::vector<unsigned char> copied(ours.grad.size());
        table.square_sums[type](ours.grad.data(), copied.data(), a.data(), 0, n);
        for (auto& x : a)
            if (!(x == x)) x = 0.0;
        compare("square sums beside a copy", a, b);
        compare("a gradient's copy", copied, want.grad);
        table.accumulate[type](ours.master.data(), ours.grad.data(), 0, n);
        scalar.accumulate[type](want.master.data(), want.grad.data(), 0, n);
        if (type != 0) {
            table.round_weight[type](ours.master.data(), ours.weight.data(), 0, n);
            scalar.round_weight[type](want.master.data(), want.weight.data(), 0, n);
        }
        compare_all(std::string(table.name) + " accumulate and round", ours, want);
    }
}

// Many callers and many sizes on one pool; a child after fork gets its own.
void pool() {
    std::vector<std::thread> callers;
    std::vector<long> sums(4, 0);
    for (std::size_t c = 0; c < sums.size(); ++c) {
        callers.emplace_back([c, &sums] {
            for (std::size_t n = 0; n < 200; ++n) {
                std::vector<long> parts(8, 0);
                parallel_ranges(process_pool(), n, 1, static_cast<int>(1 + n % 8),
                                [&](int part, std::size_t begin, std::size_t end) {
                                    parts[static_cast<std::size_t>(part)] = static_cast<long>(end - begin);
                                });
                for (const long part : parts) sums[c] += part;
            }
        });
    }
    for (auto& caller : callers) caller.join();
    for (const long sum : sums) {
        if (sum != 199 * 200 / 2) {
            std::printf("the pool lost work: %ld\n", sum);
            ++failures;
        }
    }
}

void after_fork() {
    const pid_t child = fork();
    if (child == 0) {
        long total = 0;
        std::vector<long> parts(4, 0);
        parallel_ranges(process_pool(), 1000, 1, 4, [&](int part, std::size_t begin, std::size_t end) {
            parts[static_cast<std::size_t>(part)] = static_cast<long>(end - begin);
        });
        for (const long part : parts) total += part;
        _exit(total == 1000 ? 0 : 1);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        std::printf("the pool does not work after fork\n");
        ++failures;
    }
}

}  // namespace

int main(int argc, char** argv) {
    const auto option = [&](const char* name) { return argc > 1 && std::strcmp(argv[1], name) == 0; };
    const bool threads_only = option("--threads");
    pool();
    // Neither a thread sanitizer nor a user-mode emulator (--no-fork) follows a fork of a process with threads.
    if (!threads_only && !option("--no-fork")) after_fork();
    const KernelTable& scalar = table_of("scalar");
    std::uint64_t expected = 0;
    for (const auto& isa : supported_isas()) {
        const KernelTable& table = table_of(isa);
        digest = 1469598103934665603ull;
        for (const std::size_t n : {0, 1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 511, 4095, 4096, 4097, 9001}) {
            if (threads_only && n < 4097) continue;
            steps(table, scalar, n, 1 + static_cast<int>(n % 4));
            conversions(table, scalar, n);
        }
        std::printf("%s: digest %016llx\n", isa.c_str(), static_cast<unsigned long long>(digest));
        if (expected == 0) expected = digest;
        if (digest != expected) ++failures;
    }
    std::printf(failures == 0 ? "ok\n" : "%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
