"""Unusual models, outputs and uses: right or refused by name, and nothing that stays in memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import OffloadError
from tests.engine.binding_models import NVME, WIDTH, Block, Stack, checkpointed, inputs, paired, square
from tests.engine.common import Case, config_of, placed, token_batches

swapped = pytest.mark.parametrize("case", NVME, ids=str)
CASE = NVME[0]


@dataclasses.dataclass
class Result:
    first: Tensor
    rest: dict[str, Any]


class Returning(nn.Module):
    """Returns its result in a container of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        if self.kind == "dict":
            return {"y": y, "none": None, "n": 3}
        if self.kind == "dataclass":
            return Result(y, {"deep": [y * 2, None]})
        if self.kind == "tuple":
            return y, (y * 2, "text")
        self.side = y
        return None


def collect(model: nn.Module, kind: str) -> Tensor:
    x = inputs(grad=True)
    for block in model.blocks:
        out = block(x)
        if kind == "dict":
            x = out["y"]
        elif kind == "dataclass":
            x = out.first + out.rest["deep"][0]
        elif kind == "tuple":
            x = out[0] + out[1][0]
        else:
            x = block.side
            del block.side
    return model.head(x).square().sum()


@swapped
@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple", "none"])
def test_outputs_in_containers(case: Case, swap_folder: Path, kind: str) -> None:
    with paired(Stack(block=lambda: Returning(kind)), case, swap_folder) as pair:
        pair.train(lambda model: collect(model, kind))


@swapped
def test_outputs_modified_in_place(case: Case, swap_folder: Path) -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.down(torch.tanh(self.up(x * 1))))

    def run(model: Stack) -> Tensor:
        x = inputs(grad=True) * 1
        for block in model.blocks:
            x = block(x)
            x[:, :2].mul_(2)  # through a view
            x += 1
        return model.head(x).square().sum()

    with paired(Stack(block=InPlace), case, swap_folder) as pair:
        pair.train(run)


@swapped
def test_unit_that_calls_itself(case: Case, swap_folder: Path) -> None:
    class Recursive(Block):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    with paired(Stack(block=Recursive), case, swap_folder) as pair:
        pair.train(square(inputs()))
        pair.offloaded.blocks[1].register_forward_pre_hook(_raise_when_deep, with_kwargs=True, prepend=True)
        with pytest.raises(ZeroDivisionError):
            pair.engine(inputs())
        pair.nothing_resident()


def _raise_when_deep(_module: nn.Module, args: Any, _kwargs: Any) -> None:
    if len(args) > 1 and args[1] == 0:
        raise ZeroDivisionError


@swapped
def test_input_shared_by_all_blocks(case: Case, swap_folder: Path) -> None:
    """As a position bias: its gradient is complete only when the whole backward has run."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, *, bias: Tensor) -> Tensor:
            return self.block(x) * bias

    def run(model: Stack) -> Tensor:
        bias = model.head.bias.sum() * torch.ones(WIDTH)
        x = inputs(grad=True)
        for block in model.blocks:
            x = block(x, bias=bias)
        return model.head(x).square().sum()

    with paired(Stack(6, block=Biased), case, swap_folder) as pair:
        pair.train(run, steps=1)
        planned = pair.engine.memory().planned["device"].get("leases", 0)
        assert pair.engine.memory().peak["device"]["leases"] <= planned
        pair.train(run, steps=1)


@pytest.mark.parametrize("mode", ["plain", "hooks", "reentrant", "captured"])
def test_training_in_the_least_device_memory(swap_folder: Path, mode: str) -> None:
    """With room for what is planned and not a byte more, leases that are held for speed give way."""
    run = None if mode in ("plain", "captured") else checkpointed(mode == "reentrant", 2)
    case = placed("sim", "nvme")
    with paired(Stack(8, run=run), case, swap_folder) as pair:
        planned = sum(pair.engine.memory().planned["device"].values())

    def loss(model: Stack) -> Tensor:
        caught: list[Tensor] = []
        handles = [b.up.register_forward_hook(lambda _m, _a, out: caught.append(out)) for b in model.blocks]
        out = model(inputs(grad=True)).square().sum()
        for handle in handles:
            handle.remove()
        return sum((t.mean() for t in caught), out * 0)

    with paired(Stack(8, run=run), case, swap_folder, memory={"device": planned + (64 << 10)}) as pair:
        pair.train(loss if mode == "captured" else square(inputs(grad=True)))
        assert pair.engine.memory().peak["device"]["leases"] <= planned


@swapped
def test_weight_norm_and_parametrizations(case: Case, swap_folder: Path) -> None:
    def block() -> nn.Module:
        inner = Block()
        parametrizations.weight_norm(inner.up)
        parametrizations.spectral_norm(inner.down)
        return inner

    with paired(Stack(block=block), case, swap_folder) as pair:
        pair.train(lambda model: model(inputs()).square().sum() + model.blocks[1].up.weight.square().sum())


@swapped
def test_weight_written_in_the_forward_before_it_is_used(case: Case, swap_folder: Path) -> None:
    class Clamped(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with paired(Stack(block=Clamped), case, swap_folder) as pair:
        pair.train(square(inputs()))


@swapped
def test_custom_function_that_saves_a_weight(case: Case, swap_folder: Path) -> None:
    with paired(Stack(block=Custom), case, swap_folder) as pair:
        pair.train(square(inputs(grad=True)))
        pair.train(lambda m: Product.apply(inputs(grad=True), m.blocks[0].up.weight).square().sum())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Product.apply(x, self.up.weight))


@swapped
def test_frozen_and_unfrozen(case: Case, swap_folder: Path) -> None:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    with paired(model, case, swap_folder) as pair:
        pair.train(square(inputs(grad=True)), steps=1)
        for m in (pair.offloaded, pair.plain):
            m.blocks[2].requires_grad_(False)
        pair.train(square(inputs()), steps=1)
        for m in (pair.offloaded, pair.plain):
            m.blocks[2].requires_grad_(True)
        pair.train(square(inputs()), steps=1)


@swapped
def test_views_kept_beyond_the_lease(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:
        kept: list[Tensor] = []

        def keep(module: nn.Module, _args: Any) -> None:
            kept.extend((module.weight.detach(), module.weight[1:3], module.weight.t()))

        handle = pair.offloaded.blocks[1].up.register_forward_pre_hook(keep)
        pair.backward(square(inputs()))
        handle.remove()
        expected = pair.plain.blocks[1].up.weight.detach().clone()
        pair.both(lambda model: model(inputs()))
        assert pair.engine.resident_units() == []
        assert pair.leased() > 0  # held by the views alone
        assert pair.engine.step().stepped
        for view, want in zip(kept, (expected, expected[1:3], expected.t()), strict=True):
            assert torch.equal(view, want)
        kept.clear()
        del view
        pair.nothing_resident()


@swapped
def test_graph_through_a_view_made_outside(case: Case, swap_folder: Path) -> None:
    with paired(Stack(), case, swap_folder) as pair:

        def run(model: Stack) -> Tensor:
            view = model.head.weight.t()
            return (model.run(model, inputs()) @ view).square().sum()

        pair.train(run)
        stale = run(pair.offloaded)
        pair.backward(square(inputs()))
        pair.engine.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|run the forward again"):
            stale.backward()
        pair.engine.zero_grad()


def test_forward_without_backward_leaves_no_activation(swap_folder: Path) -> None:
    """A packed result of an operation must not hold the graph that holds it."""

    class Saving(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.out = torch.exp(super().forward(x))
            return torch.sigmoid(self.out)

    with paired(Stack(block=Saving), CASE, swap_folder) as pair:
        loss = pair.offloaded(inputs()).sum()
        seen = [weakref.ref(block.out.untyped_storage()) for block in pair.offloaded.blocks]
        for block in pair.offloaded.blocks:
            del block.out
        assert any(ref() is not None for ref in seen)
        del loss
        assert [ref() for ref in seen] == [None] * len(seen)
        pair.nothing_resident()


def test_hooks_on_leaves_go_with_their_graph(swap_folder: Path) -> None:
    with paired(Stack(), CASE, swap_folder) as pair:
        x = inputs(grad=True)
        kept = pair.offloaded(x)
        assert len(x._backward_hooks) == 1
        for _ in range(3):
            pair.offloaded(x)
        assert len(x._backward_hooks) == 1
        del kept
        assert len(x._backward_hooks) == 0


def test_close_removes_hooks_and_collection_frees_the_engine(swap_folder: Path) -> None:
    model = Stack()
    engine = offload.initialize(model, config_of(CASE, swap_folder))
    engine(inputs()).sum().backward()
    engine.step()
    engine.close()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in model.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            assert not parameter._post_accumulate_grad_hooks
    ref, kept = weakref.ref(engine), list(model.parameters())
    del engine, model
    gc.collect()
    assert ref() is None
    with pytest.raises(OffloadError, match="closed"):
        kept[0].sum()


def test_an_engine_that_is_dropped_closes_itself(swap_folder: Path) -> None:
    engine = offload.initialize(Stack(), config_of(CASE, swap_folder))
    engine(inputs()).sum().backward()
    ref = weakref.ref(engine)
    del engine
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_the_module_are_ordinary_models(swap_folder: Path, how: str) -> None:
    with paired(Stack(), CASE, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        if how == "deepcopy":
            other = copy.deepcopy(pair.offloaded)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(pair.offloaded))
        else:
            buffer = io.BytesIO()
            torch.save(pair.offloaded, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        loads = pair.engine.counters()["unit_loads"]
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        loss = square(inputs())(other)
        assert torch.equal(loss, square(inputs())(pair.plain))
        loss.backward()
        optimizer.step()
        assert pair.engine.counters()["unit_loads"] == loads
        assert pair.engine.get_full("head.weight", "grad") is None
        pair.weights_equal()
        pair.train(square(inputs()), steps=1)


@swapped
def test_copy_made_within_a_forward(case: Case, swap_folder: Path) -> None:
    copies: list[nn.Module] = []
    with paired(Stack(), case, swap_folder) as pair:
        handle = pair.offloaded.blocks[1].up.register_forward_hook(lambda m, _a, _o: copies.append(copy.deepcopy(m)))
        pair.offloaded(inputs())
        handle.remove()
        assert torch.equal(copies[0].weight, pair.plain.blocks[1].up.weight)
        assert type(copies[0].weight) is nn.Parameter


def test_functional_call(swap_folder: Path) -> None:
    with paired(Stack(), CASE, swap_folder) as pair:
        own = {name: p.detach().clone() + 1 for name, p in pair.plain.named_parameters()}
        pair.both(lambda m: torch.func.functional_call(m, own, (inputs(),)))
        pair.train(
            lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (inputs(),)).square().sum(), steps=1
        )
        x = inputs()
        with torch.no_grad():
            assert torch.allclose(torch.vmap(pair.offloaded)(x), pair.plain(x), atol=1e-6)
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.grad(lambda p: torch.func.functional_call(pair.offloaded, p, (x,)).sum())(own)
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.jvp(pair.offloaded, (x,), (x,))
        pair.nothing_resident()


def test_autocast_to_another_dtype_is_refused(swap_folder: Path) -> None:
    with paired(Stack(), CASE, swap_folder) as pair:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # noqa: SIM117
            with pytest.raises(OffloadError, match=r"precision\.compute_dtype"):
                pair.offloaded(inputs())
        pair.nothing_resident()
        pair.train(square(inputs()), steps=1)


def test_autocast_to_the_parameters_dtype(swap_folder: Path) -> None:
    config = config_of(CASE, swap_folder, precision={"compute_dtype": "bf16"})
    plain = Stack()
    with offload.initialize(copy.deepcopy(plain), config) as engine:
        plain = plain.bfloat16()
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                ours, theirs = engine(inputs()).float().square().sum(), plain(inputs()).float().square().sum()
            assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.get_full(name, "grad").bfloat16(), parameter.grad)


def test_step_inside_gathered_or_a_forward_is_refused(swap_folder: Path) -> None:
    with paired(Stack(), CASE, swap_folder) as pair:
        pair.backward(square(inputs()))
        with pair.engine.gathered(), pytest.raises(OffloadError, match=r"leave gathered\(\)"):
            pair.engine.step()
        handle = pair.offloaded.blocks[1].register_forward_pre_hook(lambda *_: pair.engine.step())
        with pytest.raises(OffloadError, match="end every forward"):
            pair.offloaded(inputs())
        handle.remove()
        pair.step()


@swapped
def test_checkpoint_around_a_read_of_a_weight(case: Case, swap_folder: Path) -> None:
    """Checkpointing counts saved tensors: a weight read outside its unit counts alike in forward and recompute."""

    def run(model: Stack) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return torch.tanh(model.blocks[1].up(model.blocks[0](x)) @ model.blocks[2].up.weight)

        return model.head(checkpoint(part, inputs(grad=True), use_reentrant=False)).square().sum()

    with paired(Stack(), case, swap_folder) as pair:
        pair.train(run)


def test_units_are_loaded_once_per_pass(swap_folder: Path) -> None:
    with paired(Stack(5), CASE, swap_folder) as pair:
        pair.train(square(inputs(grad=True)), steps=2)
        before = pair.engine.counters()["unit_loads"]
        pair.backward(square(inputs(grad=True)))
        # The head, with which the forward ends and the backward begins, stays in between.
        assert pair.engine.counters()["unit_loads"] - before == 2 * 6 - 1
        with torch.no_grad():
            pair.engine(inputs())
        assert pair.engine.counters()["unit_loads"] - before == 3 * 6 - 1
        pair.step()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_train_and_generate(swap_folder: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "use_cache": True, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **sizes)
        model = transformers.GPT2LMHeadModel(config).eval()  # without dropout
    ids = token_batches(1, time=6)[0]
    with paired(model, CASE, swap_folder) as pair:
        pair.train(lambda m: m(input_ids=ids, labels=ids).loss)
        with torch.no_grad():
            pair.both(lambda m: m.generate(ids, max_new_tokens=4, do_sample=False))
        pair.offloaded.gradient_checkpointing_enable()
        pair.plain.gradient_checkpointing_enable()
        pair.offloaded.train(kind == "llama")
        pair.plain.train(kind == "llama")
        pair.train(lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss, steps=1)
