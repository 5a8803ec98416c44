"""The staging pool as a model-based property: no slot twice, none lost, waiters in order; threads at the minimum."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swap import PAGE, Budget, Slot, StagingPool, SwapError


class StagingMachine(RuleBasedStateMachine):
    """Takes and gives back slots in any order and checks them against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3
        self.budget = Budget({"host": 4 * PAGE})
        self.pool = StagingPool(self.budget, self.count * PAGE, PAGE)
        self.held: list[Slot] = []
        self.marks: dict[int, int] = {}
        self.serial = 0

    @rule()
    def take(self) -> None:
        slot = self.pool.try_acquire()
        assert (slot is None) == (len(self.held) == self.count)
        if slot is not None:
            assert slot.index not in self.marks
            self.serial += 1
            slot.tensor.fill_(self.serial % 251)
            self.marks[slot.index] = self.serial % 251
            self.held.append(slot)

    @precondition(lambda self: len(self.held) == self.count)
    @rule()
    def wait_in_vain(self) -> None:
        with pytest.raises(TimeoutError, match=r"swap\.staging"):
            self.pool.acquire(timeout=0.0)
        assert self.pool.waiting == 0

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def give_back(self, which: int) -> None:
        slot = self.held.pop(which % len(self.held))
        assert int(slot.tensor.min()) == int(slot.tensor.max()) == self.marks.pop(slot.index)
        slot.release()
        slot.release()
        with pytest.raises(SwapError, match="after its release"):
            _ = slot.tensor

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def forget(self, which: int) -> None:
        slot = self.held.pop(which % len(self.held))
        del self.marks[slot.index]
        del slot

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.in_use == len(self.held) <= self.pool.in_use_peak <= self.count
        assert self.budget.used("host") == self.count * PAGE

    def teardown(self) -> None:
        self.held.clear()
        assert self.pool.in_use == 0
        self.pool.close()
        assert self.budget.used("host") == 0


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("count", [1, 2])
def test_readers_and_writers_share_the_smallest_pools(count: int) -> None:
    """Six threads, three of them asking all the time: everyone gets every slot it asks for, in the order of asking."""
    done: dict[int, int] = dict.fromkeys(range(6), 0)
    owner: list[int | None] = [None] * count
    problems: list[str] = []

    def work(number: int, pool: StagingPool) -> None:
        rng = random.Random(number)
        for _ in range(60):
            with pool.acquire(timeout=60) as slot:
                if owner[slot.index] is not None:
                    problems.append(f"{number} shares slot {slot.index} with {owner[slot.index]}")
                owner[slot.index] = number
                slot.tensor.fill_(number)
                if rng.random() < 0.2:
                    threading.Event().wait(0.0005)
                if int(slot.tensor.min()) != number or int(slot.tensor.max()) != number:
                    problems.append(f"{number} lost slot {slot.index}")
                owner[slot.index] = None
            done[number] += 1

    with StagingPool(Budget({}), count * PAGE, PAGE) as pool:
        threads = [threading.Thread(target=work, args=(number, pool), daemon=True) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not problems and set(done.values()) == {60}
        assert pool.in_use == 0 and pool.waiting == 0


def test_waiters_are_served_in_the_order_of_their_coming() -> None:
    with StagingPool(Budget({}), PAGE, PAGE) as pool:
        first = pool.acquire()
        order: list[int] = []

        def wait(number: int) -> None:
            with pool.acquire():
                order.append(number)

        threads = []
        for number in range(4):
            thread = threading.Thread(target=wait, args=(number,), daemon=True)
            thread.start()
            threads.append(thread)
            while pool.waiting <= number:
                threading.Event().wait(0.001)
        assert pool.try_acquire() is None  # nobody jumps the queue
        first.release()
        for thread in threads:
            thread.join(60)
        assert order == [0, 1, 2, 3]


def test_the_smallest_legal_budget_is_named() -> None:
    with pytest.raises(ValueError, match=rf"swap\.staging is {PAGE} bytes.*at least {3 * PAGE} bytes"):
        StagingPool(Budget({}), PAGE, 2 * PAGE + 1)
    StagingPool(Budget({}), 3 * PAGE, 2 * PAGE + 1).close()
