"""What people do with a model and an engine between steps: export, load, average, hand the device over, read and edit.

Compared with `torch.equal`.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from offload.errors import OffloadError
from swap.errors import BudgetError
from tests.engine.binding_models import Block, Stack, inputs, square
from tests.engine.common import Case, placed, running, states_of
from tests.models.common import PLACES, Duo, cover, duo, everywhere, ordinarily


class Mixed(Stack):
    """Blocks with batch statistics, a table that is saved and one that is not, and a tied pair."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.norm = nn.BatchNorm1d(3)
        self.copy_of_head = nn.Linear(16, 3)
        self.copy_of_head.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x) + self.table * self.scratch[0]) + self.copy_of_head(x)


def same_state_dicts(pair: Duo) -> None:
    ours, theirs = pair.offloaded.state_dict(), pair.plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype
        assert torch.equal(ours[name].cpu(), value), name


@everywhere
def test_what_a_model_says_of_itself(case: Case, swap_folder: Path) -> None:
    """At any time: after initialize, after a backward, within gathered, after a step."""
    with duo(Mixed(), case, swap_folder) as pair:

        def check() -> None:
            same_state_dicts(pair)
            ours, theirs = dict(pair.offloaded.named_parameters()), dict(pair.plain.named_parameters())
            facts = [
                {n: (p.shape, p.dtype, p.requires_grad, p.numel(), p.stride()) for n, p in named.items()}
                for named in (ours, theirs)
            ]
            assert facts[0] == facts[1]
            assert sum(p.numel() for p in pair.offloaded.parameters()) == sum(p.numel() for p in theirs.values())
            assert dict(pair.offloaded.named_buffers()).keys() == dict(pair.plain.named_buffers()).keys()
            assert pair.offloaded.head.weight is pair.offloaded.copy_of_head.weight

        check()
        for seed in range(2):
            pair.backward(square(inputs(seed=seed)))
            check()
            with pair.engine.gathered():
                check()
            pair.step()
            check()


def transposed() -> nn.Module:
    model = Stack(2)
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
    return model


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("kind", "case"), cover(["transposed", "channels_last"], share=3))
def test_parameters_that_are_not_contiguous(kind: str, case: Case, swap_folder: Path) -> None:
    """They become contiguous. Equal to a twin whose parameters are; to one that is as the model was within 1e-6, since
    torch sums the products of transposed operands in another order.
    """
    build, x = {
        "transposed": (transposed, inputs()),
        "channels_last": (channels_last, inputs(2, 3, 8, 8)),
    }[kind]
    model = build()
    for p in model.parameters():
        p.data = p.data.contiguous()
    assert any(not p.is_contiguous() for p in build().parameters())
    with duo(model, case, swap_folder, given=build()) as pair:
        for name, p in pair.offloaded.named_parameters():
            assert p.is_contiguous() and p.stride() == pair.plain.get_parameter(name).stride()
        same_state_dicts(pair)
        with torch.no_grad():
            worst, largest = float((pair.offloaded(x) - build()(x)).abs().max()), float(build()(x).abs().max())
        assert worst <= 1e-6 * max(1.0, largest)
        pair.train(square(x), steps=2)


@pytest.mark.parametrize(("strict", "case"), cover([True, False], share=3))
def test_load_state_dict(strict: bool, case: Case, swap_folder: Path) -> None:
    with duo(Mixed(), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        values = {name: value.clone() * 0.5 for name, value in pair.plain.state_dict().items()}
        if not strict:
            del values["blocks.1.up.weight"]
        for module in (pair.offloaded, pair.plain):
            missing = module.load_state_dict(values, strict=strict)
            assert list(missing.missing_keys) == ([] if strict else ["blocks.1.up.weight"])
        same_state_dicts(pair)
        for name, value in pair.plain.named_parameters():
            pair.reference.shadow.masters[name].data.copy_(value.reshape(-1))
        pair.train(square(inputs()))
        for module in (pair.offloaded, pair.plain):  # torch loads what fits before it complains
            with pytest.raises(RuntimeError, match="size mismatch"):
                module.load_state_dict({**values, "head.bias": torch.zeros(4)}, strict=False)
        pair.weights_equal()


@ordinarily(0, 2, 5)
def test_save_pretrained(case: Case, swap_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=2, n_head=2)
    torch.manual_seed(0)
    ids = torch.arange(12).view(1, 12)
    with duo(transformers.GPT2LMHeadModel(config).eval(), case, swap_folder) as pair:
        pair.train(lambda m: m(input_ids=ids, labels=ids).loss, steps=1)
        pair.offloaded.save_pretrained(tmp_path / "out")
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(loaded(input_ids=ids).logits, pair.plain(input_ids=ids).logits)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


@everywhere
def test_moving_average_of_offloaded_weights(case: Case, swap_folder: Path) -> None:
    """torch's own averaging works on an offloaded model; so does a stream of parameters, one at a time."""
    with duo(Stack(2), case, swap_folder) as pair:
        averages = [
            AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for module in (pair.offloaded, pair.plain)
        ]
        streamed = {name: value.clone() for name, value in pair.engine.named_full_parameters()}
        for step in range(3):
            pair.backward(square(inputs(seed=step)))
            pair.step()
            for average, module in zip(averages, (pair.offloaded, pair.plain), strict=True):
                average.update_parameters(module)
            for name, value in pair.engine.named_full_parameters():
                streamed[name].lerp_(value, 0.1) if step else streamed[name].copy_(value)
        for (name, ours), theirs in zip(averages[0].module.named_parameters(), averages[1].parameters(), strict=True):
            assert type(ours) is nn.Parameter and torch.equal(ours.cpu(), theirs)
            assert torch.equal(streamed[name], theirs)


@everywhere
def test_handing_the_device_over(case: Case, swap_folder: Path) -> None:
    model = Mixed()
    model.blocks[0].requires_grad_(False)
    with duo(model, case, swap_folder) as pair:
        pair.backward(square(inputs()))  # gradients are taken along
        before = pair.engine.memory().current
        report = pair.engine.offload_states()
        after = pair.engine.memory().current
        assert sum(after["device"].values()) == 0
        assert report.device == sum(before["device"].values()) - sum(after["device"].values())
        assert report.host + report.nvme == report.device
        assert (report.device > 0) == (case.parameters == "device")
        assert pair.engine.offload_states() == offload.HandoverReport(device=0, host=0, nvme=0)
        used_meanwhile(pair)
        back = pair.engine.reload_states()
        assert (back.device, back.host, back.nvme) == (report.device, report.host, report.nvme)
        current = pair.engine.memory().current
        assert {tier: {k: n for k, n in kinds.items() if n} for tier, kinds in current.items()} == {
            tier: {k: n for k, n in kinds.items() if n} for tier, kinds in before.items()
        }
        assert pair.engine.reload_states().device == 0
        pair.step()
        pair.train(square(inputs(seed=1)))


def used_meanwhile(pair: Duo) -> None:
    engine = pair.engine
    uses: dict[str, Any] = {
        "call": lambda: engine(inputs()),
        "module": lambda: pair.offloaded(inputs()),
        "step": engine.step,
        "zero_grad": engine.zero_grad,
        "get_full": lambda: engine.get_full("head.bias"),
        "state_dict": lambda: pair.offloaded.state_dict(),
        "sum": lambda: float(pair.offloaded.head.bias.sum()),
        "gathered": lambda: engine.gathered().__enter__(),
        "parameters": lambda: dict(engine.named_full_parameters()),
        "group": lambda: engine.optimizer.add_param_group({"params": [pair.offloaded.head.bias]}),
    }
    for name, use in uses.items():
        with pytest.raises(OffloadError, match=r"reload_states\(\)"):
            use()
            raise AssertionError(f"{name} went through")
    assert pair.offloaded.head.weight.shape == (3, 16)


@pytest.mark.parametrize("kind", ["no room", "room on nvme", "closed meanwhile", "in use"])
def test_handing_over_at_the_limits(kind: str, swap_folder: Path) -> None:
    model = Stack(2, block=lambda: Block(192))
    model.head = nn.Linear(192, 3)
    optimizer = "nvme" if kind == "room on nvme" else "device"
    case = Case(device="sim", parameters="device", gradients="device", optimizer=optimizer)
    memory = {"host": 1 << 20, "device": 64 << 20, "nvme": 64 << 20}
    with running(model, case, swap_folder, memory=memory) as engine:
        engine.backward(engine(inputs(4, 192)).square().sum())
        states = engine.memory().current
        if kind == "no room":
            with pytest.raises(BudgetError, match=r"memory\.host"):
                engine.offload_states()
            assert engine.memory().current == states
        elif kind == "room on nvme":
            assert engine.offload_states().nvme > 1 << 20
            engine.reload_states()
        elif kind == "in use":
            with engine.gathered(), pytest.raises(OffloadError, match="in use"):
                engine.offload_states()
        else:
            model.requires_grad_(False)
        if kind != "closed meanwhile":
            assert engine.step().stepped
    small = Stack(1)
    with running(small, placed("sim", "device"), swap_folder) as engine:
        engine.offload_states()
    with pytest.raises(OffloadError, match="closed"):
        engine.reload_states()


@everywhere
def test_reading_and_editing_by_name(case: Case, swap_folder: Path) -> None:
    with duo(Stack(2), case, swap_folder) as pair:
        pair.backward(square(inputs()))
        name = "blocks.1.up.weight"
        shape = pair.plain.get_parameter(name).shape
        ones = torch.ones(shape)
        pair.engine.set_full(name, "grad", ones)
        pair.reference.gradients[name] = (ones.reshape(-1), 1)
        pair.step()
        for kind, value in (("exp_avg", 0.25), ("exp_avg_sq", 0.5), ("parameter", 2.0)):
            full = torch.full(shape, value)
            pair.engine.set_full(name, kind, full)
            assert torch.equal(pair.engine.get_full(name, kind), full)
        shadow = pair.reference.shadow
        pair.reference.masters[name].fill_(2.0)
        shadow.masters[name].data.fill_(2.0)
        for target, value in zip(pair.reference.moments[name], (0.25, 0.5), strict=True):
            target.fill_(value)
        state = shadow.optimizer.state[shadow.masters[name]]
        state["exp_avg"].fill_(0.25)
        state["exp_avg_sq"].fill_(0.5)
        pair.states_equal()
        pair.train(square(inputs()))


def test_a_step_without_a_backward(swap_folder: Path) -> None:
    """As in torch: nothing to update, nothing changes, and the scheduler counts it."""
    for case in PLACES:
        with running(Stack(2), dataclasses.replace(case), swap_folder) as engine:
            before = states_of(engine)
            result = engine.step()
            assert result.stepped and result.grad_norm == 0.0
            assert engine.counters()["steps"] == 1
            after = states_of(engine)
            assert all(torch.equal(after[n]["parameter"], before[n]["parameter"]) for n in before)


def test_a_deep_copy_for_an_average_keeps_its_values(swap_folder: Path) -> None:
    with duo(Mixed(), PLACES[2], swap_folder) as pair:
        before = copy.deepcopy(pair.offloaded)
        assert before.head.weight is before.copy_of_head.weight
        pair.train(square(inputs()))
        moved = dict(pair.engine.named_full_parameters())
        assert all(not torch.equal(p, moved[n]) for n, p in before.named_parameters())
