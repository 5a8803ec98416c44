// A thin io_uring: raw system calls, one submission queue, one completion queue. Not thread-safe except where noted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct io_uring_sqe;
struct io_uring_cqe;
struct io_uring_params;

namespace swap_native {

// What one attempt to make a ring found. `error` 0: it works.
struct ProbeResult {
    int error = 0;
    std::string stage;  // the step that failed: "setup", "features", "map", "operations", "transfer"
    unsigned features = 0;
    int files_error = 0;    // errno of registering files, 0 if it works
    int buffers_error = 0;  // errno of registering 1 MiB of memory, 0 if it works
};

ProbeResult probe_ring();

class Ring {
  public:
    Ring() = default;
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring() { close(); }

    // 0 or a negative errno. `stage` names the step that failed.
    int open(unsigned entries, std::string* stage);
    void close();
    int fd() const { return fd_; }
    unsigned features() const { return features_; }

    // The next free entry, zeroed; null when the queue is full.
    io_uring_sqe* next();
    // Submit all entries taken since the last call and wait for `wait` completions or `timeout_ns` (< 0: without limit).
    int enter(unsigned wait, std::int64_t timeout_ns);
    // Pop one completion.
    bool pop(std::uint64_t* user_data, std::int32_t* result);

    // Tables of registered files and buffers (sparse); may be called from any thread. 0 or a negative errno.
    int make_file_table(unsigned slots);
    int set_file(unsigned slot, int fd);
    int make_buffer_table(unsigned slots);
    int set_buffer(unsigned slot, void* address, std::size_t nbytes);

  private:
    int map(const io_uring_params& params);

    int fd_ = -1;
    unsigned features_ = 0;
    void* rings_ = nullptr;
    std::size_t rings_bytes_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    std::size_t sqes_bytes_ = 0;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned sq_entries_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    unsigned local_tail_ = 0;  // entries taken, published at enter()
    unsigned pending_ = 0;     // published to the kernel but not yet consumed by it, plus those taken
};

}  // namespace swap_native
