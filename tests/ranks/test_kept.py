"""What stays of gathered weights between forward and backward, and how many bytes of gathers are under way at a time:
the same bits, and traffic and memory by their formulas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import offload
from offload.models import Llama, LlamaConfig
from offload.parallel.kept import after_forward
from tests.engine.common import assert_equal, assert_states_equal, decoder, pairwise, running, states_of, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.training import Run, case_of, expected_of, own_folder, runs_of, sections_of, trained_digest

PoolOf = Callable[[int], RankPool]
kept_parts = pytest.mark.parametrize("kept", [True, 2, False])


# Bits

KEPT: dict[str, Any] = {
    "kept": [2, False],
    "parameters": ["device", "host", "nvme"],
    "device": ["cpu", "sim"],
    "step": [("barrier", True), ("deferred", True), ("eager", False)],
    "order": ["batch_major", "layer_major"],
    "activations": ["keep", "recompute"],
    "numbers": [("fp32", "fp32"), ("bf16", "compact")],
    "micro": [1, 2],
    "limit": ["auto", 1 << 16],
    "persistent": [0, 200],
}


@pytest.mark.parametrize("run", runs_of(pairwise(KEPT, seed=3), world=4), ids=str)
def test_the_same_bits(run: Run, pool_of: PoolOf, tmp_path: Path) -> None:
    results = pool_of(4).run(trained_digest, run, tmp_path)
    assert_equal(results[0][1], expected_of(run))
    assert len({digest for digest, _ in results}) == 1, "ranks differ"


# Traffic and memory


def run_of(kept: bool | int, **changes: Any) -> Run:
    return Run(world=4, kept=kept, **changes)


def one_step(engine: offload.Engine, seed: int) -> None:
    ids = token_batches(dist.get_world_size(), seed=seed)[dist.get_rank()]
    engine.backward(engine(ids, labels=ids).loss)


def untied() -> Llama:
    """Every unit is used once in a forward and once in a backward."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab_size=97, hidden_size=24, layers=3, heads=3, max_positions=32, tie_embeddings=False))


def kept_now(engine: offload.Engine) -> int:
    """Bytes of kept shards that are in use; the memory itself is kept for the next ones until others need it."""
    pool = engine._memory._pools.get("secondary")
    return 0 if pool is None else pool.live_bytes


def measured(run: Run, folder: Path) -> dict[str, Any]:
    """On a rank: bytes of a step's collectives, of all units' weights, and of memory by kind at the forward's end."""
    with running(untied(), case_of(run), own_folder(folder), **sections_of(run)) as engine:
        whole = sum(flat.flat.nbytes for unit in engine._residency.units for flat in unit.flats)
        found: dict[str, Any] = {"whole": whole, "planned": engine.memory().planned, "forward": [], "backward": []}
        for step in range(2):
            before = engine.counters()
            ids = token_batches(4, seed=step)[dist.get_rank()]
            loss = engine(ids, labels=ids).loss
            found["forward"].append(engine.memory().current)
            engine.backward(loss)
            found["backward"].append((kept_now(engine), engine.memory().current["device"].get("leases", 0)))
            engine.step()
            after = engine.counters()
            found["moved"] = {k: after[k] - before.get(k, 0) for k in after if k.endswith("_communicated_bytes")}
        found["peak"] = engine.memory().peak
        assert engine.resident_units() == []
        return found


@kept_parts
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_traffic_and_memory_are_those_of_the_formula(
    kept: bool | int, device: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    for found in pool_of(4).run(measured, run_of(kept, device=device), tmp_path):
        whole, moved = found["whole"], found["moved"]
        again = 0 if kept is False else whole
        assert moved["gradients_communicated_bytes"] == whole
        assert moved["parameters_communicated_bytes"] == whole + (again if kept is True else 0)
        assert moved.get("parameters_again_communicated_bytes", 0) == (again if kept == 2 and kept is not True else 0)
        for forward, backward in zip(found["forward"], found["backward"], strict=True):
            assert forward["host"].get("secondary", 0) == (whole // 2 if kept is not True and kept == 2 else 0)
            assert forward["device"].get("leases", 0) == (whole if kept is False else 0)
            assert backward == (0, 0)
        kinds = (("host", "secondary"), ("device", "leases"), ("host", "gather"), ("host", "reduction"))
        for tier, kind in kinds:
            assert found["peak"][tier].get(kind, 0) <= found["planned"][tier].get(kind, 0), kind
        assert found["peak"]["host"]["reduction"] and bool(found["peak"]["host"].get("gather")) == (device == "sim")


def refused(folder: Path) -> str:
    run = run_of(False, device="sim")
    sections = {**sections_of(run), "memory": {"device": 300 << 10, "host": 64 << 20}}
    with pytest.raises(offload.PlanError) as caught, running(decoder(), case_of(run), own_folder(folder), **sections):
        pass
    return str(caught.value)


def test_what_is_kept_is_charged_to_the_budget(pool_of: PoolOf, tmp_path: Path) -> None:
    for said in pool_of(4).run(refused, tmp_path):
        assert "leases" in said and "parallel.reshard_after_forward = true" in said


# Loops of one's own


def unusual(kept: bool | int, folder: Path) -> dict[str, Any]:
    """Evaluations and edits between a forward and its backward, several forwards, forwards without a backward."""
    run = run_of(kept)
    rank = dist.get_rank()
    with running(decoder(), case_of(run), own_folder(folder), **sections_of(run)) as engine:
        first, second, third = token_batches(12, seed=5)[rank::4]
        loss = engine(first, labels=first).loss
        with torch.no_grad():
            engine(third)
        engine.backward(loss)
        engine.step()
        losses = [engine(ids, labels=ids).loss for ids in (first, second)]
        for loss in losses:
            engine.backward(loss, retain_graph=True)
        engine.backward(losses[0])
        engine.step()
        engine(first, labels=first)
        engine.step()
        engine(first, labels=first)
        name = "layers.1.mlp.down_proj.weight"
        with engine.gathered(name, modify=True), torch.no_grad():
            dict(engine.module.named_parameters())[name].mul_(1.5)
        engine.backward(engine(second, labels=second).loss)
        engine.step()
        engine.zero_grad()
        assert engine.resident_units() == [], [(u.name, u.phase, u.holders) for u in engine._residency.units]
        assert kept_now(engine) == 0
        return states_of(engine)


def test_unusual_loops(pool_of: PoolOf, tmp_path: Path) -> None:
    plain, *others = (pool_of(4).run(unusual, kept, tmp_path)[0] for kept in (True, 2, False))
    for states in others:
        assert_states_equal(states, plain)


def recomputed(kept: bool | int, reentrant: bool, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    run = run_of(kept)
    model = untied()
    for layer in model.layers:
        forward = layer.forward

        def repeated(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=reentrant, **kwargs)

        layer.forward = repeated  # type: ignore[method-assign]
    with running(model, case_of(run), own_folder(folder), **sections_of(run)) as engine:
        for step in range(2):
            one_step(engine, step)
            engine.step()
        return states_of(engine), engine.counters()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_gather_no_more(reentrant: bool, pool_of: PoolOf, tmp_path: Path) -> None:
    plain, shards, whole = (pool_of(4).run(recomputed, kept, reentrant, tmp_path)[0] for kept in (True, 2, False))
    assert_states_equal(shards[0], plain[0])
    assert_states_equal(whole[0], plain[0])
    gathered = plain[1]["parameters_communicated_bytes"]
    assert whole[1]["parameters_communicated_bytes"] == gathered // 2
    assert shards[1]["parameters_communicated_bytes"] == gathered // 2
    assert shards[1]["parameters_again_communicated_bytes"] == gathered // 2


# The limit


def counted(limit: int | str, ahead: int, device: str, folder: Path) -> tuple[list[int], int, int, dict[str, Any]]:
    """On a rank: the counter's peak of each step, the most bytes that really were under way, and those of a unit."""
    run = run_of(True, limit=limit, device=device)
    lock, under_way, most = threading.Lock(), 0, 0
    sections = {**sections_of(run), "memory": {"host": 256 << 20, "device": 64 << 20}}
    sections["schedule"] = {**sections["schedule"], "prefetch_units": ahead}
    with running(decoder(), case_of(run), own_folder(folder), **sections) as engine:
        gathering = engine._residency.gather
        assert gathering is not None
        channel = gathering._channel
        submit = channel.submit

        def watched(what: str, job: Callable[[Any], Any], **options: Any) -> Any:
            nonlocal under_way, most
            if not what.startswith("gather"):
                return submit(what, job, **options)
            nbytes = job.args[1].nbytes  # type: ignore[attr-defined]
            with lock:
                under_way += nbytes
                most = max(most, under_way)

            def counting(collectives: Any) -> None:
                nonlocal under_way
                job(collectives)
                with lock:
                    under_way -= nbytes

            return submit(what, counting, **options)

        channel.submit = watched  # type: ignore[method-assign]
        peaks = []
        for step in range(4):
            gathering.in_flight.peak = 0
            one_step(engine, step)
            peaks.append(engine.counters()["gathers_in_flight_peak_bytes"])
            engine.step()
        largest = max(flat.flat.nbytes for unit in engine._residency.units for flat in unit.flats)
        assert gathering.in_flight.bytes == 0
        return peaks, most, largest, states_of(engine)


@pytest.mark.parametrize("device", ["sim", pytest.param("cpu", marks=pytest.mark.acceptance)])
def test_gathers_in_flight_stay_below_the_limit(device: str, pool_of: PoolOf, tmp_path: Path) -> None:
    """In steps 3 and 4 the order of units is known, so the peak is the limit, or what is loaded ahead without one."""
    unit = pool_of(4).run(counted, "auto", 0, device, tmp_path)[0][2]
    states = []
    for limit, ahead, expected in ((unit, 3, unit), (2 * unit, 3, 2 * unit), (1 << 30, 3, 4 * unit), ("auto", 1, None)):
        results = pool_of(4).run(counted, limit, ahead, device, tmp_path)
        for peaks, most, _, found in results:
            assert peaks == results[0][0] and peaks[2] == peaks[3]
            assert most <= max(peaks)
            if expected is not None:
                assert max(peaks) <= expected and peaks[3] == expected, (limit, peaks)
            states.append(found)
    for found in states[1:]:
        assert_states_equal(found, states[0])


# What is refused


def test_numbers_that_do_not_divide_the_ranks_are_refused() -> None:
    assert [after_forward(wanted, 4) for wanted in (True, False, 1, 2, 4)] == [True, False, False, 2, True]
    with pytest.raises(ValueError, match=r"reshard_after_forward = 3.* divisor .* which is 4 \(1, 2, 4\)"):
        after_forward(3, 4)


def limited(folder: Path) -> str:
    run = run_of(True, limit=4096)
    with pytest.raises(ValueError) as caught, running(decoder(), case_of(run), own_folder(folder), **sections_of(run)):
        pass
    return str(caught.value)


def test_a_limit_below_a_unit_is_refused(pool_of: PoolOf, tmp_path: Path) -> None:
    for said in pool_of(4).run(limited, tmp_path):
        assert said.startswith("parallel.limit_gathers = 4096: unit ") and "'auto'" in said
