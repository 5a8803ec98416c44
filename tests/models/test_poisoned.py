"""Gradients that are not finite: the step is skipped whole, and what follows is as if the batch had never been.

The twin never sees the poisoned batches. Compared with `torch.equal`; under fp16 the twin scales its losses by the
engine's scale of that step, since products with a power of two round as before except where halves become subnormal.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.engine.binding_models import Stack, inputs
from tests.engine.common import HYPER, Case, Reference, assert_states_equal, running, states_of
from tests.models.common import PLACES, cover, everywhere

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = {3: math.inf, 6: math.nan}


def loss_of(model: Any, step: int, dtype: str) -> Tensor:
    return model(inputs(seed=step).to(DTYPES[dtype])).float().square().mean()


@pytest.mark.parametrize(("dtype", "case"), cover(["bf16", "fp16"], share=6))
def test_poisoned_steps_never_were(dtype: str, case: Case, swap_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """inf at step 3 in one parameter, NaN at step 6 in another."""
    model = Stack(3)
    plain = Reference(Stack(3), dtype=dtype, lr_scheduler=lambda o: LambdaLR(o, lambda s: 1 / (1 + s)))
    precision = {"compute_dtype": dtype, "initial_loss_scale": 256.0, "loss_scale_window": 3, "hysteresis": 1}
    caplog.set_level(logging.WARNING, logger="offload")
    scheduler = {"lr_scheduler": lambda o: LambdaLR(o, lambda s: 1 / (1 + s))}
    with running(model, case, swap_folder, precision=precision, **scheduler) as engine:
        names = {3: "blocks.1.down.weight", 6: "head.bias"}
        good = 0
        for step in range(10):
            scale = engine._scale
            handle = None
            if step in POISON:
                value = POISON[step]
                parameter = model.get_parameter(names[step])
                handle = parameter.register_hook(lambda g, value=value: torch.full_like(g, value))
                before = states_of(engine)
            engine.backward(loss_of(model, step, dtype))
            result = engine.step()
            assert result.loss_scale == scale
            if handle is None:
                good += 1
                assert result.stepped and result.skipped_reason is None
                plain.backward(loss_of(plain.model, step, dtype) * scale)
                norm = plain.norm() / scale
                factor = min(1.0, plain.max_grad_norm / (norm + 1e-6)) / scale
                gradients, plain.gradients = plain.gradients, {}
                plain.apply({name: g for name, (g, _) in gradients.items()}, factor)
                plain.optimizer.step()
                plain.scheduler.step()
                assert result.grad_norm == norm
            else:
                handle.remove()
                assert not result.stepped and names[step] in result.skipped_reason
                assert str(result.grad_norm) == str(POISON[step])
                assert_states_equal(states_of(engine), before)
                assert engine._scale == (scale / 2 if dtype == "fp16" else 1.0)
            assert engine.resident_units() == []
            assert engine.lr_scheduler.last_epoch == good
            assert_states_equal(states_of(engine), plain.states())
        assert engine.counters()["steps"] == good == 8 and engine.counters()["skipped_steps"] == 2
    said = [record.getMessage() for record in caplog.records if "step skipped" in record.getMessage()]
    assert len(said) == 2 and names[3] in said[0] and names[6] in said[1]


@everywhere
def test_a_poisoned_batch_among_good_ones_of_a_step(case: Case, swap_folder: Path) -> None:
    """One bad micro-batch costs its whole step, and no later one; the first bad parameter in the model's order."""
    model = Stack(2)
    with running(model, case, swap_folder, precision={"compute_dtype": "bf16"}) as engine:
        before = states_of(engine)
        for seed, factor in enumerate((1.0, math.inf, 1.0)):
            engine.backward(loss_of(model, seed, "bf16") * factor)
        result = engine.step()
        assert not result.stepped and "blocks.0.up.weight" in result.skipped_reason
        assert_states_equal(states_of(engine), before)
        engine.backward(loss_of(model, 0, "bf16"))
        assert engine.step().stepped


@pytest.mark.parametrize(("dtype", "case"), cover(["fp16", "bf16"], share=2))
def test_without_the_check(dtype: str, case: Case, swap_folder: Path) -> None:
    """fp16 is checked even so, since the loss scale needs it; bf16 takes the gradient as torch does."""
    model = Stack(2)
    precision = {"compute_dtype": dtype, "initial_loss_scale": 64.0, "hysteresis": 1}
    sections: dict[str, Any] = {"optimizer": {**HYPER, "check_finite": False}, "max_grad_norm": None}
    with running(model, case, swap_folder, precision=precision, **sections) as engine:
        before = states_of(engine)
        engine.backward(loss_of(model, 0, dtype) * math.nan)
        result = engine.step()
        assert result.stepped == (dtype == "bf16")
        if dtype == "fp16":
            assert engine._scale == 32.0 and "blocks.0.up.weight" in result.skipped_reason
            assert_states_equal(states_of(engine), before)
        else:
            assert result.skipped_reason is None
            assert bool(torch.isnan(engine.get_full("head.weight")).all())


def test_hysteresis_and_growth_of_the_loss_scale(swap_folder: Path) -> None:
    """`hysteresis` overflows halve the scale, good steps in between do not forgive; a full window doubles it."""
    model = Stack(1)
    precision = {
        "compute_dtype": "fp16",
        "initial_loss_scale": 64.0,
        "loss_scale_window": 3,
        "hysteresis": 2,
        "min_loss_scale": 16.0,
    }
    with running(model, PLACES[1], swap_folder, precision=precision) as engine:
        scales = []
        for good in (1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1):
            engine.backward(loss_of(model, 0, "fp16") * (1.0 if good else math.inf))
            assert engine.step().stepped == bool(good)
            scales.append(engine._scale)
        assert scales == HYSTERESIS


HYSTERESIS = [64.0, 64.0, 64.0, 32.0, 32.0, 16.0, 16.0, 16.0, 16.0, 16.0, 32.0]
