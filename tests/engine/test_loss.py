"""The loss of a large vocabulary in chunks: right, the same everywhere, and never with all logits at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offload
from offload.models import Llama, LlamaConfig
from tests.engine.common import CLIP, Case, assert_states_equal, pairwise, placed, running, states_of, token_batches

VOCABULARY, WIDTH = 97, 24


class Largest(TorchDispatchMode):
    """Notes the most rows of any tensor whose last dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            shape = tensor.shape if isinstance(tensor, Tensor) else ()
            if len(shape) > 1 and shape[-1] == VOCABULARY and shape != (WIDTH, VOCABULARY):  # a transposed head
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


def head_and_data(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(4, 15, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (4, 15))
    targets[0, 3:9] = -100
    return head, hidden, targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 7, 60, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch(chunk: int, reduction: str, bias: bool) -> None:
    head, hidden, targets = head_and_data(bias=bias)
    with Largest() as largest:
        loss = offload.chunked_cross_entropy(hidden, head, targets, chunk, reduction=reduction)
        loss.backward()  # type: ignore[no-untyped-call]
    assert largest.rows == min(chunk, 60)
    found = [p.grad for p in (hidden, *head.parameters())]
    hidden.grad = None
    head.zero_grad()
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32 and torch.allclose(loss, expected, rtol=1e-6)
    for gradient, tensor in zip(found, (hidden, *head.parameters()), strict=True):
        assert gradient is not None and tensor.grad is not None
        assert torch.allclose(gradient, tensor.grad, rtol=1e-4, atol=1e-6)


def test_no_gradient_and_low_precision() -> None:
    head, hidden, targets = head_and_data(torch.bfloat16)
    with torch.no_grad():
        plain = F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten())
        assert torch.allclose(offload.chunked_cross_entropy(hidden, head.weight, targets, 8), plain, rtol=5e-2)
        assert not offload.chunked_cross_entropy(hidden, head, targets, 8).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk = 0"),
        ({"chunk": 2.0}, "chunk = 2.0"),
        ({"reduction": "none"}, "reduction = 'none'"),
        ({"targets": torch.zeros(4, 14, dtype=torch.int64)}, "do not fit"),
        ({"hidden": torch.zeros(4, 15, WIDTH + 1)}, "do not fit"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    head, hidden, targets = head_and_data()
    with pytest.raises(ValueError, match=message):
        offload.chunked_cross_entropy(**{"hidden": hidden, "head": head, "targets": targets, "chunk": 4, **change})


def model(tied: bool) -> Llama:
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            layers=3,
            heads=3,
            max_positions=32,
            tie_embeddings=tied,
            dropout=0.1,
        )
    )


def train(case: Case, folder: Path, tied: bool, **sections: Any) -> tuple[list[Any], dict[str, Any]]:
    with running(model(tied), case, folder, max_grad_norm=CLIP, **sections) as engine:
        results = []
        for step in range(2):
            batches = [{"input_ids": ids, "labels": ids} for ids in token_batches(3, seed=step)]
            with Largest() as largest:
                result = engine.train_batch(batches)
            assert largest.rows <= 5 or "loss_chunk" not in sections["schedule"]
            results.append((result.loss, result.grad_norm))
        return results, states_of(engine)


ROWS = pairwise(
    {
        "device": ["cpu", "sim"],
        "tier": ["device", "host", "nvme"],
        "order": ["batch_major", "layer_major"],
        "activations": ["keep", "recompute"],
        "tied": [False, True],
    }
)


@pytest.mark.parametrize("tied", [False, True])
def test_the_models_loss_in_chunks_has_the_same_bits_everywhere(tied: bool, swap_folder: Path) -> None:
    expected = train(placed("cpu", "host"), swap_folder, tied, schedule={"loss_chunk": 5})
    whole = train(placed("cpu", "host"), swap_folder, tied, schedule={})
    assert expected[0] == [pytest.approx(pair, rel=1e-4) for pair in whole[0]] and expected[0] != whole[0]
    for row in ROWS:
        if row["tied"] == tied:
            case = placed(row["device"], row["tier"])
            sections = {
                "schedule": {"loss_chunk": 5, "micro_batch_order": row["order"]},
                "placement": {"activations": row["activations"]},
            }
            found = train(case, swap_folder, tied, **sections)
            assert found[0] == expected[0], row
            assert_states_equal(found[1], expected[1])


class Body(nn.Module):
    """A model that returns hidden states; its head is used by the loss function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.emb(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden


@pytest.mark.parametrize("order", ["batch_major", "layer_major"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_in_a_loss_function(tier: str, order: str, swap_folder: Path) -> None:
    found = []
    for case, chosen in ((placed("cpu", "host"), "batch_major"), (placed("sim", tier), order)):
        with running(Body(), case, swap_folder, schedule={"micro_batch_order": chosen}) as engine:
            head = engine.module.head

            def loss_fn(hidden: Tensor, ids: Tensor, head: Any = head) -> Tensor:
                return offload.chunked_cross_entropy(hidden[:, :-1], head, ids[:, 1:], 5)

            loads = head_loads(engine)
            results = [engine.train_batch(token_batches(3, seed=step), loss_fn) for step in range(2)]
            if order == chosen == "layer_major":
                assert head_loads(engine) - loads <= 2 * 2
            found.append(([(r.loss, r.grad_norm) for r in results], states_of(engine)))
    assert found[0][0] == found[1][0]
    assert_states_equal(found[1][1], found[0][1])


def head_loads(engine: offload.Engine) -> int:
    return next(unit.loads for unit in engine._residency.units if unit.name == "head")


def test_a_chunk_without_effect_warns(swap_folder: Path) -> None:
    with (
        pytest.warns(UserWarning, match=r"loss_chunk = 8 has no effect on Body.*chunked_cross_entropy"),
        running(Body(), placed("cpu", "nvme"), swap_folder, schedule={"loss_chunk": 8}),
    ):
        pass
