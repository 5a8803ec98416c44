from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from swap import PAGE, Budget, BudgetError, Slot, StagingPool, SwapError


def wait_until_waiting(pool: StagingPool, count: int) -> None:
    deadline = time.monotonic() + 30
    while pool.waiting != count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_whole_region_is_charged_once_and_comes_back() -> None:
    budget = Budget({"host": 16 * PAGE})
    pool = StagingPool(budget, 10 * PAGE + 5, 3 * PAGE)
    assert pool.count == 3
    assert budget.used_by_kind("host") == {"staging": 9 * PAGE}
    with pool.acquire() as slot:
        assert slot.tensor.shape == (3 * PAGE,) and slot.tensor.data_ptr() % PAGE == 0
        assert budget.used("host") == 9 * PAGE
    pool.close()
    pool.close()
    assert budget.used("host") == 0


def test_slots_do_not_overlap_whatever_their_size() -> None:
    with StagingPool(Budget({}), 8 * PAGE, PAGE + 100) as pool:
        slots = [pool.acquire() for _ in range(pool.count)]
        assert len(slots) == 4
        for number, slot in enumerate(slots):
            assert slot.tensor.shape == (PAGE + 100,)
            slot.tensor.fill_(number)
        for number, slot in enumerate(slots):
            assert bool((slot.tensor == number).all()) and slot.tensor.data_ptr() % PAGE == 0
        assert pool.try_acquire() is None
        assert (pool.in_use, pool.in_use_peak) == (4, 4)


def test_less_than_one_slot_names_the_minimum_and_the_key() -> None:
    with pytest.raises(ValueError, match=rf"swap\.staging is 100 bytes.*at least {2 * PAGE} bytes"):
        StagingPool(Budget({}), 100, PAGE + 1)
    with pytest.raises(ValueError, match=r"swap\.staging"):
        StagingPool(Budget({}), PAGE, 0)
    budget = Budget({"host": PAGE})
    with pytest.raises(BudgetError, match=r"swap\.staging: .*memory\.host"):
        StagingPool(budget, 2 * PAGE, PAGE)
    assert budget.used("host") == 0


def test_a_released_slot_cannot_be_read_and_is_returned_once() -> None:
    with StagingPool(Budget({}), 2 * PAGE, PAGE, poison=True) as pool:
        slot = pool.acquire()
        assert bool(slot.tensor.view(torch.float32).isnan().all())
        view = slot.tensor
        view.zero_()
        slot.release()
        slot.release()
        assert bool((view == 255).all())
        with pytest.raises(SwapError, match="release"):
            _ = slot.tensor
        assert pool.in_use == 0
        first, second = pool.acquire(), pool.acquire()
        assert first.index != second.index
        assert pool.try_acquire() is None


def test_a_lost_slot_returns_by_itself() -> None:
    with StagingPool(Budget({}), PAGE, PAGE) as pool:
        slot: Slot | None = pool.acquire()
        with pytest.raises(TimeoutError, match=r"swap\.staging"):
            pool.acquire(timeout=0.01)
        assert pool.waiting == 0
        slot = None
        gc.collect()
        assert slot is None and pool.acquire(timeout=30).index == 0


def test_waiters_are_served_in_order_of_arrival_and_nobody_overtakes() -> None:
    with StagingPool(Budget({}), PAGE, PAGE) as pool:
        order: list[int] = []

        def work(number: int) -> None:
            with pool.acquire():
                order.append(number)

        slot = pool.acquire()
        threads = []
        for number in range(6):
            thread = threading.Thread(target=work, args=(number,))
            thread.start()
            threads.append(thread)
            wait_until_waiting(pool, number + 1)
        slot.release()
        for thread in threads:
            thread.join()
        assert order == list(range(6))
        assert pool.in_use_peak == 1


def test_a_waiter_that_gave_up_neither_keeps_its_place_nor_loses_the_slot() -> None:
    with StagingPool(Budget({}), PAGE, PAGE) as pool:
        slot = pool.acquire()
        got: list[int] = []
        failed: list[str] = []

        def impatient() -> None:
            try:
                pool.acquire(timeout=0.05)
            except TimeoutError as error:
                failed.append(str(error))

        def patient() -> None:
            got.append(pool.acquire().index)

        first = threading.Thread(target=impatient)
        first.start()
        wait_until_waiting(pool, 1)
        second = threading.Thread(target=patient)
        second.start()
        first.join()
        slot.release()
        second.join()
        assert len(failed) == 1 and got == [0]


def test_more_workers_than_slots_all_finish_within_the_slots() -> None:
    with StagingPool(Budget({}), 3 * PAGE, PAGE, poison=True) as pool:
        wrong = []

        def work(number: int) -> None:
            for _ in range(60):
                with pool.acquire() as slot:
                    slot.tensor.fill_(number)
                    if not bool((slot.tensor == number).all()):
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert pool.in_use == 0 and pool.in_use_peak <= 3


def test_close_wakes_the_waiters_with_an_error() -> None:
    pool = StagingPool(Budget({}), PAGE, PAGE)
    slot = pool.acquire()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pool.acquire()
        except SwapError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until_waiting(pool, 3)
    pool.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    for attempt in (pool.acquire, pool.try_acquire):
        with pytest.raises(SwapError, match="closed"):
            attempt()
    slot.release()


def test_close_leaves_the_memory_of_a_held_slot_until_it_is_gone() -> None:
    budget = Budget({"host": 4 * PAGE})
    pool = StagingPool(budget, 2 * PAGE, PAGE)
    slot = pool.acquire()
    slot.tensor.fill_(5)
    pool.close()
    assert bool((slot.tensor == 5).all())
    assert budget.used("host") == 2 * PAGE
    slot.release()
    assert budget.used("host") == 0


def test_a_slot_released_while_the_pool_is_locked_reaches_the_next_waiter() -> None:
    with StagingPool(Budget({}), PAGE, PAGE) as pool:
        slot = pool.acquire()
        with pool._lock:
            slot.release()
        assert pool.acquire(timeout=30).index == 0


def test_parts_of_a_slot_are_looked_at_once_and_go_with_the_pool() -> None:
    budget = Budget({})
    pool = StagingPool(budget, 2 * PAGE, 2 * PAGE)
    with pool.acquire() as slot:
        part = slot.part(PAGE, PAGE, torch.float32)
        part.tensor.fill_(2.0)
        assert part.tensor.shape == (PAGE // 4,) and part.address == part.tensor.data_ptr()
        assert part.address == slot.tensor.data_ptr() + PAGE
        assert part.nbytes == part.view.nbytes == PAGE and bytes(part.view[:4]) == b"\0\0\0\x40"
    with pytest.raises(SwapError, match="after its release"):
        slot.part(PAGE, PAGE, torch.float32)
    again = pool.acquire()
    assert again.part(PAGE, PAGE, torch.float32) is part
    assert again.part(0, PAGE, torch.float32) is not part
    for size in range(1, 200):  # of very many sizes not all are kept
        assert again.part(0, size, torch.uint8).nbytes == size
    assert len(again._parts) < 100
    pool.close()
    assert budget.used("host") == 2 * PAGE
    del part
    assert again.part(PAGE, PAGE, torch.float32).nbytes == PAGE
    again.release()
    del again, slot
    gc.collect()
    assert budget.used("host") == 0
