"""Parameters of awkward sizes, shapes and dtypes train exactly, and staging stays within its budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import PlanError

from .common import TIERS, Case, Reference, assert_states_equal, cover, placed, running, states_of

SIZES = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 1_000_003)
MIB = 1 << 20


class Odd(nn.Module):
    """One block: parameters of all awkward sizes, in one dtype or alternating between two, all needed at once."""

    def __init__(self, *dtypes: torch.dtype, frozen: bool = False) -> None:
        super().__init__()
        shapes = [(0, 8), (8, 0), (), (5, 1, 3), *((n,) for n in SIZES)]
        for index, shape in enumerate(shapes):
            values = torch.randn(shape).to(dtypes[index % len(dtypes)])
            self.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=not (frozen and index % 4 == 1)))

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            wide = p.float()
            x = x + ((wide * torch.cos(x.sum() + wide)).mean() if p.numel() else wide.sum())
        return x


class Many(nn.Module):
    """A module that needs forty parameters at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(257 + 64 * i)) for i in range(40)])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([p.square().mean() for p in self.parts]).sum().tanh()


class Big(nn.Module):
    """5 MiB in one parameter of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1280, 1024) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.table[:4, :].sum(1)).tanh().sum() + self.table.square().mean()


class Net(nn.Module):
    """Blocks one after another on a vector of four."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def build(kind: str) -> Net:
    torch.manual_seed(5)
    if kind == "mixed":
        return Net(Odd(torch.bfloat16, torch.float32), Odd(torch.float32, torch.bfloat16))
    if kind == "frozen":
        return Net(Odd(torch.bfloat16, torch.float32, torch.float32, frozen=True), Odd(torch.float32, frozen=True))
    if kind == "many":
        return Net(Many(), Many())
    return Net(Big(), Big())


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, generator=generator) for _ in range(count)]


def train(model: nn.Module, case: Case, folder: Path, steps: int = 5, parts: int = 1, **options: Any) -> None:
    """Trains with engine and reference and compares them bit for bit."""
    twin = Reference(copy.deepcopy(model), max_grad_norm=1.0)
    with running(model, case, folder, max_grad_norm=1.0, **options) as engine:
        data = iter(inputs(steps * parts))
        for _ in range(steps):
            for _ in range(parts):
                x = next(data)
                found, right = engine(x), twin.model(x)
                assert torch.equal(found, right)
                engine.backward(found)
                twin.backward(right)
            assert engine.step().grad_norm == twin.step()
            assert engine.resident_units() == []
        assert_states_equal(states_of(engine), twin.states())
        staging = engine._memory.staging
        assert staging is not None and 0 <= staging.in_use_peak <= staging.count
        assert staging.in_use_peak * staging.slot_bytes <= case.staging
        report = engine.memory()
        assert report.peak["host"].get("staging", 0) <= case.staging
        for tier, limit in report.limits.items():
            assert limit is None or sum(report.current[tier].values()) <= limit


@cover({"kind": ["mixed", "frozen", "many"], "device": ["cpu", "sim"], "tier": TIERS})
def test_awkward_parameters(kind: str, device: str, tier: str, swap_folder: Path) -> None:
    train(build(kind), placed(device, tier, staging=MIB, chunk=64 << 10), swap_folder)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_awkward_parameters_with_accumulation_on_mixed_tiers(device: str, swap_folder: Path) -> None:
    case = Case(device=device, parameters="host", gradients="nvme", optimizer="device", staging=MIB, chunk=64 << 10)
    train(build("mixed"), case, swap_folder, steps=2, parts=3)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_parameter_larger_than_all_of_staging(device: str, tier: str, swap_folder: Path) -> None:
    train(build("big"), placed(device, tier, staging=MIB, chunk=64 << 10), swap_folder, parts=2, steps=3)


def test_the_smallest_staging_is_named_if_less_is_given(swap_folder: Path) -> None:
    with (
        pytest.raises(PlanError, match=r"at least .* \((\d+),(\d+) bytes\)"),
        running(build("mixed"), Case(staging=64 << 10), swap_folder),
    ):
        pass
    train(build("mixed"), Case(staging=80 << 10), swap_folder, steps=1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_foreign_dtypes_are_carried_exactly(device: str, tier: str, swap_folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        "int8": torch.randint(-128, 128, (700,), dtype=torch.int8, generator=generator),
        "uint8": torch.randint(0, 256, (5, 7), dtype=torch.uint8, generator=generator),
        "bool": torch.rand(513, generator=generator) > 0.5,
        "int64": torch.randint(-(1 << 62), 1 << 62, (9000,), dtype=torch.int64, generator=generator),
        "int32": torch.randint(-(1 << 30), 1 << 30, (3,), dtype=torch.int32, generator=generator),
        "fp64": torch.randn(4097, dtype=torch.float64, generator=generator),
        "fp16": torch.randn(1000, generator=generator).half(),
        "complex": torch.randn(33, dtype=torch.complex64, generator=generator),
    }

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))
            for name, value in values.items():
                self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))

        def forward(self, x: Tensor) -> Tensor:
            assert torch.equal(self.int8, values["int8"]) and torch.equal(self.int64, values["int64"])
            return x * self.scale * self.fp64[:4].float() * self.bool[:4]

    model = Net(Holder(), Holder())
    with running(model, placed(device, tier, staging=MIB), swap_folder) as engine:
        for x in inputs(2):
            engine.backward(engine(x))
            assert engine.step().stepped
        weights = dict(engine.named_full_parameters())
        for name, value in values.items():
            full = f"blocks.1.{name}"
            assert weights[full].dtype == value.dtype and torch.equal(weights[full], value), name
            found = engine.get_full(full)
            assert found is not None and found.dtype == value.dtype and torch.equal(found, value)
            assert engine.get_full(full, "grad") is None
            with pytest.raises(ValueError, match="not trained"):
                engine.get_full(full, "exp_avg")
            new = value.roll(1)
            engine.set_full(full, "parameter", new)
            found = engine.get_full(full)
            assert found is not None and torch.equal(found, new), name
        assert torch.equal(dict(engine.named_full_parameters())["blocks.0.int64"], values["int64"])


def test_a_unit_of_empty_parameters_only(swap_folder: Path) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.none.sum() * x

    for device in ("cpu", "sim"):
        for tier in TIERS:
            train(Net(Empty(), Empty()), placed(device, tier), swap_folder, steps=2, parts=2)
