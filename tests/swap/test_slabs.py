from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path

import psutil
import pytest
import torch

from swap import PAGE, Budget, BudgetError, HostPool, SwapError


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def budget() -> Budget:
    return Budget({"host": 64 * PAGE})


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE])
def test_exact_size_page_aligned_and_alone_in_its_storage(budget: Budget, nbytes: int) -> None:
    pool = HostPool(budget, "host", "weights")
    first, second = pool.take(nbytes), pool.take(nbytes)
    rounded = -(-nbytes // PAGE) * PAGE
    for tensor in (first, second):
        assert tensor.shape == (nbytes,) and tensor.dtype == torch.uint8 and tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == nbytes
        if nbytes:
            assert tensor.data_ptr() % PAGE == 0
    if nbytes:
        assert first.data_ptr() != second.data_ptr()
    first.fill_(3)
    second.fill_(4)
    assert bool((first == 3).all()) and bool((second == 4).all())
    assert pool.live_bytes == 2 * rounded == budget.used("host")
    assert budget.used_by_kind("host") == ({"weights": 2 * rounded} if nbytes else {})


def test_a_view_keeps_the_bytes_until_it_dies(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    tensor = pool.take(4 * PAGE)
    tensor.fill_(7)
    view = tensor[PAGE : 2 * PAGE].view(torch.float32)
    address = tensor.data_ptr()
    del tensor
    assert pool.live_bytes == 4 * PAGE
    other = pool.take(4 * PAGE)
    assert other.data_ptr() != address
    assert bool((view.view(torch.uint8) == 7).all())
    del view
    assert (pool.live_bytes, pool.cached_bytes) == (4 * PAGE, 4 * PAGE)
    again = pool.take(4 * PAGE)
    assert again.data_ptr() == address
    assert (pool.live_bytes, pool.cached_bytes) == (8 * PAGE, 0)


def test_autograd_and_numpy_views_keep_the_bytes_too(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    weight = pool.take(4 * PAGE).view(torch.float32).fill_(2.0)
    array = weight.numpy()
    leaf = torch.ones(weight.numel(), requires_grad=True)
    product = (leaf * weight).sum()
    del weight
    product.backward()
    assert leaf.grad is not None and bool((leaf.grad == 2).all())
    del product
    gc.collect()
    assert pool.live_bytes == 4 * PAGE
    assert float(array.sum()) == 2.0 * PAGE
    del array
    gc.collect()
    assert pool.live_bytes == 0


def test_another_size_unmaps_the_cache_and_only_then_is_the_budget_exceeded(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    del_me = [pool.take(16 * PAGE) for _ in range(4)]
    with pytest.raises(BudgetError, match=r"layers\.0: .*memory\.host"):
        pool.take(1, what="layers.0")
    del_me.clear()
    assert pool.cached_bytes == 64 * PAGE
    big = pool.take(40 * PAGE)
    assert budget.used("host") <= 64 * PAGE
    assert budget.peak("host") == 64 * PAGE
    assert pool.live_bytes == 40 * PAGE
    del big
    cached = pool.cached_bytes
    assert cached >= 40 * PAGE and pool.trim() == cached
    assert (pool.cached_bytes, budget.used("host")) == (0, 0)


def test_one_pool_gives_its_cache_to_another_one(budget: Budget) -> None:
    weights, states = HostPool(budget, "host", "weights"), HostPool(budget, "host", "states")
    tensor = weights.take(60 * PAGE)
    del tensor
    assert weights.cached_bytes == 60 * PAGE
    taken = states.take(50 * PAGE)
    assert weights.cached_bytes == 0
    assert budget.used_by_kind("host") == {"states": 50 * PAGE}
    del taken


def test_a_blocking_take_waits_for_a_storage_to_die_in_another_thread(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    held = [pool.take(64 * PAGE)]
    with pytest.raises(BudgetError):
        pool.take(65 * PAGE, block=True)
    timer = threading.Timer(0.05, held.clear)
    timer.start()
    assert pool.take(32 * PAGE, block=True).shape == (32 * PAGE,)
    timer.join()


def test_many_threads_take_and_drop_within_the_budget(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights", poison=True)
    wrong = []

    def work(seed: int) -> None:
        for step in range(100):
            tensor = pool.take(((seed + step) % 7 + 1) * PAGE, block=True)
            if not bool((tensor == 255).all()):
                wrong.append(step)
            tensor.fill_(seed)
            if not bool((tensor == seed).all()):
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.live_bytes == 0
    assert budget.peak("host") <= 64 * PAGE
    pool.close()
    assert budget.used("host") == 0


def test_a_storage_that_dies_while_the_pool_is_locked_is_taken_back(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    tensor = pool.take(PAGE)
    with pool._lock:
        del tensor
    assert (pool.live_bytes, pool.cached_bytes) == (0, PAGE)


def test_close_unmaps_at_once_what_is_free_and_later_what_is_alive(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights")
    alive, dead = pool.take(2 * PAGE), pool.take(3 * PAGE)
    alive.fill_(9)
    del dead
    pool.close()
    pool.close()
    assert budget.used("host") == 2 * PAGE
    assert bool((alive == 9).all())
    with pytest.raises(SwapError, match="closed"):
        pool.take(PAGE)
    del alive
    assert budget.used("host") == 0


def test_memory_goes_back_to_the_system() -> None:
    budget = Budget({"host": 256 << 20})
    before, maps = resident(), mappings()
    pool = HostPool(budget, "host", "weights")
    tensors = [pool.take(32 << 20).fill_(1) for _ in range(4)]
    assert resident() - before > 120 << 20
    tensors.clear()
    pool.close()
    assert resident() - before < 40 << 20
    assert mappings() <= maps + 4


def test_reuse_keeps_resident_memory_flat() -> None:
    pool = HostPool(Budget({"host": 64 << 20}), "host", "weights")
    pool.take(16 << 20).fill_(1)
    before = resident()
    for _ in range(200):
        pool.take(16 << 20).fill_(1)
    assert resident() - before < 24 << 20
    pool.close()


def test_poison_shows_early_and_stale_reads_as_nan(budget: Budget) -> None:
    pool = HostPool(budget, "host", "weights", poison=True)
    tensor = pool.take(PAGE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert bool(tensor.view(dtype).isnan().all())
    tensor.zero_()
    region = tensor.data_ptr()
    del tensor
    again = pool.take(PAGE)
    assert again.data_ptr() == region and bool((again == 255).all())


def test_every_mapping_is_registered_once_and_unregistered_before_it_goes(budget: Budget) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, nbytes: int) -> None:
        assert address % PAGE == 0 and nbytes % PAGE == 0 and address not in pinned
        pinned[address] = nbytes

    def unregister(address: int, nbytes: int) -> None:
        assert pinned.pop(address) == nbytes

    pool = HostPool(budget, "host", "weights", register=register, unregister=unregister)
    first, second = pool.take(1), pool.take(5 * PAGE)
    assert sorted(pinned.values()) == [PAGE, 5 * PAGE] and first.data_ptr() in pinned
    del first
    assert len(pinned) == 2
    pool.close()
    assert list(pinned.values()) == [5 * PAGE]
    del second
    assert pinned == {}


def test_a_registration_that_fails_leaves_nothing_charged(budget: Budget) -> None:
    def register(address: int, nbytes: int) -> None:
        raise RuntimeError("pin limit reached")

    pool = HostPool(budget, "host", "weights", register=register)
    with pytest.raises(RuntimeError, match="pin limit"):
        pool.take(PAGE)
    assert (budget.used("host"), pool.live_bytes, pool.cached_bytes) == (0, 0, 0)


def test_negative_sizes_are_refused(budget: Budget) -> None:
    with pytest.raises(ValueError, match="-1"):
        HostPool(budget, "host", "weights").take(-1)


def test_large_blocks_of_a_power_of_two_do_not_collide_in_the_cache() -> None:
    """Planes that are walked through together, as an optimizer step does: see [Note: colours]. No page is touched."""

    def cache_hash(address: int) -> int:
        return sum((((address >> 12 + bit) ^ (address >> 27 - bit)) & 1) << bit for bit in range(8))

    with HostPool(Budget({}), "host", "x") as pool:
        for nbytes in (4 << 20, 64 << 20, 128 << 20, 256 << 20):
            planes = [pool.take(nbytes) for _ in range(3)]
            assert all(plane.data_ptr() % PAGE == 0 and plane.numel() == nbytes for plane in planes)
            for one, other in itertools.combinations(planes, 2):
                pages = range(0, nbytes, PAGE)
                equal = sum(cache_hash(one.data_ptr() + at) == cache_hash(other.data_ptr() + at) for at in pages)
                # Without colours all are equal; with them few, how few depends on the addresses that the kernel gave.
                assert equal <= len(pages) // 2, (nbytes, hex(one.data_ptr()), hex(other.data_ptr()))
