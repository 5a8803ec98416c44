"""The first-use probe and its cache; the measurements behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swap import PAGE, Budget, tuning
from swap.measure import PATTERNS, Bench, Setting, mixing_penalty
from swap.tuning import DriveProbe, cache_file, recall, tune

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(tuning, "PROBE_BYTES", 4 << 20)


def test_a_drive_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune([tmp_path], engine="threads", probe=False) is None
    calls: list[str] = []
    real = tuning.probe_drive
    monkeypatch.setattr(
        tuning, "probe_drive", lambda path, engine, **more: calls.append(engine) or real(path, engine, seconds=0.05)
    )
    first = tune([tmp_path], engine="threads")
    assert first is not None and first.block % PAGE == 0 and first.queue_depth <= tuning.MOST_DEPTH
    assert tune([tmp_path], engine="threads") == first == tune([tmp_path], engine="threads", probe=False)
    assert calls == ["threads"]
    assert tune([tmp_path], engine="aiofiles", probe=False) is None  # another engine, another key
    two = tune([tmp_path, tmp_path / "."], engine="threads")
    assert two is not None and two.weights == (first.weights[0],) * 2 and len(calls) == 1


@pytest.mark.parametrize(("penalties", "burst"), [((0.7, 1.0), 0), ((1.2,), 0), ((0.5, 1.4), tuning.BURST)])
def test_bursts_where_mixing_hurts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penalties: tuple[float, ...], burst: int
) -> None:
    rates = {f"{name}_bytes_per_s": 1.0 for name in ("read", "write", "mixed")}
    drives = {
        str(number): DriveProbe(engine="threads", block=PAGE, queue_depth=4, **rates, mixing_penalty=penalty)
        for number, penalty in enumerate(penalties)
    }
    for name in drives:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tuning, "recall", lambda path, engine: drives[Path(path).name])
    found = tune([tmp_path / name for name in drives], engine="threads")
    assert found is not None and found.burst == burst


def test_a_damaged_cache_is_no_cache(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"version": 0}', '{"version": 1, "drives": []}'):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        cache_file().write_text(text)
        assert recall(tmp_path, "threads") is None
    good = DriveProbe(
        engine="threads",
        block=PAGE,
        queue_depth=4,
        read_bytes_per_s=1.0,
        write_bytes_per_s=1.0,
        mixed_bytes_per_s=1.0,
        mixing_penalty=1.0,
    )
    tuning._remember(tuning._key(tmp_path, "threads"), good)
    assert recall(tmp_path, "threads") == good
    content = json.loads(cache_file().read_text())
    (entry,) = content["drives"].values()
    for change in ({"block": 5}, {"queue_depth": 0}, {"read_bytes_per_s": -1.0}, {"more": 1}):
        content["drives"] = {key: {**entry, **change} for key in content["drives"]}
        cache_file().write_text(json.dumps(content))
        assert recall(tmp_path, "threads") is None


def test_the_probe_keeps_to_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PROBE_REQUEST", 1 << 20)  # of 4 MiB in all, so each setting takes 4 buffers
    for limit, works in ((4 << 20, True), (2 << 20, False)):
        budget = Budget({"host": limit})
        found = tuning.probe_drive(tmp_path, "threads", seconds=0.05, budget=budget)
        assert (found is not None) == works
        assert budget.used("host") == 0 and (budget.peak("host") == limit) == works


def test_no_room_or_no_path_means_no_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune([tmp_path / "nowhere"]) is None
    monkeypatch.setattr(tuning, "PROBE_BYTES", 1 << 60)
    assert tune([tmp_path]) is None


@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
def test_the_bench_moves_what_it_says(tmp_path: Path, engine: str) -> None:
    setting = Setting(engine=engine, block=16 * PAGE, queue_depth=2)
    with Bench([tmp_path], setting, nbytes=4 << 20, request=64 * PAGE) as bench:
        for pattern in PATTERNS:
            rate = bench.run(pattern)
            assert rate.nbytes == 4 << 20 and rate.bytes_per_s > 0 and rate.cpu_seconds_per_gb >= 0
        stats = bench._store.stats
        assert (stats.read_bytes, stats.write_bytes) == (6 << 20, 6 << 20)
    with pytest.raises(ValueError, match="request"):
        Bench([tmp_path], setting, nbytes=PAGE, request=64 * PAGE)


def test_the_mixing_penalty_is_that_of_the_formula() -> None:
    assert mixing_penalty(2.0, 2.0, 4.0) == 0.0  # duplex: both at full speed
    assert mixing_penalty(2.0, 2.0, 2.0) == 1.0  # taking turns
    assert mixing_penalty(2.0, 1.0, 4 / 3) == 1.0
    assert mixing_penalty(2.0, 2.0, 1.0) == 3.0
