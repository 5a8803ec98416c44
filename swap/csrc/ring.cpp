#include "ring.h"

#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

namespace swap_native {
namespace {

// The numbers are the same on every architecture; the build machine's headers may be older than the running kernel.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

constexpr unsigned kSingleMmap = 1U << 0;
constexpr unsigned kExtArg = 1U << 8;  // kernel 5.11: a time limit for waiting
constexpr unsigned kEnterGetEvents = 1U << 0;
constexpr unsigned kEnterExtArg = 1U << 3;
constexpr unsigned kSetupSubmitAll = 1U << 7;
constexpr unsigned kSetupCoopTaskrun = 1U << 8;
constexpr unsigned kRegisterFilesUpdate = 6;
constexpr unsigned kUnregisterBuffers = 1;
constexpr unsigned kRegisterFiles = 2;
constexpr unsigned kUnregisterFiles = 3;
constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
constexpr unsigned kRegisterSparse = 1U << 0;

struct WaitArgument {
    std::uint64_t sigmask;
    std::uint32_t sigmask_size;
    std::uint32_t pad;
    std::uint64_t timespec;
};

struct Resources {  // io_uring_rsrc_register
    std::uint32_t count;
    std::uint32_t flags;
    std::uint64_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
};

struct ResourceUpdate {  // io_uring_rsrc_update2
    std::uint32_t offset;
    std::uint32_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
    std::uint32_t count;
    std::uint32_t reserved2;
};

struct FilesUpdate {  // io_uring_files_update
    std::uint32_t offset;
    std::uint32_t reserved;
    std::uint64_t fds;
};

struct IoVector {
    void* base;
    std::size_t size;
};

int result_of(long value) { return value < 0 ? -errno : static_cast<int>(value); }

int call_register(int fd, unsigned operation, const void* argument, unsigned count) {
    return result_of(syscall(kRegister, fd, operation, argument, count));
}

unsigned load_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store_release(unsigned* p, unsigned value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

template <class T> T* at(void* base, std::size_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

int Ring::open(unsigned entries, std::string* stage) {
    *stage = "setup";
    io_uring_params params;
    int fd = -1;
    // From the best to the plainest: older kernels refuse flags that they do not know.
    for (const unsigned flags : {kSetupSubmitAll | kSetupCoopTaskrun, 0U}) {
        std::memset(&params, 0, sizeof(params));
        params.flags = flags;
        fd = result_of(syscall(kSetup, entries, &params));
        if (fd != -EINVAL) break;
    }
    if (fd < 0) return fd;
    fd_ = fd;
    features_ = params.features;
    if (!(features_ & kSingleMmap) || !(features_ & kExtArg)) {
        *stage = "features";
        close();
        return -ENOSYS;
    }
    *stage = "map";
    const int error = map(params);
    if (error < 0) close();
    return error;
}

int Ring::map(const io_uring_params& params) {
    const std::size_t submission = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t completion = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = submission > completion ? submission : completion;
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return -errno;
    rings_ = rings;
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* sqes = mmap(nullptr, sqes_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES);
    if (sqes == MAP_FAILED) return -errno;
    sqes_ = static_cast<io_uring_sqe*>(sqes);
    // A forked child has no business with the queues.
    madvise(rings_, rings_bytes_, MADV_DONTFORK);
    madvise(sqes_, sqes_bytes_, MADV_DONTFORK);
    sq_head_ = at<unsigned>(rings_, params.sq_off.head);
    sq_tail_ = at<unsigned>(rings_, params.sq_off.tail);
    sq_array_ = at<unsigned>(rings_, params.sq_off.array);
    sq_mask_ = *at<unsigned>(rings_, params.sq_off.ring_mask);
    sq_entries_ = params.sq_entries;
    cq_head_ = at<unsigned>(rings_, params.cq_off.head);
    cq_tail_ = at<unsigned>(rings_, params.cq_off.tail);
    cq_mask_ = *at<unsigned>(rings_, params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(rings_, params.cq_off.cqes);
    local_tail_ = *sq_tail_;
    return 0;
}

void Ring::close() {
    if (fd_ >= 0) {
        // The kernel tears a ring down in the background; files and pins must be gone when this returns.
        call_register(fd_, kUnregisterFiles, nullptr, 0);
        call_register(fd_, kUnregisterBuffers, nullptr, 0);
    }
    if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) ::close(fd_);
    sqes_ = nullptr;
    rings_ = nullptr;
    fd_ = -1;
}

io_uring_sqe* Ring::next() {
    if (local_tail_ - load_acquire(sq_head_) >= sq_entries_) return nullptr;
    const unsigned index = local_tail_ & sq_mask_;
    sq_array_[index] = index;
    ++local_tail_;
    ++pending_;
    io_uring_sqe* entry = sqes_ + index;
    std::memset(entry, 0, sizeof(*entry));
    return entry;
}

int Ring::enter(unsigned wait, std::int64_t timeout_ns) {
    store_release(sq_tail_, local_tail_);
    __kernel_timespec limit{timeout_ns / 1000000000, timeout_ns % 1000000000};
    WaitArgument argument{0, 0, 0, reinterpret_cast<std::uint64_t>(&limit)};
    unsigned flags = wait ? kEnterGetEvents : 0;
    const bool limited = wait && timeout_ns >= 0;
    if (limited) flags |= kEnterExtArg;
    const int taken = result_of(syscall(kEnter, fd_, pending_, wait, flags, limited ? &argument : nullptr,
                                        limited ? sizeof(argument) : 0));
    // What the kernel has consumed is told by the head, also when the call ended with an error while waiting.
    pending_ = local_tail_ - load_acquire(sq_head_);
    return taken;
}

bool Ring::pop(std::uint64_t* user_data, std::int32_t* result) {
    const unsigned head = *cq_head_;
    if (head == load_acquire(cq_tail_)) return false;
    const io_uring_cqe& entry = cqes_[head & cq_mask_];
    *user_data = entry.user_data;
    *result = entry.res;
    store_release(cq_head_, head + 1);
    return true;
}

int Ring::make_file_table(unsigned slots) {
    const std::vector<std::int32_t> empty(slots, -1);
    return call_register(fd_, kRegisterFiles, empty.data(), slots);
}

int Ring::set_file(unsigned slot, int fd) {
    const std::int32_t value = fd;
    FilesUpdate update{slot, 0, reinterpret_cast<std::uint64_t>(&value)};
    const int count = call_register(fd_, kRegisterFilesUpdate, &update, 1);
    return count < 0 ? count : 0;
}

int Ring::make_buffer_table(unsigned slots) {
    Resources table{};
    table.count = slots;
    table.flags = kRegisterSparse;
    return call_register(fd_, kRegisterBuffers2, &table, sizeof(table));
}

int Ring::set_buffer(unsigned slot, void* address, std::size_t nbytes) {
    const IoVector vector{address, nbytes};
    const std::uint64_t tag = 0;
    ResourceUpdate update{};
    update.offset = slot;
    update.data = reinterpret_cast<std::uint64_t>(&vector);
    update.tags = reinterpret_cast<std::uint64_t>(&tag);
    update.count = 1;
    const int count = call_register(fd_, kRegisterBuffersUpdate, &update, sizeof(update));
    return count < 0 ? count : 0;
}

ProbeResult probe_ring() {
    ProbeResult probe;
    Ring ring;
    const int error = ring.open(8, &probe.stage);
    probe.features = ring.features();
    if (error < 0) {
        probe.error = -error;
        return probe;
    }
    // A no-op has to come back before we trust the rest: some sandboxes let the setup pass and refuse to enter.
    probe.stage = "operations";
    io_uring_sqe* entry = ring.next();
    entry->opcode = IORING_OP_NOP;
    entry->user_data = 7;
    const int taken = ring.enter(1, 1000000000);
    std::uint64_t user_data = 0;
    std::int32_t result = -1;
    if (taken < 0 || !ring.pop(&user_data, &result) || user_data != 7 || result != 0) {
        probe.error = taken < 0 ? -taken : EIO;
        return probe;
    }
    probe.stage.clear();
    probe.files_error = -ring.make_file_table(4);
    probe.buffers_error = -ring.make_buffer_table(4);
    if (probe.buffers_error == 0) {
        constexpr std::size_t kBytes = 1 << 20;
        void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            probe.buffers_error = errno;
        } else {
            probe.buffers_error = -ring.set_buffer(0, memory, kBytes);
            munmap(memory, kBytes);
        }
    }
    return probe;
}

}  // namespace swap_native
