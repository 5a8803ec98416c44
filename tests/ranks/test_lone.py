"""What one rank does alone: other numbers of forwards, reads and writes that the others do not take part in, an early
end. It works where no other rank is needed; elsewhere all ranks end soon, with what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload
from offload.checkpoint.errors import CheckpointError
from offload.errors import ParallelError
from tests.engine.common import assert_states_equal, decoder, placed, running, states_of, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.training import loss_of, own_folder

PoolOf = Callable[[int], RankPool]
ACCEPTANCE = pytest.mark.acceptance


def engine_of(folder: Path, stage: int, **parallel: Any) -> Any:
    settings = {"stage": stage, "timeout": 60.0, "place_ranks": False, **parallel}
    return running(decoder(), placed("cpu", "host"), own_folder(folder), parallel=settings)


def a_step(engine: offload.Engine) -> float | None:
    engine.backward(loss_of(engine, token_batches(4)[dist.get_rank()]))
    return engine.step().grad_norm


def evaluate(engine: offload.Engine, batches: int) -> None:
    ids = token_batches(1)[0]
    engine.eval()
    with torch.no_grad():
        for _ in range(batches):
            engine(ids, labels=ids)
    engine.train()


# Other numbers of forwards


def alone(folder: Path, stage: int, what: str, parallel: dict[str, Any]) -> None:
    """Rank 0 does something that the others do not do, and then all train on."""
    with engine_of(folder, stage, **parallel) as engine:
        a_step(engine)
        first = dist.get_rank() == 0
        if what == "evaluation":
            evaluate(engine, 3 if first else 2)
        elif what == "generation":
            engine.module.generate(token_batches(1, time=4)[0], 6 if first else 3)
        elif first and what == "state dict":
            engine.module.state_dict()
        elif first and what == "export":
            engine.export_safetensors(folder / "weights")
        elif first and what == "gathered":
            with engine.gathered():
                pass
        for _ in range(2):
            a_step(engine)


WORLDS: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas": {"shard_size": 2},
    "kept": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize(
    ("grid", "what"),
    [
        ("shards", "evaluation"),
        ("replicas", "state dict"),
        *(
            pytest.param(grid, what, marks=ACCEPTANCE)
            for grid in WORLDS
            for what in ("evaluation", "generation", "state dict", "export", "gathered")
            if (grid, what) not in (("shards", "evaluation"), ("replicas", "state dict"))
        ),
    ],
)
def test_stage_3_says_soon_that_one_rank_does_more(grid: str, what: str, pool_of: PoolOf, tmp_path: Path) -> None:
    """Long before the timeout; shards that have replicas too."""
    outcomes = pool_of(2 if grid == "shards" else 4).outcomes(alone, tmp_path, 3, what, WORLDS[grid])
    assert all(o.kind == "ParallelError" and o.at < 50 and not o.left for o in outcomes), outcomes
    told = [o.message for o in outcomes if re.search("ranks (do different things|wait for each other): ", o.message)]
    advice = "enter engine.gathered() around those that differ"
    if what == "state dict":
        advice = "on all of them, and write the result on one"
    assert told and all(advice in text for text in told), outcomes


def other_lengths_within_gathered(folder: Path, stage: int) -> None:
    """What the errors advise."""
    rank = dist.get_rank()
    ids = token_batches(1, time=4)[0]
    with engine_of(folder, stage) as engine:
        before = a_step(engine)
        expected = engine.module.generate(ids, 5)
        with engine.gathered():
            found = engine.module.generate(ids, 3 + 2 * rank)
            assert torch.equal(found, expected[:, : found.shape[1]])
            evaluate(engine, 1 + rank)
        assert engine.resident_units() == [] and before is not None
        a_step(engine)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=ACCEPTANCE)])
def test_ranks_of_different_lengths_within_gathered(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(other_lengths_within_gathered, tmp_path, stage)


def other_numbers_of_batches(folder: Path, stage: int, more: str) -> None:
    with engine_of(folder, stage) as engine:
        a_step(engine)
        if dist.get_rank() == 0:
            evaluate(engine, 1) if more == "evaluation" else a_step(engine)


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, "step"), pytest.param(3, "step", marks=ACCEPTANCE), pytest.param(3, "evaluation", marks=ACCEPTANCE)],
)
def test_a_rank_that_is_done_earlier(stage: int, more: str, pool_of: PoolOf, tmp_path: Path) -> None:
    first, second = pool_of(2).outcomes(other_numbers_of_batches, tmp_path, stage, more)
    assert not second.failed and first.kind == "ParallelError" and not first.left and first.at < 50
    assert "rank 1 is gone" in first.message and "it has closed its engine: all ranks need the same" in first.message


def lengths_of_transformers(folder: Path) -> None:
    """`generate` of `transformers` with `synced_gpus`: ranks that are done go on until all are."""
    transformers = pytest.importorskip("transformers")
    rank = dist.get_rank()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with running(
        model, placed("cpu", "host"), own_folder(folder), parallel={"stage": 3, "timeout": 60.0, "place_ranks": False}
    ) as engine:
        ids = torch.arange(1, 9).view(1, 8)
        engine.eval()
        made = engine.module.generate(ids, max_new_tokens=3 + 4 * rank, do_sample=False, synced_gpus=True)
        assert made.shape[1] == 8 + 3 + 4 * rank
        engine.train()
        engine.backward(engine(ids, labels=ids).loss)
        assert engine.step().stepped


@ACCEPTANCE
def test_generate_of_transformers_with_synced_gpus(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(lengths_of_transformers, tmp_path)


# What one rank writes


def edit(engine: offload.Engine, how: str, rank: int) -> None:
    """A change that rank 0 makes otherwise than the others, or alone."""
    lone, weight = rank == 0, engine.module.norm.weight
    if how == "gathered":
        with engine.gathered("norm.weight", modify=True):
            if lone:
                weight.data.add_(1.0)
    elif how == "in place" and lone:
        with torch.no_grad():
            weight.add_(1.0)
    elif how == "parameter":
        engine.set_full("layers.1.mlp.up_proj.weight", "parameter", torch.full((64, 24), 0.01 * (1 + rank)))
    elif how == "state":
        engine.set_full("norm.weight", "exp_avg", torch.full((24,), float(rank)))
    elif how == "gradient":
        weight.grad = torch.full((24,), float(rank))


def written_otherwise(folder: Path, stage: int, how: str) -> None:
    rank = dist.get_rank()
    with engine_of(folder, stage) as engine:
        engine.backward(loss_of(engine, token_batches(2)[rank]))
        if how == "gradient":
            edit(engine, how, rank)
        engine.step()
        edit(engine, how, rank)
        with pytest.raises(CheckpointError, match="what was written to weights, states or gradients"):
            engine.save_checkpoint(folder / "saved")
        with pytest.raises(ParallelError, match=r"ranks have not written the same \(by CRC-32\) to: ") as caught:
            for _ in range(2):
                a_step(engine)
        assert "norm.weight" in str(caught.value) or "up_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, "gathered"),
        (1, "in place"),
        (3, "gathered"),
        (3, "parameter"),
        pytest.param(2, "gathered", marks=ACCEPTANCE),
        pytest.param(2, "in place", marks=ACCEPTANCE),
        pytest.param(2, "parameter", marks=ACCEPTANCE),
        pytest.param(2, "state", marks=ACCEPTANCE),
        pytest.param(3, "state", marks=ACCEPTANCE),
    ],
)
def test_what_one_rank_writes_otherwise_is_found(stage: int, how: str, pool_of: PoolOf, tmp_path: Path) -> None:
    """Before the next step: a part that another rank keeps would be lost, or replicas would drift apart."""
    pool_of(2).run(written_otherwise, tmp_path, stage, how)


def gradient_written_otherwise(folder: Path) -> None:
    rank = dist.get_rank()
    with engine_of(folder, 0) as engine:
        engine.backward(loss_of(engine, token_batches(2)[rank]))
        edit(engine, "gradient", rank)
        for _ in range(2):
            a_step(engine)


def test_a_gradient_that_one_rank_writes_otherwise_is_found(pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = pool_of(2).outcomes(gradient_written_otherwise, tmp_path)
    assert all(o.kind == "ParallelError" and not o.left for o in outcomes), outcomes


def written_alike(folder: Path, stage: int) -> None:
    """Every way of writing, the same on all ranks, and gradients beside it: all of it counts, and nobody is refused."""
    with engine_of(folder, stage) as engine:
        for how in ("gathered", "in place", "parameter", "state"):
            edit(engine, how, 0) if how != "gathered" else None
            if how == "gathered":
                with engine.gathered("norm.weight", modify=True):
                    engine.module.norm.weight.data.add_(1.0)
            a_step(engine)
        engine.module.load_state_dict({name: p.clone() for name, p in decoder(seed=5).state_dict().items()})
        a_step(engine)
        engine.save_checkpoint(folder / "saved")
        states = states_of(engine)
    with engine_of(folder, stage) as engine:
        engine.load_checkpoint(folder / "saved")
        assert_states_equal(states_of(engine), states)


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=ACCEPTANCE), pytest.param(2, marks=ACCEPTANCE)])
def test_what_all_ranks_write_alike_counts(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(written_alike, tmp_path, stage)


# Saves


def waits_otherwise(folder: Path) -> None:
    rank = dist.get_rank()
    with engine_of(folder, 2) as engine:
        a_step(engine)
        with pytest.raises(CheckpointError, match=r"whether to wait\) differs between ranks: \(1, True\) on rank 0"):
            engine.save_checkpoint(folder / "saved", wait=rank == 0)
        dist.barrier()
        assert list((folder / "saved").iterdir()) == []
        dist.barrier()
        a_step(engine)
        engine.save_checkpoint(folder / "saved", wait=False)
        engine.wait_checkpoint()


def test_a_save_that_one_rank_waits_for_is_refused(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(waits_otherwise, tmp_path)
