"""The models of these tests in `train_batch`, micro-batches unit by unit or one after another.

Compared with `torch.equal` to a twin that takes the micro-batches one after another: contributions to a gradient are
added in their order, whatever order the units run in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.randomness import seed_everything
from tests.engine.binding_models import WIDTH, Block, Stack, checkpointed, inputs
from tests.engine.common import (
    DTYPES,
    Case,
    Reference,
    assert_states_equal,
    decoder,
    running,
    states_of,
    token_batches,
)
from tests.models.common import Duo, cover, duo, ordinarily
from tests.models.test_conditional import Bare, Experts, Integers
from tests.models.test_freeze_thaw import Late, grow, with_adapters
from tests.models.test_modes import EPISODES, Interrupted
from tests.models.test_outputs import CONTAINERS, Chain
from tests.models.test_shared import Borrower, Lists, Loop, Tied, Universal, normed, parametrized, table_shared

ORDERS = ("layer_major", "batch_major")


class Dropping(nn.Module):
    """Blocks left out at random by torch's global generator, and dropout in those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if float(torch.rand(())) > 0.4:
                x = nn.functional.dropout(block(x), 0.2)
        return x * 1.5


def hooked() -> nn.Module:
    """Hooks of modules and parameters change activations and gradients."""
    model = Stack(3)
    model.blocks[0].up.weight.register_hook(lambda g: g * 0.5)
    model.blocks[1].register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 3,))
    model.blocks[1].register_forward_hook(lambda _m, _a, y: y.clamp(-2, 2))
    model.blocks[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 2,))
    return model


class Coded(nn.Module):
    """A frozen table of 8-bit codes with a trained scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-100, 100, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(0)).to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ (self.codes.float() * self.scale[:, None]).t()


Loss = Callable[[Any, Any, Any], Tensor]


def square(_model: Any, outputs: Any, _batch: Any) -> Tensor:
    return outputs.square().sum()  # type: ignore[no-any-return]


def penalised(model: Any, outputs: Any, _batch: Any) -> Tensor:
    """Reads parameters of all units outside any forward, in every micro-batch."""
    return outputs.square().sum() + 1e-2 * sum(w.pow(2).sum() for w in model.parameters())  # type: ignore[no-any-return]


def of_tokens(_model: Any, outputs: Any, ids: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), ids.flatten())


def in_a_container(container: str) -> Loss:
    def loss(_model: Any, outputs: Any, _batch: Any) -> Tensor:
        value = outputs if isinstance(outputs, Tensor) else CONTAINERS[container][1](outputs)
        return value.square().sum()

    return loss


def vectors(seed: int) -> Tensor:
    return inputs(seed=seed)


def with_gradients(seed: int) -> Tensor:
    return inputs(seed=seed, grad=True)  # reentrant checkpointing wants one


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Loss]] = {
    "linear three times": (Loop, vectors, square),
    "blocks twice, checkpointed": (Universal, vectors, square),
    "tied and read by the parent": (Tied, tokens, of_tokens),
    "table of one block": (table_shared, vectors, square),
    "weight of a sibling": (Borrower, vectors, square),
    "penalty on all weights": (lambda: Stack(3), vectors, penalised),
    "normed": (normed, vectors, square),
    "parametrizations": (parametrized, vectors, square),
    "lists, GRU": (Lists, vectors, square),
    "experts": (Experts, vectors, square),
    "one expert": (lambda: Experts(only=2), vectors, square),
    "left out at random": (Dropping, with_gradients, square),
    "integers, unused parts": (Integers, tokens, square),
    "no gradient into a part": (Bare, vectors, square),
    "hooks": (hooked, vectors, square),
    **{name: (partial(Chain, name, name == "nested"), vectors, in_a_container(name)) for name in CONTAINERS},
    "adapters": (with_adapters, vectors, square),
    "adapters, reentrant": (lambda: with_adapters(checkpointed(True, 1)), with_gradients, square),
    "adapters, checkpointed": (lambda: with_adapters(checkpointed(False, 2)), vectors, square),
    "8-bit base": (lambda: Stack(3, block=Coded), vectors, square),
}


def batch_step(pair: Duo, count: int = 3, make: Callable[[int], Tensor] = vectors, loss_of: Loss = square) -> None:
    """One step of both; losses, gradients' effects and states are equal."""
    batches = [make(seed) for seed in range(count)]
    step = sum(pair.engine.counters()[kind] for kind in ("steps", "skipped_steps"))
    ours = pair.offloaded
    result = pair.engine.train_batch(batches, loss_fn=lambda outputs, batch: loss_of(ours, outputs, batch))
    total = 0.0
    for index, x in enumerate(make(seed) for seed in range(count)):
        seed_everything(pair.engine.config.seed, step, index)
        loss = loss_of(pair.plain, pair.plain(x), x) / count
        pair.reference.backward(loss)
        total += float(loss.detach())
    pair.reference.step()
    assert result.stepped and result.loss == total
    pair.states_equal()
    pair.nothing_resident()


@pytest.mark.parametrize(("scenario", "case"), cover([(m, o) for m in MODELS for o in ORDERS]))
def test_micro_batches(scenario: tuple[str, str], case: Case, swap_folder: Path) -> None:
    name, order = scenario
    build, make, loss = MODELS[name]
    twins = []
    for _ in range(2):  # a deep copy would lack hooks of parameters
        torch.manual_seed(2)
        twins.append(build())
    with duo(twins[0], case, swap_folder, given=twins[1], schedule={"micro_batch_order": order}) as pair:
        for _ in range(2):
            batch_step(pair, make=make, loss_of=loss)


@ordinarily(2, 4)
def test_evaluation_and_errors_between_steps(case: Case, swap_folder: Path) -> None:
    """The twin does only the training."""
    with duo(decoder(), case, swap_folder, schedule={"micro_batch_order": "layer_major"}) as pair:

        def train(seed: int) -> None:
            batches = [{"input_ids": ids, "labels": ids} for ids in token_batches(2, seed=seed)]
            result = pair.engine.train_batch(batches)
            for batch in batches:
                pair.reference.backward(pair.plain(**batch).loss / 2)
            pair.reference.step()
            assert result.stepped
            pair.states_equal()
            pair.nothing_resident()

        for seed, episode in enumerate(EPISODES):
            train(seed)
            episode(pair)
        for where in ("forward", "backward"):
            register = getattr(pair.offloaded.layers[1], f"register_{'full_' * (where == 'backward')}{where}_hook")
            handle = register(fail)
            with pytest.raises(Interrupted):
                pair.engine.train_batch([{"input_ids": ids, "labels": ids} for ids in token_batches(2)])
            handle.remove()
            pair.nothing_resident()
            train(9)


def fail(*_args: Any) -> None:
    raise Interrupted


@pytest.mark.parametrize(("order", "case"), cover(ORDERS, share=2))
def test_two_engines_and_a_reference_in_the_loss(order: str, case: Case, swap_folder: Path) -> None:
    """Alternating steps of two engines; each one's loss asks the other, or a frozen one, without gradients."""
    sections: dict[str, Any] = {"schedule": {"micro_batch_order": order}}
    frozen = Stack(2)
    frozen.requires_grad_(False)
    with (
        duo(Stack(3), case, swap_folder, **sections) as first,
        duo(Stack(4), case, swap_folder, **sections) as second,
        duo(frozen, case, swap_folder, **sections) as judge,
    ):

        def loss_of(other: Duo) -> Loss:
            def loss(model: Any, outputs: Any, batch: Any) -> Tensor:
                asked = [
                    pair.plain if model in (first.plain, second.plain) else pair.offloaded for pair in (other, judge)
                ]
                with torch.no_grad():
                    target = asked[0](batch) - asked[1](batch)
                return (outputs - target).square().sum()  # type: ignore[no-any-return]

            return loss

        for _ in range(2):
            batch_step(first, 2, loss_of=loss_of(second))
            batch_step(second, 2, loss_of=loss_of(first))
            judge.states_equal()


@pytest.mark.parametrize(("order", "case"), cover(ORDERS, share=2))
def test_thawing_and_growing_between_steps(order: str, case: Case, swap_folder: Path) -> None:
    model = Late()
    model.body.blocks[1].requires_grad_(False)
    sections: dict[str, Any] = {"schedule": {"micro_batch_order": order}}
    with duo(model, case, swap_folder, **sections) as pair:
        batch_step(pair)
        for module in (pair.offloaded, pair.plain):
            module.body.blocks[1].requires_grad_(True)
        pair.engine.optimizer.add_param_group({"params": pair.offloaded.body.blocks[1].parameters(), "lr": 1e-3})
        pair.reference.add_group({"params": list(pair.plain.body.blocks[1].parameters()), "lr": 1e-3})
        batch_step(pair)
        for module in (pair.offloaded, pair.plain):
            grow(module)
        pair.engine.adopt()
        fresh = [p for n, p in pair.plain.named_parameters() if "body" not in n and p.requires_grad]
        pair.reference.add_group({"params": fresh})
        batch_step(pair)
        batch_step(pair)


@pytest.mark.parametrize(
    ("scenario", "case"), cover([(dtype, order) for dtype in ("fp32", "bf16", "fp16") for order in ORDERS])
)
def test_a_poisoned_micro_batch_costs_its_step_only(scenario: tuple[str, str], case: Case, swap_folder: Path) -> None:
    """As if the step had never been, but for its number, from which the next one's random numbers come."""
    dtype, order = scenario
    model = Stack(3)
    plain = Reference(Stack(3), dtype=dtype, max_grad_norm=None)
    precision = {"compute_dtype": dtype, "initial_loss_scale": 256.0, "hysteresis": 1}
    sections: dict[str, Any] = {"schedule": {"micro_batch_order": order}, "precision": precision}
    with running(model, case, swap_folder, max_grad_norm=None, **sections) as engine:
        for step in range(4):
            batches = [inputs(seed=step * 3 + k).to(DTYPES[dtype]) for k in range(3)]
            if step in (1, 2):
                batches[1] = batches[1] * (float("inf") if step == 1 else float("nan"))
            scale = engine._scale
            result = engine.train_batch(batches, loss_fn=lambda outputs, _batch: outputs.float().square().sum())
            assert result.stepped == (step not in (1, 2))
            if result.stepped:
                for x in batches:
                    plain.backward(plain.model(x).float().square().sum() / 3 * scale)
                gradients, plain.gradients = plain.gradients, {}
                plain.apply({name: g for name, (g, _) in gradients.items()}, 1 / scale)
            else:
                assert "blocks.0.up.weight" in result.skipped_reason
                assert engine._scale == (scale / 2 if dtype == "fp16" else 1.0)
            assert_states_equal(states_of(engine), plain.states())
            assert engine.resident_units() == []
