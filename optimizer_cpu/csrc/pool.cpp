#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace optimizer_cpu {

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) {
    constexpr unsigned kMasks = 0x1F80;  // all exceptions masked, round to nearest, no FTZ (bit 15), no DAZ (bit 6)
    _mm_setcsr(kMasks);
}
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const std::uint64_t zero = 0;  // nearest, no flush to zero, no default NaN, no traps
    asm volatile("msr fpcr, %0" ::"r"(zero));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() = default;
#endif

Pool::~Pool() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
}

int Pool::workers() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(threads_.size());
}

void Pool::run(int parts, const std::function<void(int)>& task) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (parts > 1) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (static_cast<int>(threads_.size()) < parts - 1) {
            // Signals belong to the thread that Python chose for them: workers inherit a full mask.
            sigset_t all, old;
            sigfillset(&all);
            pthread_sigmask(SIG_BLOCK, &all, &old);
            try {
                while (static_cast<int>(threads_.size()) < parts - 1) {
                    const int part = static_cast<int>(threads_.size()) + 1;
                    threads_.emplace_back([this, part] { work(part); });
                }
            } catch (...) {
                pthread_sigmask(SIG_SETMASK, &old, nullptr);
                throw;
            }
            pthread_sigmask(SIG_SETMASK, &old, nullptr);
        }
        task_ = &task;
        parts_ = parts;
        running_ = parts - 1;
        ++job_;
        lock.unlock();
        start_.notify_all();
    }
    {
        const FloatEnvironment environment;
        task(0);
    }
    if (parts > 1) {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
        task_ = nullptr;
    }
}

void Pool::work(int part) {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        start_.wait(lock, [&] { return stop_ || (job_ != seen && task_ != nullptr); });
        if (stop_) return;
        seen = job_;
        if (part >= parts_) continue;
        const auto* task = task_;
        lock.unlock();
        {
            const FloatEnvironment environment;
            (*task)(part);
        }
        lock.lock();
        if (--running_ == 0) done_.notify_one();
    }
}

namespace {

// Never destroyed: at exit a daemon thread of Python may still be inside a kernel, and idle workers need no farewell.
Pool*& pool_slot() {
    static Pool* slot = nullptr;
    return slot;
}

// The old pool's threads are gone and its locks may be held for ever: abandon it.
void renew_after_fork() { pool_slot() = new Pool; }

}  // namespace

Pool& process_pool() {
    static const bool once = [] {
        pool_slot() = new Pool;
        pthread_atfork(nullptr, nullptr, renew_after_fork);
        return true;
    }();
    static_cast<void>(once);
    return *pool_slot();
}

int parallel_ranges(Pool& pool, std::size_t elements, std::size_t unit, int threads,
                    const std::function<void(int, std::size_t, std::size_t)>& body) {
    const std::size_t units = (elements + unit - 1) / unit;
    if (units == 0) return 0;
    const int parts = static_cast<int>(std::min(units, static_cast<std::size_t>(std::max(threads, 1))));
    const auto edge = [&](int part) {
        const auto whole = static_cast<std::size_t>(part) * units / static_cast<std::size_t>(parts);
        return std::min(elements, whole * unit);
    };
    pool.run(parts, [&](int part) { body(part, edge(part), edge(part + 1)); });
    return parts;
}

}  // namespace optimizer_cpu
