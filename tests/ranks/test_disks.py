"""A disk that fails one rank only: it says what and where, the others say which rank and why, and nobody trains on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import offload.checkpoint.saving
from offload.checkpoint.errors import CheckpointSaveError
from tests.engine.common import decoder, pairwise, placed, running, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.training import own_folder

PoolOf = Callable[[int], RankPool]
CULPRIT = 1


def shorten(folder: Path, keep: float) -> None:
    """Cuts this process's swap files, which have no name, to a share of their length."""
    cut = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith(str(folder)) and os.stat(entry.path).st_size:
            os.truncate(entry.path, int(os.stat(entry.path).st_size * keep))
            cut += 1
    assert cut


@contextmanager
def limited(when: bool) -> Iterator[Callable[[], None]]:
    """Gives what keeps this process from writing files beyond their first page, as a full disk does."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1])) if when else None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def training(folder: Path, stage: int, how: str, where: str, schedule: str) -> None:
    own, culprit = own_folder(folder), dist.get_rank() == CULPRIT
    options: dict[str, Any] = {"parallel": {"stage": stage, "timeout": 60.0, "place_ranks": False}}
    if schedule == "eager":
        options |= {"optimizer": {"check_finite": False}, "max_grad_norm": None}
    with limited(culprit and how == "full") as fill:
        if where == "set-up":
            fill()
        with running(decoder(), placed("cpu", "nvme", schedule=schedule), own, **options) as engine:
            for step in range(4):
                ids = token_batches(2, seed=step)[dist.get_rank()]

                def loss(outputs: Any, _: object, fails: bool = culprit and step == 2) -> Any:
                    if fails and where == "backward":
                        fill() if how == "full" else shorten(own, 0.0 if how == "cut" else 0.5)
                    return outputs.loss

                if culprit and step == 2 and where == "forward":
                    fill() if how == "full" else shorten(own, 0.0 if how == "cut" else 0.5)
                engine.train_batch([{"input_ids": ids, "labels": ids}], loss)
            engine.synchronize()


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "how": ["full", "cut", "halved"],
    "where": ["forward", "backward"],
    "schedule": ["barrier", "deferred", "eager"],
}
ORDINARY = [(0, "full", "backward", "deferred"), (1, "cut", "forward", "barrier"), (3, "full", "set-up", "barrier")]


def rows() -> list[Any]:
    more = [tuple(row.values()) for row in pairwise(FACTORS)]
    return [*ORDINARY, *(pytest.param(*row, marks=pytest.mark.acceptance) for row in more)]


@pytest.mark.parametrize(("stage", "how", "where", "schedule"), rows())
def test_a_swap_file_that_fails_one_rank(
    pool_of: PoolOf, tmp_path: Path, stage: int, how: str, where: str, schedule: str
) -> None:
    first, second = pool_of(2).outcomes(training, tmp_path, stage, how, where, schedule)
    assert second.kind == "SwapIOError" and str(tmp_path / "rank1") in second.message, second
    assert first.kind == "ParallelError" and "rank 1: SwapIOError: swap " in first.message, first
    assert not first.left and not second.left and first.at < 50


def saving(folder: Path, what: str) -> None:
    """Rank 0 makes the directory and completes the checkpoint: what fails it fails all, and the older one stays."""
    options: dict[str, Any] = {"parallel": {"stage": 3, "timeout": 60.0, "place_ranks": False}}
    with running(decoder(), placed("cpu", "host"), own_folder(folder), **options) as engine:
        ids = token_batches(2)[dist.get_rank()]
        engine.train_batch([{"input_ids": ids, "labels": ids}])
        older = engine.save_checkpoint(folder / "saved")
        engine.train_batch([{"input_ids": ids, "labels": ids}])

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(28, os.strerror(28))

        for wait in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 0:
                    patch.setattr(offload.checkpoint.saving, what, full)
                with pytest.raises(CheckpointSaveError, match="No space left"):
                    engine.save_checkpoint(folder / "saved", wait=wait)
                    engine.wait_checkpoint()
            dist.barrier()
            assert [path.name for path in (folder / "saved").iterdir()] == [older.path.name]
            dist.barrier()
        engine.train_batch([{"input_ids": ids, "labels": ids}])
        engine.save_checkpoint(folder / "saved")


@pytest.mark.parametrize("what", ["make_manifest", "open_directory"])
def test_a_checkpoint_that_rank_0_cannot_complete(pool_of: PoolOf, tmp_path: Path, what: str) -> None:
    pool_of(2).run(saving, tmp_path, what)
