"""Several engines in one process, copies of their models, and data-loader workers.

Compared with `torch.equal` to twins without any engine.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from offload.parameters import OffloadedParameter
from tests.engine.binding_models import WIDTH, Block, Stack, inputs, square
from tests.engine.common import Case, running
from tests.engine.resources import descriptors, threads
from tests.models.common import PLACES, Duo, cover, duo, everywhere


@contextmanager
def two(case: Case, folder: Path, first: nn.Module, second: nn.Module) -> Iterator[tuple[Duo, Duo]]:
    with duo(first, case, folder) as a, duo(second, case, folder) as b:
        yield a, b


def build(seed: int, depth: int = 2) -> Stack:
    model = Stack(depth)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)
    return model


@everywhere
def test_policy_and_reference(case: Case, swap_folder: Path) -> None:
    """A frozen reference on an engine of its own, as preference optimisation has it."""
    reference = build(0)
    reference.requires_grad_(False)
    with two(case, swap_folder, build(0), reference) as (policy, fixed):
        for step in range(3):
            x = inputs(seed=step)
            losses = []
            for ours in (True, False):
                actor, judge = ((policy.offloaded, fixed.offloaded), (policy.plain, fixed.plain))[not ours]
                with torch.no_grad():
                    target = judge(x)
                losses.append(-torch.nn.functional.logsigmoid(0.1 * (actor(x) - target)).sum())
            assert torch.equal(losses[0].detach().cpu(), losses[1].detach())
            policy.engine.backward(losses[0])
            losses[1].backward()
            policy.step()
            fixed.states_equal()
            fixed.nothing_resident()


def generator_loss(g: Any, d: Any, x: Tensor) -> Tensor:
    return -d(nn.functional.pad(g(x), (0, WIDTH - 3))).mean()


def critic_loss(g: Any, d: Any, x: Tensor) -> Tensor:
    return d(nn.functional.pad(g(x).detach(), (0, WIDTH - 3))).mean() - d(x).mean()


@everywhere
def test_adversaries_alternate(case: Case, swap_folder: Path) -> None:
    """The generator's loss goes through the critic, whose gradients of that pass are dropped."""
    with two(case, swap_folder, build(1), build(2)) as (g, d):
        for step in range(3):
            x = inputs(seed=step)
            for loss, trained in ((critic_loss, d), (generator_loss, g)):
                trained.engine.backward(loss(g.offloaded, d.offloaded, x))
                loss(g.plain, d.plain, x).backward()
                trained.step()
            d.engine.zero_grad()
            for p in d.plain.parameters():
                p.grad = None


@pytest.mark.parametrize(("order", "case"), cover(["first", "second"], share=3))
def test_a_joint_loss(order: str, case: Case, swap_folder: Path) -> None:
    with two(case, swap_folder, build(1), build(2)) as (a, b):
        for step in range(3):
            x = inputs(seed=step)
            (a.offloaded(x) * b.offloaded(x)).sum().backward()
            (a.plain(x) * b.plain(x)).sum().backward()
            for pair in (a, b) if order == "first" else (b, a):
                pair.step()


@everywhere
def test_an_engine_closed_while_another_trains(case: Case, swap_folder: Path) -> None:
    with duo(build(1), case, swap_folder) as pair:
        stop = threading.Event()
        failures: list[BaseException] = []

        def others() -> None:
            try:
                while not stop.is_set():
                    with running(build(3), case, swap_folder) as engine:
                        engine.backward(engine(inputs()).square().sum())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=others)
        thread.start()
        try:
            pair.train(square(inputs()), steps=4)
        finally:
            stop.set()
            thread.join()
        assert not failures


@pytest.mark.parametrize(("how", "case"), cover(["deepcopy", "pickle", "torch.save"], share=2))
def test_copies_are_ordinary_models(how: str, case: Case, swap_folder: Path) -> None:
    with duo(build(1), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        module = pair.offloaded
        if how == "deepcopy":
            twin = copy.deepcopy(module)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(module))
        else:
            buffer = io.BytesIO()
            torch.save(module, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        twin = twin.cpu()
        assert not any(isinstance(p, OffloadedParameter) for p in twin.parameters())
        assert torch.equal(twin(inputs()), pair.plain(inputs()))
        twin(inputs()).sum().backward()
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        pair.states_equal()  # the engine's own did not change
        pair.train(square(inputs()), steps=1)


class Samples(Dataset[Tensor]):
    """Samples that a frozen module of ordinary parameters makes; workers get it by fork or by pickle."""

    def __init__(self) -> None:
        self.filter = Block()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.filter(inputs(seed=index)[0])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_data_loader_workers(method: str, swap_folder: Path) -> None:
    samples = Samples()
    with duo(build(1), PLACES[2], swap_folder) as pair:
        loader = DataLoader(samples, batch_size=2, num_workers=1, multiprocessing_context=method)
        for batch in loader:
            pair.backward(square(batch))
            pair.step()


@pytest.mark.parametrize(("count", "case"), cover([20]))
def test_engines_leave_nothing(count: int, case: Case, swap_folder: Path) -> None:
    def one() -> None:
        with running(build(1), case, swap_folder) as engine:
            engine.backward(engine(inputs()).square().sum())
            engine.step()

    for _ in range(3):
        one()
    gc.collect()
    before = threads(), len(descriptors())
    for _ in range(count):
        one()
    gc.collect()
    assert threads() <= before[0] and len(descriptors()) <= before[1]
    assert list(swap_folder.iterdir()) == []


@pytest.mark.acceptance
@everywhere
def test_hundreds_of_engines_leave_nothing(case: Case, swap_folder: Path) -> None:
    for _ in range(10):
        with running(build(1), case, swap_folder) as engine:
            engine(inputs())
    gc.collect()
    before = threads(), len(descriptors())
    for _ in range(300):
        with running(build(1), case, swap_folder) as engine:
            engine(inputs())
    gc.collect()
    assert threads() <= before[0] and len(descriptors()) <= before[1]
