"""Freezing, thawing and growing: adapters on a frozen base, layers that begin to be trained or stop, new modules.

Everything is compared with `torch.equal`: what a parameter computes does not depend on which flat holds it.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.lr_scheduler import LambdaLR

from offload.errors import GradientError, OffloadError, PlanError
from tests.engine.binding_models import WIDTH, Block, Stack, checkpointed, inputs, plainly, square
from tests.engine.common import HYPER, Case, running
from tests.models.common import PLACES, Duo, cover, duo, everywhere, ordinarily


class Adapter(nn.Module):
    """A low-rank correction of a linear layer that it wraps."""

    def __init__(self, base: nn.Linear, rank: int = 3, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank, generator=generator) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def wide() -> Block:
    """A block whose matrices are larger than a layout block, so that large and small parameters meet."""
    return Block(48)


def frozen_stack(run: Any = None, block: Any = Block) -> Stack:
    model = Stack(3, run, block)
    model.requires_grad_(False)
    return model


def with_adapters(run: Any = None) -> Stack:
    torch.manual_seed(0)
    model = frozen_stack(run)
    for index, block in enumerate(model.blocks):
        block.up = Adapter(block.up, seed=index)
    return model


def planes_of(pair: Duo, name: str) -> bytes:
    """The bytes of a frozen parameter where they rest."""
    weight = pair.engine.get_full(name, "weight")
    return weight.contiguous().view(torch.uint8).numpy().tobytes()


RUNS = {
    "plain": plainly,
    "reentrant": checkpointed(True, 1),
    "non-reentrant": checkpointed(False, 1),
    "reentrant over two": checkpointed(True, 2),
    "non-reentrant over two": checkpointed(False, 2),
}


@pytest.mark.parametrize(("run", "case"), cover(list(RUNS), share=2))
def test_adapters_on_a_frozen_base(run: str, case: Case, swap_folder: Path) -> None:
    grad = "reentrant" in run and not run.startswith("non")  # reentrant checkpointing wants an input with a gradient
    with duo(with_adapters(RUNS[run]), case, swap_folder, max_grad_norm=0.5) as pair:
        frozen = [name for name, p in pair.plain.named_parameters() if not p.requires_grad]
        before = {name: planes_of(pair, name) for name in frozen}
        for seed in range(3):
            x = inputs(grad=grad, seed=seed)
            pair.backward(square(x))
            pair.step()
        assert {name: planes_of(pair, name) for name in frozen} == before
        for name in frozen:
            assert pair.engine.get_full(name, "grad") is None
            with pytest.raises(ValueError, match="not trained"):
                pair.engine.get_full(name, "exp_avg")


@everywhere
def test_frozen_parameters_take_no_state(case: Case, swap_folder: Path) -> None:
    model = frozen_stack(block=wide)
    model.head = nn.Linear(48, 3)
    weights = sum(p.numel() for p in model.blocks.parameters())
    with running(model, case, swap_folder) as engine:
        engine.backward(engine(inputs(4, 48)).square().sum())
        peaks = engine.memory().peak
        held = sum(peaks[tier].get(kind, 0) for tier in peaks for kind in ("optimizer", "gradients"))
        assert held <= 6 * 4096 * 4  # the head's block, not the base's
        assert held < 4 * weights
        engine.step()
        written = engine.counters()["nvme_write_bytes"]
        engine.backward(engine(inputs(4, 48)).square().sum())
        engine.step()
        if case.parameters == "nvme":
            # Weight, two moments and the gradient of at most one block: nothing of the base is written again.
            assert 0 < engine.counters()["nvme_write_bytes"] - written <= 4 * 4096 * 4


@everywhere
def test_thaw_refreeze_and_grow(case: Case, swap_folder: Path) -> None:
    """Thaw a layer at step 5 with a rate of its own, freeze it again at 10, attach an adapter at 12."""
    model = Stack(3)
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    with duo(model, case, swap_folder, max_grad_norm=0.5) as pair:
        for step in range(15):
            if step == 5:
                for module in (pair.offloaded, pair.plain):
                    module.blocks[1].requires_grad_(True)
                pair.engine.optimizer.add_param_group({"params": pair.offloaded.blocks[1].parameters(), "lr": 1e-3})
                pair.reference.add_group({"params": list(pair.plain.blocks[1].parameters()), "lr": 1e-3})
                assert pair.engine.get_full("blocks.1.up.weight", "exp_avg").abs().sum() == 0
            if step == 10:
                for module in (pair.offloaded, pair.plain):
                    module.blocks[1].requires_grad_(False)
                kept = pair.engine.get_full("blocks.1.up.weight", "exp_avg")
            if step == 12:
                attach_adapters(pair)
            pair.backward(square(inputs(seed=step)))
            if step >= 10:
                name = "blocks.1.up.weight" if step < 12 else "blocks.1.up.base.weight"
                assert pair.engine.get_full(name, "grad") is None
                assert torch.equal(pair.engine.get_full(name, "exp_avg"), kept)
                assert pair.engine.module.get_parameter(name).grad is None
            pair.step()
        states = dict(pair.engine.named_full_states())
        assert [states[f"blocks.1.up.{n}"]["step"] for n in ("base.weight", "a", "b")] == [5, 3, 3]
        assert states["head.weight"]["step"] == 15


def attach_adapters(pair: Duo) -> None:
    for module in (pair.offloaded, pair.plain):
        module.blocks[1].up = Adapter(module.blocks[1].up, seed=7)
    adapter = pair.offloaded.blocks[1].up
    pair.engine.optimizer.add_param_group({"params": [adapter.a, adapter.b], "lr": 5e-3, "weight_decay": 0.0})
    pair.reference.rename({f"blocks.1.up.{n}": f"blocks.1.up.base.{n}" for n in ("weight", "bias")})
    twin = pair.plain.blocks[1].up
    pair.reference.add_group({"params": [twin.a, twin.b], "lr": 5e-3, "weight_decay": 0.0})


@everywhere
def test_thawing_what_is_in_a_group_needs_nothing_else(case: Case, swap_folder: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters()), "lr": 1e-3}]

    model = Stack(3, block=wide)
    model.head = nn.Linear(48, 3)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    with duo(model, case, swap_folder, engine_groups=groups) as pair:
        for name, p in pair.plain.blocks.named_parameters():
            if not p.requires_grad:  # what the reference makes when a parameter is thawed
                pair.reference._begin(f"blocks.{name}", p)
        frozen = {n: pair.reference.steps.pop(n) for n in list(pair.reference.steps) if "2.up" in n or "s.0." in n}
        pair.train(square(inputs(4, 48)))
        for module in (pair.offloaded, pair.plain):
            module.blocks[0].requires_grad_(True)
            module.blocks[2].up.weight.requires_grad = True
        pair.reference.steps.update({n: 0 for n in frozen if n != "blocks.2.up.bias"})
        pair.train(square(inputs(4, 48)), steps=3)
        assert dict(pair.engine.named_full_states())["blocks.0.up.weight"]["step"] == 3
        assert pair.engine.get_full("blocks.2.up.bias", "grad") is None


@ordinarily(1, 2, 5)
def test_thaw_between_forward_and_backward(case: Case, swap_folder: Path) -> None:
    """A graph that was built before keeps working: its weights are found where they are now."""
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    with duo(model, case, swap_folder) as pair:
        x = inputs(grad=True)
        loss, expected = square(x)(pair.offloaded), square(x)(pair.plain)
        for module in (pair.offloaded, pair.plain):
            module.blocks[1].requires_grad_(True)
        pair.engine.optimizer.add_param_group({"params": pair.offloaded.blocks[1].parameters()})
        pair.reference.add_group({"params": list(pair.plain.blocks[1].parameters())})
        pair.engine.backward(loss)
        expected.backward()
        pair.step()
        pair.train(square(inputs()), steps=2)


def test_thawed_within_gathered_is_noticed(swap_folder: Path) -> None:
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    with duo(model, PLACES[2], swap_folder) as pair:
        with pair.engine.gathered():
            pair.offloaded.blocks[1].requires_grad_(True)  # the parameters are plain here
            with pytest.raises(OffloadError, match="in use"):
                pair.engine.optimizer.add_param_group({"params": pair.offloaded.blocks[1].parameters()})
        pair.engine.optimizer.add_param_group({"params": pair.offloaded.blocks[1].parameters()})
        pair.plain.blocks[1].requires_grad_(True)
        pair.reference.add_group({"params": list(pair.plain.blocks[1].parameters())})
        pair.train(square(inputs()))


def test_thawed_without_a_group_is_said_once(swap_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    model.blocks[1].requires_grad_(False)
    with running(model, PLACES[1], swap_folder) as engine:
        model.blocks[1].up.bias.requires_grad_(True)
        for _ in range(2):
            engine.backward(engine(inputs()).square().sum())
            engine.step()
        said = [r.getMessage() for r in caplog.records if "no parameter group" in r.getMessage()]
        assert len(said) == 1 and "blocks.1.up.bias" in said[0] and "add_param_group" in said[0]


def test_no_room_for_a_thawed_layer_changes_nothing(swap_folder: Path) -> None:
    model = Stack(2, block=lambda: Block(256))
    model.head = nn.Linear(256, 3)
    model.blocks.requires_grad_(False)
    memory = {"host": 3 << 20, "nvme": 64 << 20}
    placement = {"parameters": "nvme", "optimizer": "host", "gradients": "host"}
    with running(model, PLACES[2], swap_folder, memory=memory, placement=placement) as engine:
        before = engine.describe()
        model.blocks.requires_grad_(True)
        with pytest.raises(PlanError, match=r"memory\.host"):
            engine.optimizer.add_param_group({"params": model.blocks.parameters()})
        assert len(engine.optimizer.param_groups) == 1 and engine.describe() == before
        model.blocks.requires_grad_(False)
        engine.backward(engine(inputs(4, 256)).square().sum())
        assert engine.step().stepped


@ordinarily(1, 2, 5)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float64])
def test_frozen_weights_keep_their_dtype_and_bits(case: Case, dtype: torch.dtype, swap_folder: Path) -> None:
    class Quantised(nn.Module):
        """A frozen table of codes with a trained scale for each row."""

        def __init__(self) -> None:
            super().__init__()
            codes = torch.randint(0, 100, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(0)).to(dtype)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.full((WIDTH,), 1e-3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.codes.float() * self.scale[:, None]).t()

    with duo(Stack(3, block=Quantised), case, swap_folder) as pair:
        before = planes_of(pair, "blocks.1.codes")
        pair.train(square(inputs(grad=True)), steps=3)
        assert planes_of(pair, "blocks.1.codes") == before
        weight = pair.engine.get_full("blocks.1.codes", "weight")
        assert weight.dtype == dtype and torch.equal(weight, pair.plain.blocks[1].codes)
        with pytest.raises(RuntimeError, match="floating point" if dtype != torch.float64 else "cannot hold"):
            pair.offloaded.blocks[1].codes.requires_grad_(True)
        assert not pair.offloaded.blocks[1].codes.requires_grad


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("state_format", ["fp32", "split", "compact"])
def test_thaw_in_low_precision(dtype: str, state_format: str, swap_folder: Path) -> None:
    """The master of a thawed weight begins as the weight itself."""
    if dtype == "fp16" and state_format != "fp32":
        pytest.skip("split and compact are for bf16 weights")
    results = []
    for thaw in (False, True):
        model = Stack(2).to(torch.bfloat16 if dtype == "bf16" else torch.float16)
        model.blocks[0].requires_grad_(not thaw)
        case = dataclasses.replace(PLACES[2 + 3 * (state_format == "split")], staging=2 << 20)
        options: dict[str, Any] = {"max_grad_norm": None, "optimizer": {**HYPER, "state_format": state_format}}
        options["precision"] = {"compute_dtype": dtype, "initial_loss_scale": 4}
        with running(model, case, swap_folder, **options) as engine:
            if thaw:
                model.blocks[0].requires_grad_(True)
                engine.optimizer.add_param_group({"params": model.blocks[0].parameters()})
            for seed in range(3):
                engine.backward(engine(inputs(seed=seed).to(model.head.weight.dtype)).float().square().mean())
                assert engine.step().stepped
            results.append({name: state for name, state in engine.named_full_states()})
    for name, state in results[0].items():
        for kind, value in state.items():
            assert torch.equal(torch.as_tensor(results[1][name][kind]), torch.as_tensor(value)), (name, kind)


def test_thawing_everything_of_a_frozen_fp16_model_brings_a_loss_scale(swap_folder: Path) -> None:
    model = Stack(2).to(torch.float16)
    model.requires_grad_(False)
    with running(model, PLACES[1], swap_folder, precision={"compute_dtype": "fp16"}) as engine:
        model.head.requires_grad_(True)
        engine.optimizer.add_param_group({"params": model.head.parameters()})
        loss = engine(inputs().half()).float().square().mean()
        with pytest.raises(GradientError, match=r"engine\.backward"):
            loss.backward()
        engine.zero_grad()
        engine.backward(engine(inputs().half()).float().square().mean())
        engine.step()


class Late(nn.Module):
    """A body to which a head with a body of its own, a bare parameter and blocks are added later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = Stack(3)
        self.extra: nn.Module | None = None
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.extra is not None:
            y = self.extra(y)
        return y if self.scale is None else y * self.scale


def grow(model: Any, seed: int = 5) -> None:
    torch.manual_seed(seed)
    model.extra = nn.Sequential(nn.Linear(3, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2))
    model.extra[0].requires_grad_(False)
    model.scale = nn.Parameter(torch.tensor([0.5, 2.0]))


@everywhere
def test_new_modules_join(case: Case, swap_folder: Path) -> None:
    with duo(Late(), case, swap_folder, max_grad_norm=0.5) as pair:
        pair.train(square(inputs()))
        for module in (pair.offloaded, pair.plain):
            grow(module)
        with pytest.raises(OffloadError, match=r"engine\.adopt"):
            pair.engine(inputs())
        names = pair.engine.adopt()
        assert sorted(names) == sorted(n for n, _ in pair.plain.named_parameters() if "body" not in n)
        assert len(pair.engine.optimizer.param_groups) == 2
        fresh = [p for n, p in pair.plain.named_parameters() if "body" not in n and p.requires_grad]
        pair.reference.add_group({"params": fresh})
        pair.train(square(inputs()), steps=3)
        assert len(pair.engine._residency.units) > 5
        assert "extra" in pair.engine.describe()


@ordinarily(0, 2, 4)
def test_a_replaced_module_leaves(case: Case, swap_folder: Path) -> None:
    """What resizing an embedding does: a new module in the place of an old one, whose values it copies."""
    with duo(Late(), case, swap_folder) as pair:
        pair.train(square(inputs()))
        left = pair.offloaded.body.head
        for module in (pair.offloaded, pair.plain):
            larger = nn.Linear(WIDTH, 5)
            with torch.no_grad():
                larger.weight.zero_()
                larger.bias.zero_()
                larger.weight[:3].copy_(module.body.head.weight)
                larger.bias[:3].copy_(module.body.head.bias)
            module.body.head = larger
        kept = pair.plain.body.head.weight[:3].detach().clone()
        pair.engine.adopt()
        assert type(left.weight) is nn.Parameter and torch.equal(left.weight.detach().cpu(), kept)
        for name in ("body.head.weight", "body.head.bias"):
            del pair.reference.steps[name], pair.reference.masters[name], pair.reference.moments[name]
            del pair.reference.shadow.masters[name]
        pair.reference.add_group({"params": list(pair.plain.body.head.parameters())})
        pair.train(square(inputs()), steps=2)
        listed = [id(p) for group in pair.engine.optimizer.param_groups for p in group["params"]]
        assert id(left.weight) not in listed and id(pair.offloaded.body.head.weight) in listed
        left(inputs()).sum().backward()  # an ordinary module again
        assert left.weight.grad is not None


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


@pytest.mark.parametrize(("kind", "case"), cover(["parametrization", "weight norm", "pruning"], share=2))
def test_parametrizations_of_a_model_in_training(kind: str, case: Case, swap_folder: Path) -> None:
    """Registered in `gathered`, where parameters are plain, and followed by `adopt`; a parameter keeps its state."""
    with duo(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        for module in (pair.offloaded, pair.plain):
            with pair.engine.gathered(modify=True):
                if kind == "parametrization":
                    parametrize.register_parametrization(module[1], "weight", Symmetric())
                elif kind == "weight norm":
                    parametrizations.weight_norm(module[1])
                else:
                    prune.l1_unstructured(module[1], "weight", amount=0.5)
        fresh = pair.engine.adopt()
        renamed = {"parametrization": "1.parametrizations.weight.original", "pruning": "1.weight_orig"}
        if kind in renamed:
            assert fresh == []
            pair.reference.rename({"1.weight": renamed[kind]})
        else:
            for table in (pair.reference.steps, pair.reference.masters, pair.reference.moments):
                del table["1.weight"]  # type: ignore[attr-defined]
            del pair.reference.shadow.masters["1.weight"]
            twins = dict(pair.plain.named_parameters())
            pair.reference.add_group({"params": [twins[name] for name in fresh]})
        pair.train(square(inputs()), steps=2)


@ordinarily(1, 5)
def test_optimizer_state_after_growth(case: Case, swap_folder: Path) -> None:
    """`state_dict` covers thawed and new parameters and restores them."""
    model = Late()
    model.body.blocks[0].requires_grad_(False)
    with duo(model, case, swap_folder) as pair:
        for module in (pair.offloaded, pair.plain):
            grow(module)
            module.body.blocks[0].requires_grad_(True)
        pair.engine.adopt()
        pair.reference.add_group(
            {"params": [p for n, p in pair.plain.named_parameters() if "body" not in n and p.requires_grad]}
        )
        pair.engine.optimizer.add_param_group({"params": pair.offloaded.body.blocks[0].parameters(), "lr": 1e-4})
        pair.reference.add_group({"params": list(pair.plain.body.blocks[0].parameters()), "lr": 1e-4})
        pair.train(square(inputs()))
        saved = copy.deepcopy(pair.engine.optimizer.state_dict())
        weights = {name: w.clone() for name, w in pair.engine.named_full_parameters()}
        after = []
        for _ in range(2):
            pair.engine.backward(square(inputs())(pair.offloaded))
            pair.engine.step()
            after.append(dict(pair.engine.named_full_parameters()))
            pair.offloaded.load_state_dict(weights)
            pair.engine.optimizer.load_state_dict(saved)
        for name, weight in after[0].items():
            assert torch.equal(weight, after[1][name]), name


def test_a_scheduler_follows_a_new_group(swap_folder: Path) -> None:
    model = Stack(2)
    model.blocks[0].requires_grad_(False)
    with running(model, PLACES[1], swap_folder, lr_scheduler=lambda o: LambdaLR(o, lambda s: 1 / (1 + s))) as engine:
        for step in range(4):
            if step == 2:
                model.blocks[0].requires_grad_(True)
                engine.optimizer.add_param_group({"params": model.blocks[0].parameters(), "lr": 1e-2})
            engine.backward(engine(inputs()).square().sum())
            engine.step()
        assert [group["lr"] for group in engine.optimizer.param_groups] == [HYPER["lr"] / 5, 1e-2 / 5]


def test_what_growth_refuses(swap_folder: Path) -> None:
    model = Stack(2)
    with running(model, PLACES[2], swap_folder) as engine:
        with pytest.raises(ValueError, match="not a parameter of the model"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ValueError, match="more than one parameter group"):
            engine.optimizer.add_param_group({"params": [model.head.weight]})
        model.late = nn.Linear(3, 3)
        with pytest.raises(ValueError, match="beta1"):
            engine.optimizer.add_param_group({"params": model.late.parameters(), "betas": (2.0, 0.9)})
        assert len(engine.optimizer.param_groups) == 1
        with torch.device("meta"):
            model.late = nn.Linear(3, 3)
        with pytest.raises(ValueError, match=r"late\.weight is on the meta device"):
            engine.adopt()
        model.late = nn.LazyLinear(3)
        with pytest.raises(ValueError, match=r"late\.weight is a UninitializedParameter"):
            engine.adopt()
        del model.late
        engine.backward(engine(inputs()).square().sum())
        engine.step()


def test_growing_from_memory_to_swap_files(swap_folder: Path) -> None:
    """A run that had nothing on nvme opens its swap files when the first trainable parameter needs them."""
    model = Stack(2)
    model.requires_grad_(False)
    case = Case(device="cpu", parameters="host", gradients="nvme", optimizer="nvme")
    with running(model, case, swap_folder) as engine:
        assert engine.memory().current["nvme"] == {}
        model.blocks.requires_grad_(True)
        engine.optimizer.add_param_group({"params": model.blocks.parameters()})
        engine.backward(engine(inputs()).square().sum())
        assert engine.step().stepped
        assert engine.memory().current["nvme"]["optimizer"] > 0


@pytest.mark.parametrize("schedule", ["barrier", "deferred"])
@ordinarily(2, 5)
def test_thawing_with_one_chunk_of_staging_and_pending_updates(case: Case, schedule: str, swap_folder: Path) -> None:
    model = Stack(3, block=lambda: Block(96))
    model.head = nn.Linear(96, 3)
    model.blocks[1].requires_grad_(False)
    tight = dataclasses.replace(case, staging=112 << 10)
    with duo(model, tight, swap_folder, schedule={"optimizer_step": schedule}) as pair:
        assert pair.engine._memory.staging.count <= 2
        pair.backward(square(inputs(4, 96)))
        pair.engine.step()
        pair.reference.step()
        for module in (pair.offloaded, pair.plain):
            module.blocks[1].requires_grad_(True)
        pair.engine.optimizer.add_param_group({"params": pair.offloaded.blocks[1].parameters()})
        pair.reference.add_group({"params": list(pair.plain.blocks[1].parameters())})
        pair.train(square(inputs(4, 96)), steps=3)
