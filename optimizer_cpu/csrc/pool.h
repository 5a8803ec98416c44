// A fixed pool of threads that runs one job at a time, statically partitioned.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace optimizer_cpu {

// Restores the floating-point environment that the contract needs (nearest, denormals kept, no traps) for a scope: callers
// and pool threads may have been switched to flush denormals by other libraries.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    std::uint64_t saved_;
};

class Pool {
  public:
    Pool() = default;
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Runs task(part) for part in [0, parts), part 0 on the calling thread and each other part on its own worker, and
    // returns when all have ended. Calls from several threads take turns. Tasks must not throw. Throws std::system_error
    // when a thread cannot be started; nothing has run then.
    void run(int parts, const std::function<void(int)>& task);

    // Workers started so far.
    int workers();

  private:
    void work(int part);

    std::mutex turn_;   // one job at a time
    std::mutex mutex_;  // guards everything below
    std::condition_variable start_, done_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* task_ = nullptr;
    std::uint64_t job_ = 0;
    int parts_ = 0;
    int running_ = 0;
    bool stop_ = false;
};

// The process's pool. A forked child gets a new one: threads do not survive fork.
Pool& process_pool();

// Splits [0, elements) into at most `threads` contiguous ranges of whole `unit`s and runs `body(part, begin, end)` on each.
// Returns the number of parts. The partition depends on nothing but the arguments.
int parallel_ranges(Pool& pool, std::size_t elements, std::size_t unit, int threads,
                    const std::function<void(int, std::size_t, std::size_t)>& body);

}  // namespace optimizer_cpu
