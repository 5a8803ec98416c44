// Many transfers of odd sizes and priorities from two threads, with registered memory coming and going, cancellation
// and a stop in mid-flight; every byte is checked. Prints "ok". Built by test_native_stress.py with sanitizers.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "crc32c.h"
#include "transfers.h"

using namespace swap_native;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBytes = 8 << 20;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

unsigned char* map() {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    return static_cast<unsigned char*>(memory);
}

// Waits for `count` ends of transfers, or for the stop; returns how many failed.
std::size_t reap(Driver& driver, std::size_t count, bool* stopped) {
    std::size_t failures = 0;
    while (count > 0 || (stopped != nullptr && !*stopped)) {
        pollfd poll_fd{driver.event_fd(), POLLIN, 0};
        if (poll(&poll_fd, 1, 60000) != 1) fail("no event in a minute");
        for (const Event& event : driver.take()) {
            if (event.kind == EventKind::kStopped) {
                if (stopped == nullptr) fail("stopped too early");
                *stopped = true;
            } else if (event.kind == EventKind::kDone) {
                failures += event.result != 0;
                if (count > 0) --count;
            }
        }
    }
    return failures;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) fail("usage: driver_stress DIRECTORY");
    const int fd = open(argv[1], O_RDWR | O_TMPFILE | O_DIRECT, 0600);
    if (fd < 0) fail("open");
    if (ftruncate(fd, kBytes) != 0) fail("ftruncate");
    unsigned char* source = map();
    unsigned char* target = map();
    for (std::size_t i = 0; i < kBytes; ++i) source[i] = static_cast<unsigned char>((i * 2654435761U) >> 13);

    Options options;
    options.depth = 8;
    options.block = 3 * kPage;
    options.timeout_ns = 30000000000;
    auto driver = std::make_shared<Driver>(options);
    std::string stage;
    if (driver->start(&stage) < 0) {
        std::puts("no io_uring");
        return 0;
    }
    driver->add_file(fd);
    std::atomic<std::uint64_t> next{1};
    for (const bool write : {true, false}) {
        unsigned char* memory = write ? source : target;
        driver->add_region(reinterpret_cast<std::uintptr_t>(memory), kBytes / 2);
        auto submit = [&](std::size_t begin, std::size_t end) {
            for (std::size_t at = begin; at < end;) {
                const std::size_t size = std::min(end - at, kPage * (1 + at / kPage % 17));
                if (!driver->submit(next++, fd, write, at, reinterpret_cast<std::uintptr_t>(memory) + at, size,
                                    static_cast<int>(at % 4)))
                    fail("submit");
                at += size;
            }
        };
        const std::uint64_t first = next;
        std::thread other(submit, 0, kBytes / 2);
        submit(kBytes / 2, kBytes);
        other.join();
        if (reap(*driver, next - first, nullptr) != 0) fail("a transfer failed");
        driver->remove_region(reinterpret_cast<std::uintptr_t>(memory));
    }
    if (std::memcmp(source, target, kBytes) != 0) fail("other bytes came back");
    std::vector<std::uint32_t> sums(kBytes / kPage);
    crc32c_pages(source, kBytes, kPage, sums.data());
    if (crc32c_verify(target, kBytes, kPage, sums.data()) != -1) fail("checksums");

    const std::uint64_t first = next;
    for (int i = 0; i < 20; ++i)
        driver->submit(next++, fd, true, 0, reinterpret_cast<std::uintptr_t>(source), kBytes, 0);
    driver->cancel();
    for (int i = 0; i < 20; ++i)
        driver->submit(next++, fd, false, 0, reinterpret_cast<std::uintptr_t>(target), kBytes, 0);
    driver->stop();
    bool stopped = false;
    reap(*driver, next - first, &stopped);
    if (driver->submit(next, fd, false, 0, reinterpret_cast<std::uintptr_t>(target), kPage, 0)) fail("after the stop");
    driver->close_descriptors();
    std::puts("ok");
    return 0;
}
