"""Shared by the tests of whole models: the six placements, and an engine beside a plain PyTorch twin.

The twin runs the same model with torch alone. Its weights follow `optimizer_cpu.reference`, which the engine must equal
bit for bit (losses, gradients, weights, masters, moments, step counts). Beside it a `torch.optim.AdamW` over fp32
masters takes the very same gradients, with the same groups: it must agree within 1e-6 of a tensor's largest value,
because torch's AdamW rounds in another order (`addcdiv`, fused bias corrections); what differs in meaning (a skipped
step, a group, a rate, a frozen parameter) shows as far more.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from swap import FaultPlan
from tests.engine.binding_models import Pair, assert_same
from tests.engine.common import (
    HYPER,
    TIERS,
    Case,
    Reference,
    assert_states_equal,
    config_of,
    placed,
    states_of,
)

PLACES = [placed(device, tier) for device in ("cpu", "sim") for tier in TIERS]
"""{device, host, nvme} x {cpu, sim}: everything rests on one tier."""

TORCH = 1e-6


def cover(*columns: Sequence[Any], share: int = 1) -> Any:
    """`pytest.mark.parametrize` arguments for scenarios x PLACES.

    Every scenario runs on `share` placements in the ordinary run, dealt out so that each placement has its turn, and on
    the others under `acceptance`.
    """
    params = []
    for row, scenario in enumerate(columns[0]):
        for column, case in enumerate(PLACES):
            chosen = any((row * share + i) % len(PLACES) == column for i in range(share))
            marks = () if chosen else (pytest.mark.acceptance,)
            params.append(pytest.param(scenario, case, id=f"{scenario}-{case.device}-{case.parameters}", marks=marks))
    return params


def everywhere(function: Any) -> Any:
    """Runs a test on all six placements."""
    return pytest.mark.parametrize("case", PLACES, ids=lambda c: f"{c.device}-{c.parameters}")(function)


def ordinarily(*chosen: int) -> Any:
    """Runs a test on the placements of these numbers, and on the others under `acceptance`."""
    cases = [
        pytest.param(
            case, id=f"{case.device}-{case.parameters}", marks=() if i in chosen else (pytest.mark.acceptance,)
        )
        for i, case in enumerate(PLACES)
    ]
    return pytest.mark.parametrize("case", cases)


class Shadow:
    """`torch.optim.AdamW` over fp32 masters of a reference's parameters."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.masters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.AdamW | None = None
        for group in reference.optimizer.param_groups:
            self.add(group)

    def add(self, group: dict[str, Any]) -> None:
        names = {id(p): name for name, p in self.reference.model.named_parameters()}
        made = []
        for p in group["params"]:
            name = names[id(p)]
            if name in self.reference.masters:
                self.masters[name] = nn.Parameter(self.reference.masters[name].clone())
                made.append(self.masters[name])
        if not made:
            return
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([{"params": made, **options}])
        else:
            self.optimizer.add_param_group({"params": made, **options})

    def rename(self, renamed: dict[str, str]) -> None:
        self.masters = {renamed.get(name, name): p for name, p in self.masters.items()}

    def apply(self, gradients: dict[str, Tensor], factor: float) -> None:
        assert self.optimizer is not None
        for name, p in self.masters.items():
            p.grad = gradients[name].float() * factor if name in gradients else None
        self.optimizer.step()

    def check(self) -> None:
        for name, p in self.masters.items():
            master = self.reference.masters[name]
            if master.numel():
                limit = TORCH * max(float(p.detach().abs().max()), 1e-3)
                worst = float((p.detach() - master).abs().max())
                assert worst <= limit, f"{name}: {worst} from torch.optim.AdamW, {limit} allowed"


class Plain(Reference):
    """A reference whose groups can grow, and which a `Shadow` follows."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.shadow = Shadow(self)

    def add_group(self, group: dict[str, Any]) -> None:
        """Trains further parameters of the model, with moments zero."""
        self.optimizer.add_param_group(group)
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p in self.optimizer.param_groups[-1]["params"]:
            self._begin(names[id(p)], p)
        self.shadow.add(self.optimizer.param_groups[-1])

    def _begin(self, name: str, p: nn.Parameter) -> None:
        master = p.detach().reshape(-1)
        self.masters[name] = master if p.dtype == torch.float32 else master.float().clone()
        self.moments[name] = (torch.zeros(p.numel()), torch.zeros(p.numel()))
        self.steps[name] = 0

    def rename(self, renamed: dict[str, str]) -> None:
        """Parameters that have other names now."""
        for table in (self.masters, self.moments, self.gradients, self.steps):
            for old, new in renamed.items():
                if old in table:
                    table[new] = table.pop(old)  # type: ignore[attr-defined, assignment]
        self.shadow.rename(renamed)

    def apply(self, gradients: dict[str, Tensor], factor: float) -> None:
        self.shadow.apply(gradients, factor)
        super().apply(gradients, factor)
        self.shadow.check()


class Duo(Pair):
    """An engine and a plain twin that are trained alike and compared after every step, see the module's docstring."""

    reference: Plain

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        folder: Path,
        *,
        engine_groups: Any = None,
        given: nn.Module | None = None,
        faults: FaultPlan | None = None,
        **sections: Any,
    ) -> None:
        """`given`: what the engine gets, where that is not a copy of `model`. `faults` are those of its disk."""
        precision = sections.get("precision", {})
        dtype = precision.get("compute_dtype", "auto" if case.dtype == "fp32" else case.dtype)
        clip = sections.get("max_grad_norm")
        self.plain = model
        ours = copy.deepcopy(model) if given is None else given
        config = config_of(case, folder, **{"max_grad_norm": None, **sections})
        groups = None if engine_groups is None else engine_groups(ours)
        self.engine = offload.initialize(ours, config, param_groups=groups, faults=faults)
        self.engine._memory.device.delay = case.delay if case.device == "sim" else 0
        plain_groups = None if engine_groups is None else engine_groups(model)
        self.reference = Plain(
            model,
            max_grad_norm=clip,
            dtype="fp32" if dtype == "auto" else dtype,
            keep=[n for n, _ in model.named_parameters() if any(fnmatchcase(n, k) for k in precision.get("keep", ()))],
            groups=plain_groups,
        )

    def step(self) -> offload.StepResult:
        self.gradients_equal()
        result = self.engine.step()
        self.reference.step()
        self.states_equal()
        self.nothing_resident()
        return result

    def states_equal(self) -> None:
        assert_states_equal(states_of(self.engine), self.reference.states())


@contextmanager
def duo(model: nn.Module, case: Case, folder: Path, **options: Any) -> Iterator[Duo]:
    """A `Duo` whose engine is closed at the end."""
    gc.collect()
    gc.disable()  # what leaves memory only by a collection counts as a leak
    try:
        pair = Duo(model, case, folder, **options)
        try:
            yield pair
        finally:
            pair.engine.close()
    finally:
        gc.enable()


Run = Callable[[Any], Any]

__all__ = ["HYPER", "PLACES", "Duo", "Run", "assert_same", "cover", "duo", "everywhere", "ordinarily"]
