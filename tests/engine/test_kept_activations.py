"""What `auto` keeps without noting what a repetition would need: counted as what it is, until it is gone."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.binding_recompute import Root, Visit
from tests.engine.binding_models import (
    WIDTH,
    Block,
    Stack,
    inputs,
    square,
)
from tests.engine.common import placed, running
from tests.engine.test_activations import letting_go


def test_what_surely_fits_is_kept_without_being_noted(swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs of the same shapes left half of the room the last time, nothing is prepared for a repetition."""
    visits: list[str] = []
    begin = Visit.__init__

    def noted(visit: Visit, root: Root, *args: Any) -> None:
        visits.append(root.units[0].name)
        begin(visit, root, *args)

    monkeypatch.setattr(Visit, "__init__", noted)
    with letting_go(Stack(), placed("cpu", "nvme"), swap_folder, "auto") as pair:
        activations = pair.engine._binding.activations
        assert activations is not None
        activations.room = 1 << 40
        pair.train(square(inputs(grad=True)))
        first, kept = len(visits), activations.kept
        assert first > 0 and kept == 2 * first  # two steps
        pair.train(square(inputs(grad=True)))
        assert len(visits) == first and activations.kept == 2 * kept
        loss = pair.engine(inputs(grad=True)).square().sum()  # counted while the graph is alive, however it ends
        known = activations.kept_bytes
        assert known > 0
        del loss
        assert activations.kept_bytes == 0
        pair.train(square(inputs(5, WIDTH, grad=True)))  # other shapes: not known yet
        assert len(visits) == 2 * first
        pair.offloaded.eval()
        pair.plain.eval()
        pair.train(square(inputs(grad=True)))
        assert len(visits) == 3 * first
        pair.offloaded.train()
        pair.plain.train()
        activations.room = known  # enough, but not ample
        pair.train(square(inputs(grad=True)))
        assert len(visits) > 3 * first
        activations.room = 0
        pair.train(square(inputs(grad=True)))
        assert activations.recomputed > 0 and activations.kept_bytes == 0


def test_inputs_that_never_repeat_are_not_remembered_for_ever(
    swap_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, step: int) -> Tensor:
            return self.linear(x) * step

    roots: list[Root] = []
    begin = Visit.__init__

    def noted(visit: Visit, root: Root, *args: Any) -> None:
        roots.append(root)
        begin(visit, root, *args)

    monkeypatch.setattr(Visit, "__init__", noted)
    with running(
        nn.ModuleList([Numbered()]), placed("cpu", "nvme"), swap_folder, units={"wrap": ["Numbered"]}
    ) as engine:
        for step in range(70):
            engine.module[0](inputs(grad=True), step).sum()  # type: ignore[index]
        assert len(roots) == 70 and len(roots[0].sizes) == 64
        for _ in range(3):  # what comes again later is remembered
            engine.module[0](inputs(grad=True), 1000).sum()  # type: ignore[index]
        assert len(roots) == 71


def test_bytes_count_until_what_was_saved_is_gone(swap_folder: Path) -> None:
    """Not for as long as somebody has the loss: its graph has let go of all that was saved."""
    with letting_go(Stack(), placed("cpu", "nvme"), swap_folder, "auto") as pair:
        activations = pair.engine._binding.activations
        assert activations is not None
        activations.room = 1 << 40
        pair.train(square(inputs(grad=True)))
        total, counts = torch.zeros(()), []
        for _ in range(3):
            loss = pair.engine(inputs(grad=True)).square().sum()
            counts.append(activations.kept_bytes)
            total = total + loss
            pair.engine.backward(loss, retain_graph=True)
            assert activations.kept_bytes == counts[0] > 0  # may come again
            pair.engine.backward(loss)
            assert activations.kept_bytes == 0
            pair.engine.zero_grad()
        assert counts == counts[:1] * 3
        loss = pair.engine(inputs(grad=True)).square().sum()
        pair.offloaded.head.register_forward_hook(lambda *_: 1 // 0)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            pair.engine(inputs(grad=True))
        assert activations.kept_bytes == counts[0]
        pair.engine.close()
        del loss, total
        assert activations.kept_bytes == 0


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_forwards_of_a_handler(activations: str, swap_folder: Path) -> None:
    """What is called where an error is being handled has not failed itself."""
    with letting_go(Stack(), placed("cpu", "nvme"), swap_folder, activations) as pair:
        found = pair.engine._binding.activations
        assert found is not None
        try:
            raise KeyError
        except KeyError:
            for _ in range(2):
                pair.train(square(inputs(grad=True)))
            hook = pair.offloaded.head.register_forward_pre_hook(lambda *_: 1 // 0)  # type: ignore[union-attr]
            before = found.kept, found.recomputed
            with pytest.raises(ZeroDivisionError):
                pair.engine(inputs(grad=True))
            hook.remove()
        assert before == ((4, 16) if activations == "recompute" else (20, 0))  # the head saves its input only
        failed = found.kept + found.recomputed - sum(before)
        assert failed == (4 if activations == "recompute" else 5) and found.kept_bytes == 0


class Sometimes(nn.Module):
    """Does as much as it is told, which no shape shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.often = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor, often: Tensor) -> Tensor:
        for _ in range(int(often)):
            x = torch.tanh(self.linear(x))
        return x


def test_bytes_that_depend_on_data_are_counted(swap_folder: Path) -> None:
    """What is expected of a forward by its shapes may be far too little; what it saved counts, and is remembered."""
    model, wrap = nn.ModuleList([Sometimes()]), {"wrap": ["Sometimes"]}
    with letting_go(model, placed("cpu", "nvme"), swap_folder, "auto", units=wrap) as pair:
        activations = pair.engine._binding.activations
        assert activations is not None
        unit, x = pair.engine.module[0], inputs(grad=True)  # type: ignore[index]
        each = x.numel() * 4
        activations.room = 40 * each
        for often in (0, 1):
            unit(x, torch.tensor(often)).sum()
        graphs = [unit(x, torch.tensor(20))]
        assert 20 * each <= activations.kept_bytes <= 21 * each
        graphs.append(unit(x, torch.tensor(1)))  # may be another 20
        assert activations.recomputed == 0 and activations.kept_bytes < 24 * each
        graphs.append(unit(x, torch.tensor(15)))
        assert activations.recomputed == 0
        graphs.append(unit(x, torch.tensor(5)))
        assert activations.recomputed == 1 and activations.kept_bytes <= activations.room
        for graph in graphs:
            graph.sum().backward()
        assert activations.kept_bytes == 0


class Odd(str):
    """Compares in its own way, so it has no hash."""

    def __eq__(self, other: object) -> bool:
        return other is self


class Kind(enum.Enum):
    ONE = 1

    def __eq__(self, other: object) -> bool:
        return other is self


@pytest.mark.parametrize(
    "value",
    [
        Odd("x"),
        Kind.ONE,
        math.nan,
        {1: 2, "a": Kind.ONE, None: 4, (1, 2): torch.ones(2)},
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(3).to_sparse(),
        [object()],
    ],
    ids=["string", "enum", "nan", "keys", "nested", "sparse", "object"],
)
def test_inputs_of_any_kind(value: Any, swap_folder: Path) -> None:
    class Given(Block):
        def forward(self, x: Tensor, value: Any = None) -> Tensor:
            return super().forward(x)

    def call(model: Any) -> Tensor:
        return model[1](model[0](inputs(grad=True), value), value=value).square().sum()  # type: ignore[no-any-return]

    model = nn.ModuleList([Given(), Given()])
    with letting_go(model, placed("cpu", "nvme"), swap_folder, "auto", units={"wrap": ["Given"]}) as pair:
        pair.train(call, steps=3)
        assert pair.engine._binding.activations.kept_bytes == 0  # type: ignore[union-attr]
