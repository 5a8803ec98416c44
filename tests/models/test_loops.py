"""Training loops as they are written for torch: what they do to gradients and through the optimizer arrives.

Compared with `torch.equal`: torch's functions do the same arithmetic on the twin's gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.utils.data import Dataset

import offload
from optimizer_cpu import CPUAdamW
from tests.engine.binding_models import Stack, inputs, square
from tests.engine.common import Case, config_of
from tests.models.common import Duo, cover, duo, everywhere, ordinarily


def flatten(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients as one vector and back, as distributed loops do it."""
    parameters = list(parameters)
    vector = torch.cat([p.grad.reshape(-1) for p in parameters]) / 3
    offset = 0
    for p in parameters:
        p.grad.copy_(vector[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def noise(parameters: Iterable[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.grad += torch.randn(p.shape, generator=generator) * 0.01


def decay(parameters: Iterable[nn.Parameter]) -> None:
    """Decay of weights by hand, in the gradient."""
    with torch.no_grad():
        for p in parameters:
            if p.dim() > 1:
                p.grad = p.grad + 0.1 * p
            else:
                p.grad.add_(p, alpha=0.1)


def surgery(parameters: Iterable[nn.Parameter]) -> None:
    """Takes the part along the weight out of every gradient."""
    with torch.no_grad():
        for p in parameters:
            p.grad.data.sub_(p.data * (p.grad * p).sum() / p.square().sum().clamp(min=1e-6))


def centred(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None and p.dim() > 1:
            p.grad.data -= p.grad.data.mean(dim=1, keepdim=True)


FLOWS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "clip by norm": lambda parameters: utils.clip_grad_norm_(parameters, 0.5),
    "clip by largest": lambda parameters: utils.clip_grad_norm_(parameters, 0.01, norm_type=float("inf")),
    "clip by value": lambda parameters: utils.clip_grad_value_(parameters, 0.05),
    "norm of the gradients": lambda parameters: utils.get_total_norm([p.grad for p in parameters]),
    "flatten": flatten,
    "noise": noise,
    "decay": decay,
    "surgery": surgery,
    "centred": centred,
    "zeros": lambda parameters: [p.grad.zero_() for p in parameters],
}


def on_gradients(pair: Duo, flow: Callable[[Iterable[nn.Parameter]], Any]) -> None:
    """Runs on the engine's parameters and on the twin's, whose `.grad` are the sums of the reference meanwhile."""
    ours = flow(pair.offloaded.parameters())
    for name, p in pair.plain.named_parameters():
        p.grad = pair.reference.gradients.pop(name)[0].view(p.shape)
    theirs = flow(pair.plain.parameters())
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    for name, p in pair.plain.named_parameters():
        assert p.grad is not None
        pair.reference.gradients[name] = p.grad.reshape(-1), 1
        p.grad = None
    pair.gradients_equal()


@pytest.mark.parametrize(("flow", "case"), cover(list(FLOWS)))
def test_what_a_loop_does_to_gradients(flow: str, case: Case, swap_folder: Path) -> None:
    with duo(Stack(3), case, swap_folder) as pair:
        for step in range(2):
            pair.backward(square(inputs(seed=step)))
            pair.backward(square(inputs(seed=step + 5)))
            on_gradients(pair, FLOWS[flow])
            pair.step()


@everywhere
def test_the_commonest_loop(case: Case, swap_folder: Path) -> None:
    """loss.backward(), clip_grad_norm_, optimizer.step(), scheduler.step(), zero_grad()."""
    with duo(Stack(3), case, swap_folder) as pair:
        optimizer = pair.engine.optimizer
        plain = pair.reference.optimizer, pair.reference.shadow.optimizer
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, *plain)]
        for step in range(3):
            for model in (pair.offloaded, pair.plain):
                square(inputs(seed=step))(model).backward()
            pair.reference.collect()
            on_gradients(pair, lambda parameters: utils.clip_grad_norm_(parameters, max_norm=1.0))
            assert optimizer.step().stepped
            pair.reference.step()
            optimizer.zero_grad()
            pair.offloaded.zero_grad()
            pair.reference.optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            pair.states_equal()
            pair.nothing_resident()


@pytest.mark.parametrize(("rho", "case"), cover([0.05], share=2))
def test_gradients_at_perturbed_weights(rho: float, case: Case, swap_folder: Path) -> None:
    """Weights go along the gradient, a second backward is made there, and they come back (sharpness-aware)."""
    with duo(Stack(2), case, swap_folder) as pair:
        for step in range(2):
            loss = square(inputs(seed=step))
            for model in (pair.offloaded, pair.plain):
                loss(model).backward()
                kept = []
                with torch.no_grad():
                    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                    for p in model.parameters():
                        kept.append(p.detach().clone())
                        p.add_(p.grad, alpha=rho / float(norm))
                model.zero_grad()
                loss(model).backward()
                with torch.no_grad():
                    for p, value in zip(model.parameters(), kept, strict=True):
                        p.copy_(value)
            pair.step()


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Blocks, head and biases: nothing in common."""
    blocks = [p for name, p in model.named_parameters() if "blocks" in name and p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": blocks, "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"params": [model.get_parameter("head.weight")], "lr": 5e-3, "betas": (0.8, 0.95), "eps": 1e-4},
        {"params": biases, "lr": 2e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    ]


@everywhere
def test_each_parameter_follows_its_group(case: Case, swap_folder: Path) -> None:
    """All hyperparameters differ, and one group's change between steps."""
    with duo(Stack(2), case, swap_folder, engine_groups=three_groups) as pair:
        for step in range(4):
            pair.backward(square(inputs(seed=step)))
            pair.step()
            shadow = pair.reference.shadow.optimizer
            for optimizer in (pair.engine.optimizer, pair.reference.optimizer, shadow):
                group = optimizer.param_groups[1]
                assert len(group["params"]) == 1
                group.update(lr=1e-2 / (1 + step), betas=(0.7, 0.9), eps=1e-5, weight_decay=0.05 * step)


@pytest.mark.parametrize(("scale", "case"), cover([2.0**10]))
def test_the_scaler_of_torch(scale: float, case: Case, swap_folder: Path) -> None:
    """`torch.amp.GradScaler` around the optimizer: unscaled gradients are stepped with, infinite ones are not."""
    with duo(Stack(2), case, swap_folder) as pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(square(inputs(seed=step))(pair.offloaded) * factor).backward()
            scaler.unscale_(pair.engine.optimizer)
            utils.clip_grad_norm_(pair.offloaded.parameters(), 1e9)
            scaler.step(pair.engine.optimizer)
            scaler.update()
            pair.engine.optimizer.zero_grad()
            if step != 1:
                square(inputs(seed=step))(pair.plain).backward()
                pair.reference.collect()
                pair.reference.step()
            pair.states_equal()
        assert scaler.get_scale() == scale / 2


class Samples(Dataset[dict[str, Tensor]]):
    """Token ids that are their own labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 97, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[Any]:
    """Three steps of two micro-batches by the trainer of `transformers`; returns losses and gradient norms."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Samples(), optimizers=(optimizer, scheduler)
    )
    trainer.train()
    return [(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history]


@ordinarily(2)
def test_the_trainer_of_transformers(case: Case, swap_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    model = copy.deepcopy(plain)
    expected = fit(plain, CPUAdamW(plain.parameters(), lr=1e-3, weight_decay=0.01), tmp_path)
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
    with offload.initialize(model, config_of(case, swap_folder, max_grad_norm=None, optimizer=settings)) as engine:
        assert fit(engine.module, engine.optimizer, tmp_path) == expected
        twin = dict(plain.named_parameters())
        for name, value in engine.named_full_parameters():
            assert torch.equal(value, twin[name]), name
