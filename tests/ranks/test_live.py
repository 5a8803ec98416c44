"""What a rank really holds at any time, on the simulated device: found by content in all live memory, whatever the
engine's own books say. Stage 3 never has the whole set of weights, stage 2 never a whole set of gradients.

Every 61st element of each parameter, and of its gradient on this rank as plain PyTorch computes it, is a mark. At every
hook of every module in forward and backward, at every gradient and after every collective, all memory is searched for
them: the simulated device's allocator, whatever its buffers are held by, and every tensor that Python knows of.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

import offload
from tests.engine.common import running
from tests.ranks.harness import RankPool
from tests.ranks.training import Run, case_of, own_folder, sections_of

PoolOf = Callable[[int], RankPool]
BLOCKS, WIDTH, STRIDE = 8, 64, 61
UNITS = BLOCKS + 1
"""The blocks and what the model itself owns."""


class Block(nn.Module):
    """Four matrices of one layout block each, so that ranks own equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return x + hidden


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


def bits(tensor: Tensor) -> NDArray[np.uint32]:
    found: NDArray[np.uint32] = tensor.detach().reshape(-1)[::STRIDE].clone().numpy().view(np.uint32)
    return found


class Marks:
    """Values whose presence in memory is looked for, by their bits; those that occur twice are left out."""

    def __init__(self, tensors: list[Tensor]) -> None:
        every, counts = np.unique(np.concatenate([bits(tensor) for tensor in tensors]), return_counts=True)
        self.values: NDArray[np.uint32] = every[counts == 1]
        self._table = np.zeros(1 << 16, dtype=bool)
        self._table[self.values & 0xFFFF] = True

    def share(self, memory: list[NDArray[np.uint32]]) -> float:
        """The part of them that is anywhere in `memory`."""
        candidates = [words[self._table[words & 0xFFFF]] for words in memory]
        everything = np.concatenate(candidates) if candidates else np.empty(0, dtype=np.uint32)
        places = np.searchsorted(self.values, everything).clip(max=len(self.values) - 1)
        there = np.zeros(len(self.values), dtype=bool)
        there[places[self.values[places] == everything]] = True
        return float(there.mean())


def live_memory(engine: offload.Engine) -> list[NDArray[np.uint32]]:
    """All live buffers of the device, and the memory of all tensors elsewhere."""
    ranges: set[tuple[int, int]] = set()
    arena = engine._memory.device._arena  # type: ignore[attr-defined]
    with arena._lock:
        ranges.update((address, size) for address, size in arena._live.items())
    # A look must not use the engine's parameters: other threads wait for the one that does.
    with torch._C.DisableTorchFunctionSubclass():
        for candidate in gc.get_objects():
            if issubclass(type(candidate), Tensor) and candidate.device.type == "cpu":
                storage = candidate.untyped_storage()
                ranges.add((storage.data_ptr(), storage.nbytes() // 4 * 4))
    return [
        np.frombuffer((ctypes.c_char * size).from_address(address), dtype=np.uint32)
        for address, size in ranges
        if size and address % 4 == 0
    ]


class Watch:
    """The largest shares seen at any hook, and how often was looked."""

    def __init__(self, engine: offload.Engine, marks: dict[str, Marks]) -> None:
        self._engine, self._marks = engine, marks
        self.most = dict.fromkeys(marks, 0.0)
        self.device_bytes = self.looks = 0

    def look(self, *_: Any) -> None:
        memory = live_memory(self._engine)
        for name, marks in self._marks.items():
            self.most[name] = max(self.most[name], marks.share(memory))
        self.device_bytes = max(self.device_bytes, self._engine._memory.device.used)  # type: ignore[attr-defined]
        self.looks += 1

    def attach(self) -> None:
        """To every module, every gradient, and every collective."""
        for module in self._engine.module.modules():
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self._after)
        for parameter in self._engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.look)  # type: ignore[no-untyped-call]
        cluster = self._engine._cluster
        assert cluster is not None
        for channel in cluster._channels:
            self._watch(channel)

    def _after(self, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.look()
        for tensor in (*inputs, output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.look)  # type: ignore[no-untyped-call]

    def _watch(self, channel: Any) -> None:
        submit = channel.submit

        def submitted(what: str, job: Callable[[Any], Any], **options: Any) -> Any:
            def looking(collectives: Any) -> Any:
                result = job(collectives)
                self.look()
                return result

            return submit(what, looking, **options)

        channel.submit = submitted


def gradients_of_every_rank() -> list[list[Tensor]]:
    """As plain PyTorch computes them on each rank's batch, from the first values."""
    found = []
    for rank in range(dist.get_world_size()):
        twin = Tower()
        twin(batch(rank)).backward()
        found.append([p.grad.clone() for p in twin.parameters() if p.grad is not None])
    return found


def watched(stage: int, kept: bool | int, ahead: int, folder: Path) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # what was there before need not be looked at every time
    try:
        return watched_from_here(stage, kept, ahead, folder)
    finally:
        gc.unfreeze()


def watched_from_here(stage: int, kept: bool | int, ahead: int, folder: Path) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Tower()
    everybodys = gradients_of_every_rank()
    marks = {
        "weights": Marks(list(model.parameters())),
        "own gradients": Marks(everybodys[rank]),
        "mean gradients": Marks([sum(of[1:], of[0]) / world for of in zip(*everybodys, strict=True)]),
    }
    del everybodys
    gc.collect()
    run = Run(world=world, stage=stage, kept=kept, device="sim", clip=False)
    sections = {**sections_of(run), "memory": {"host": 64 << 20, "device": 16 << 20}}
    sections["schedule"] = {**sections["schedule"], "prefetch_units": ahead}
    with running(model, case_of(run), own_folder(folder), **sections) as engine:
        watch = Watch(engine, marks)
        engine(batch(rank))  # the order of units is known from here on, so that they are loaded ahead
        watch.attach()
        engine.backward(engine(batch(rank)))
        watch.look()
        before_step = dict(watch.most)
        engine._reduce(on_all_ranks=True)
        watch.look()
        weights = sum(flat.flat.nbytes for unit in engine._residency.units for flat in unit.flats)
        return {
            "most": watch.most,
            "backward": before_step,
            "looks": watch.looks,
            "device": watch.device_bytes / weights,
        }


def test_the_search_finds_what_stage_0_holds(pool_of: PoolOf, tmp_path: Path) -> None:
    for found in pool_of(2).run(watched, 0, True, 1, tmp_path, timeout=100):
        assert found["looks"] > 4 * UNITS
        assert found["most"]["weights"] == 1.0
        assert found["backward"]["own gradients"] == 1.0
        assert found["most"]["mean gradients"] >= 0.99


def test_stage_2_never_holds_all_gradients(pool_of: PoolOf, tmp_path: Path) -> None:
    """Whole ones are there for the unit that they arrive in and the three whose reduction is under way or about to be;
    of the sums over ranks, this rank's half.
    """
    for found in pool_of(2).run(watched, 2, True, 1, tmp_path, timeout=100):
        assert found["most"]["weights"] == 1.0
        assert 0 < found["most"]["own gradients"] <= 4.5 / UNITS, found
        assert 0.45 < found["most"]["mean gradients"] <= 0.5 + 2.5 / UNITS, found


@pytest.mark.parametrize("ahead", [0, 2])
def test_stage_3_never_holds_all_weights(ahead: int, pool_of: PoolOf, tmp_path: Path) -> None:
    """Beside this rank's half there are the unit that computes, those that are loaded ahead, and what the model itself
    owns.
    """
    for found in pool_of(2).run(watched, 3, True, ahead, tmp_path, timeout=100):
        there = 2 + ahead + 0.5
        assert 0.5 < found["most"]["weights"] <= 0.5 + 0.5 * there / UNITS, found
        assert found["device"] <= (2 + ahead) / UNITS + 0.02, found
        assert 0 < found["most"]["own gradients"] <= 4.5 / UNITS, found
        assert 0.45 < found["most"]["mean gradients"] <= 0.5 + 2.5 / UNITS, found


def test_kept_shards_are_no_more_than_they_say(pool_of: PoolOf, tmp_path: Path) -> None:
    """A quarter is this rank's own, and half is what it keeps for the backward; both of four ranks may lie apart."""
    for found in pool_of(4).run(watched, 3, 2, 1, tmp_path, timeout=100):
        assert 0.5 < found["most"]["weights"] <= 0.75 + 0.25 * 3.5 / UNITS, found
