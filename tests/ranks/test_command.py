"""`offload train` under torchrun: one run directory, the same data at any number of ranks, one end for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.offload.test_cli import TINY
from tests.ranks.harness import Ended, RankPool, run_torchrun
from tests.ranks.training import trained_by_command as trained

PoolOf = Callable[[int], RankPool]

# Per step two micro-batches of five windows: two ranks have unequal shares.
SETTINGS = (*TINY, "train.batch_size=5", "train.micro_batches=2", "train.steps=4", "parallel.stage=3")


def _arguments(run: Path) -> list[str]:
    return ["train", *SETTINGS, "--json", "--run-dir", str(run)]


def _train(run: Path, ranks: int) -> Ended:
    return run_torchrun(["-m", "offload", *_arguments(run)], nproc=ranks)


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reads_the_same_text_at_any_number_of_ranks(tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        if ranks == 1:
            ended: Any = programs.run("-m", "offload", *_arguments(run), cwd=tmp_path)
        else:
            ended = _train(run, ranks)
            assert not ended.left
        assert ended.returncode == 0, ended.stderr
        summary = json.loads(ended.stdout)  # of rank 0 only
        assert summary["ranks"] == ranks and summary["tokens"] == 4 * 2 * 5 * 32
        assert sorted(entry.name for entry in run.iterdir()) == ["config.toml", "metrics.jsonl", "summary.json"]
        assert ended.stderr.count("building model ...") == 1
        found[ranks] = _records(run)
    for one, two in zip(found[1], found[2], strict=True):
        assert one["step"] == two["step"]
        for key in ("loss", "eval_loss", "grad_norm"):
            # Sums over windows in float32, in another order: a few units in the last place.
            assert one.get(key) == (None if key not in two else pytest.approx(two[key], rel=1e-5))
    steps = [record for record in found[2] if "loss" in record]
    assert all(r["parameters_communicated_bytes"] > 0 and r["gradients_communicated_bytes"] > 0 for r in steps)
    assert not any("communicated" in key for record in found[1] for key in record)


def test_what_one_rank_is_refused_ends_all_with_its_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    ended = _train(run, 2)
    assert ended.returncode != 0 and not ended.left
    assert "already holds a run (summary.json)" in ended.stderr
    assert (run / "summary.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.batch_size=1", "1 samples in a batch cannot be shared by 2 ranks"),
        ("parallel.shard_size=3", "error: parallel.shard_size = 3"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(pool_of: PoolOf, tmp_path: Path, setting: str, said: str) -> None:
    run = tmp_path / "run"
    ended = pool_of(2).run(trained, run, [*SETTINGS, setting])
    assert [status for status, _ in ended] == [2, 2], ended
    assert all(said in text for _, text in ended), ended
    assert not (run / "metrics.jsonl").exists()
