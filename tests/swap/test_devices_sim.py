"""What only the simulated device does: every ordering or lifetime mistake ends in NaN, on every run."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

import swap.devices.sim as sim_module
from swap.devices import CopyError, SimDevice
from swap.devices.arena import HostArena
from swap.devices.protocol import DeviceOutOfMemory

N = 1024


@pytest.fixture
def sim() -> Iterator[SimDevice]:
    with SimDevice(capacity=1 << 20, delay=0.0) as device:
        yield device


def floats(device: SimDevice, count: int = N) -> torch.Tensor:
    return device.empty(4 * count).view(torch.float32)


def all_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor).all())


def test_fresh_and_freed_memory_is_poison(sim: SimDevice) -> None:
    buffer = floats(sim)
    assert all_nan(buffer) and all_nan(buffer.view(torch.bfloat16)) and all_nan(buffer.view(torch.float16))
    buffer.fill_(1.0)
    address = buffer.data_ptr()
    del buffer
    again = floats(sim)
    assert again.data_ptr() == address
    assert all_nan(again)


def test_reading_without_waiting_gives_nan_even_over_old_contents(sim: SimDevice) -> None:
    buffer, source, result = floats(sim), torch.ones(N), torch.zeros(N)
    buffer.fill_(9.0)
    sim.pause()
    arrived = sim.copy_in(buffer, source)
    assert all_nan(buffer * 2) and not arrived.done()
    sim.resume()
    sim.compute_wait(arrived)
    assert torch.equal(buffer, source)
    sim.pause()
    left = sim.copy_out(result, buffer)
    assert all_nan(result)
    sim.resume()
    left.wait()
    assert torch.equal(result, source)


def test_copy_out_without_after_reads_poison(sim: SimDevice) -> None:
    # The streams are independent: h2d is held up by its delay, d2h is not.
    buffer, source, result = floats(sim), torch.ones(N), torch.zeros(N)
    sim.delay = (5.0, 5.0)
    sim.copy_in(buffer, source)
    sim.delay = 0.0
    sim.copy_out(result, buffer).wait()
    assert all_nan(result)


def test_overwriting_a_buffer_before_its_copy_out_has_run(sim: SimDevice) -> None:
    def run(ordered: bool) -> torch.Tensor:
        buffer, result, following = floats(sim), torch.zeros(N), torch.full((N,), 2.0)
        buffer.fill_(1.0)
        sim.pause()
        left = sim.copy_out(result, buffer)
        arrived = sim.copy_in(buffer, following, after=[left] if ordered else [])
        sim.resume()
        sim.compute_wait(arrived)
        left.wait()
        assert torch.equal(buffer, following)
        return result

    assert torch.equal(run(ordered=True), torch.ones(N))
    sim.delay = 0.0
    wrong = run(ordered=False)
    assert not torch.equal(wrong, torch.ones(N))  # poison, or already the next contents


def test_order_is_followed_through_other_copies(sim: SimDevice) -> None:
    buffer, other, result = floats(sim), floats(sim), torch.zeros(N)
    buffer.fill_(1.0)
    sim.pause()
    left = sim.copy_out(result, buffer)
    between = sim.copy_in(other, torch.zeros(N), after=[left])  # on the same stream as the copy below
    source = torch.full((N,), 2.0)
    arrived = sim.copy_in(buffer, source)
    sim.resume()
    arrived.wait()
    assert between.done() or left.done()
    assert torch.equal(result, torch.ones(N))


def test_buffer_freed_before_its_copy_out(sim: SimDevice) -> None:
    buffer, result = floats(sim), torch.zeros(N)
    buffer.fill_(1.0)
    sim.pause()
    event = sim.copy_out(result, buffer)
    del buffer
    assert sim.used == 0
    sim.resume()
    event.wait()
    assert all_nan(result)


def test_late_copy_in_lands_in_whoever_has_the_memory_now(sim: SimDevice) -> None:
    buffer, source = floats(sim), torch.ones(N)
    sim.pause()
    event = sim.copy_in(buffer, source)
    del buffer
    innocent = floats(sim)
    innocent.fill_(5.0)
    sim.resume()
    event.wait()
    assert torch.equal(innocent, source)


def test_dead_buffers_stay_mapped_while_copies_are_queued(sim: SimDevice) -> None:
    buffer, result = floats(sim), torch.zeros(N)
    sim.pause()
    event = sim.copy_out(result, buffer)
    del buffer
    whole = sim.empty(1 << 20)  # evicts the dead buffer from the free list
    sim.resume()
    event.wait()
    assert all_nan(result)
    assert whole.numel() == 1 << 20


@pytest.mark.parametrize("keep", ["tensor", "view", "storage", "nothing"])
def test_source_outside_the_arena_must_be_held(sim: SimDevice, keep: str) -> None:
    gradient, result = torch.ones(N), torch.zeros(N)
    sim.pause()
    event = sim.copy_out(result, gradient)
    held = {"tensor": gradient, "view": gradient[3:], "storage": gradient.untyped_storage(), "nothing": None}[keep]
    del gradient
    sim.resume()
    event.wait()
    if keep == "nothing":
        assert held is None and all_nan(result)
    else:
        assert torch.equal(result, torch.ones(N))


def test_two_copies_of_one_dropped_source_are_both_poison(sim: SimDevice) -> None:
    source, first, second = torch.ones(N), floats(sim), floats(sim)
    sim.pause()
    sim.copy_in(first, source)
    last = sim.copy_in(second, source)
    del source
    sim.resume()
    last.wait()
    assert all_nan(first) and all_nan(second)


def test_delays_are_seeded_and_per_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(seed: int) -> list[float]:
        drawn: list[float] = []
        real = random.Random.uniform

        def uniform(self: random.Random, low: float, high: float) -> float:
            drawn.append(real(self, low, high))
            return 0.0

        monkeypatch.setattr(random.Random, "uniform", uniform)
        with SimDevice(seed=seed, delay=0.25) as device:
            buffer, host = floats(device, 8), torch.zeros(8)
            for _ in range(3):
                device.compute_wait(device.copy_in(buffer, host))
                device.copy_out(host, buffer).wait()
        monkeypatch.setattr(random.Random, "uniform", real)
        return drawn

    first = delays(1)
    assert first == delays(1) != delays(2)
    assert len(set(first)) == 6 and all(0 <= delay <= 0.25 for delay in first)


@pytest.mark.parametrize("delay", [-1.0, (2.0, 1.0)])
def test_bad_delays_are_refused(delay: float | tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="delay"):
        SimDevice(delay=delay)


def test_failure_of_a_copy_reaches_its_waiters_and_followers(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dst: int, src: int, nbytes: int) -> None:
        raise OSError(5, "bus fault")

    buffer, result, source = floats(sim), torch.zeros(N), torch.ones(N)
    with monkeypatch.context() as patch:
        patch.setattr(sim_module, "_memmove", broken)
        event = sim.copy_in(buffer, source)
        with pytest.raises(CopyError, match=r"copy 1 to the sim device \(4,096 bytes\) failed: .*bus fault") as caught:
            sim.compute_wait(event)
        assert isinstance(caught.value.__cause__, OSError)
    follower = sim.copy_out(result, buffer, after=[event])
    with pytest.raises(CopyError, match="bus fault"):
        follower.wait()
    assert all_nan(result)
    again = sim.copy_in(buffer, source)
    sim.compute_wait(again)
    assert torch.equal(buffer, source)


def test_wait_with_timeout(sim: SimDevice) -> None:
    buffer, source = floats(sim), torch.ones(N)
    sim.pause()
    event = sim.copy_in(buffer, source)
    with pytest.raises(TimeoutError, match="copy 1"):
        event.wait(timeout=0.01)
    sim.resume()
    event.wait(timeout=60)


@pytest.mark.parametrize("held_by", ["pause", "delay"])
def test_close_fails_queued_copies_and_ends_the_threads(held_by: str) -> None:
    before = set(threading.enumerate())
    device = SimDevice(delay=(3600.0, 3600.0))
    if held_by == "pause":
        device.pause()
    buffer, source, result = floats(device), torch.ones(N), torch.zeros(N)
    first = device.copy_in(buffer, source)
    second = device.copy_out(result, buffer, after=[first])
    device.close()
    assert set(threading.enumerate()) == before
    for event in (first, second):
        assert event.done()
        with pytest.raises(CopyError, match="closed"):
            event.wait()
    assert all_nan(buffer) and all_nan(result)
    with pytest.raises(RuntimeError, match="closed"):
        device.copy_in(buffer, source)


def test_finished_copies_hold_nothing(sim: SimDevice) -> None:
    source = torch.ones(N)
    storage = source.untyped_storage()
    buffer = floats(sim)
    sim.copy_in(buffer, source).wait()
    del source
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert not sim._kept and not sim._queued


def test_overlapping_ends_are_refused(sim: SimDevice) -> None:
    buffer = floats(sim)
    with pytest.raises(ValueError, match="overlap"):
        sim.copy_in(buffer[:10], buffer[5:15])


def test_arena_reuses_equal_sizes_and_evicts_others_within_capacity() -> None:
    arena = HostArena("cpu", 64 << 10)
    first = arena.empty(32 << 10, "")
    address = first.data_ptr()
    del first
    assert (arena.used, arena.cached) == (0, 32 << 10)
    second = arena.empty((32 << 10) - 5, "")
    assert second.data_ptr() == address and arena.cached == 0
    del second
    third = arena.empty(48 << 10, "")
    assert arena.used + arena.cached <= 64 << 10
    with pytest.raises(DeviceOutOfMemory):
        arena.empty(20 << 10, "more")
    del third
    assert arena.used == 0


def test_arena_without_capacity_caches_no_more_than_its_peak() -> None:
    arena = HostArena("cpu", None)
    for pages in (1, 2, 3, 4, 5):
        tensor = arena.empty(pages << 12, "")
        del tensor
        assert arena.cached <= arena.peak == pages << 12
