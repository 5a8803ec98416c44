"""Collectives run beside compute: shown by compute that does not go on before they have ended, not by times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.ranks.harness import RankPool
from tests.ranks.overlap_program import WIDTH, Tower, config

PoolOf = Callable[[int], RankPool]
UNITS = 6
PATIENCE = 20.0  # seconds after which what is waited for does not come


class Ended:
    """Which collectives of the running step have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended: list[str] = []
        self.missed: list[str] = []

    def forget(self) -> None:
        with self._changed:
            self._ended.clear()

    def note(self, what: str) -> None:
        with self._changed:
            self._ended.append(what.partition(" in step ")[0])
            self._changed.notify_all()

    def wait_for(self, what: str, times: int = 1) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended.count(what) >= times, PATIENCE):
                self.missed.append(f"{what} ({times}) did not end beside compute; ended: {self._ended}")

    def listen(self, channel: Any) -> None:
        submit = channel.submit

        def submitted(what: str, job: Callable[[Any], Any], **options: Any) -> Any:
            def noting(collectives: Any) -> Any:
                result = job(collectives)
                self.note(what)
                return result

            return submit(what, noting, **options)

        channel.submit = submitted


def beside_compute(device: str, _folder: Path) -> list[str]:
    """On a rank: a unit's forward does not end before the next unit's gather has, its backward not before the gather of
    the unit before it and the reduction of the one after it have.
    """
    ended, known = Ended(), [False]

    def during(index: int, backward: bool) -> None:
        if not known[0] or ended.missed:
            return
        gather = "gather the weights of blocks.{}".format
        if not backward and index + 1 < UNITS:
            ended.wait_for(gather(index + 1))
        if backward and index > 0:
            ended.wait_for(gather(index - 1), 2)
        if backward and index + 1 < UNITS:
            ended.wait_for(f"reduce the gradients of blocks.{index + 1}")

    with offload.initialize(Tower(UNITS, during), config(device)) as engine:
        cluster = engine._cluster
        assert cluster is not None
        ended.listen(cluster.gathering._channel)
        ended.listen(cluster.reduction._channel)
        for _ in range(3):
            ended.forget()
            engine.backward(engine(torch.ones(4, WIDTH)))
            engine.step()
            known[0] = True  # the order of units, from the second step on
    return ended.missed


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_gathers_and_reductions_end_while_units_compute(device: str, pool_of: PoolOf, tmp_path: Path) -> None:
    for missed in pool_of(2).run(beside_compute, device, tmp_path):
        assert missed == []
