"""Training interrupted by evaluation, generation and exceptions equals training alone.

The twin does only the training. Compared with `torch.equal`: nothing that happens between steps may change a number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.binding_models import Stack, inputs, square
from tests.engine.common import Case, decoder, token_batches
from tests.models.common import Duo, cover, duo, everywhere


def generate(model: Any, prompt: Tensor, count: int) -> Tensor:
    """Greedy decoding without a cache."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


class Interrupted(Exception):
    """Raised on purpose."""


def parts(pair: Duo) -> tuple[Any, Tensor, Callable[[Any], Tensor]]:
    """The repeated blocks of either model, an input and a loss."""
    if isinstance(pair.offloaded, Stack):
        return pair.offloaded.blocks, inputs(), lambda model: model(inputs()).sum()
    ids = token_batches(1)[0]
    return pair.offloaded.layers, ids, lambda model: model(ids, labels=ids).loss


def fail_in_forward(pair: Duo) -> None:
    blocks, x, _ = parts(pair)
    handle = blocks[1].register_forward_hook(_raise)
    with pytest.raises(Interrupted):
        pair.engine(x)
    handle.remove()


def fail_in_backward(pair: Duo) -> None:
    blocks, _, loss_of = parts(pair)
    handle = blocks[1].register_full_backward_hook(_raise)
    loss = loss_of(pair.engine)
    with pytest.raises(Interrupted):
        pair.engine.backward(loss)
    handle.remove()
    pair.engine.zero_grad()  # what the failed backward left behind, as in torch


def _raise(*_args: Any) -> None:
    raise Interrupted


def evaluate(context: Callable[[], Any]) -> Callable[[Duo], None]:
    def run(pair: Duo) -> None:
        ids = token_batches(1, seed=9)[0]
        pair.engine.eval()
        pair.plain.eval()
        with context():
            pair.both(lambda model: model(ids).logits)
        pair.engine.train()
        pair.plain.train()

    return run


def generate_twenty(pair: Duo) -> None:
    prompt = token_batches(1, size=1, time=4, seed=8)[0]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            ids = pair.both(lambda model: generate(model, prompt, 20))
    assert ids.shape == (1, 24)


EPISODES: list[Callable[[Duo], None]] = [
    evaluate(torch.no_grad),
    evaluate(torch.inference_mode),
    generate_twenty,
    fail_in_forward,
    fail_in_backward,
    evaluate(torch.enable_grad),
]


@everywhere
def test_mode_dance(case: Case, swap_folder: Path) -> None:
    with duo(decoder(), case, swap_folder, max_grad_norm=0.25) as pair:
        for step, ids in enumerate(token_batches(len(EPISODES) + 5)):
            pair.backward(lambda model, ids=ids: model(ids, labels=ids).loss)
            pair.step()
            if step < len(EPISODES):
                EPISODES[step](pair)
                pair.nothing_resident()
                pair.states_equal()


@pytest.mark.parametrize(("dropout", "case"), cover([0.1]))
def test_random_state_is_the_users(dropout: float, case: Case, swap_folder: Path) -> None:
    """A plain call draws what it would draw without the engine, also after evaluation in between."""
    with duo(decoder(dropout=dropout), case, swap_folder) as pair:
        for ids in token_batches(3):
            for model in (pair.offloaded, pair.plain):
                torch.manual_seed(4)
                model.eval()
                with torch.no_grad():
                    model(ids)
                model.train()
                loss = model(ids, labels=ids).loss
                loss.backward()
            pair.step()


@pytest.mark.parametrize(("cache", "case"), cover(["key-value cache", "no cache"], share=3))
def test_generation_of_transformers(cache: str, case: Case, swap_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    with duo(transformers.LlamaForCausalLM(config), case, swap_folder) as pair:
        for ids in token_batches(2):
            pair.backward(lambda model, ids=ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
            pair.step()
            prompt = ids[:1, :4]
            options = {
                "max_new_tokens": 20,
                "do_sample": False,
                "use_cache": cache == "key-value cache",
                "pad_token_id": 0,
            }
            pair.both(lambda model, prompt=prompt, options=options: model.generate(prompt, **options))
            pair.nothing_resident()


@pytest.mark.parametrize(("context", "case"), cover(["inference_mode", "no_grad"], share=3))
def test_a_part_of_the_model_under_inference(context: str, case: Case, swap_folder: Path) -> None:
    """What was loaded ahead for the next block meanwhile serves a training step."""
    with duo(Stack(4), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        for count in (1, 2, 3):
            with getattr(torch, context)():
                for index in range(count):
                    pair.both(lambda model, index=index: model.blocks[index](inputs()))
                pair.both(lambda model: model.head.weight * 1.0)
            pair.train(square(inputs()), steps=1)


@pytest.mark.parametrize(("kind", "case"), cover(["forward", "backward", "step"], share=2))
def test_exceptions_leave_nothing_resident(kind: str, case: Case, swap_folder: Path) -> None:
    with duo(Stack(4), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        for _ in range(3):
            if kind == "forward":
                fail_in_forward(pair)
            elif kind == "backward":
                fail_in_backward(pair)
            else:
                with pair.engine.gathered(), pytest.raises(RuntimeError, match="in use"):
                    pair.engine.step()
        pair.engine.zero_grad()
        pair.nothing_resident()
        pair.train(square(inputs()), steps=2)


@pytest.mark.parametrize(("frozen", "case"), cover([True]))
def test_evaluation_builds_no_graph_state(frozen: bool, case: Case, swap_folder: Path) -> None:
    """Many evaluations between two steps: no lease, no activation and no gradient is left of them."""
    model = Stack(3)
    model.blocks[0].requires_grad_(not frozen)
    with duo(model, case, swap_folder) as pair:
        for _ in range(20):
            pair.both(lambda m: m(inputs()).detach())  # a graph is built and dropped
        pair.nothing_resident()
        assert pair.engine.get_full("head.weight", "grad") is None
        pair.train(square(inputs()))


def test_modules_say_their_mode(swap_folder: Path) -> None:
    with duo(nn.Sequential(Stack(2), nn.Dropout(0.5)), Case(), swap_folder) as pair:
        assert pair.engine.train(False) is pair.engine and not pair.offloaded[1].training
        assert pair.engine.train() is pair.engine and pair.offloaded[1].training
