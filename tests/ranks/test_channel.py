"""Channels: order, results, the first error, peers that die, raise, diverge or do not come, and the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from offload.errors import ParallelError
from offload.parallel.channel import Channel
from offload.parallel.collectives import Collectives
from offload.parallel.ranks import Ranks
from offload.parallel.stalls import Stall, say
from tests.ranks.harness import Outcome, RankPool

PoolOf = Callable[[int], RankPool]


@contextmanager
def opened(timeout: float = 20.0) -> Iterator[tuple[Ranks, Channel]]:
    ranks = Ranks.open(shard_size=None, replicate_size=None, timeout=timeout, device_kind="cpu")
    assert ranks is not None
    channel = Channel("test", ranks, lambda n, dtype: torch.empty(n, dtype=dtype))
    try:
        yield ranks, channel
    finally:
        channel.close()
        ranks.close()


def tell(collectives: Collectives) -> list[int]:
    return collectives.all_gather_objects(collectives._ranks.rank, "world")


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("offload-comm-")}


# What works


def in_order() -> list[str]:
    order: list[str] = []
    with opened() as (_, channel):
        first = threading.Event()

        def before() -> None:
            first.wait(10)
            order.append("before")

        def job(name: str) -> Callable[[Collectives], list[int]]:
            def run(collectives: Collectives) -> list[int]:
                order.append(name)
                return tell(collectives)

            return run

        pending = [channel.submit("one", job("one"), before=before), channel.submit("two", job("two"))]
        with pytest.raises(TimeoutError, match="two"):
            pending[1].wait(0.05)
        assert not pending[0].done()
        first.set()
        assert [p.result() for p in pending] == [[0, 1], [0, 1]] and pending[0].done()
        assert ours() == {"offload-comm-test", "offload-comm-test-watch"}
    assert not ours()
    channel.close()
    with pytest.raises(ParallelError, match="three: the engine is closed"):
        channel.submit("three", tell)
    return order


def test_jobs_run_in_order_of_submission(pool_of: PoolOf) -> None:
    assert pool_of(2).run(in_order) == [["before", "one", "two"]] * 2


def forgotten() -> None:
    ranks = Ranks.open(shard_size=None, replicate_size=None, timeout=20.0, device_kind="cpu")
    assert ranks is not None
    owner = type("Owner", (), {})()
    channel = Channel("test", ranks, lambda n, dtype, owner=owner: torch.empty(n, dtype=dtype))
    channel.submit("tell", tell).wait()
    seen = weakref.ref(owner)
    del owner, channel
    deadline = time.monotonic() + 20
    while (seen() is not None or ours()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert seen() is None and not ours()
    ranks.close()


def test_a_forgotten_channel_ends_and_keeps_nothing(pool_of: PoolOf) -> None:
    pool_of(2).run(forgotten)


# What a rank's own errors do


def failing(where: str) -> None:
    """An error in a job, or ahead of it, is everybody's answer from then on; what it held is free."""
    with opened() as (_, channel):
        tensor = torch.zeros(1000)
        seen = weakref.ref(tensor)

        def fails(_: object = None, held: torch.Tensor = tensor) -> None:
            copy = held
            raise KeyError(f"the cause {copy.numel()}")

        if where == "job":
            pending = [channel.submit("one", fails), channel.submit("two", tell)]
        else:
            pending = [channel.submit("one", tell, before=fails), channel.submit("two", tell)]
        del fails, tensor
        for operation in [*pending, *pending]:
            with pytest.raises(KeyError, match="the cause 1000"):
                operation.wait(20)
        with pytest.raises(KeyError, match="the cause 1000"):
            channel.submit("three", tell)
        gc.collect()
        assert seen() is None


@pytest.mark.parametrize("where", ["job", "before"])
def test_the_first_error_answers_everything(pool_of: PoolOf, where: str) -> None:
    pool_of(2).run(failing, where)


def each_its_own() -> None:
    with opened() as (_, channel):
        channel.fail(ParallelError("the first"))
        channel.fail(ParallelError("a second"))
        raised: list[ParallelError] = []
        for _ in range(2):
            with pytest.raises(ParallelError, match="the first") as caught:
                channel.submit("one", tell)
            raised.append(caught.value)
        assert raised[0] is not raised[1]


def test_a_stored_error_is_raised_anew_each_time(pool_of: PoolOf) -> None:
    pool_of(2).run(each_its_own)


# What other ranks do


def caught(work: Callable[[], object]) -> str:
    try:
        work()
    except ParallelError as error:
        return str(error)
    raise AssertionError("no error")


def peer_raises() -> str:
    with opened() as (ranks, channel):
        channel.submit("tell", tell).wait()
        if ranks.rank == 2:
            ranks.report_failure(ValueError("the batch\nis broken"))
            return ""
        return caught(lambda: channel.submit("tell again", tell).wait(30))


def test_a_peer_that_raises_is_quoted(pool_of: PoolOf) -> None:
    texts = pool_of(3).run(peer_raises)
    for text in texts[:2]:
        assert "tell again" in text and "rank 2: ValueError: the batch is broken" in text


def peer_killed(during: bool) -> str:
    with opened() as (ranks, channel):
        channel.submit("tell", tell).wait()
        if ranks.rank == 2:
            if during:  # the others have sent their parts and wait for this one's
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return caught(lambda: channel.submit("tell again", tell).wait(30))


def survivors(outcomes: list[Outcome]) -> list[str]:
    assert outcomes[2].exit == -signal.SIGKILL
    assert not outcomes[0].failed and not outcomes[1].failed, outcomes
    return [outcomes[0].value, outcomes[1].value]


@pytest.mark.parametrize("during", [False, True])
def test_a_killed_peer_is_named(pool_of: PoolOf, during: bool) -> None:
    for text in survivors(pool_of(3).outcomes(peer_killed, during)):
        assert "tell again" in text and "rank 2 is gone" in text and "parallel.timeout" in text


def diverging() -> str:
    with opened(timeout=60.0) as (ranks, channel):
        channel.submit("tell", tell).wait()
        what = "gather unit 1" if ranks.rank == 0 else "gather unit 2"
        return caught(lambda: channel.submit(what, tell).wait(30))


def test_ranks_that_do_different_things_name_both(pool_of: PoolOf) -> None:
    for text in pool_of(2).run(diverging):
        assert "gather unit 1" in text and "gather unit 2" in text


def absent() -> str:
    with opened(timeout=4.0) as (ranks, channel):
        channel.submit("tell", tell).wait()
        if ranks.rank == 1:
            ranks.store.wait(["given up"], timedelta(seconds=60))
            return ""
        text = caught(lambda: channel.submit("tell again", tell).wait(30))
        ranks.publish("given up", "yes")
        return text


def test_a_peer_that_does_not_come_is_named(pool_of: PoolOf) -> None:
    text = pool_of(2).run(absent)[0]
    assert "tell again" in text and "rank 1" in text and "parallel.timeout = 4 s" in text


def closes_without() -> float:
    """Closing while a peer does not come: not as long as the timeout."""
    with opened(timeout=60.0) as (ranks, channel):
        channel.submit("tell", tell).wait()
        if ranks.rank == 1:
            ranks.store.wait(["closed"], timedelta(seconds=60))
            return 0.0
        stuck = channel.submit("tell again", tell)
        began = time.monotonic()
        channel.close()
        assert not ours()  # though the message could wait for long yet
        ranks.publish("closed", "yes")
        ranks.close()
        with pytest.raises(ParallelError, match="tell again"):
            stuck.wait(5)
        return time.monotonic() - began


def test_closing_does_not_wait_for_a_peer_that_is_gone(pool_of: PoolOf) -> None:
    assert pool_of(2).run(closes_without)[0] < 55  # the timeout is 60 s


def interrupted() -> None:
    with opened() as (_, channel):
        go_on = threading.Event()
        pending = channel.submit("tell", tell, before=lambda: go_on.wait(60))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
            assert not pending.done()
        finally:
            signal.signal(signal.SIGINT, before)
            go_on.set()
        assert pending.result() == [0, 1]


def test_waits_can_be_interrupted(pool_of: PoolOf) -> None:
    pool_of(2).run(interrupted)


# One job, several engines


def after_a_failure() -> list[int]:
    """What was said on behalf of an engine that is closed is not held against the next one."""
    with opened() as (ranks, channel):
        # As a rank does that has waited for long.
        say(ranks, "test", Stall(number=2, what="gather something else", waits=True, come_to={}))
        if ranks.rank == 0:
            ranks.report_failure(ValueError("of the first engine"))
        channel.submit("tell", tell).wait()
    with opened() as (ranks, channel):
        channel.submit("tell", tell).wait()
        slow = (lambda: time.sleep(6)) if ranks.rank == 1 else None
        return channel.submit("tell again", tell, before=slow).result()


def test_a_later_engine_does_not_see_what_an_earlier_one_said(pool_of: PoolOf) -> None:
    assert pool_of(2).run(after_a_failure) == [[0, 1], [0, 1]]
