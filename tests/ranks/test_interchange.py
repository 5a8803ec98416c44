"""Checkpoints of other systems to and from several ranks: from any number of them, in any stage, to any other."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import offload
from tests.checkpoint.deepspeed_fixture import Net as DeepSpeedNet
from tests.checkpoint.test_interchange import HERE, convert, deepspeed_python, free_port
from tests.engine.common import Case, assert_states_equal, running, states_of
from tests.ranks.harness import RankPool
from tests.ranks.training import own_folder

PoolOf = Callable[[int], RankPool]
KINDS = ("parameter", "exp_avg", "exp_avg_sq")


class Uneven(nn.Module):
    """Nothing divides by the numbers of ranks: fewer rows than ranks, blocks that end within a row, a frozen part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(6, 83), nn.Linear(83, 71), nn.Linear(71, 1)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.second(torch.relu(self.first(self.frozen(x)))))).pow(2).mean()
        return found


def engine_of(model: nn.Module, folder: Path, stage: int, dtype: str, state_format: str) -> Any:
    case = Case(parameters="host", optimizer="nvme", dtype=dtype, staging=4 << 20, chunk=64 << 10)
    parallel: dict[str, Any] = {"stage": stage, "timeout": 60.0, "place_ranks": False}
    if dist.get_world_size() == 4:
        parallel["shard_size"] = 2
    return running(model, case, own_folder(folder), parallel=parallel, optimizer={"state_format": state_format})


def train(engine: offload.Engine, steps: int, dtype: str) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(4, 6, generator=generator).to(getattr(torch, dtype))))
        engine.step()


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def saves(folder: Path, stage: int, dtype: str, state_format: str) -> Any:
    with engine_of(Uneven(0), folder, stage, dtype, state_format) as engine:
        train(engine, 2, DTYPES[dtype])
        engine.save_checkpoint(folder / "ours")
        states = states_of(engine)
    return states if dist.get_rank() == 0 else None


def there_and_back(folder: Path, expected: dict[str, dict[str, Any]]) -> None:
    """torch reads what was converted into its own shards, and writes them again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(value: Tensor) -> Any:
        return distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])

    trained = {name: entry for name, entry in expected.items() if "exp_avg" in entry}
    tree: dict[str, Any] = {
        "model": {name: shard(entry["parameter"]) for name, entry in expected.items()},
        "optim": {
            "state": {
                name: {"step": torch.tensor(0.0), **{kind: shard(entry[kind]) for kind in KINDS[1:]}}
                for name, entry in trained.items()
            }
        },
    }
    dcp.load(tree, checkpoint_id=folder / "theirs")

    def same(found: DTensor, value: Tensor) -> bool:
        return torch.equal(found.full_tensor(), value)

    for name, entry in expected.items():
        assert same(tree["model"][name], entry["parameter"]), name
    for name, entry in trained.items():
        state = tree["optim"]["state"][name]
        assert all(same(state[kind], entry[kind]) for kind in KINDS[1:]) and state["step"] == entry["step"], name
    dcp.save(tree, checkpoint_id=folder / "again")


def loads(folder: Path, stage: int, dtype: str, state_format: str, expected: dict[str, dict[str, Any]]) -> None:
    with engine_of(Uneven(9), folder, stage, dtype, state_format) as engine:
        engine.load_checkpoint(folder / "back")
        assert_states_equal(states_of(engine), expected)
        train(engine, 1, DTYPES[dtype])


JOURNEYS = [  # (ranks, stage) here, ranks there, (ranks, stage) here again, and the numbers
    ((2, 3), 3, (3, 1), ("fp32", "fp32")),
    ((3, 2), 2, (2, 3), ("bf16", "split")),
    ((3, 0), 2, (1, 0), ("bf16", "fp32")),
    ((4, 3), 3, (2, 0), ("fp32", "fp32")),
    ((1, 0), 3, (4, 2), ("bf16", "split")),
    ((3, 1), 3, (4, 3), ("fp32", "fp32")),
]


@pytest.mark.parametrize(
    ("here", "there", "again", "numbers"),
    [JOURNEYS[0], *(pytest.param(*journey, marks=pytest.mark.acceptance) for journey in JOURNEYS[1:])],
)
def test_torch_checkpoints_between_worlds(
    pool_of: PoolOf,
    tmp_path: Path,
    here: tuple[int, int],
    there: int,
    again: tuple[int, int],
    numbers: tuple[str, str],
) -> None:
    """Every bit of weights, moments and steps, through the shards of `torch.distributed.checkpoint`."""
    expected = pool_of(here[0]).run(saves, tmp_path, here[1], *numbers)[0]
    convert(tmp_path / "ours", tmp_path / "theirs", "--to", "dcp")
    pool_of(there).run(there_and_back, tmp_path, expected, may_leave=True)  # torch's meshes keep their groups
    convert(tmp_path / "again", tmp_path / "back", "--to", "checkpoint")
    pool_of(again[0]).run(loads, tmp_path, again[1], *numbers, expected)


def loads_deepspeed(folder: Path, stage: int, expected: dict[str, dict[str, Tensor]]) -> None:
    torch.manual_seed(3)
    with engine_of(DeepSpeedNet(), folder, stage, "bf16", "split") as engine:
        engine.load_checkpoint(folder / "back")
        states = states_of(engine)
        for name, entry in expected.items():
            assert torch.equal(states[name]["parameter"], entry["master"]) and states[name]["step"] == 3, name
            assert all(torch.equal(states[name][kind], entry[kind]) for kind in KINDS[1:]), name
        engine.backward(engine(torch.randn(2, 7).bfloat16()))
        assert engine.step().stepped


@pytest.mark.skipif(deepspeed_python() is None, reason="DeepSpeed is not installed; see OFFLOAD_DEEPSPEED_PYTHON")
@pytest.mark.parametrize(
    ("stage", "world", "again"), [(1, 3, (2, 3)), (2, 3, (3, 0)), (3, 3, (2, 2)), (3, 2, (4, 3)), (2, 2, (3, 1))]
)
@pytest.mark.acceptance
def test_deepspeed_checkpoints_between_worlds(
    pool_of: PoolOf, tmp_path: Path, stage: int, world: int, again: tuple[int, int]
) -> None:
    python = deepspeed_python()
    assert python is not None
    done = subprocess.run(
        [python, str(HERE / "deepspeed_fixture.py"), str(tmp_path / "theirs"), str(stage), str(world), "bf16"],
        env={**os.environ, "MASTER_PORT": free_port()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = torch.load(tmp_path / "theirs" / "expected.pt")
    convert(tmp_path / "theirs", tmp_path / "back", "--to", "checkpoint")
    pool_of(again[0]).run(loads_deepspeed, tmp_path, again[1], expected)
