"""The store: every byte comes back, on each engine and kind of filesystem, and nothing is left when it closes."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from swap import (
    PAGE,
    Budget,
    BudgetError,
    Extent,
    FaultPlan,
    HostPool,
    SwapError,
    SwapIOError,
    SwapPathError,
    SwapStore,
    Ticket,
    wait_all,
)
from swap.engines.protocol import PATIENCE, Priority
from tests import programs

from .memory import aligned

pytestmark = pytest.mark.usefixtures("no_leaks")

ENGINES = ("io_uring", "threads", "aiofiles")
SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 2**20 + 1, 5 * 2**20)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def round_trip(store: SwapStore, sizes: tuple[int, ...] = SIZES) -> None:
    """Write all, then read all, so that what one extent does to another shows."""
    extents = [store.allocate(nbytes, f"plane of {nbytes}") for nbytes in sizes]
    data = [random_bytes(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    wait_all([store.write(extent, tensor) for extent, tensor in zip(extents, data, strict=True)], timeout=60)
    for extent, tensor in zip(extents, data, strict=True):
        buffer = torch.full((tensor.numel() + 64,), 77, dtype=torch.uint8)
        store.read(extent, buffer, nbytes=tensor.numel()).wait(60)
        assert torch.equal(buffer[: tensor.numel()], tensor), extent.label
        assert bool((buffer[tensor.numel() :] == 77).all()), "read past the end"
    for extent in extents:
        store.free(extent)
    assert store.used_bytes == 0


@pytest.mark.parametrize("direct", ["auto", False])
def test_odd_sizes_on_a_disk(tmp_path: Path, engine: str, direct: str | bool) -> None:
    with SwapStore([tmp_path], engine=engine, direct=direct, block=64 * 1024) as store:
        assert store.engine == engine and store.paths == (str(tmp_path),)
        if direct is False:
            assert store.direct == (False,)
        round_trip(store)


@pytest.mark.parametrize("direct", ["auto", False])
def test_odd_sizes_on_tmpfs(shm_path: Path, engine: str, direct: str | bool) -> None:
    with SwapStore([shm_path], engine=engine, direct=direct) as store:
        round_trip(store)


@pytest.mark.parametrize("paths", [2, 3])
def test_stripes_over_several_paths(tmp_path: Path, engine: str, paths: int) -> None:
    roots = [tmp_path / str(number) for number in range(paths)]
    for root in roots:
        root.mkdir()
    with SwapStore(roots, engine=engine) as store:
        big = store.allocate(4 * 2**20 * paths + 2**20 + PAGE, "big")
        assert {segment.path for segment in big.segments} == set(range(paths))
        data = random_bytes(big.nbytes)
        store.write(big, data).wait(60)
        assert all(nbytes >= 2**22 for nbytes in store.stats.path_write_bytes)
        assert sum(store.stats.path_write_bytes) == store.stats.write_bytes == big.nbytes
        buffer = torch.zeros_like(data)
        store.read(big, buffer).wait(60)
        assert torch.equal(buffer, data)
        # A window across a stripe boundary, at page granularity.
        store.read(big, buffer[: 3 * PAGE], offset=2**22 - PAGE).wait(60)
        assert torch.equal(buffer[: 3 * PAGE], data[2**22 - PAGE : 2**22 + 2 * PAGE])
        store.free(big)
        round_trip(store)


def test_a_disk_and_tmpfs_together(tmp_path: Path, shm_path: Path, engine: str) -> None:
    with SwapStore([tmp_path, shm_path], engine=engine) as store:
        round_trip(store)


@pytest.mark.parametrize("shift", [1, 64, 512])
def test_unaligned_memory_is_copied_once_more_and_right(tmp_path: Path, engine: str, shift: int) -> None:
    base = random_bytes(700_000 + shift)
    source = base[shift:]
    with SwapStore([tmp_path], engine=engine, block=256 * 1024) as store:
        extent = store.allocate(source.numel())
        store.write(extent, source).wait(60)
        buffer = torch.zeros(source.numel() + shift, dtype=torch.uint8)
        store.read(extent, buffer[shift:]).wait(60)
        assert torch.equal(buffer[shift:], source) and bool((buffer[:shift] == 0).all())
        if all(store.direct):
            assert store.stats.bounced_bytes > 0


def test_bouncing_goes_page_by_page_when_the_budget_is_full(tmp_path: Path, engine: str) -> None:
    budget = Budget({"host": 4 * PAGE})
    source = random_bytes(300_001)[1:]
    with SwapStore([tmp_path], engine=engine, budget=budget) as store:
        extent = store.allocate(source.numel())
        buffer = torch.zeros_like(source)
        store.write(extent, source).wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, source)
        assert budget.used("host") <= 4 * PAGE
    assert budget.used("host") == 0


def test_aligned_whole_pages_are_never_copied(tmp_path: Path, engine: str) -> None:
    budget = Budget({})
    with HostPool(budget, "host", "x") as pool, SwapStore([tmp_path], engine=engine) as store:
        buffer = pool.take(2**20 + PAGE)
        buffer.copy_(random_bytes(buffer.numel()))
        before = buffer.clone()
        extent = store.allocate(buffer.numel())
        store.write(extent, buffer).wait(60)
        buffer.zero_()
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, before)
        assert store.stats.bounced_bytes == 0


def test_reading_an_odd_tail_leaves_the_rest_of_the_storage_alone(tmp_path: Path, engine: str) -> None:
    with HostPool(Budget({}), "host", "x") as pool, SwapStore([tmp_path], engine=engine) as store:
        flat = pool.take(4 * PAGE)
        flat.copy_(random_bytes(flat.numel()))
        before = flat.clone()
        extent = store.allocate(2 * PAGE)
        store.write(extent, flat, nbytes=PAGE + 100).wait(60)
        flat[: PAGE + 100] = 0
        store.read(extent, flat, nbytes=PAGE + 100).wait(60)
        assert torch.equal(flat, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float64])
def test_any_dtype_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    with SwapStore([tmp_path]) as store:
        for shape in [(), (3, 5), (1000, 7), (0, 8)]:
            source = (torch.rand(shape) * 3).to(dtype)
            if dtype.is_floating_point:
                source.requires_grad_()
            extent = store.allocate(source.numel() * source.element_size())
            buffer = torch.zeros(shape, dtype=dtype)
            store.write(extent, source).wait(60)
            store.read(extent, buffer).wait(60)
            assert torch.equal(buffer, source.detach())


def test_a_default_device_elsewhere_does_not_matter(tmp_path: Path) -> None:
    source = torch.arange(PAGE, dtype=torch.uint8)
    with SwapStore([tmp_path]) as store, HostPool(Budget({}), "host", "x") as pool, torch.device("meta"):
        buffer = pool.take(PAGE)
        assert pool.take(0).device.type == "cpu"
        extent = store.allocate(PAGE)
        store.write(extent, source).wait(60)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, source)


def test_priorities_and_many_requests_at_once(tmp_path: Path, engine: str) -> None:
    with SwapStore([tmp_path], engine=engine, queue_depth=3, faults=FaultPlan(3).delay(0.002)) as store:
        extents = [store.allocate(8 * PAGE, str(number)) for number in range(40)]
        data = [random_bytes(8 * PAGE, number) for number in range(40)]
        tickets = [
            store.write(extent, tensor, priority=-number)
            for number, (extent, tensor) in enumerate(zip(extents, data, strict=True))
        ]
        Ticket.gather(tickets).wait(60)
        assert all(ticket.done() for ticket in tickets)
        buffers = [torch.zeros(8 * PAGE, dtype=torch.uint8) for _ in extents]
        wait_all([store.read(extent, buffer) for extent, buffer in zip(extents, buffers, strict=True)])
        assert all(torch.equal(*pair) for pair in zip(buffers, data, strict=True))


def test_lower_priority_numbers_go_first(tmp_path: Path, engine: str) -> None:
    order: list[int] = []
    plan = FaultPlan(1).stick("write", nth=1)
    with SwapStore([tmp_path], engine=engine, queue_depth=1, faults=plan) as store:
        extent = store.allocate(PAGE)
        tickets = []
        for priority in (0, 3, 2, 1):
            ticket = store.write(extent, aligned(PAGE), priority=priority)
            ticket.add_done_callback(lambda _, priority=priority: order.append(priority))
            tickets.append(ticket)
        # The first is stuck until all have come.
        plan.release()
        wait_all(tickets, timeout=60)
    assert order == [0, 1, 2, 3]


def test_nobody_is_overtaken_for_ever(tmp_path: Path, engine: str) -> None:
    """One step of priority is worth PATIENCE bytes of later requests, and no more."""
    order: list[str] = []
    plan, most = FaultPlan(1).stick("write", nth=1), 64 << 20
    with (
        HostPool(Budget({}), "host", "x") as pool,
        SwapStore([tmp_path], engine=engine, queue_depth=1, block=most, faults=plan) as store,
    ):
        extent, page, buffer = store.allocate(most), store.allocate(PAGE), pool.take(most)
        tickets = [
            store.write(page, buffer, nbytes=PAGE),
            store.write(page, buffer, nbytes=PAGE, priority=1),
            *(store.read(extent, buffer) for _ in range(PATIENCE // most + 4)),
        ]
        for number, ticket in enumerate(tickets):
            ticket.add_done_callback(lambda _, number=number: order.append("late" if number == 1 else "urgent"))
        plan.release()
        wait_all(tickets, timeout=100)
    assert order.index("late") == 1 + PATIENCE // most


@pytest.mark.parametrize("burst", [0, 4, 100])
def test_reads_and_writes_take_turns(tmp_path: Path, engine: str, burst: int) -> None:
    """Reads are the more urgent throughout, yet with bursts of n pages n writes have their turn after n reads."""
    order: list[str] = []
    plan, count = FaultPlan(1).stick("write", nth=1), 12
    with SwapStore([tmp_path], engine=engine, queue_depth=1, faults=plan, block=PAGE, burst=burst * PAGE) as store:
        extent, page = store.allocate(2 * count * PAGE), aligned(PAGE)
        tickets = [store.write(extent, page)]  # the beginning of a burst of writes
        deadline = time.monotonic() + 60
        while not plan.injected["stick"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for number in range(1, count):
            tickets.append(store.write(extent, page, offset=number * PAGE, priority=Priority.STATE_WRITE))
            target = aligned(PAGE)
            tickets.append(store.read(extent, target, offset=(count + number) * PAGE, priority=Priority.WEIGHT_READ))
        for number, ticket in enumerate(tickets):
            ticket.add_done_callback(lambda _, kind="rw"[number % 2 or not number]: order.append(kind))
        plan.release()
        wait_all(tickets, timeout=60)
    expected = {
        0: "w" + "r" * 11 + "w" * 11,
        4: "wwww" + "rrrr" + "wwww" + "rrrr" + "wwww" + "rrr",
        100: "w" * 12 + "r" * 11,
    }
    assert "".join(order) == expected[burst]


def test_what_waits_in_either_line_is_cancelled_and_counted(tmp_path: Path, engine: str) -> None:
    plan = FaultPlan(1).stick("write", nth=1)
    store = SwapStore([tmp_path], engine=engine, queue_depth=1, faults=plan, block=PAGE, burst=2 * PAGE)
    extent = store.allocate(8 * PAGE)
    tickets = [store.write(extent, aligned(PAGE))]
    for number in range(1, 4):
        tickets.append(store.write(extent, aligned(PAGE), offset=number * PAGE))
        tickets.append(store.read(extent, aligned(PAGE), offset=number * PAGE))
    plan.release()
    store.close()
    assert all(ticket.done() for ticket in tickets)
    for bad in (-1, -PAGE):
        with pytest.raises(ValueError, match=r"swap\.burst"):
            SwapStore([tmp_path], burst=bad)


def test_a_ticket_keeps_its_buffer_and_then_lets_go(tmp_path: Path, engine: str) -> None:
    with HostPool(Budget({}), "host", "x") as pool, SwapStore([tmp_path], engine=engine) as store:
        extent = store.allocate(4 * 2**20)
        ticket = store.write(extent, pool.take(4 * 2**20).fill_(5))
        assert pool.live_bytes in (0, 4 * 2**20)
        ticket.wait(60)
        # The I/O thread drops its references right after it reported.
        deadline = time.monotonic() + 30
        while pool.live_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        buffer = torch.zeros(4 * 2**20, dtype=torch.uint8)
        store.read(extent, buffer).wait(60)
        assert bool((buffer == 5).all())


def test_nothing_to_wait_for_is_no_error(tmp_path: Path) -> None:
    Ticket.gather([]).wait(1)
    wait_all([])
    with SwapStore([tmp_path]) as store:
        empty = store.allocate(0)
        assert empty.nbytes == 0 and store.write(empty, torch.empty(0)).done()


def test_ranges_and_buffers_are_checked(tmp_path: Path) -> None:
    with SwapStore([tmp_path]) as store, SwapStore([tmp_path]) as other:
        extent = store.allocate(2 * PAGE, "layers.0.weight")
        page = torch.zeros(PAGE, dtype=torch.uint8)
        for arguments in (
            {"offset": 1},
            {"offset": -PAGE},
            {"offset": 2 * PAGE},
            {"nbytes": -1},
            {"nbytes": PAGE + 1},
        ):
            with pytest.raises(ValueError, match=r"layers\.0\.weight"):
                store.write(extent, page, **arguments)
        with pytest.raises(ValueError, match="contiguous"):
            store.write(extent, torch.zeros(8, 8).t()[:, :3])
        with pytest.raises(ValueError, match="meta"):
            store.read(extent, torch.zeros(8, device="meta"))
        with pytest.raises(ValueError, match="-4"):
            store.allocate(-4)
        with pytest.raises(SwapError, match="not allocated"):
            other.read(extent, page)
        with pytest.raises(SwapError, match="not allocated"):
            other.free(extent)
        store.free(extent)
        with pytest.raises(SwapError, match="not allocated"):
            store.free(extent)
        with pytest.raises(SwapError, match="not allocated"):
            store.read(extent, page)
        assert store.stats.requests == 0


def test_extents_are_charged_and_bounded(tmp_path: Path) -> None:
    budget = Budget({"nvme": 10 * PAGE})
    with SwapStore([tmp_path], budget=budget) as store:
        first = store.allocate(4 * PAGE + 1, "a", kind="weight")
        store.allocate(PAGE, "b")
        assert budget.used_by_kind("nvme") == {"weight": 5 * PAGE, "swap": PAGE}
        with pytest.raises(BudgetError, match=r"c: .*memory\.nvme"):
            store.allocate(5 * PAGE, "c")
        store.free(first)
        store.allocate(9 * PAGE, "d")
        assert store.file_bytes <= 10 * PAGE
    assert budget.used("nvme") == 0
    with SwapStore([tmp_path], capacity=3 * PAGE) as store:
        store.allocate(2 * PAGE)
        with pytest.raises(BudgetError, match=r"memory\.nvme"):
            store.allocate(2 * PAGE, "too much")
        assert store.used_bytes == 2 * PAGE


def test_free_from_a_finalizer_while_the_allocator_is_locked(tmp_path: Path) -> None:
    with SwapStore([tmp_path]) as store:
        extent = store.allocate(PAGE)
        with store._core.lock:
            store.free(extent)
        assert store.used_bytes == 0


def test_statistics_add_up(tmp_path: Path, engine: str) -> None:
    with SwapStore([tmp_path], engine=engine, block=PAGE) as store:
        extent = store.allocate(3 * PAGE)
        # Not at the beginning of a page: an engine that splits requests itself gets these in blocks too.
        store.write(extent, aligned(4 * PAGE, seed=1)[64 : 64 + 3 * PAGE]).wait(60)
        store.read(extent, aligned(2 * PAGE)[64 : 64 + PAGE]).wait(60)
        snapshot = store.stats.snapshot()
        assert (snapshot.write_bytes, snapshot.read_bytes) == (3 * PAGE, PAGE)
        assert (snapshot.write_requests, snapshot.read_requests) == (3, 1)
        assert snapshot.write_seconds > 0 and snapshot.read_seconds > 0
        assert store.stats.in_flight == 0


def test_two_stores_share_a_path_without_touching_each_other(tmp_path: Path, engine: str) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with SwapStore([tmp_path], engine=engine, owner=str(seed)) as store:
                data = random_bytes(2**20, seed)
                extent = store.allocate(data.numel(), "0")
                for _ in range(5):
                    store.write(extent, data).wait(60)
                    buffer = torch.zeros_like(data)
                    store.read(extent, buffer).wait(60)
                    assert torch.equal(buffer, data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_close_is_final_and_repeatable(tmp_path: Path, engine: str) -> None:
    store = SwapStore([tmp_path], engine=engine)
    extent = store.allocate(PAGE)
    store.close()
    store.close()
    assert store.closed
    store.free(extent)  # owners that outlive the store may still tidy up
    for call in (
        lambda: store.allocate(PAGE),
        lambda: store.write(extent, torch.zeros(PAGE, dtype=torch.uint8)),
        lambda: store.reserve_capacity(PAGE),
    ):
        with pytest.raises(SwapError, match="closed"):
            call()


def test_close_cancels_what_waits(tmp_path: Path, engine: str) -> None:
    plan = FaultPlan(0).delay(0.2)
    store = SwapStore([tmp_path], engine=engine, queue_depth=1, block=PAGE, faults=plan)
    extent = store.allocate(64 * PAGE)
    ticket = store.write(extent, torch.zeros(64 * PAGE, dtype=torch.uint8))
    store.close()
    for _ in range(2):
        with pytest.raises(SwapError, match="closed"):
            ticket.wait(0)
    assert plan.calls["write"] <= 2


def test_a_forgotten_store_is_closed_by_the_garbage_collector(tmp_path: Path, engine: str) -> None:
    budget = Budget({})
    store = SwapStore([tmp_path], engine=engine, budget=budget)
    store.allocate(PAGE)
    del store
    gc.collect()
    assert budget.used("nvme") == 0 and budget.used("host") == 0


def test_failed_construction_leaves_nothing(tmp_path: Path) -> None:
    budget = Budget({"host": 0})
    for _ in range(2):
        try:
            store = SwapStore([tmp_path], budget=budget)
        except BudgetError:
            continue
        assert not any(store.direct)
        store.close()
    with pytest.raises(ValueError, match="unknown engine"):
        SwapStore([tmp_path], engine="aio")
    with pytest.raises(ValueError, match="threads, aiofiles"):
        SwapStore([tmp_path], engine="fast")
    for options, key in (
        ({"block": 1000}, "swap.block"),
        ({"queue_depth": 0}, "swap.queue_depth"),
        ({"direct": "yes"}, "swap.direct"),
        ({"capacity": -1}, "memory.nvme"),
    ):
        with pytest.raises(ValueError, match=key):
            SwapStore([tmp_path], **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_forked_child_can_neither_use_nor_harm_the_store(tmp_path: Path) -> None:
    with SwapStore([tmp_path]) as store:
        data = random_bytes(PAGE)
        extent = store.allocate(PAGE)
        store.write(extent, data).wait(60)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.read(extent, torch.zeros(PAGE, dtype=torch.uint8))
            except SwapError:
                store.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        buffer = torch.zeros_like(data)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)


@pytest.mark.parametrize("how", ["forgets", "raises"])
def test_an_interpreter_exits_cleanly_with_open_stores(tmp_path: Path, engine: str, how: str) -> None:
    program = f"""
        import torch, swap
        store = swap.SwapStore([{str(tmp_path)!r}], engine={engine!r})
        extent = store.allocate(8 << 20)
        ticket = store.write(extent, torch.zeros(8 << 20, dtype=torch.uint8))
        pool = swap.HostPool(swap.Budget({{}}), "host", "x")
        held = pool.take(1 << 20)
        if {how == "raises"}:
            raise KeyError("on purpose")
    """
    result = programs.run("-c", program)
    if how == "forgets":
        assert (result.returncode, result.stderr) == (0, "")
    else:
        assert result.returncode == 1 and result.stderr.strip().endswith("KeyError: 'on purpose'")
    assert os.listdir(tmp_path) == []


def test_buffered_swap_does_not_fill_the_page_cache(tmp_path: Path, engine: str) -> None:
    nbytes = 96 << 20
    with SwapStore([tmp_path], engine=engine, direct=False) as store:
        extent = store.allocate(nbytes)
        chunk = random_bytes(8 << 20)
        for offset in range(0, nbytes, chunk.numel()):
            store.write(extent, chunk, offset=offset).wait(60)
        for offset in range(0, nbytes, chunk.numel()):
            buffer = torch.zeros_like(chunk)
            store.read(extent, buffer, offset=offset).wait(60)
            assert torch.equal(buffer, chunk)
        assert cached_bytes(store, nbytes) <= 64 << 20


def cached_bytes(store: SwapStore, nbytes: int) -> int:
    """Bytes of the store's first file in the page cache, as mincore tells."""
    import ctypes
    import mmap

    with mmap.mmap(store._core.files[0].fd, nbytes, flags=mmap.MAP_SHARED) as mapping:
        pages = nbytes // mmap.PAGESIZE
        present = (ctypes.c_ubyte * pages)()
        window = (ctypes.c_char * 1).from_buffer(mapping)
        result = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(window)), ctypes.c_size_t(nbytes), present
        )
        del window
        assert result == 0
        return sum(page & 1 for page in present) * mmap.PAGESIZE


def test_public_types() -> None:
    assert issubclass(SwapPathError, ValueError) and issubclass(SwapIOError, SwapError)
    assert Extent.__hash__ is object.__hash__
