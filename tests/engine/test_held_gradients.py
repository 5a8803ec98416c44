"""`.grad` of an offloaded parameter: what torch code does to it arrives, or is refused; it never works on a stub."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.errors import GradientError
from tests.engine.binding_models import NVME, Pair, Stack, inputs, paired, square
from tests.engine.common import Case, placed, running, states_of

PLACES = [*NVME, placed("cpu", "host"), placed("sim", "device")]
NAME = "blocks.1.up.weight"


def imul(g: Tensor) -> None:
    g *= 2.0


def out(g: Tensor) -> None:
    torch.add(g, 1.0, out=g)


def data(g: Tensor) -> None:
    g.data = torch.ones(g.shape)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "multiplied": lambda g: g.mul_(0.5),
    "augmented": imul,
    "zero": lambda g: g.zero_(),
    "a row": lambda g: g.__setitem__(0, 1.0),
    "data": lambda g: g.data.clamp_(-0.1, 0.1),
    "data replaced": data,
    "detached": lambda g: g.detach().add_(1.0),
    "in a list": lambda g: torch._foreach_mul_([g, g], 0.5),
    "as output": out,
    "a function": lambda g: nn.functional.relu(g, inplace=True),
    "copied to": lambda g: g.copy_(torch.arange(float(g.numel())).view(g.shape)),
    "with itself": lambda g: g.sub_(g.mean()).div_(g.norm()),
    "masked": lambda g: g.masked_fill_(g > 0, 0.0),
}


def through(pair: Pair, edit: Callable[[Tensor], Any]) -> None:
    """The same edit of both gradients."""
    edit(pair.offloaded.get_parameter(NAME).grad)
    held, count = pair.reference.gradients[NAME]
    plain = held.view(pair.plain.get_parameter(NAME).shape)
    edit(plain)
    pair.reference.gradients[NAME] = plain.reshape(-1), count


@pytest.mark.parametrize("case", PLACES, ids=str)
def test_edits_arrive(case: Case, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        for edit in EDITS.values():
            pair.backward(square(inputs()))
            through(pair, edit)
            pair.gradients_equal()
            pair.backward(square(inputs(seed=1)))  # later contributions come on top
            through(pair, edit)
            pair.step()


READS: dict[str, Callable[[Tensor], Any]] = {
    "facts": lambda g: (g.shape, g.dtype, g.stride(), g.is_contiguous(), g.requires_grad, g.is_leaf, g.numel(), len(g)),
    "value": lambda g: (g.norm(), float(g.sum()), g[0, 0].item(), g.tolist(), g.max(0)),
    "views": lambda g: (g.T, g.mT, g.view(-1), g[0], list(g), g.real),
    "numpy": lambda g: (g.numpy().copy().tolist(), np.asarray(g).tolist()),
    "copies": lambda g: (g.clone(), copy.deepcopy(g), pickle.loads(pickle.dumps(g)), g.double(), g.cpu()),
    "operators": lambda g: (g + 1, 2 - g, g @ g.T, -g, g > 0, torch.stack([g, g]), torch.cat([g, g])),
    "foreach": lambda g: (torch._foreach_norm([g, g]), torch._foreach_mul([g], 2.0)),
    "saved": lambda g: saved(g),
}


def saved(g: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save({"g": g}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["g"]


@pytest.mark.parametrize("case", PLACES[1:3], ids=str)
def test_reads_are_right(case: Case, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        pair.engine.backward(square(inputs())(pair.offloaded))
        square(inputs())(pair.plain).backward()
        ours, theirs = pair.offloaded.get_parameter(NAME).grad, pair.plain.get_parameter(NAME).grad
        for what, read in READS.items():
            found, expected = (torch.utils._pytree.tree_leaves(read(g)) for g in (ours, theirs))
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b) if isinstance(b, Tensor) else a == b, what
        assert repr(ours) == repr(theirs)
        pair.reference.collect()
        pair.step()


MIXED: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "gradient first": lambda p, q: (p.grad + p, p.grad.add(q, alpha=0.1), torch.stack([p.grad, q])),
    "parameter first": lambda p, q: (p + p.grad, torch.dot(q.view(-1), p.grad.view(-1)), torch.stack([q, p.grad])),
    "data first": lambda p, q: (p.data + q, p.detach() * p.grad, torch.stack([p.data, q.grad, q])),
    "view first": lambda p, q: (p.grad.T @ q, p.data.T @ q.grad, p.grad.view(-1) + q.view(-1)),
    "state first": lambda p, q: torch._foreach_add([p.data, p.grad, p], [q, q.data, q.grad]),
}


@pytest.mark.parametrize("mix", MIXED)
@pytest.mark.parametrize("case", [NVME[1], placed("cpu", "host")], ids=str)
def test_what_the_engine_holds_meets_in_one_operation(case: Case, mix: str, swap_folder: Path) -> None:
    """Gradients, parameters and read-only copies in one call: none of them is read as a stub."""
    with paired(Stack(2), case, swap_folder) as pair:
        pair.engine.backward(square(inputs())(pair.offloaded))
        square(inputs())(pair.plain).backward()
        found, expected = (
            torch.utils._pytree.tree_leaves(MIXED[mix](m.get_parameter(NAME), m.get_parameter("blocks.0.up.weight")))
            for m in (pair.offloaded, pair.plain)
        )
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.detach(), b.detach())
        del found, a
        pair.reference.collect()
        pair.step()


GONE: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "step": lambda engine, _p: engine.step(),
    "zero_grad": lambda engine, _p: engine.zero_grad(),
    "None": lambda _e, p: setattr(p, "grad", None),
    "another": lambda _e, p: setattr(p, "grad", torch.ones(p.shape)),
}


@pytest.mark.parametrize("how", GONE)
def test_a_gradient_that_was_let_go_says_so(how: str, swap_folder: Path) -> None:
    with running(Stack(2), NVME[0], swap_folder) as engine:
        engine.backward(engine(inputs()).square().sum())
        parameter = engine.module.get_parameter(NAME)
        old = parameter.grad
        GONE[how](engine, parameter)
        engine.backward(engine(inputs()).square().sum())
        for use in (lambda: old + 1, lambda: old.mul_(2), lambda: float(old.sum()), lambda: copy.deepcopy(old)):
            with pytest.raises(GradientError, match=rf"{NAME}: this gradient was let go"):
                use()
        assert old.shape == parameter.shape and float(parameter.grad.norm()) > 0
    with pytest.raises(GradientError, match="let go"):
        old.clone()


def test_that_gradients_do_not_show_in_gathered_is_said_once(
    swap_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Stack(2), NVME[0], swap_folder) as engine:
        with engine.gathered():
            assert not caplog.records
        engine.backward(engine(inputs()).square().sum())
        for _ in range(2):
            with engine.gathered():
                assert engine.module.get_parameter(NAME).grad is None
        said = [r.getMessage() for r in caplog.records if "gathered" in r.getMessage()]
        assert len(said) == 1 and ".grad is None" in said[0]


def test_later_contributions_show(swap_folder: Path) -> None:
    with running(Stack(2), NVME[0], swap_folder) as engine:
        engine.backward(engine(inputs()).square().sum())
        shown = engine.module.get_parameter(NAME).grad
        once = shown.clone()
        engine.backward(engine(inputs()).square().sum())
        assert torch.equal(shown, once * 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_edits_cost_no_bits_of_sums_and_scaled_gradients(dtype: str, swap_folder: Path) -> None:
    """A product with a power of two, undone by another, leaves the step as it was: also of gradients so small that the
    parameter's dtype does not hold them without the loss scale.
    """
    results = []
    for edit in (False, True):
        precision = {"compute_dtype": dtype, "initial_loss_scale": 2.0**12}
        with running(Stack(2), NVME[1], swap_folder, max_grad_norm=None, precision=precision) as engine:
            for seed in range(2):
                x = inputs(seed=seed).to(torch.bfloat16 if dtype == "bf16" else torch.float16)
                engine.backward(engine(x).float().square().sum() * 2.0**-14)
            if edit:
                for parameter in engine.module.parameters():
                    parameter.grad.mul_(0.25).mul_(4.0)
            assert engine.step().stepped
            results.append(states_of(engine))
    for name, state in results[0].items():
        for kind, value in state.items():
            assert torch.equal(torch.as_tensor(results[1][name][kind]), torch.as_tensor(value)), (name, kind)


def test_refused_edits_change_nothing(swap_folder: Path) -> None:
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        pair.backward(square(inputs()))
        gradient = pair.offloaded.get_parameter(NAME).grad
        with pytest.raises(RuntimeError):
            gradient.add_(torch.ones(5, 5))
        with pytest.raises(GradientError, match=r"clone\(\)"):
            gradient.requires_grad_()
        pair.step()


def test_the_norm_is_that_of_edited_gradients(swap_folder: Path) -> None:
    """Also after the norm was known: it is computed anew."""
    for case in PLACES:
        with running(Stack(2), case, swap_folder, max_grad_norm=0.1) as engine:
            engine.backward(engine(inputs()).square().sum())
            before = engine.clip_grad_norm_(1e9)
            for parameter in engine.module.parameters():
                parameter.grad.mul_(2.0)
            assert float(engine.clip_grad_norm_(1e9)) == float(before) * 2
            for parameter in engine.module.parameters():
                parameter.grad = parameter.grad.clone() * 2.0
            assert float(torch.tensor(engine.step().grad_norm)) == float(before) * 4
