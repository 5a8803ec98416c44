"""The optimizer step: skipped as a whole or done as a whole, and torch's rules for groups, schedulers and gradients."""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, ReduceLROnPlateau, SequentialLR

from offload.config import load_config
from offload.errors import GradientError
from offload.recipe import build_param_groups
from offload.scaler import LossScaler

from .common import (
    HYPER,
    TIERS,
    Case,
    Reference,
    assert_states_equal,
    decoder,
    pairwise,
    placed,
    running,
    states_of,
    token_batches,
    two_groups,
    warmup_cosine,
)


class Pair(nn.Module):
    """Three small blocks; the loss is the sum of the chosen blocks' outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return sum(self.blocks[i](x).square().sum() for i in use)  # type: ignore[return-value]


def vectors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(2, 6, generator=generator) for _ in range(count)]


# Gradients that are not finite


BAD = pairwise(
    {
        "bad": (float("inf"), float("-inf"), float("nan")),
        "where": ("first", "middle", "last"),
        "tier": TIERS,
        "device": ("cpu", "sim"),
    }
)


@pytest.mark.parametrize("row", BAD, ids=lambda row: "-".join(map(str, row.values())))
def test_a_gradient_that_is_not_finite_skips_the_whole_step(
    row: dict[str, Any], swap_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, where, tier, device = row.values()
    model = decoder(wide=True)
    names = [name for name, _ in model.named_parameters()]
    name = names[{"first": 0, "middle": len(names) // 2, "last": len(names) - 1}[where]]
    twin = Reference(copy.deepcopy(model), groups=None, lr_scheduler=warmup_cosine)
    case = Case(device=device, gradients=tier)
    with running(model, case, swap_folder, lr_scheduler=warmup_cosine) as engine:
        for number, ids in enumerate(token_batches(3)):
            engine.backward(engine(ids, labels=ids).loss)
            if number == 1:
                before, rates = states_of(engine), [g["lr"] for g in engine.optimizer.param_groups]
                gradient = engine.get_full(name, "grad")
                assert gradient is not None
                gradient.view(-1)[-1] = bad
                engine.set_full(name, "grad", gradient)
                with caplog.at_level(logging.WARNING, logger="offload"):
                    result = engine.step()
                assert not result.stepped and result.skipped_reason is not None and name in result.skipped_reason
                assert result.grad_norm is not None and not torch.isfinite(torch.tensor(result.grad_norm))
                assert name in caplog.text and engine.counters()["skipped_steps"] == 1
                assert_states_equal(states_of(engine), before)
                assert [g["lr"] for g in engine.optimizer.param_groups] == rates
                assert engine.get_full(name, "grad") is None
                continue
            twin.backward(twin.model(ids, labels=ids).loss)
            assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())


def test_the_first_bad_parameter_in_the_models_order_is_named(swap_folder: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.ones(3))
            self.large = nn.Parameter(torch.ones(9000))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.small.sum() * self.large.sum()

    with running(nn.Sequential(Mixed(), Mixed()), Case(), swap_folder) as engine:
        engine.backward(engine(torch.tensor(float("nan"))))
        reason = engine.step().skipped_reason
        assert reason is not None and "0.small" in reason
        assert [name for name, _ in engine.named_full_parameters()] == ["0.small", "0.large", "1.small", "1.large"]


@pytest.mark.parametrize("tier", TIERS)
def test_without_the_check_a_bad_gradient_goes_through_as_in_torch(tier: str, swap_folder: Path) -> None:
    model = Pair()
    twin = Reference(copy.deepcopy(model), check_finite=False, max_grad_norm=None)
    options: dict[str, Any] = {"max_grad_norm": None, "optimizer": {"check_finite": False}}
    with running(model, placed("cpu", tier), swap_folder, **options) as engine:
        for number, x in enumerate(vectors(2)):
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                loss = forward(x, (0, 1))
                backward(loss * float("nan") if number else loss)
            result = engine.step()
            twin.step()
            assert result.stepped and result.grad_norm is None
        found, right = states_of(engine), twin.states()
        for name, entry in right.items():
            assert torch.equal(found[name]["weight"].isnan(), entry["weight"].isnan()), name
            assert entry["weight"].isnan().all() == (not name.startswith("blocks.2"))


# Parameters without a gradient, frozen ones, groups


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_parameters_without_a_gradient_keep_value_and_step_count(device: str, tier: str, swap_folder: Path) -> None:
    model = Pair()
    twin, theirs = Reference(copy.deepcopy(model), max_grad_norm=None), copy.deepcopy(model)
    adamw = torch.optim.AdamW(theirs.parameters(), **HYPER, foreach=False)
    with running(model, placed(device, tier), swap_folder, max_grad_norm=None) as engine:
        for x, use in zip(vectors(4), [(0, 1), (1,), (1, 2), (0, 1, 2)], strict=True):
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                backward(forward(x, use))
            engine.step()
            twin.step()
            theirs(x, use).backward()
            adamw.step()
            adamw.zero_grad()
        assert_states_equal(states_of(engine), twin.states())
        for name, entry in engine.named_full_states():
            assert entry["step"] == int(adamw.state[theirs.get_parameter(name)]["step"]), name
        assert [entry["step"] for _, entry in engine.named_full_states()] == [2, 2, 4, 4, 2, 2]


def test_a_step_without_gradients_changes_nothing(swap_folder: Path) -> None:
    with running(Pair(), Case(), swap_folder) as engine:
        before = states_of(engine)
        assert engine.step().stepped
        assert_states_equal(states_of(engine), before)


def test_frozen_parameters_in_groups_and_out_of_groups(swap_folder: Path) -> None:
    model = Pair()
    model.blocks[1].weight.requires_grad_(False)
    groups = [{"params": list(model.blocks[:2].parameters()), "lr": 0.1}, {"params": [model.blocks[2].bias]}]
    copied = copy.deepcopy(model)
    theirs = [{"params": list(copied.blocks[:2].parameters()), "lr": 0.1}, {"params": [copied.blocks[2].bias]}]
    twin = Reference(copied, groups=theirs)
    with (
        pytest.warns(UserWarning, match=r"blocks\.2\.weight"),
        running(model, placed("sim", "nvme"), swap_folder, param_groups=groups) as engine,
    ):
        for x in vectors(3):
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                backward(forward(x))
            assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())
        assert engine.optimizer.param_groups[0]["params"][0] is model.blocks[0].weight
        assert engine.get_full("blocks.2.weight", "grad") is None


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_freezing_after_initialize_keeps_the_state_for_later(device: str, swap_folder: Path) -> None:
    model = Pair()
    twin = Reference(copy.deepcopy(model))
    with running(model, placed(device, "nvme"), swap_folder) as engine:
        for number, x in enumerate(vectors(5)):
            for module in (model, twin.model):
                module.get_submodule("blocks.1").requires_grad_(number not in (1, 2))
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                backward(forward(x))
            if number == 3:  # as in torch, a gradient that is there is used
                for module in (model, twin.model):
                    module.get_submodule("blocks.1").requires_grad_(False)
            assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())
        assert dict(engine.named_full_states())["blocks.1.weight"]["step"] == 3


def test_no_decay_groups_of_the_recipe(swap_folder: Path) -> None:
    model, copied = decoder(), decoder()
    settings = load_config({"optimizer": {"no_decay": ["norms", "biases"], "weight_decay": 0.1}}).optimizer
    twin = Reference(copied, groups=build_param_groups(copied, settings))
    with running(model, Case(), swap_folder, param_groups=build_param_groups(model, settings)) as engine:
        assert sorted(g["weight_decay"] for g in engine.optimizer.param_groups) == [0.0, 0.1]
        for ids in token_batches(3):
            engine.backward(engine(ids, labels=ids).loss)
            twin.backward(twin.model(ids, labels=ids).loss)
            assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())


def test_hyperparameters_are_those_in_force_at_the_step(swap_folder: Path) -> None:
    model = Pair()
    twin = Reference(copy.deepcopy(model))
    with running(model, Case(), swap_folder) as engine:
        for number, x in enumerate(vectors(3)):
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                backward(forward(x))
            for optimizer in (engine.optimizer, twin.optimizer):
                group = optimizer.param_groups[0]
                group["lr"] = torch.tensor(0.5**number) if number else 0.02
                group["betas"], group["eps"], group["weight_decay"] = (0.8, 0.9), 1e-5, 0.3 * number
            engine.step()
            twin.step()
        assert_states_equal(states_of(engine), twin.states())
        engine.optimizer.param_groups[0]["lr"] = -1.0
        before = states_of(engine)
        engine.backward(engine(vectors(1)[0]))
        with pytest.raises(ValueError, match="lr"):
            engine.step()
        engine.optimizer.param_groups[0]["lr"] = 0.1
        assert_states_equal(states_of(engine), before)
        assert engine.step().stepped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "beta2"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"amsgrad": True}, "amsgrad"),
        ({"maximize": True}, "maximize"),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v),
)
def test_wrong_groups_are_refused_before_anything_is_taken_over(
    change: dict[str, Any], message: str, swap_folder: Path
) -> None:
    model = Pair()
    with (
        pytest.raises(ValueError, match=message),
        running(model, Case(), swap_folder, param_groups=[{"params": list(model.parameters()), **change}]),
    ):
        pass
    assert type(model.blocks[0].weight) is nn.Parameter and bool(model.blocks[0].weight.isfinite().all())
    with (
        pytest.raises(ValueError, match="more than one"),
        running(
            model,
            Case(),
            swap_folder,
            param_groups=[{"params": list(model.parameters())}, {"params": [model.blocks[0].weight]}],
        ),
    ):
        pass
    with running(model, Case(), swap_folder) as engine, pytest.raises(ValueError, match="not a parameter of the model"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


# Clipping


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_clip_grad_norm_is_torchs(device: str, tier: str, swap_folder: Path) -> None:
    """Within 1e-5: torch sums squares in fp32 and rounds each clipped gradient, the engine sums in fp64 and keeps one
    factor.
    """
    model = decoder()
    theirs = copy.deepcopy(model)
    with running(model, placed(device, tier), swap_folder, max_grad_norm=None) as engine:
        ids, *_ = token_batches(1)
        engine.backward(engine(ids, labels=ids).loss)
        theirs(ids, labels=ids).loss.backward()
        for limit in (0.5, 100.0, 0.1):
            right = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
            found = engine.clip_grad_norm_(limit)
            assert found.shape == right.shape and found.dtype == right.dtype
            assert float(found) == pytest.approx(float(right), rel=1e-5)
            for name, p in theirs.named_parameters():
                gradient = engine.get_full(name, "grad")
                assert gradient is not None and p.grad is not None
                assert torch.allclose(gradient, p.grad, rtol=1e-5, atol=1e-9), name
        with pytest.raises(GradientError, match="clip once"):
            engine.backward(engine(ids, labels=ids).loss)
        assert engine.step().grad_norm == pytest.approx(0.1, rel=1e-4)
        engine.backward(engine(ids, labels=ids).loss)  # clipping ended with its step


def test_clipping_by_hand_equals_clipping_by_configuration(swap_folder: Path) -> None:
    results = []
    for by_hand in (False, True):
        with running(decoder(), Case(), swap_folder, max_grad_norm=None if by_hand else 0.5) as engine:
            for ids in token_batches(3):
                engine.backward(engine(ids, labels=ids).loss)
                if by_hand:
                    engine.clip_grad_norm_(0.5)
                engine.step()
            results.append(states_of(engine))
    assert_states_equal(results[0], results[1])


def test_clip_grad_norm_refuses_what_it_does_not_do(swap_folder: Path) -> None:
    with running(Pair(), Case(), swap_folder) as engine:
        with pytest.raises(ValueError, match="norm_type"):
            engine.clip_grad_norm_(1.0, norm_type=1.0)
        with pytest.raises(ValueError, match="max_norm"):
            engine.clip_grad_norm_(-1.0)
        assert float(engine.clip_grad_norm_(1.0)) == 0.0
        engine.backward(engine(vectors(1)[0]) * float("inf"))
        with pytest.raises(RuntimeError, match=r"blocks\.0\.weight is not finite"):
            engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert not engine.step().stepped


@pytest.mark.parametrize("foreach", [None, False, True])
def test_torchs_own_clipping_reaches_the_gradients(foreach: bool | None, swap_folder: Path) -> None:
    model = decoder()
    theirs = copy.deepcopy(model)
    with running(model, Case(), swap_folder, max_grad_norm=None) as engine:
        ids, *_ = token_batches(1)
        engine.backward(engine(ids, labels=ids).loss)
        theirs(ids, labels=ids).loss.backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (model, theirs)]
        assert torch.equal(*norms)
        for name, p in theirs.named_parameters():
            assert torch.equal(engine.get_full(name, "grad"), p.grad), name
        assert engine.step().grad_norm == pytest.approx(0.1, rel=1e-4)


def test_gradients_of_zero_instead_of_none_warn(swap_folder: Path) -> None:
    with running(Pair(), Case(), swap_folder) as engine:
        engine.backward(engine(vectors(1)[0]))
        with pytest.warns(UserWarning, match="set_to_none=False"):
            engine.optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None for p in engine.module.parameters())


def test_zero_grad_between_backward_and_step_also_ends_clipping(swap_folder: Path) -> None:
    model = Pair()
    twin = Reference(copy.deepcopy(model), max_grad_norm=None)
    x, y = vectors(2)
    with running(model, Case(), swap_folder, max_grad_norm=None) as engine:
        for forget in (engine.zero_grad, engine.optimizer.zero_grad, model.zero_grad):
            engine.backward(engine(x))
            engine.clip_grad_norm_(0.01)
            forget()
            assert all(p.grad is None for p in model.parameters())
            engine.backward(engine(y))
            twin.backward(twin.model(y))
            assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())


# The optimizer and schedulers


def test_the_optimizers_step_is_the_engines(swap_folder: Path) -> None:
    model = Pair()
    twin = Reference(copy.deepcopy(model), lr_scheduler=warmup_cosine)
    with running(model, Case(), swap_folder, lr_scheduler=warmup_cosine) as engine:
        for number, x in enumerate(vectors(3)):
            engine.optimizer.zero_grad()

            def closure(x: Tensor = x) -> Tensor:
                loss = engine(x)
                engine.backward(loss)
                return loss

            if number == 1:
                loss = engine.optimizer.step(closure)
                assert torch.equal(loss, twin.model(x))
            else:
                closure()
                result = engine.optimizer.step()
                assert result.stepped
            twin.backward(twin.model(x))
            twin.step()
        assert_states_equal(states_of(engine), twin.states())
        assert engine.lr_scheduler.last_epoch == 3


@pytest.mark.parametrize(
    "make",
    [
        partial(LambdaLR, lr_lambda=lambda step: 1 / (step + 1)),
        partial(CosineAnnealingLR, T_max=4),
        lambda o: SequentialLR(o, [ExponentialLR(o, 0.5), CosineAnnealingLR(o, 3)], milestones=[2]),
    ],
    ids=["lambda", "cosine", "sequential"],
)
@pytest.mark.parametrize("driven_by", ["engine", "user"])
def test_torch_schedulers_work_without_a_warning(make: Any, driven_by: str, swap_folder: Path) -> None:
    model, theirs = Pair(), Pair()
    adamw = torch.optim.AdamW(two_groups(theirs), **HYPER)
    right = make(adamw)
    given = make if driven_by == "engine" else None
    with running(model, Case(), swap_folder, param_groups=two_groups(model), lr_scheduler=given) as engine:
        scheduler = engine.lr_scheduler if driven_by == "engine" else make(engine.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for x in vectors(4):
                engine.backward(engine(x))
                engine.step()
                if driven_by == "user":
                    scheduler.step()
                rates = [group["lr"] for group in engine.optimizer.param_groups]
        for _ in range(4):
            adamw.step()
            right.step()
        assert rates == [group["lr"] for group in adamw.param_groups] == scheduler.get_last_lr()
        state = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(copy.deepcopy(state))
        assert [group["lr"] for group in engine.optimizer.param_groups] == rates
        engine.backward(engine(vectors(1)[0]))
        assert engine.step().stepped


def test_schedulers_that_could_not_work_are_refused(swap_folder: Path) -> None:
    model = Pair()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for wrong, message in (
        (ExponentialLR(other, 0.9), "another optimizer"),
        (ReduceLROnPlateau, "metric"),
        (lambda optimizer: 3, "step"),
    ):
        with pytest.raises(ValueError, match=message), running(model, Case(), swap_folder, lr_scheduler=wrong):
            pass


# fp16 and its loss scale


def fp16(**precision: Any) -> dict[str, Any]:
    return {"precision": {"compute_dtype": "fp16", **precision}, "max_grad_norm": None}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_loss_scale_changes_no_bits_of_the_update(device: str, tier: str, swap_folder: Path) -> None:
    twin = Reference(Pair(), dtype="fp16", max_grad_norm=0.5)
    options = {**fp16(initial_loss_scale=256.0), "max_grad_norm": 0.5}
    with running(Pair(), placed(device, tier, dtype="fp16"), swap_folder, **options) as engine:
        for x in vectors(3):
            half = x.half()
            loss, right = engine(half).float(), twin.model(half).float()
            engine.backward(loss)
            right.mul(256.0).backward()
            twin.collect()
            gradient, stored = engine.get_full("blocks.0.weight", "grad"), twin.gradients["blocks.0.weight"][0]
            assert gradient is not None and torch.equal(gradient.reshape(-1), stored.float() / 256)
            assert engine.get_full("blocks.0.weight", "weight").dtype == torch.float16  # type: ignore[union-attr]
            result = engine.step()
            norm = twin.norm() / 256
            gradients = {name: g for name, (g, _) in twin.gradients.items()}
            twin.gradients = {}
            twin.apply(gradients, min(1.0, 0.5 / (norm + 1e-6)) / 256)
            assert result.grad_norm == norm and result.loss_scale == 256.0
        assert_states_equal(states_of(engine), twin.states())


def test_an_overflow_skips_and_lowers_the_scale(swap_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = fp16(initial_loss_scale=1024.0, hysteresis=2, loss_scale_window=2)
    options["optimizer"] = {"check_finite": False}  # under fp16 there is no choice
    x = vectors(1)[0].half()
    with running(Pair(), Case(dtype="fp16"), swap_folder, **options) as engine:
        before = states_of(engine)
        scales = []
        for _ in range(3):
            engine.backward(engine(x).float() * float("inf"))
            result = engine.step()
            scales.append(result.loss_scale)
            assert not result.stepped and "blocks.0.weight" in (result.skipped_reason or "")
        assert scales == [1024.0, 1024.0, 512.0]
        assert_states_equal(states_of(engine), before)
        for _ in range(3):
            engine.backward(engine(x).float() * 1e-3)
            scales.append(engine.step().loss_scale)
        assert scales[3:] == [512.0, 512.0, 1024.0] and engine.counters()["skipped_steps"] == 3


def test_a_gradient_outside_the_engines_backward_is_an_error_under_fp16(swap_folder: Path) -> None:
    x = vectors(1)[0].half()
    with running(Pair(), Case(dtype="fp16"), swap_folder, **fp16()) as engine:
        with pytest.raises(GradientError, match=r"engine\.backward"):
            engine(x).float().backward()
        engine.zero_grad()
        engine.backward(engine(x).float() * 1e-4)
        assert engine.step().stepped


def test_gradients_set_by_hand_under_a_loss_scale_are_what_was_meant(swap_folder: Path) -> None:
    x = vectors(1)[0].half()
    model = Pair()
    with running(model, Case(dtype="fp16"), swap_folder, **fp16(initial_loss_scale=64.0)) as engine:
        engine.backward(engine(x).float())
        p = model.blocks[1].weight
        before = engine.get_full("blocks.1.weight", "grad")
        assert p.grad is not None and before is not None
        p.grad = p.grad * 0.5
        assert torch.equal(engine.get_full("blocks.1.weight", "grad"), before * 0.5)  # type: ignore[arg-type]
        engine.set_full("blocks.1.weight", "grad", torch.full((6, 6), 1 / 3))
        assert torch.equal(engine.get_full("blocks.1.weight", "grad"), torch.full((6, 6), 1 / 3))  # type: ignore[arg-type]


def test_loss_scaler_arithmetic() -> None:
    scaler = LossScaler(scale=4.0, dynamic=True, window=2, minimum=1.0, hysteresis=1)
    for overflow, scale in ((True, 2.0), (True, 1.0), (True, 1.0), (False, 1.0), (False, 2.0), (False, 2.0)):
        scaler.update(overflow=overflow)
        assert scaler.scale == scale
    fixed = LossScaler(scale=8.0, dynamic=False, window=1, minimum=1.0, hysteresis=1)
    fixed.update(overflow=True)
    assert fixed.scale == 8.0
