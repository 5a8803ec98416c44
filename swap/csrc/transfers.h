// A thread that drives a ring: it splits transfers into blocks, serves them by priority, checks every result and
// resubmits what came short. It never touches Python: whoever owns it reads events after `event_fd` became readable.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "ring.h"

namespace swap_native {

enum class EventKind : int {
    kDone = 0,     // a transfer ended; see Event
    kBefore = 1,   // intercepted: a system call is about to be made, answer with proceed() or finish()
    kAfter = 2,    // intercepted: a system call returned, answer with finish()
    kStopped = 3,  // the thread has ended; nothing follows
    kSlow = 4,     // a block has been under way for a third of the time limit
};

enum class Detail : int { kNone = 0, kEndOfFile = 1, kTooMany = 2, kStalled = 3, kTimeout = 4, kCancelled = 5 };

struct Event {
    EventKind kind = EventKind::kDone;
    std::uint64_t id = 0;      // transfer (done, slow) or block (before, after)
    std::int64_t result = 0;   // done: errno, 0 if it went well; after: what the system call returned
    Detail detail = Detail::kNone;
    std::uint64_t offset = 0;  // of the block, in the file
    std::uint64_t nbytes = 0;  // of the block; before, after: of the system call
    std::uint64_t moved = 0;   // of the block, before the failure; done without error: of the transfer
    bool write = false;
    int fd = -1;
    std::uintptr_t address = 0;
};

struct Counters {
    std::uint64_t blocks = 0;      // system calls' worth of reads and writes submitted
    std::uint64_t fixed = 0;       // of them with registered buffers
    std::uint64_t enters = 0;      // io_uring_enter calls
    std::uint64_t resubmitted = 0; // after short or interrupted transfers
};

struct Options {
    unsigned depth = 4;               // blocks under way at most
    std::uint64_t block = 1 << 20;    // bytes
    std::int64_t timeout_ns = 0;      // for one block; 0: none
    bool intercept = false;
    bool registered = true;           // use registered files and buffers where they work
    std::uint64_t burst = 0;          // bytes read, or written, before the other direction has its turn; 0: none
};

class Driver : public std::enable_shared_from_this<Driver> {
  public:
    explicit Driver(const Options& options) : options_(options) {}
    ~Driver();

    // Opens the ring and starts the thread; 0 or a negative errno, with the failed step in `stage`.
    int start(std::string* stage);

    int event_fd() const { return event_fd_; }
    // Descriptors that a forked child must close.
    std::vector<int> descriptors() const { return {ring_.fd(), wake_fd_, event_fd_}; }
    int files_error() const { return files_error_; }
    int buffers_error() const { return buffers_error_; }

    // Lets the kernel keep `fd` between calls; 0 or a negative errno. Without it transfers on `fd` work too.
    int add_file(int fd);
    // Pins memory for transfers inside it; 0 or a negative errno. Without it transfers there work too.
    int add_region(std::uintptr_t address, std::size_t nbytes);
    void remove_region(std::uintptr_t address);

    // Queue a transfer; false after stop().
    bool submit(std::uint64_t id, int fd, bool write, std::uint64_t offset, std::uintptr_t address,
                std::uint64_t nbytes, int priority);
    // End what waits and cut short what is under way; returns how many transfers.
    std::size_t cancel();
    // Cancel, refuse new transfers, end the thread when the last block has returned.
    void stop();
    // Closes the descriptors, after kStopped; nothing else may be called then.
    void close_descriptors();

    std::vector<Event> take();
    void proceed(std::uint64_t block, std::uint64_t nbytes);
    void finish(std::uint64_t block, std::int64_t result);

    Counters counters();

  private:
    struct Transfer {
        std::uint64_t id = 0;
        int fd = -1;
        bool write = false;
        std::uint64_t offset = 0;
        std::uintptr_t address = 0;
        std::uint64_t nbytes = 0;
        std::int64_t place = 0;      // in line, see kPatience
        std::uint64_t sequence = 0;
        std::uint64_t issued = 0;    // bytes handed to blocks
        unsigned outstanding = 0;    // blocks
        bool failed = false;
        Event error;
    };

    enum class BlockState { kFree, kKernel, kBefore, kAfter };

    struct Block {
        Transfer* transfer = nullptr;
        std::uint64_t begin = 0;   // in the transfer
        std::uint64_t nbytes = 0;
        std::uint64_t done = 0;
        std::uint64_t limit = 0;   // of the system call under way, below nbytes - done only if intercepted
        std::int64_t started = 0;  // monotonic, ns
        unsigned stalls = 0;
        bool slow = false;
        BlockState state = BlockState::kFree;
    };

    struct Region {
        std::uintptr_t address;
        std::size_t nbytes;
        unsigned slot;
    };

    // A transfer stands in line as if it had come this many bytes of transfers later for each step of its priority: the
    // urgent overtake the others, but nobody waits for ever. PATIENCE of engines/protocol.py is the same.
    static constexpr std::int64_t kPatience = std::int64_t{1} << 30;

    using Key = std::tuple<std::int64_t, std::uint64_t, Transfer*>;
    using Line = std::set<Key>;

    void run();
    void fill();
    Line* next_line();
    Line& line_of(const Transfer& transfer) { return lines_[transfer.write ? 1 : 0]; }
    void begin(unsigned index);
    void issue(unsigned index, std::uint64_t nbytes);
    void reap();
    void complete(unsigned index, std::int64_t result);
    void fail(unsigned index, int error, Detail detail);
    void release(unsigned index);
    void report(Transfer& transfer);
    void drop_if_over(Transfer* transfer);
    void check_time();
    void post(const Event& event);
    void wake();
    void arm();
    Event of_block(EventKind kind, unsigned index) const;

    Options options_;
    Ring ring_;
    int wake_fd_ = -1;
    int event_fd_ = -1;
    int files_error_ = 0;
    int buffers_error_ = 0;
    int pid_ = 0;

    std::mutex mutex_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Transfer>> transfers_;
    std::array<Line, 2> lines_;  // reads, writes
    std::size_t direction_ = 0;  // of the burst under way: an index of lines_
    std::uint64_t served_ = 0;   // bytes of it
    std::vector<Block> blocks_;
    std::vector<unsigned> free_blocks_;
    std::vector<std::tuple<unsigned, bool, std::int64_t>> verdicts_;  // block, whether finished, bytes or result
    std::vector<int> files_;
    std::vector<Region> regions_;
    std::vector<unsigned> free_regions_;
    std::vector<Event> events_;
    Counters counters_;
    std::uint64_t sequence_ = 0;
    std::int64_t arrived_ = 0;  // bytes
    bool sleeping_ = false;
    bool armed_ = false;
    bool stopping_ = false;
    bool announced_ = false;
};

}  // namespace swap_native
