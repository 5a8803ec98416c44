"""Models with awkward structure, and a pair of an engine and a plain twin that must agree bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.engine.common import Case, Reference, config_of, placed

WIDTH = 16
PLACES = [placed("cpu", "nvme"), placed("cpu", "host"), placed("sim", "nvme"), placed("sim", "device")]
NVME = [placed("cpu", "nvme"), placed("sim", "nvme", delay=1e-3)]


class Pair:
    """`engine` trains one copy of a model, `plain` is the twin that torch and the reference optimizer train."""

    def __init__(self, model: nn.Module, case: Case, folder: Path, **sections: Any) -> None:
        self.plain = model
        config = config_of(case, folder, max_grad_norm=None, **sections)
        self.engine = offload.initialize(copy.deepcopy(model), config)
        self.engine._memory.device.delay = case.delay if case.device == "sim" else 0
        self.reference = Reference(model, max_grad_norm=None)

    @property
    def offloaded(self) -> nn.Module:
        return self.engine.module

    def both(self, run: Callable[[Any], Any]) -> Any:
        """Runs on the engine's module and on the twin; the results (tensors in any structure) must be equal."""
        ours, theirs = run(self.offloaded), run(self.plain)
        assert_same(ours, theirs)
        return ours

    def backward(self, run: Callable[[Any], Tensor]) -> None:
        """`run` returns a loss; both are differentiated and all gradients compared."""
        loss, expected = run(self.offloaded), run(self.plain)
        assert_same(loss.detach(), expected.detach())
        self.engine.backward(loss)
        expected.backward()
        self.gradients_equal()

    def gradients_equal(self) -> None:
        """All gradients so far, after torch's own `.grad` of the twin are moved to the reference's sums."""
        self.reference.collect()
        for name, parameter in self.plain.named_parameters():
            ours = self.engine.get_full(name, "grad")
            held = self.reference.gradients.get(name)
            if held is None:
                assert ours is None, f"{name}: a gradient that the twin has not"
                continue
            assert ours is not None, f"{name}: no gradient"
            assert torch.equal(ours, held[0].view(parameter.shape).to(ours.dtype)), f"{name}: gradients differ"

    def step(self) -> None:
        """One step of both; weights must be equal and nothing may stay resident."""
        self.gradients_equal()
        assert self.engine.step().stepped
        self.reference.step()
        self.weights_equal()
        self.nothing_resident()

    def train(self, run: Callable[[Any], Tensor], steps: int = 2) -> None:
        for _ in range(steps):
            self.backward(run)
            self.step()

    def weights_equal(self) -> None:
        expected = dict(self.plain.named_parameters())
        for name, weight in self.engine.named_full_parameters():
            assert torch.equal(weight, expected[name].detach()), f"{name}: weights differ"

    def nothing_resident(self) -> None:
        """No unit and no leased byte beyond what placement says, without help of the garbage collector."""
        assert self.engine.resident_units() == []
        assert [(u.name, u.leases) for u in self.engine._residency.units if u.leases] == []
        deadline = time.monotonic() + 20
        while self.leased() and time.monotonic() < deadline:
            time.sleep(0.002)  # a read that is not wanted any more keeps its buffer until it ends
        assert self.leased() == 0

    def leased(self) -> int:
        return self.engine.memory().current["device"].get("leases", 0)


@contextmanager
def paired(model: nn.Module, case: Case, folder: Path, **sections: Any) -> Iterator[Pair]:
    """A `Pair` whose engine is closed at the end."""
    gc.collect()
    gc.disable()  # what leaves memory only by a collection counts as a leak
    pair = Pair(model, case, folder, **sections)
    try:
        yield pair
    finally:
        gc.enable()
        pair.engine.close()


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal structure, equal bits."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(theirs):
        assert_same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def inputs(*shape: int, seed: int = 3, grad: bool = False) -> Tensor:
    """Normal values of `shape`, by default (4, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator).requires_grad_(grad)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks and a head; `run` says how the blocks are called."""

    def __init__(
        self, depth: int = 4, run: Callable[[Stack, Tensor], Tensor] | None = None, block: Any = Block
    ) -> None:
        super().__init__()
        torch.manual_seed(depth)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.run = run or plainly

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, x))


def plainly(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def checkpointed(reentrant: bool, span: int, **options: Any) -> Callable[[Stack, Tensor], Tensor]:
    """Activation checkpointing over `span` blocks at a time."""

    def run(model: Stack, x: Tensor) -> Tensor:
        for start in range(0, len(model.blocks), span):
            segment = list(model.blocks[start : start + span])

            def call(h: Tensor, segment: list[nn.Module] = segment) -> Tensor:
                for block in segment:
                    h = block(h)
                return h

            x = checkpoint(call, x, use_reentrant=reentrant, **options)
        return x

    return run


def nested(reentrant: bool) -> Callable[[Stack, Tensor], Tensor]:
    """A checkpoint over all blocks, with one over each block inside."""

    def run(model: Stack, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            for block in model.blocks:
                h = checkpoint(block, h, use_reentrant=reentrant)
            return h

        return checkpoint(inner, x, use_reentrant=reentrant)

    return run


def square(x: Tensor) -> Callable[[Any], Tensor]:
    """The loss of a model that returns a tensor."""
    return lambda model: model(x).square().sum()
