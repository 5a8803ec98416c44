"""The models of these tests in `train_batch`, micro-batches unit by unit or one after another.

Compared with `torch.equal` to a twin that takes the micro-batches one after another: contributions to a gradient are
added in their order, whatever order the units run in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.binding_models import Stack, inputs
from tests.engine.common import Case
from tests.models.common import Duo, cover, duo
from tests.models.test_conditional import Experts
from tests.models.test_freeze_thaw import Late, grow, with_adapters
from tests.models.test_shared import Borrower, Lists, Loop, normed, table_shared

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear three times": Loop,
    "table of one block": table_shared,
    "weight of a sibling": Borrower,
    "normed": normed,
    "lists, GRU": Lists,
    "experts": Experts,
    "one expert": lambda: Experts(only=2),
    "adapters": with_adapters,
}


def batch_step(pair: Duo, count: int = 3) -> None:
    """One step of both; losses, gradients' effects and states are equal."""
    batches = [inputs(seed=seed) for seed in range(count)]
    result = pair.engine.train_batch(batches, loss_fn=lambda outputs, _batch: outputs.square().sum())
    total = 0.0
    for x in batches:
        loss = pair.plain(x).square().sum() / count
        pair.reference.backward(loss)
        total += float(loss.detach())
    pair.reference.step()
    assert result.stepped and result.loss == total
    pair.states_equal()
    pair.nothing_resident()


@pytest.mark.parametrize(("scenario", "case"), cover([(m, o) for m in MODELS for o in ("layer_major", "batch_major")]))
def test_micro_batches(scenario: tuple[str, str], case: Case, swap_folder: Path) -> None:
    name, order = scenario
    torch.manual_seed(2)
    with duo(MODELS[name](), case, swap_folder, schedule={"micro_batch_order": order}) as pair:
        for _ in range(2):
            batch_step(pair)


@pytest.mark.parametrize(("order", "case"), cover(["layer_major", "batch_major"], share=2))
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


@pytest.mark.parametrize(("order", "case"), cover(["layer_major", "batch_major"]))
def test_a_poisoned_micro_batch_costs_its_step_only(order: str, case: Case, swap_folder: Path) -> None:
    with duo(Stack(3), case, swap_folder, schedule={"micro_batch_order": order}) as pair:
        batches = [inputs(seed=seed) for seed in range(3)]
        batches[1] = batches[1] * float("nan")

        def loss(outputs: Tensor, _batch: Any) -> Tensor:
            return outputs.square().sum()

        result = pair.engine.train_batch(batches, loss_fn=loss)
        assert not result.stepped and "blocks.0.up.weight" in result.skipped_reason
        pair.states_equal()
        batch_step(pair)
