"""The io_uring engine beyond what all engines share: probe, step-down, registered memory, priorities, time limit."""

from __future__ import annotations

import errno
import gc
import logging
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from swap import PAGE, FaultPlan, Priority, SwapError, SwapIOError, SwapStore, engines, native
from swap.native import UringProbe, probe_io_uring
from tests import programs

from .memory import aligned

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(not probe_io_uring().usable, reason=f"io_uring: {probe_io_uring().text}"),
]


def counters(store: SwapStore) -> dict[str, int]:
    found: dict[str, int] = store._core._engine.counters()  # type: ignore[union-attr]
    return found


def test_auto_takes_io_uring_and_cuts_requests_natively(tmp_path: Path) -> None:
    with SwapStore([tmp_path], block=4 * PAGE, queue_depth=3) as store:
        assert store.engine == "io_uring"
        if not store.direct[0]:
            pytest.skip("no direct I/O here")
        data, buffer = aligned(41 * PAGE, seed=1), aligned(41 * PAGE)
        extent = store.allocate(41 * PAGE)
        store.write(extent, data).wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)
        assert counters(store)["blocks"] == 2 * 11
        assert store.stats.requests == 2


def test_registered_memory_is_used_until_it_is_given_up(tmp_path: Path) -> None:
    with SwapStore([tmp_path], block=4 * PAGE, direct=True) as store:
        data = aligned(8 * PAGE, seed=2)
        store.register_memory(data)
        extent = store.allocate(8 * PAGE)
        store.write(extent, data).wait(60)
        if not probe_io_uring().buffers:
            pytest.skip("memory cannot be registered here")
        assert counters(store)["fixed"] == 2
        store.unregister_memory(data)
        buffer = aligned(8 * PAGE)
        store.read(extent, buffer).wait(60)
        store.write(extent, data).wait(60)
        assert counters(store)["fixed"] == 2
        assert torch.equal(buffer, data)


def test_memory_that_cannot_be_pinned_is_said_once() -> None:
    """Without the right to lock more than 64 KiB the engine goes on with plain buffers."""
    script = """
        import logging, os, resource, sys, ctypes
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        import torch
        from swap import SwapStore, HostPool, Budget
        import swap.engines.uring
        from swap.native import load
        load()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        pool = HostPool(Budget({}), "host", "test")
        data, back = pool.take(1 << 20), pool.take(1 << 20)
        data.fill_(7)
        with SwapStore([sys.argv[1]], direct=True) as store:
            print(store.engine)
            store.register_memory(data)
            store.register_memory(back)
            extent = store.allocate(1 << 20)
            store.write(extent, data).wait(60)
            store.read(extent, back).wait(60)
            print(torch.equal(data, back), store._core._engine.counters()["fixed"])
    """
    with tempfile.TemporaryDirectory() as path:  # pytest's own directories are closed to other users
        os.chmod(path, 0o777)
        done = programs.run("-c", script, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["io_uring", "True", "0"]
    lines = [line for line in done.stderr.splitlines() if "io_uring" in line]
    assert len(lines) == 1 and "64 KiB" in lines[0] and "ulimit -l" in lines[0]


def test_a_seccomp_filter_means_threads_and_one_line_that_says_so(tmp_path: Path) -> None:
    """As in a container whose profile refuses io_uring_setup."""
    script = """
        import ctypes, logging, struct, sys
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        import torch
        from swap import SwapStore
        SETUP, ALLOW, EPERM = 425, 0x7FFF0000, 0x00050001
        program = b"".join(struct.pack("HBBI", *step) for step in (
            (0x20, 0, 0, 0),        # load the number of the system call
            (0x15, 0, 1, SETUP),    # equal: next, else skip one
            (0x06, 0, 0, EPERM),
            (0x06, 0, 0, ALLOW),
        ))
        buffer = ctypes.create_string_buffer(program)
        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)
        argument = Program(4, ctypes.addressof(buffer))
        if libc.prctl(22, 2, ctypes.byref(argument), 0, 0):
            sys.exit(77)
        for _ in range(2):
            with SwapStore([sys.argv[1]], engine=sys.argv[2]) as store:
                extent = store.allocate(4096)
                store.write(extent, torch.ones(4096, dtype=torch.uint8)).wait(60)
                print(store.engine)
    """
    for engine in ("auto", "io_uring"):
        done = programs.run("-c", script, str(tmp_path), engine)
        if done.returncode == 77:
            pytest.skip("no seccomp here")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["threads", "threads"]
        (line,) = [line for line in done.stderr.splitlines() if "io_uring" in line]
        assert "seccomp" in line and "threads" in line and "io_uring_setup" in line


def test_every_refusal_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        interface = native.INTERFACE
        has_io_uring = True

        def __init__(self) -> None:
            self.found: dict[str, object] = {}

        def probe(self) -> dict[str, object]:
            return {"error": 0, "stage": "", "files_error": 0, "buffers_error": 0, **self.found}

    module = Module()
    monkeypatch.setattr(native, "load", lambda: (module, ""))
    files = {"/proc/sys/kernel/io_uring_disabled": "0", "/proc/self/status": ""}
    monkeypatch.setattr(native, "_read", lambda path: files[path])
    for found, switch, words in (
        ({"error": errno.EPERM}, "2", ["io_uring_disabled = 2", "sysctl"]),
        ({"error": errno.ENOSYS}, "0", ["no io_uring", "5.11"]),
        ({"error": errno.ENOSYS, "stage": "features"}, "0", ["too old", "5.11"]),
        ({"error": errno.ENOMEM}, "0", ["ENOMEM", "ulimit -l"]),
        ({"error": errno.EMFILE}, "0", ["descriptor", "ulimit -n"]),
        ({"error": errno.EIO, "stage": "operations"}, "0", ["EIO", "operations"]),
    ):
        module.found = found
        files["/proc/sys/kernel/io_uring_disabled"] = switch
        probe = native.probe_io_uring()
        assert not probe.usable and all(word in probe.text for word in words), probe
    module.found = {"buffers_error": errno.ENOMEM}
    probe = native.probe_io_uring()
    assert probe.usable and not probe.buffers and "ulimit -l" in probe.text
    module.has_io_uring = False
    assert "without io_uring" in native.probe_io_uring().text
    monkeypatch.setattr(native, "load", lambda: (None, "broken"))
    assert native.probe_io_uring().reason == "broken"


def test_a_forced_probe_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = UringProbe(usable=False, files=False, buffers=False, reason="forced", remedy="allow it")
    monkeypatch.setattr(engines, "_probe", lambda: refused)
    engines._step_down.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with SwapStore([tmp_path]) as store:
                assert store.engine == "threads"
    assert [record.getMessage() for record in caplog.records] == [
        "swap: using threads instead of io_uring: forced; allow it"
    ]


def test_urgent_requests_overtake(tmp_path: Path) -> None:
    """With one block in flight, a weight read that comes last is served before the queued blocks of a spill."""
    plan = FaultPlan(seed=0).stick("write", nth=1)
    with SwapStore([tmp_path], block=PAGE, queue_depth=1, faults=plan, direct=True) as store:
        spill, weight = store.allocate(64 * PAGE), store.allocate(PAGE)
        order: list[str] = []
        data, buffer = aligned(64 * PAGE, seed=1), aligned(PAGE)
        slow = store.write(spill, data, priority=Priority.SPILL)
        state = store.write(weight, data, nbytes=PAGE, priority=Priority.STATE_WRITE)
        quick = store.read(weight, buffer, priority=Priority.WEIGHT_READ)
        for ticket, name in ((slow, "spill"), (state, "write"), (quick, "read")):
            ticket.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
        plan.release()
        for ticket in (slow, state, quick):
            ticket.wait(60)
        assert order == ["read", "write", "spill"]


@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_stuck_request_becomes_one_error(tmp_path: Path, engine: str, operation: str) -> None:
    plan = FaultPlan(seed=0).stick(operation, nth=1)
    store = SwapStore([tmp_path], engine=engine, faults=plan, timeout=0.3, block=PAGE)
    try:
        extent = store.allocate(2 * PAGE)
        buffer = aligned(2 * PAGE)
        call = store.write if operation == "write" else store.read
        with pytest.raises(SwapIOError, match=r"ETIMEDOUT.*swap\.timeout") as caught:
            call(extent, buffer).wait(15)
        assert caught.value.errno == errno.ETIMEDOUT and caught.value.nbytes == PAGE
        assert str(tmp_path) in caught.value.path
        with pytest.raises(SwapIOError, match="ETIMEDOUT"):
            store.read(extent, buffer)
    finally:
        plan.release()
        store.close()
    assert store._core.fully_closed


def test_reordered_completions_give_the_same_bytes(tmp_path: Path) -> None:
    plan = FaultPlan(seed=5)
    for operation in ("read", "write"):
        plan.reorder(0.01, operation=operation).delay(0.005, operation=operation)
    with SwapStore([tmp_path], block=PAGE, queue_depth=8, faults=plan, direct=True) as store:
        extent = store.allocate(32 * PAGE)
        data, buffer = aligned(32 * PAGE, seed=4), aligned(32 * PAGE)
        tickets = [store.write(extent, data[i * PAGE :], offset=i * PAGE, nbytes=PAGE) for i in range(32)]
        for ticket in reversed(tickets):
            ticket.wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)
        assert plan.injected["reorder"] == plan.injected["delay"] == 64


@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_each_failure_is_one_exception(tmp_path: Path, engine: str, operation: str, number: int) -> None:
    plan = FaultPlan(seed=2).fail(operation, number, nth=3)
    with SwapStore([tmp_path], engine=engine, faults=plan, block=PAGE) as store:
        extent = store.allocate(8 * PAGE)
        data = aligned(8 * PAGE, seed=3)
        if operation == "read":
            store.write(extent, data).wait(20)
        ticket = store.write(extent, data) if operation == "write" else store.read(extent, aligned(8 * PAGE))
        with pytest.raises(SwapIOError) as caught:
            ticket.wait(20)
        error = caught.value
        assert (error.operation, error.errno, error.nbytes) == (operation, number, PAGE)
        assert str(tmp_path) in error.path and error.offset % PAGE == 0
        assert errno.errorcode[number] in str(error) and f"offset {error.offset}" in str(error)
        for call in (store.read, store.write):
            with pytest.raises(SwapIOError):
                call(extent, data)


@pytest.mark.parametrize("nbytes", [0, 100, PAGE, PAGE + 100, 3 * PAGE])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_short_transfers_are_continued_or_end_in_an_error(tmp_path: Path, operation: str, nbytes: int) -> None:
    plan = FaultPlan(seed=2).short(operation, nbytes=nbytes, times=3)
    with SwapStore([tmp_path], faults=plan, block=4 * PAGE, direct=True, checksum=True) as store:
        extent = store.allocate(9 * PAGE)
        data, buffer = aligned(9 * PAGE, seed=3), aligned(9 * PAGE)
        store.write(extent, data).wait(20)
        if operation == "read" and nbytes == 0:
            with pytest.raises(SwapIOError, match="end of file"):
                store.read(extent, buffer).wait(20)
            return
        store.read(extent, buffer).wait(20)
        assert torch.equal(buffer, data)
        assert plan.injected["short"] == 3


def test_a_drive_that_never_moves_a_byte_is_given_up(tmp_path: Path) -> None:
    plan = FaultPlan(seed=2).short("write", nbytes=0, times=None)
    with SwapStore([tmp_path], faults=plan, direct=True) as store, pytest.raises(SwapIOError, match="no progress"):
        store.write(store.allocate(PAGE), aligned(PAGE, seed=1)).wait(20)


def test_close_cancels_what_waits_and_a_forgotten_store_goes(tmp_path: Path) -> None:
    plan = FaultPlan(seed=0).delay(0.05)
    store = SwapStore([tmp_path], block=PAGE, queue_depth=2, faults=plan, direct=True)
    extent = store.allocate(256 * PAGE)
    tickets = [store.write(extent, aligned(256 * PAGE, seed=1)) for _ in range(3)]
    store.close()
    for ticket in tickets:
        with pytest.raises(SwapError, match="closed"):
            ticket.wait(20)
    with pytest.raises(SwapError, match="closed"):
        store.read(extent, aligned(PAGE))
    forgotten = SwapStore([tmp_path])
    forgotten.allocate(PAGE)
    before = threading.active_count()
    del forgotten
    gc.collect()
    assert threading.active_count() < before


def test_a_forked_child_neither_uses_nor_keeps_the_ring(tmp_path: Path) -> None:
    with SwapStore([tmp_path], direct=True) as store:
        extent = store.allocate(PAGE)
        data, buffer = aligned(PAGE, seed=1), aligned(PAGE)
        store.write(extent, data).wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                links = []
                for name in os.listdir("/proc/self/fd"):
                    try:
                        links.append(os.readlink(f"/proc/self/fd/{name}"))
                    except OSError:
                        continue
                try:
                    store.read(extent, buffer)
                except SwapError:
                    code = 0 if not any("io_uring" in link for link in links) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)
