from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest

from swap import Budget, BudgetError, SwapError, SwapIOError
from swap.deferred import DeferredLock


def test_reservations_add_up_and_come_back() -> None:
    budget = Budget({"device": None, "host": 100})
    first = budget.reserve("host", "staging", 60)
    second = budget.reserve("host", "weights", 40)
    assert (budget.used("host"), budget.peak("host"), budget.available("host")) == (100, 100, 0)
    assert budget.used_by_kind("host") == {"staging": 60, "weights": 40}
    first.release()
    first.release()
    assert first.released and not second.released
    assert (budget.used("host"), budget.peak("host")) == (40, 100)
    assert budget.used_by_kind("host") == {"weights": 40}
    assert budget.peak_by_kind("host") == {"staging": 60, "weights": 40}
    budget.reserve("device", "weights", 10**15)
    assert budget.limit("device") is None and budget.available("device") is None
    assert budget.limit("nvme") is None and budget.used("nvme") == 0


def test_an_excess_names_who_how_much_and_the_key() -> None:
    budget = Budget({"host": 100})
    budget.reserve("host", "weights", 70)
    with pytest.raises(BudgetError, match=r"layers\.3: .*'staging'.*70 of 100 bytes.*20 bytes.*memory\.host") as caught:
        budget.reserve("host", "staging", 50, what="layers.3")
    error = caught.value
    assert isinstance(error, MemoryError) and isinstance(error, ValueError)
    assert (error.tier, error.kind, error.requested, error.used, error.limit) == ("host", "staging", 50, 70, 100)
    assert error.what == "layers.3"
    assert budget.try_reserve("host", "staging", 31) is None
    assert budget.used("host") == 70


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="gpu"):
        Budget({"gpu": 1})
    with pytest.raises(ValueError, match=r"memory\.host"):
        Budget({"host": -1})
    with pytest.raises(ValueError, match="disk"):
        Budget({}).used("disk")
    with pytest.raises(ValueError, match="-5"):
        Budget({}).reserve("host", "x", -5)


def test_threads_never_exceed_the_limit_and_all_of_it_comes_back() -> None:
    budget = Budget({"host": 10})
    failures = []

    def work() -> None:
        for _ in range(300):
            with budget.wait_and_reserve("host", "x", 3):
                if budget.used("host") > 10:
                    failures.append(budget.used("host"))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert budget.used("host") == 0
    assert budget.peak("host") <= 10


def test_waiting_ends_with_a_release_or_a_timeout_and_never_starts_in_vain() -> None:
    budget = Budget({"host": 10})
    held = budget.reserve("host", "x", 10)
    with pytest.raises(BudgetError):
        budget.wait_and_reserve("host", "x", 11)
    with pytest.raises(BudgetError):
        budget.wait_and_reserve("host", "x", 1, timeout=0.01)
    assert not budget.wait_for_release(0.01)
    timer = threading.Timer(0.05, held.release)
    timer.start()
    assert budget.wait_and_reserve("host", "x", 10, timeout=30).nbytes == 10
    timer.join()


def test_a_release_while_the_same_thread_holds_the_lock_neither_deadlocks_nor_gets_lost() -> None:
    budget = Budget({"host": 100})
    reservation = budget.reserve("host", "x", 60)
    # As a finalizer would, at the worst moment: inside the critical section.
    with budget._lock:
        reservation.release()
    assert budget.used("host") == 0
    assert budget.reserve("host", "x", 100).nbytes == 100


def test_releases_by_the_garbage_collector_at_any_moment() -> None:
    budget = Budget({"host": 1 << 30})

    class Holder:
        def __init__(self) -> None:
            weakref.finalize(self, budget.reserve("host", "x", 7).release)
            self.cycle = self

    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    try:
        threads = [threading.Thread(target=lambda: [Holder() for _ in range(300)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert budget.used("host") == 0


def test_a_full_tier_asks_caches_to_give_back() -> None:
    budget = Budget({"host": 100})

    class Cache:
        def __init__(self) -> None:
            self.held = [budget.reserve("host", "cache", 20) for _ in range(4)]

        def trim(self, nbytes: int) -> int:
            freed = 0
            while self.held and freed < nbytes:
                self.held.pop().release()
                freed += 20
            return freed

    cache = Cache()
    budget.add_reclaimer("host", cache.trim)
    assert budget.reserve("host", "x", 50).nbytes == 50
    assert len(cache.held) == 2  # no more than needed
    with pytest.raises(BudgetError):
        budget.reserve("host", "x", 101)
    assert len(cache.held) == 2  # what can never fit costs nobody anything
    del cache
    gc.collect()
    with pytest.raises(BudgetError):
        budget.reserve("host", "x", 80)


def test_deferred_items_posted_under_the_lock_are_handled_on_leaving() -> None:
    seen: list[int] = []
    lock: DeferredLock[int] = DeferredLock(seen.append)
    lock.post(1)
    with lock:
        lock.post(2)
        assert seen == [1]
    assert seen == [1, 2]


def test_io_errors_say_what_where_and_why() -> None:
    error = SwapIOError(operation="write", path="/data/swap", offset=8192, nbytes=4096, errno=28, detail="after 1 of 2")
    for part in ("write", "/data/swap", "8192", "4096", "ENOSPC", "after 1 of 2", "memory.nvme_paths"):
        assert part in str(error)
    assert isinstance(error, SwapError) and isinstance(error, OSError) and isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    for found in (copy, error.clone()):
        assert str(found) == str(error)
        assert (found.operation, found.path, found.offset, found.nbytes, found.errno) == (
            "write",
            "/data/swap",
            8192,
            4096,
            28,
        )
