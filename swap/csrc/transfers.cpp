#include "transfers.h"

#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

namespace swap_native {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr unsigned kMaxStalls = 16;        // calls in a row without progress
constexpr unsigned kFileSlots = 64;
constexpr unsigned kRegionSlots = 1024;
constexpr std::size_t kRegionBytes = std::size_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr std::uint8_t kOpPollAdd = 6, kOpReadFixed = 4, kOpWriteFixed = 5, kOpRead = 22, kOpWrite = 23;
constexpr std::uint8_t kFixedFile = 1;
constexpr std::int64_t kTick = 1000000000;

std::int64_t now_ns() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return std::int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

}  // namespace

Driver::~Driver() { close_descriptors(); }

void Driver::close_descriptors() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ring_.close();
    for (int* fd : {&wake_fd_, &event_fd_}) {
        if (*fd >= 0) ::close(*fd);
        *fd = -1;
    }
}

int Driver::start(std::string* stage) {
    // Room for every block and the wake-up poll.
    const int error = ring_.open(options_.depth + 2, stage);
    if (error < 0) return error;
    *stage = "eventfd";
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0 || event_fd_ < 0) return -errno;
    if (options_.registered) {
        files_error_ = -ring_.make_file_table(kFileSlots);
        buffers_error_ = -ring_.make_buffer_table(kRegionSlots);
    } else {
        files_error_ = buffers_error_ = ECANCELED;
    }
    for (unsigned slot = kRegionSlots; slot-- > 0;) free_regions_.push_back(slot);
    blocks_.resize(options_.depth);
    for (unsigned index = options_.depth; index-- > 0;) free_blocks_.push_back(index);
    pid_ = getpid();
    // Signals are for the threads that run Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *stage = "thread";
    int result = 0;
    try {
        std::thread([self = shared_from_this()] { self->run(); }).detach();
    } catch (const std::system_error& failure) {
        result = -failure.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return result;
}

int Driver::add_file(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (files_error_ != 0) return -files_error_;
    if (files_.size() >= kFileSlots) return -EMFILE;
    const int error = ring_.set_file(static_cast<unsigned>(files_.size()), fd);
    if (error == 0) files_.push_back(fd);
    return error;
}

int Driver::add_region(std::uintptr_t address, std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (buffers_error_ != 0) return -buffers_error_;
    for (std::size_t done = 0; done < nbytes;) {
        const std::size_t part = std::min(nbytes - done, kRegionBytes);
        if (free_regions_.empty()) return -ENOSPC;
        const unsigned slot = free_regions_.back();
        const int error = ring_.set_buffer(slot, reinterpret_cast<void*>(address + done), part);
        if (error < 0) return error;
        free_regions_.pop_back();
        regions_.push_back({address + done, part, slot});
        done += part;
    }
    return 0;
}

void Driver::remove_region(std::uintptr_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto region = regions_.begin(); region != regions_.end();) {
        if (region->address != address) {
            ++region;
            continue;
        }
        const bool chained = region->nbytes == kRegionBytes;
        ring_.set_buffer(region->slot, nullptr, 0);
        free_regions_.push_back(region->slot);
        regions_.erase(region);
        if (!chained) return;
        address += kRegionBytes;
        region = regions_.begin();
    }
}

bool Driver::submit(std::uint64_t id, int fd, bool write, std::uint64_t offset, std::uintptr_t address,
                    std::uint64_t nbytes, int priority) {
    auto transfer = std::make_unique<Transfer>();
    transfer->id = id;
    transfer->fd = fd;
    transfer->write = write;
    transfer->offset = offset;
    transfer->address = address;
    transfer->nbytes = nbytes;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return false;
    transfer->sequence = sequence_++;
    transfer->place = arrived_ + priority * kPatience;
    arrived_ += static_cast<std::int64_t>(nbytes);
    line_of(*transfer).emplace(transfer->place, transfer->sequence, transfer.get());
    transfers_.emplace(id, std::move(transfer));
    wake();
    return true;
}

std::size_t Driver::cancel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Transfer*> waiting;
    for (Line& line : lines_) {
        for (const Key& key : line) waiting.push_back(std::get<2>(key));
        line.clear();
    }
    for (Transfer* transfer : waiting) {
        if (!transfer->failed) {
            transfer->failed = true;
            transfer->error.result = ECANCELED;
            transfer->error.detail = Detail::kCancelled;
        }
        drop_if_over(transfer);
    }
    return waiting.size();
}

void Driver::stop() {
    cancel();
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wake();
}

std::vector<Event> Driver::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::uint64_t count = 0;
    if (announced_) [[maybe_unused]] const auto n = ::read(event_fd_, &count, sizeof(count));
    announced_ = false;
    return std::exchange(events_, {});
}

void Driver::proceed(std::uint64_t block, std::uint64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    verdicts_.emplace_back(static_cast<unsigned>(block), false, static_cast<std::int64_t>(nbytes));
    wake();
}

void Driver::finish(std::uint64_t block, std::int64_t result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    verdicts_.emplace_back(static_cast<unsigned>(block), true, result);
    wake();
}

Counters Driver::counters() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
}

void Driver::wake() {
    if (!sleeping_) return;
    sleeping_ = false;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(wake_fd_, &one, sizeof(one));
}

void Driver::post(const Event& event) {
    events_.push_back(event);
    if (announced_) return;
    announced_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(event_fd_, &one, sizeof(one));
}

void Driver::arm() {
    if (armed_) return;
    io_uring_sqe* entry = ring_.next();
    if (entry == nullptr) return;
    entry->opcode = kOpPollAdd;
    entry->fd = wake_fd_;
    entry->poll32_events = POLLIN;
    entry->user_data = kWakeTag;
    armed_ = true;
}

void Driver::run() {
    pthread_setname_np(pthread_self(), "swap-io_uring");
    while (true) {
        std::int64_t limit = -1;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& [index, finished, value] : std::exchange(verdicts_, {})) {
                if (finished) {
                    complete(index, value);
                } else if (blocks_[index].transfer->failed) {
                    release(index);
                } else {
                    issue(index, static_cast<std::uint64_t>(value));
                }
            }
            fill();
            arm();
            const bool busy = free_blocks_.size() < blocks_.size();
            if (stopping_ && !busy) break;
            if (busy && options_.timeout_ns > 0) limit = std::min(options_.timeout_ns / 4, kTick);
            // Not before all the work at hand is in the queue: from here on a submitter rings the bell.
            sleeping_ = true;
            ++counters_.enters;
        }
        const int entered = ring_.enter(1, limit);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            sleeping_ = false;
            reap();
            check_time();
        }
        // The kernel is out of memory for requests, or its completion queue is full: let others run, then go on.
        if (entered == -EAGAIN || entered == -EBUSY) usleep(1000);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ring_.close();
    Event event;
    event.kind = EventKind::kStopped;
    post(event);
}

// The line to serve: that of the most urgent transfer, but with bursts the same one until so many bytes are served that
// the other has its turn. RequestQueue of engines/queue.py does the same.
Driver::Line* Driver::next_line() {
    Line& reads = lines_[0];
    Line& writes = lines_[1];
    if (reads.empty() && writes.empty()) return nullptr;
    if (reads.empty() || writes.empty()) {
        const std::size_t only = reads.empty() ? 1 : 0;
        if (direction_ != only) served_ = 0;
        direction_ = only;
    } else if (options_.burst == 0) {
        direction_ = *writes.begin() < *reads.begin() ? 1 : 0;
    } else if (served_ >= options_.burst) {
        direction_ = 1 - direction_;
        served_ = 0;
    }
    return &lines_[direction_];
}

void Driver::fill() {
    while (!free_blocks_.empty()) {
        Line* line = next_line();
        if (line == nullptr) return;
        const Key key = *line->begin();
        Transfer* transfer = std::get<2>(key);
        const unsigned index = free_blocks_.back();
        free_blocks_.pop_back();
        Block& block = blocks_[index];
        block = Block{};
        block.transfer = transfer;
        block.begin = transfer->issued;
        block.nbytes = std::min(options_.block, transfer->nbytes - transfer->issued);
        transfer->issued += block.nbytes;
        ++transfer->outstanding;
        served_ += block.nbytes;
        if (transfer->issued == transfer->nbytes) line->erase(key);
        block.started = now_ns();
        begin(index);
    }
}

void Driver::begin(unsigned index) {
    Block& block = blocks_[index];
    if (!options_.intercept) {
        issue(index, block.nbytes - block.done);
        return;
    }
    block.state = BlockState::kBefore;
    post(of_block(EventKind::kBefore, index));
}

void Driver::issue(unsigned index, std::uint64_t nbytes) {
    Block& block = blocks_[index];
    const Transfer& transfer = *block.transfer;
    block.limit = std::min(nbytes, block.nbytes - block.done);
    block.state = BlockState::kKernel;
    const std::uintptr_t address = transfer.address + block.begin + block.done;
    io_uring_sqe* entry = ring_.next();  // never null: there are more entries than blocks
    const Region* region = nullptr;
    for (const Region& candidate : regions_) {
        const std::uintptr_t end = candidate.address + candidate.nbytes;
        if (address >= candidate.address && address + block.limit <= end) {
            region = &candidate;
            break;
        }
    }
    if (region != nullptr) {
        entry->opcode = transfer.write ? kOpWriteFixed : kOpReadFixed;
        entry->buf_index = static_cast<std::uint16_t>(region->slot);
        ++counters_.fixed;
    } else {
        entry->opcode = transfer.write ? kOpWrite : kOpRead;
    }
    const auto file = std::find(files_.begin(), files_.end(), transfer.fd);
    if (file != files_.end()) {
        entry->fd = static_cast<std::int32_t>(file - files_.begin());
        entry->flags = kFixedFile;
    } else {
        entry->fd = transfer.fd;
    }
    entry->addr = address;
    entry->len = static_cast<std::uint32_t>(block.limit);
    entry->off = transfer.offset + block.begin + block.done;
    entry->user_data = index;
    ++counters_.blocks;
}

void Driver::reap() {
    std::uint64_t tag = 0;
    std::int32_t result = 0;
    while (ring_.pop(&tag, &result)) {
        if (tag == kWakeTag) {
            std::uint64_t count = 0;
            [[maybe_unused]] const auto n = ::read(wake_fd_, &count, sizeof(count));
            armed_ = false;
            continue;
        }
        const auto index = static_cast<unsigned>(tag);
        if (options_.intercept) {
            blocks_[index].state = BlockState::kAfter;
            Event event = of_block(EventKind::kAfter, index);
            event.nbytes = blocks_[index].limit;
            event.result = result;
            post(event);
        } else {
            complete(index, result);
        }
    }
}

void Driver::complete(unsigned index, std::int64_t result) {
    Block& block = blocks_[index];
    if (block.transfer->failed) {
        release(index);
        return;
    }
    const std::uint64_t left = block.nbytes - block.done;
    std::uint64_t progress = block.done;
    if (result == -EINTR || result == -EAGAIN) {
        result = 0;
    } else if (result < 0) {
        fail(index, static_cast<int>(-result), Detail::kNone);
        return;
    } else if (static_cast<std::uint64_t>(result) > left) {
        fail(index, EIO, Detail::kTooMany);
        return;
    } else if (result == 0 && !block.transfer->write) {
        fail(index, EIO, Detail::kEndOfFile);
        return;
    }
    progress += static_cast<std::uint64_t>(result);
    // The rest must start on a page again, in memory and in the file: transfer the broken page anew.
    if (progress < block.nbytes) progress -= progress % kPage;
    block.stalls = progress == block.done ? block.stalls + 1 : 0;
    if (block.stalls >= kMaxStalls) {
        fail(index, EIO, Detail::kStalled);
        return;
    }
    block.done = progress;
    if (block.done == block.nbytes) {
        release(index);
        return;
    }
    ++counters_.resubmitted;
    begin(index);
}

void Driver::fail(unsigned index, int error, Detail detail) {
    Transfer& transfer = *blocks_[index].transfer;
    Event event = of_block(EventKind::kDone, index);
    event.id = transfer.id;
    event.result = error;
    event.detail = detail;
    event.offset = transfer.offset + blocks_[index].begin;
    event.nbytes = blocks_[index].nbytes;
    event.moved = blocks_[index].done;
    transfer.failed = true;
    transfer.error = event;
    line_of(transfer).erase(Key{transfer.place, transfer.sequence, &transfer});
    if (detail != Detail::kTimeout) release(index);
}

void Driver::release(unsigned index) {
    Block& block = blocks_[index];
    Transfer* transfer = block.transfer;
    block.transfer = nullptr;
    block.state = BlockState::kFree;
    free_blocks_.push_back(index);
    --transfer->outstanding;
    drop_if_over(transfer);
}

void Driver::drop_if_over(Transfer* transfer) {
    if (transfer->outstanding || !(transfer->failed || transfer->issued == transfer->nbytes)) return;
    // A transfer that was given up is reported a second time, so that its memory is kept until now.
    report(*transfer);
    transfers_.erase(transfer->id);
}

void Driver::report(Transfer& transfer) {
    Event event = transfer.failed ? transfer.error : Event{};
    event.kind = EventKind::kDone;
    event.id = transfer.id;
    if (!transfer.failed) event.moved = transfer.nbytes;
    post(event);
}

void Driver::check_time() {
    if (options_.timeout_ns <= 0) return;
    const std::int64_t now = now_ns();
    for (unsigned index = 0; index < blocks_.size(); ++index) {
        Block& block = blocks_[index];
        if (block.state == BlockState::kFree) continue;
        const std::int64_t age = now - block.started;
        if (!block.slow && age > options_.timeout_ns / 3) {
            block.slow = true;
            Event event = of_block(EventKind::kSlow, index);
            event.id = block.transfer->id;
            post(event);
        }
        if (age <= options_.timeout_ns || block.transfer->failed) continue;
        fail(index, ETIMEDOUT, Detail::kTimeout);
        report(*block.transfer);
    }
}

Event Driver::of_block(EventKind kind, unsigned index) const {
    const Block& block = blocks_[index];
    const Transfer& transfer = *block.transfer;
    Event event;
    event.kind = kind;
    event.id = index;
    event.offset = transfer.offset + block.begin + block.done;
    event.nbytes = block.nbytes - block.done;
    event.moved = block.done;
    event.write = transfer.write;
    event.fd = transfer.fd;
    event.address = transfer.address + block.begin + block.done;
    return event;
}

}  // namespace swap_native
