"""`train_batch`: one optimizer step over micro-batches, with means, token counts and seeds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offload.errors import GradientError
from offload.models.llama import LlamaOutput
from offload.randomness import seed_everything

from .common import (
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
)


def as_dicts(batches: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def reference_step(twin: Reference, batches: list[Tensor], number: int) -> tuple[float, float]:
    total = 0.0
    for index, ids in enumerate(batches):
        seed_everything(0, number, index)
        loss = twin.model(ids, labels=ids).loss / len(batches)
        twin.backward(loss)
        total += float(loss.detach())
    return total, twin.step()


ROWS = pairwise(
    {
        "parameters": TIERS,
        "gradients": TIERS,
        "optimizer": TIERS,
        "device": ("cpu", "sim"),
        "dtype": ("fp32", "bf16"),
        "prefetch": (0, 2),
    }
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_the_mean_over_micro_batches_with_dropout(row: dict[str, Any], swap_folder: Path) -> None:
    case = Case(**row)
    twin = Reference(decoder(dropout=0.3), dtype=case.dtype)
    with running(decoder(dropout=0.3), case, swap_folder) as engine:
        for number in range(3):
            batches = token_batches(3, seed=number)
            torch.manual_seed(number + int(case.device == "sim"))  # what came before must not matter
            result = engine.train_batch(as_dicts(batches))
            loss, norm = reference_step(twin, batches, number)
            assert (result.stepped, result.loss, result.grad_norm) == (True, loss, norm)
        assert_states_equal(states_of(engine), twin.states())


def token_sum(outputs: LlamaOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["labels"][:, 1:].flatten()
    losses = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return losses, (targets != -100).sum()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_mean_over_all_target_tokens(device: str, swap_folder: Path) -> None:
    """Micro-batches with different numbers of targets weigh as their tokens do."""
    (ids,) = token_batches(1, size=6)
    labels = ids.clone()
    labels[1, 3:], labels[4, :9] = -100, -100
    whole = decoder()
    loss = whole(ids, labels=labels).loss
    loss.backward()
    right = {name: p.grad for name, p in whole.named_parameters()}
    with running(decoder(), placed(device, "nvme"), swap_folder, max_grad_norm=None) as engine:
        seen: dict[str, Tensor] = {}
        original = engine.step

        def step() -> Any:
            seen.update({name: engine.get_full(name, "grad") for name in right})  # type: ignore[misc]
            return original()

        engine.step = step  # type: ignore[method-assign]
        parts = [{"input_ids": ids[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2, 4)]
        result = engine.train_batch(parts, token_sum)
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
        norm = torch.nn.utils.get_total_norm([g for g in right.values() if g is not None])
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for name, gradient in right.items():
            assert gradient is not None and torch.allclose(seen[name], gradient, rtol=1e-4, atol=1e-8), name
        del engine.step


def test_kinds_of_micro_batches(swap_folder: Path) -> None:
    (ids,) = token_batches(1)
    results = []
    for batch in ({"input_ids": ids, "labels": ids}, (ids, ids), [ids, ids]):
        with running(decoder(), Case(), swap_folder) as engine:
            results.append(engine.train_batch([batch]).loss)
    with running(decoder(), Case(), swap_folder) as engine:

        def loss_fn(outputs: LlamaOutput, batch: Tensor) -> Tensor:
            return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        results.append(engine.train_batch(iter([ids]), loss_fn).loss)
    assert results[0] == results[1] == results[2] == pytest.approx(results[3], rel=1e-6)


def test_what_cannot_be_a_loss_is_named_and_leaves_nothing_behind(swap_folder: Path) -> None:
    (ids,) = token_batches(1)
    good = {"input_ids": ids, "labels": ids}
    with running(decoder(), Case(), swap_folder) as engine:
        before = states_of(engine)
        with pytest.raises(ValueError, match="at least one"):
            engine.train_batch([])
        with pytest.raises(ValueError, match=r"train_batch\(\[batch\]\)"):
            engine.train_batch(good)
        with pytest.raises(ValueError, match=r"outputs\.loss of micro-batch 1"):
            engine.train_batch([good, {"input_ids": ids}])
        with pytest.raises(ValueError, match="loss_fn of micro-batch 0"):
            engine.train_batch([good], lambda outputs, batch: outputs.logits)
        counts = iter([(1.0, 3), 1.0])

        def sometimes(outputs: LlamaOutput, batch: Any) -> Any:
            return (outputs.loss, 3) if isinstance(next(counts), tuple) else outputs.loss

        with pytest.raises(ValueError, match="some micro-batches only"):
            engine.train_batch([good, good], sometimes)
        with pytest.raises(TypeError):
            engine.train_batch([good, {"wrong": 1}])
        assert all(engine.get_full(name, "grad") is None for name in before)
        assert_states_equal(states_of(engine), before)
        engine.backward(engine(**good).loss)
        with pytest.raises(GradientError, match="earlier backward"):
            engine.train_batch([good])
        assert engine.step().stepped and engine.train_batch([good]).stepped


def test_a_skipped_batch_says_so_and_the_next_has_other_random_numbers(swap_folder: Path) -> None:
    (ids,) = token_batches(1)
    draws = []

    def loss_fn(outputs: LlamaOutput, batch: Any) -> Tensor:
        draws.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        assert outputs.loss is not None
        return outputs.loss * (float("nan") if len(draws) == 1 else 1.0)

    good = {"input_ids": ids, "labels": ids}
    with running(decoder(), Case(), swap_folder) as engine:
        result = engine.train_batch([good], loss_fn)
        assert not result.stepped and result.skipped_reason is not None
        assert engine.train_batch([good, good], loss_fn).stepped
    assert len(set(draws)) == 3
    draws_before, draws[:] = list(draws), []
    with running(decoder(), placed("sim", "host"), swap_folder) as engine:
        engine.train_batch([good], loss_fn)
        engine.train_batch([good, good], loss_fn)
    assert draws == draws_before
    with running(decoder(), Case(seed=1), swap_folder) as engine:
        engine.train_batch([good], loss_fn)
    assert draws[-1] != draws_before[0]


def test_plain_calls_leave_random_state_alone(swap_folder: Path) -> None:
    (ids,) = token_batches(1)
    model, twin = decoder(dropout=0.2), decoder(dropout=0.2)
    with running(model, placed("sim", "nvme"), swap_folder) as engine:
        torch.manual_seed(5)
        found = [engine(ids, labels=ids).loss for _ in range(2)]
        torch.manual_seed(5)
        right = [twin(ids, labels=ids).loss for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
