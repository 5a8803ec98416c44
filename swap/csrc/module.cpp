// Python binding: raw addresses and sizes only. Python has checked every range before (swap/native.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>

#include "crc32.h"
#include "crc32c.h"
#if SWAP_IO_URING
#include "transfers.h"
#endif

namespace nb = nanobind;

namespace swap_native {
namespace {

using Address = std::uintptr_t;

#if SWAP_IO_URING
nb::dict probe() {
    ProbeResult found;
    {
        const nb::gil_scoped_release release;
        found = probe_ring();
    }
    nb::dict result;
    result["error"] = found.error;
    result["stage"] = found.stage;
    result["features"] = found.features;
    result["files_error"] = found.files_error;
    result["buffers_error"] = found.buffers_error;
    return result;
}

// (kind, id, result, detail, offset, nbytes, moved, write, fd, address) of each event since the last call.
nb::list take(Driver& driver) {
    nb::list list;
    for (const Event& e : driver.take())
        list.append(nb::make_tuple(static_cast<int>(e.kind), e.id, e.result, static_cast<int>(e.detail), e.offset,
                                   e.nbytes, e.moved, e.write, e.fd, e.address));
    return list;
}

nb::dict counters(Driver& driver) {
    const Counters c = driver.counters();
    nb::dict result;
    result["blocks"] = c.blocks;
    result["fixed"] = c.fixed;
    result["enters"] = c.enters;
    result["resubmitted"] = c.resubmitted;
    return result;
}

void bind_io_uring(nb::module_& m) {
    m.def("probe", &probe);
    nb::class_<Driver>(m, "Driver")
        // Not released around these: each takes a lock for microseconds and makes no blocking call.
        .def("event_fd", &Driver::event_fd)
        .def("descriptors", &Driver::descriptors)
        .def("files_error", &Driver::files_error)
        .def("buffers_error", &Driver::buffers_error)
        .def("add_file", &Driver::add_file)
        .def("add_region", &Driver::add_region, nb::call_guard<nb::gil_scoped_release>())
        .def("remove_region", &Driver::remove_region, nb::call_guard<nb::gil_scoped_release>())
        .def("submit", &Driver::submit)
        .def("cancel", &Driver::cancel)
        .def("stop", &Driver::stop)
        .def("close_descriptors", &Driver::close_descriptors)
        .def("take", &take)
        .def("proceed", &Driver::proceed)
        .def("finish", &Driver::finish)
        .def("counters", &counters);
    // (driver, 0, "") or (None, errno, the step that failed)
    m.def("start", [](unsigned depth, std::uint64_t block, double timeout, bool intercept, bool registered,
                      std::uint64_t burst) {
        Options options;
        options.depth = depth;
        options.block = block;
        options.timeout_ns = static_cast<std::int64_t>(timeout * 1e9);
        options.intercept = intercept;
        options.registered = registered;
        options.burst = burst;
        auto driver = std::make_shared<Driver>(options);
        std::string stage;
        const int error = driver->start(&stage);
        if (error < 0) return nb::make_tuple(nb::none(), -error, stage);
        return nb::make_tuple(driver, 0, std::string());
    });
}
#endif

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // an interpreter that exits on a signal may keep objects alive; that is no leak of ours
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.attr("interface") = 3;  // swap/native.py refuses another number
    m.def("crc32c_method", &crc32c_method);
    m.def("crc32c_pages", [](Address data, std::size_t nbytes, std::size_t page, Address out) {
        crc32c_pages(reinterpret_cast<const void*>(data), nbytes, page, reinterpret_cast<std::uint32_t*>(out));
    }, Release());
    m.def("crc32c_verify", [](Address data, std::size_t nbytes, std::size_t page, Address expected) {
        return crc32c_verify(reinterpret_cast<const void*>(data), nbytes, page,
                             reinterpret_cast<const std::uint32_t*>(expected));
    }, Release());
    m.def("crc32_method", &crc32_method);
    m.def("crc32", [](std::uint32_t crc, Address data, std::size_t nbytes) {
        return crc32(crc, reinterpret_cast<const void*>(data), nbytes);
    }, Release());
#if SWAP_IO_URING
    m.attr("has_io_uring") = true;
    bind_io_uring(m);
#else
    m.attr("has_io_uring") = false;
#endif
}

}  // namespace swap_native
