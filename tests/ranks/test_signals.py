"""Signals to some or all ranks of `offload train`: one complete checkpoint, one status, and a resumed run that equals
the one that was never interrupted; and the checkpoint written and verified before the first step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import offload
import offload.train
from offload.checkpoint import complete_checkpoints
from offload.checkpoint.tensorfile import PagedFile
from tests.engine.common import pairwise
from tests.offload.test_cli import TINY
from tests.ranks.harness import Ended, Marked, RankPool, run_torchrun
from tests.ranks.training import trained_by_command as trained

PoolOf = Callable[[int], RankPool]
STEPS = 6
SETTINGS = (
    *TINY,
    f"train.steps={STEPS}",
    "train.batch_size=5",  # unequal shares
    "train.micro_batches=2",
    "train.eval_interval=2",
    "train.eval_batches=2",
    "train.threads=1",
    "model.dropout=0.1",
)
RANKS = {"rank 0": (0,), "rank 1": (1,), "all": (0, 1)}
FACTORS: dict[str, Any] = {
    "phase": ["__call__", "backward", "step", "eval", "save_checkpoint"],
    "at": list(RANKS),
    "signum": [signal.SIGTERM, signal.SIGUSR1],
    "form": [(0, "batch_major", "barrier"), (2, "layer_major", "deferred"), (3, "batch_major", "eager")],
}


def label(row: dict[str, Any]) -> str:
    return f"{row['phase']}-{row['at']}-{row['signum'].name}-stage {row['form'][0]}"


def settings(form: tuple[int, str, str]) -> list[str]:
    stage, order, step = form
    more = ["optimizer.check_finite=false", "optimizer.max_grad_norm=none"]  # or eager is refused
    chosen = [f"parallel.stage={stage}", f"schedule.micro_batch_order={order}", f"schedule.optimizer_step={step}"]
    return [*SETTINGS, *chosen, *more]


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens")
    return [{key: line[key] for key in kept if key in line} for line in lines]


def tensors(run: Path) -> dict[str, Any]:
    _, path = complete_checkpoints(run / "checkpoints")[-1]
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {key: value.tolist() for key, value in load_file(file).items() if not key.startswith("pad/")}
    return found


# In a rank


def signalled(run: Path, arguments: Sequence[str], phase: str, at: Sequence[int], signum: int) -> tuple[int, str]:
    """The same with a signal at some ranks as their engine comes to `phase` for the n-th time."""
    calls: list[int] = []
    real = getattr(offload.Engine, phase)

    def signalling(self: offload.Engine, *positional: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if phase in ("eval", "save_checkpoint") else 5) and int(os.environ["RANK"]) in at:
            signal.raise_signal(signum)
        return real(self, *positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.train, "POLL_SECONDS", 0.0)
        patch.setattr(offload.Engine, phase, signalling)
        return trained(run, arguments)


def signalled_in_set_up(run: Path, arguments: Sequence[str], at: int, signum: int) -> tuple[int, str]:
    """The same with a signal at one rank just before its engine, which the other ranks wait for."""
    real = offload.initialize

    def signalling(*positional: Any, **named: Any) -> Any:
        if int(os.environ["RANK"]) == at:
            signal.raise_signal(signum)
        return real(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "initialize", signalling)
        return trained(run, arguments)


def with_a_broken_disk(run: Path, arguments: Sequence[str], how: str) -> tuple[int, str]:
    """The same where rank 1 cannot write, or writes other bytes than it was given."""
    real = PagedFile.write

    def write(self: PagedFile, data: memoryview, at: int) -> None:
        if how == "full":
            raise OSError(28, os.strerror(28))
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 4
        real(self, memoryview(changed), at)

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(PagedFile, "write", write)
        return trained(run, arguments)


# The tests


@pytest.fixture(scope="module")
def whole(
    pool_of: PoolOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[tuple[int, str, str]], tuple[Any, Any]]]:
    """Records and final state of uninterrupted runs."""
    made: dict[Any, Any] = {}

    def of(form: tuple[int, str, str]) -> tuple[Any, Any]:
        if form not in made:
            run = tmp_path_factory.mktemp("whole") / "run"
            ended = pool_of(2).run(trained, run, [*settings(form), f"checkpoint.interval={STEPS}"])
            assert [status for status, _ in ended] == [0, 0], ended
            made[form] = records(run), tensors(run)
        return made[form]

    yield of


def rows() -> list[Any]:
    """One of each phase in the ordinary run, and each pair of factors with the acceptance tests."""
    found, phases = [], set()
    for row in pairwise(FACTORS):
        marks = [pytest.mark.acceptance] if row["phase"] in phases else []
        phases.add(row["phase"])
        found.append(pytest.param(row, marks=marks, id=label(row)))
    return found


@pytest.mark.parametrize("row", rows())
def test_a_signal_saves_and_the_run_continues(
    pool_of: PoolOf, tmp_path: Path, whole: Callable[..., tuple[Any, Any]], row: dict[str, Any]
) -> None:
    run, pool, common = tmp_path / "run", pool_of(2), settings(row["form"])
    ended = pool.run(signalled, run, [*common, "checkpoint.interval=2"], row["phase"], RANKS[row["at"]], row["signum"])
    assert [status for status, _ in ended] == [128 + row["signum"]] * 2, ended
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"] == row["signum"].name and 0 < summary["steps"] < STEPS
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")
    assert complete_checkpoints(run / "checkpoints")[-1][0] == summary["steps"]
    ended = pool.run(trained, run, [*common, "--resume", "auto", f"checkpoint.interval={STEPS}"])
    assert [status for status, _ in ended] == [0, 0], ended
    assert (records(run), tensors(run)) == whole(row["form"])


def test_target_tokens_of_unequal_shares_under_eager(whole: Callable[..., tuple[Any, Any]]) -> None:
    """What gradients are divided by is agreed on while the last micro-batch is in its backward."""
    (eager, state), (barrier, expected) = (whole((3, "batch_major", step)) for step in ("eager", "barrier"))
    assert [line.get("loss") for line in eager] == [line.get("loss") for line in barrier]
    assert state == expected


def test_an_interrupt_at_one_rank_ends_all_without_a_checkpoint(pool_of: PoolOf, tmp_path: Path) -> None:
    run = tmp_path / "run"
    common = settings((3, "batch_major", "barrier"))
    ended = pool_of(2).run(signalled, run, common, "backward", (1,), signal.SIGINT)
    assert [status for status, _ in ended] == [130, 130], ended
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"] == "SIGINT" and summary["checkpoint"] is None
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("at", "signum"), [(1, signal.SIGINT), pytest.param(0, signal.SIGTERM, marks=pytest.mark.acceptance)]
)
def test_a_signal_at_one_rank_in_set_up_ends_all(pool_of: PoolOf, tmp_path: Path, at: int, signum: int) -> None:
    """Long before the timeout of ten minutes, and as an interruption, not as an error."""
    run = tmp_path / "run"
    ended = pool_of(2).run(signalled_in_set_up, run, settings((3, "batch_major", "barrier")), at, signum, timeout=60.0)
    assert [status for status, _ in ended] == [128 + signum] * 2, ended
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["interrupted"], summary["error"]) == (signal.Signals(signum).name, None)


@pytest.mark.parametrize("broken", [None, "full", "flipped"])
def test_a_checkpoint_before_the_first_step(pool_of: PoolOf, tmp_path: Path, broken: str | None) -> None:
    run = tmp_path / "run"
    common = [*settings((3, "batch_major", "barrier")), "checkpoint.dry_run=true", "checkpoint.on_signal=false"]
    if broken is None:
        ended = pool_of(2).run(trained, run, common)
        assert [status for status, _ in ended] == [0, 0], ended
        assert "checkpoint.dry_run" in ended[0][1] and "written and verified" in ended[0][1]
        (step, path), *more = complete_checkpoints(run / "checkpoints")
        assert step == 0 and not more and len(list(path.glob("*.safetensors"))) == 2
        return
    ended = pool_of(2).run(with_a_broken_disk, run, common, broken)
    assert [status for status, _ in ended] == [1, 1], ended
    expected = {"full": "No space left on device", "flipped": "rank-00001-of-00002.safetensors"}[broken]
    assert all(expected in said for _, said in ended), ended
    assert json.loads((run / "summary.json").read_text())["steps"] == 0
    assert not complete_checkpoints(run / "checkpoints")


def _interrupted(run: Path, send: Callable[[Marked], None], *more: str) -> Ended:
    def interrupt(marked: Marked) -> None:
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(records(run)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        send(marked)

    arguments = ["-m", "offload", "train", *SETTINGS, "train.steps=100000", "parallel.stage=2", *more]
    return run_torchrun([*arguments, "--run-dir", str(run)], nproc=2, while_running=interrupt)


def _launcher(marked: Marked) -> psutil.Process:
    (found,) = (p for p in marked.processes() if "RANK" not in p.environ())
    return found


def _to_the_launcher(marked: Marked) -> None:
    _launcher(marked).send_signal(signal.SIGTERM)


def _to_all(marked: Marked) -> None:
    for process in marked.processes():
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("send", [pytest.param(_to_the_launcher, marks=pytest.mark.acceptance), _to_all])
def test_the_launchers_own_signal_saves(tmp_path: Path, send: Callable[[Marked], None]) -> None:
    run = tmp_path / "run"
    ended = _interrupted(run, send, "checkpoint.interval=5", "checkpoint.keep=2")
    assert ended.returncode != 0 and not ended.left, ended
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"] == "SIGTERM" and summary["error"] is None, ended
    assert complete_checkpoints(run / "checkpoints")[-1][0] == summary["steps"]
    assert offload.checkpoint.find_checkpoint(run / "checkpoints").name == Path(summary["checkpoint"]).name


def _without_a_launcher(marked: Marked) -> None:
    _launcher(marked).kill()
    deadline = time.monotonic() + 60
    while marked.processes() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path) -> None:
    """Nobody sends them a signal; they would train on for ever, on devices that the next job wants."""
    run = tmp_path / "run"
    ended = _interrupted(run, _without_a_launcher)
    assert ended.returncode == -signal.SIGKILL and not ended.left, ended
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"] == "SIGTERM" and "the launcher is gone" in ended.stderr, ended
    assert complete_checkpoints(run / "checkpoints")[-1][0] == summary["steps"]
    assert not (run / "swap").exists()


def _stopped(marked: Marked) -> None:
    marked.processes(ranks=True)[1].send_signal(signal.SIGSTOP)


def _stopped_then_all(signum: int) -> Callable[[Marked], None]:
    def send(marked: Marked) -> None:
        _stopped(marked)
        time.sleep(1.0)
        for process in marked.processes():
            process.send_signal(signum)

    return send


@pytest.mark.acceptance
@pytest.mark.parametrize("send", [_stopped, _stopped_then_all(signal.SIGINT), _stopped_then_all(signal.SIGTERM)])
def test_a_rank_that_stands_still_is_named_and_killed(tmp_path: Path, send: Callable[[Marked], None]) -> None:
    """The others end after their timeout; the launcher gives what is left thirty seconds."""
    run = tmp_path / "run"
    ended = _interrupted(run, send, "parallel.timeout=6")
    assert ended.returncode != 0 and not ended.left, ended
    assert "rank 1 did not come within parallel.timeout = 6 s" in ended.stderr, ended
    assert not (run / "swap").exists() or not list((run / "swap").iterdir())
