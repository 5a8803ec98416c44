"""Bad paths, full disks, failing drives, short transfers: one clear error, or none, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from swap import (
    PAGE,
    Budget,
    BudgetError,
    FaultPlan,
    SwapError,
    SwapIOError,
    SwapPathError,
    SwapStore,
    find_leftovers,
    remove_leftovers,
    wait_all,
)
from swap import files as swap_files
from swap.engines.system import OperatingSystem
from tests import programs

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=["io_uring", "threads", "aiofiles"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def unaligned(nbytes: int) -> torch.Tensor:
    """A pattern that is not on a page's boundary, as some of torch's own memory is by chance: it has to be copied, so
    that all engines pass by `OperatingSystem`.
    """
    memory = pattern(nbytes + 2 * PAGE)
    start = -memory.data_ptr() % PAGE + 64
    return memory[start : start + nbytes]


def test_a_missing_path_and_a_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(SwapPathError, match=r"nowhere.*memory\.nvme_paths") as caught:
        SwapStore([tmp_path / "nowhere"])
    assert caught.value.path == str(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(SwapPathError, match=r"not a directory.*memory\.nvme_paths"):
        SwapStore([file])
    with pytest.raises(SwapPathError, match=r"cannot be used.*memory\.nvme_paths"):
        SwapStore([file / "below"])


def test_an_unwritable_path() -> None:
    # Not a question of permissions, which do not stop root.
    with pytest.raises(SwapPathError, match=r"/proc.*not writable.*memory\.nvme_paths"):
        SwapStore(["/proc"])


def test_no_path_one_string_or_the_same_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"memory\.nvme_paths"):
        SwapStore([])
    with pytest.raises(ValueError, match=r"memory\.nvme_paths"):
        SwapStore(str(tmp_path))
    with pytest.raises(SwapPathError, match="twice"):
        SwapStore([tmp_path, tmp_path / "."])


def test_a_second_bad_path_closes_the_first(tmp_path: Path) -> None:
    with pytest.raises(SwapPathError):
        SwapStore([tmp_path, "/proc"])


def test_too_little_free_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    with pytest.raises(SwapPathError, match=r"memory\.nvme") as caught:
        SwapStore([tmp_path], capacity=free + 2**40)
    assert caught.value.needed == free + 2**40
    assert caught.value.free is not None and abs(caught.value.free - free) < 2**30
    assert str(tmp_path) in str(caught.value)
    with SwapStore([tmp_path]) as store:
        with pytest.raises(SwapPathError, match=str(tmp_path)):
            store.reserve_capacity(free + 2**40)
        store.allocate(PAGE)


def test_space_is_not_promised_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    status = os.statvfs(tmp_path)
    most = status.f_bavail * status.f_frsize * 6 // 10
    with SwapStore([tmp_path / "a"], capacity=most) as first:
        with pytest.raises(SwapPathError, match="free"):
            SwapStore([tmp_path / "b"], capacity=most)
        # One filesystem behind two paths has its space once.
        with pytest.raises(SwapPathError, match="free"):
            SwapStore([tmp_path / "a", tmp_path / "b"], capacity=most)
        first.allocate(PAGE)
        first.reserve_capacity(most)
    with SwapStore([tmp_path / "a", tmp_path / "b"], capacity=most):
        pass


def test_direct_io_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_files, "_can_transfer", lambda fd: False)
    with pytest.raises(SwapPathError, match=r"direct I/O.*swap\.direct"):
        SwapStore([tmp_path], direct=True)
    with SwapStore([tmp_path], direct="auto") as store:
        assert store.direct == (False,)


def test_a_filesystem_without_anonymous_files_or_direct_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, mode, **kwargs))  # the file is made all the same
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with SwapStore([tmp_path], engine=engine) as store:
        assert store.direct == (False,)
        assert os.listdir(tmp_path) == []
        data = pattern(3 * PAGE + 5)
        extent = store.allocate(data.numel())
        buffer = torch.zeros_like(data)
        store.write(extent, data).wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)


def test_a_directory_that_cannot_vanish_stays_locked_until_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_files._Directory, "vanish", lambda self: None)
    with SwapStore([tmp_path]):
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert find_leftovers(tmp_path) == [] and remove_leftovers(tmp_path) == []
        assert directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_without_preallocation(tmp_path: Path) -> None:
    plan = FaultPlan().fail("allocate", errno.EOPNOTSUPP)
    with SwapStore([tmp_path], faults=plan) as store:
        extent = store.allocate(PAGE)
        store.write(extent, pattern(PAGE)).wait(60)
        buffer = torch.zeros(PAGE, dtype=torch.uint8)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, pattern(PAGE))
        with pytest.raises(SwapIOError, match="ENOSPC"):
            store.allocate(2**60, "more than any disk")


def test_a_disk_full_at_allocation_is_reported_and_survived(tmp_path: Path, engine: str) -> None:
    budget = Budget({})
    plan = FaultPlan().fail("allocate", errno.ENOSPC, nth=2)
    with SwapStore([tmp_path], engine=engine, faults=plan, budget=budget) as store:
        store.allocate(PAGE, "first")
        used = budget.used("nvme")
        with pytest.raises(SwapIOError, match=r"allocate .*ENOSPC.*memory\.nvme_paths") as caught:
            store.allocate(2**30, "second")
        assert str(tmp_path) in caught.value.path and caught.value.errno == errno.ENOSPC
        assert budget.used("nvme") == used
        store.allocate(PAGE, "a hole is still there")


def test_a_really_full_disk(engine: str, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "swap-test", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no right to mount a small tmpfs")
    try:
        with SwapStore([mount], engine=engine) as store:
            extent = store.allocate(2**20)
            store.write(extent, pattern(2**20)).wait(60)
            with pytest.raises(SwapIOError, match="ENOSPC"):
                store.allocate(2**21)
            store.allocate(2**19)
        with pytest.raises(SwapPathError, match="free"):
            SwapStore([mount], capacity=2**22)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize(("operation", "number"), [("read", errno.EIO), ("write", errno.ENOSPC), ("write", errno.EIO)])
def test_a_failing_drive_is_named_at_every_wait_and_fails_the_store(
    tmp_path: Path, engine: str, operation: str, number: int
) -> None:
    plan = FaultPlan().fail(operation, number, at_offset=5 * PAGE)
    budget = Budget({})
    with SwapStore([tmp_path], engine=engine, faults=plan, budget=budget, block=2 * PAGE) as store:
        extent = store.allocate(16 * PAGE, "layers.1")
        data = pattern(16 * PAGE)
        if operation == "read":
            store.write(extent, data).wait(60)
            ticket = store.read(extent, torch.zeros_like(data))
        else:
            ticket = store.write(extent, data)
        for _ in range(2):
            with pytest.raises(SwapIOError) as caught:
                ticket.wait(60)
            error = caught.value
            assert (error.operation, error.errno, error.offset, error.nbytes) == (operation, number, 4 * PAGE, 2 * PAGE)
            assert error.path.startswith(str(tmp_path))
            for part in (operation, error.path, str(4 * PAGE), errno.errorcode[number], os.strerror(number)):
                assert part in str(error)
        for submit in (store.read, store.write):
            with pytest.raises(SwapIOError, match=errno.errorcode[number]):
                submit(extent, data)
        with pytest.raises(SwapIOError):
            store.allocate(PAGE)
        store.free(extent)
    assert budget.used("nvme") == 0


def test_the_first_error_ends_what_is_queued(tmp_path: Path, engine: str) -> None:
    plan = FaultPlan(2).fail("write", nth=3).delay(0.002)
    with SwapStore([tmp_path], engine=engine, faults=plan, queue_depth=2, block=PAGE) as store:
        extent = store.allocate(256 * PAGE)
        data = torch.zeros(256 * PAGE, dtype=torch.uint8)
        tickets = [store.write(extent, data[: 128 * PAGE])]
        with contextlib.suppress(SwapIOError):  # the first one may have failed already
            tickets.append(store.write(extent, data[: 128 * PAGE], offset=128 * PAGE))
        with pytest.raises(SwapIOError, match="EIO"):
            wait_all(tickets, timeout=60)
        assert all(isinstance(ticket.error, SwapIOError) for ticket in tickets)
        assert plan.calls["write"] < 20


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 100_000])
def test_short_transfers_are_continued(
    tmp_path: Path, engine: str, direct: str | bool, operation: str, nbytes: int
) -> None:
    plan = FaultPlan().short(operation, nbytes=nbytes, times=5)
    with SwapStore([tmp_path], engine=engine, direct=direct, faults=plan, block=128 * 1024) as store:
        data = pattern(400_000)
        extent = store.allocate(data.numel())
        buffer = torch.zeros_like(data)
        store.write(extent, data).wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)
        assert plan.injected["short"] == 5


@pytest.mark.parametrize(("operation", "nbytes"), [("read", 0), ("write", 0)])
def test_transfers_that_never_move_are_an_error(tmp_path: Path, engine: str, operation: str, nbytes: int) -> None:
    plan = FaultPlan().short(operation, nbytes=nbytes, times=None)
    with SwapStore([tmp_path], engine=engine, faults=plan) as store:
        extent = store.allocate(PAGE)
        data = torch.zeros(PAGE, dtype=torch.uint8)
        with pytest.raises(SwapIOError, match=r"end of file|no progress") as caught:
            getattr(store, operation)(extent, data).wait(60)
        assert caught.value.operation == operation


def test_a_file_cut_behind_our_back_is_an_error_not_zeros(tmp_path: Path, engine: str) -> None:
    with SwapStore([tmp_path], engine=engine) as store:
        extent = store.allocate(8 * PAGE)
        store.write(extent, pattern(8 * PAGE)).wait(60)
        os.ftruncate(store._core.files[0].fd, 4 * PAGE)
        with pytest.raises(SwapIOError, match="unexpected end of file after 16384 of 32768 bytes"):
            store.read(extent, torch.zeros(8 * PAGE, dtype=torch.uint8)).wait(60)


def test_a_lying_byte_count_is_an_error(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatingSystem, "pread_into", lambda self, fd, view, offset: view.nbytes + 1)
    with SwapStore([tmp_path], engine=engine) as store:
        extent = store.allocate(PAGE)
        with pytest.raises(SwapIOError, match="reported 4097 bytes"):
            store.read(extent, unaligned(PAGE)).wait(60)


def test_failed_writeback_of_buffered_data_fails_the_write(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(swap_files, "_WRITEBACK_WINDOW", PAGE)
    monkeypatch.setattr(swap_files, "_write_back", fail)
    with SwapStore([tmp_path], engine=engine, direct=False) as store:
        extent = store.allocate(PAGE)
        with pytest.raises(SwapIOError, match=r"writing back the page cache: .*EIO"):
            store.write(extent, pattern(PAGE)).wait(60)


def test_an_error_does_not_keep_the_buffer(tmp_path: Path, engine: str) -> None:
    from swap import HostPool

    budget = Budget({})
    with HostPool(budget, "host", "x") as pool:
        plan = FaultPlan().fail("write")
        with SwapStore([tmp_path], engine=engine, faults=plan) as store:
            extent = store.allocate(PAGE)
            ticket = store.write(extent, pool.take(PAGE))
            with pytest.raises(SwapIOError):
                ticket.wait(60)
            import gc
            import time

            deadline = time.monotonic() + 30
            while pool.live_bytes:
                gc.collect()
                assert time.monotonic() < deadline
                time.sleep(0.001)


def test_many_threads_through_a_slow_and_short_drive(tmp_path: Path, engine: str) -> None:
    plan = FaultPlan(7).delay(0.003).short("read", nbytes=4096, times=20).short("write", nbytes=8192, times=20)
    wrong: list[object] = []
    with SwapStore([tmp_path], engine=engine, faults=plan, block=16 * 1024) as store:

        def work(seed: int) -> None:
            try:
                for step in range(6):
                    data = pattern(50_000 + seed, seed * 100 + step)
                    extent = store.allocate(data.numel())
                    buffer = torch.zeros_like(data)
                    store.write(extent, data).wait(60)
                    store.read(extent, buffer).wait(60)
                    if not torch.equal(buffer, data):
                        wrong.append((seed, step))
                    store.free(extent)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.used_bytes == 0


def test_a_flipped_bit_is_injected_as_seeded(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with SwapStore([tmp_path], faults=FaultPlan(5).flip(nth=2)) as store:
            extent = store.allocate(PAGE)
            zeros, buffer = torch.zeros(PAGE, dtype=torch.uint8), torch.zeros(PAGE, dtype=torch.uint8)
            store.write(extent, zeros).wait(60)
            store.read(extent, buffer).wait(60)
            assert torch.equal(buffer, zeros)
            store.read(extent, buffer).wait(60)
            (index,) = buffer.nonzero().tolist()
            found.append((index, int(buffer[index[0]])))
    assert found[0] == found[1] and bin(found[0][1]).count("1") == 1


def test_fault_plans_check_their_rules() -> None:
    with pytest.raises(ValueError, match="seek"):
        FaultPlan().fail("seek")
    with pytest.raises(ValueError, match="short"):
        FaultPlan().short("allocate", nbytes=1)
    with pytest.raises(ValueError, match="allocate"):
        FaultPlan().flip("allocate")


def test_close_does_not_wait_for_a_hanging_drive_and_can_be_repeated(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answer = threading.Event(), threading.Event()
    real = OperatingSystem.pwrite_from

    def hang(self: OperatingSystem, fd: int, view: memoryview, offset: int) -> int:
        begun.set()
        answer.wait(60)
        return real(self, fd, view, offset)

    monkeypatch.setattr(OperatingSystem, "pwrite_from", hang)
    monkeypatch.setattr("swap.store._CLOSE_SECONDS", 0.2)
    store = SwapStore([tmp_path], engine=engine, queue_depth=1)
    extent = store.allocate(PAGE)
    hanging, queued = (store.write(extent, unaligned(PAGE)) for _ in range(2))
    assert begun.wait(60)
    store.close()
    assert store.closed and not hanging.done()
    with pytest.raises(SwapError, match="closed"):
        queued.wait(0)
    with pytest.raises(TimeoutError):
        hanging.wait(0)
    answer.set()
    hanging.wait(60)
    store.close()


def test_control_c_interrupts_a_wait(tmp_path: Path, engine: str) -> None:
    with SwapStore([tmp_path], engine=engine, queue_depth=1, block=PAGE, faults=FaultPlan(0).delay(0.5)) as store:
        extent = store.allocate(64 * PAGE)
        ticket = store.write(extent, pattern(64 * PAGE))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        timer.join()
        assert not ticket.done()


KILLED = """
    import os, signal, sys, torch, swap
    from swap import files
    if {keep}:
        files._Directory.vanish = lambda self: None
    store = swap.SwapStore([{path!r}], engine={engine!r})
    extent = store.allocate(1 << 20)
    store.write(extent, torch.zeros(1 << 20, dtype=torch.uint8)).wait()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_a_killed_process_leaves_nothing_or_what_can_be_removed(tmp_path: Path, engine: str, keep: bool) -> None:
    process = programs.Program("-c", KILLED.format(keep=keep, path=str(tmp_path), engine=engine))
    try:
        assert process.stdout.readline() == "ready\n"
        # Alive: nobody may take its directory away.
        assert remove_leftovers(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == int(keep)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()
    left = list(tmp_path.iterdir())
    assert len(left) == int(keep)
    assert find_leftovers(tmp_path) == left
    for directory in left:
        assert sum(file.stat().st_size for file in directory.iterdir()) == 0
    assert remove_leftovers(tmp_path) == left
    assert list(tmp_path.iterdir()) == []


def test_only_our_own_dead_directories_are_removed(tmp_path: Path) -> None:
    host = swap_files.host_name()
    other_host = tmp_path / f"offload-{host}x-12-{'0' * 16}"
    with_strangers = tmp_path / f"offload-{host}-12-{'1' * 16}"
    elsewhere = tmp_path / "elsewhere"
    link = tmp_path / f"offload-{host}-12-{'2' * 16}"
    dead = tmp_path / f"offload-{host}-12-{'3' * 16}"
    newborn = tmp_path / f"offload-{host}-12-{'4' * 16}"
    for directory in (other_host, with_strangers, elsewhere, dead, newborn):
        directory.mkdir()
        if directory != newborn:
            (directory / "lock").touch()
    (with_strangers / "thesis.tex").touch()
    (dead / "swap").write_bytes(b"x" * 100)
    link.symlink_to(elsewhere)
    (tmp_path / "offload-notes").mkdir()
    assert find_leftovers(tmp_path) == [dead, newborn]
    assert remove_leftovers(tmp_path) == [dead, newborn]
    assert not dead.exists() and not newborn.exists()
    assert find_leftovers(tmp_path, any_host=True) == [other_host]
    assert remove_leftovers(tmp_path, any_host=True) == [other_host]
    assert (elsewhere / "lock").exists() and (with_strangers / "thesis.tex").exists()
    assert find_leftovers(tmp_path / "nowhere") == []
    for directory in (with_strangers, link, tmp_path / "offload-notes"):
        directory.rename(tmp_path / f"kept{directory.name}")


def test_a_cleaner_that_meets_a_newborn_directory_only_makes_it_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir
    removed: list[Path] = []

    def mkdir_then_clean(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        if not removed:
            removed.extend(remove_leftovers(tmp_path))

    monkeypatch.setattr(os, "mkdir", mkdir_then_clean)
    with SwapStore([tmp_path]) as store:
        assert len(removed) == 1
        store.allocate(PAGE)


def test_a_cleaner_that_takes_the_lock_first_only_makes_it_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = swap_files.fcntl.flock
    removed: list[Path] = []

    def clean_then_lock(fd: int, operation: int) -> None:
        if not removed and not operation & swap_files.fcntl.LOCK_NB:
            removed.extend(remove_leftovers(tmp_path))
        real(fd, operation)

    monkeypatch.setattr(swap_files.fcntl, "flock", clean_then_lock)
    with SwapStore([tmp_path]) as store:
        assert len(removed) == 1
        store.allocate(PAGE)


def test_errors_have_a_common_base() -> None:
    assert issubclass(SwapIOError, SwapError) and not issubclass(SwapPathError, SwapError)
    assert issubclass(BudgetError, ValueError)
