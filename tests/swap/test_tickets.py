"""Tickets by themselves: who sleeps, who comes late, and what many are together."""

from __future__ import annotations

import threading
import time

import pytest

from swap.errors import SwapError
from swap.tickets import Ticket


def test_sleepers_wake_when_the_last_part_has_ended() -> None:
    ticket = Ticket(2)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(ticket.wait() is None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    ticket.finish_part(None)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        ticket.wait(0.01)
    assert not ticket.done() and not woken
    ticket.finish_part(None)
    for thread in threads:
        thread.join(10)
    assert ticket.done() and woken == [True] * 3
    ticket.wait(0)


def test_waiting_and_ending_at_the_same_moment() -> None:
    def end(ticket: Ticket, seconds: float) -> None:
        time.sleep(seconds)
        ticket.finish_part(None)

    for number in range(300):
        ticket = Ticket(1)
        ender = threading.Thread(target=end, args=(ticket, number % 3 * 1e-5))
        ender.start()
        ticket.wait(10)
        ender.join()


def test_the_buffer_is_let_go_before_anybody_learns_of_the_end() -> None:
    class Memory:
        gone = False

        def __del__(self) -> None:
            Memory.gone = True

    ticket = Ticket(1, Memory())
    seen = []
    ticket.add_done_callback(lambda _: seen.append(Memory.gone))
    assert not Memory.gone
    ticket.finish_part(None)
    assert seen == [True]
    ticket.add_done_callback(lambda _: seen.append(True))  # at once, since it is done
    assert seen == [True, True]


def test_many_tickets_are_one() -> None:
    assert Ticket.gather([]).done()
    one, two = Ticket(1), Ticket(1)
    assert Ticket.gather([one]) is one
    both = Ticket.gather([one, two])
    two.finish_part(SwapError("broken"))
    assert not both.done()
    one.finish_part(None)
    for _ in range(2):  # at every call
        with pytest.raises(SwapError, match="broken"):
            both.wait()
    one.wait()
