"""Reading and changing parameters, gradients and state between steps; the model as the ordinary module it remains."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import GradientError, OffloadError, StaleWeightsError
from offload.inspection import KINDS
from offload.parameters import OffloadedParameter
from optimizer_cpu import reference

from .common import (
    Case,
    Reference,
    assert_states_equal,
    cover,
    decoder,
    placed,
    running,
    states_of,
    token_batches,
)

NAME = "layers.1.mlp.up_proj.weight"
FIRST = "embed_tokens.weight"
PLACES = [("cpu", "host"), ("cpu", "nvme"), ("sim", "device"), ("sim", "nvme")]


def train(engine: offload.Engine, twin: Reference, steps: int, seed: int = 1) -> None:
    for ids in token_batches(steps, seed=seed):
        engine.backward(engine(ids, labels=ids).loss)
        twin.backward(twin.model(ids, labels=ids).loss)
        assert engine.step().grad_norm == twin.step()


def pair(wide: bool = False, dtype: str = "fp32") -> tuple[nn.Module, Reference]:
    model = decoder(wide=wide)
    return model, Reference(copy.deepcopy(model), dtype=dtype)


def write(twin: Reference, name: str, change: Any) -> None:
    """What a change of a weight means: elements that differ afterwards become the fp32 value, others keep it."""
    weight, master = twin.parameters[name].data, twin.masters[name]
    before = weight.clone()
    change(weight)
    changed = (weight != before).reshape(-1)
    master.copy_(torch.where(changed, weight.reshape(-1).float(), master))
    reference.round_weight_(master, weight.reshape(-1))


# gathered


@pytest.mark.parametrize(("device", "tier"), PLACES)
def test_gathered_reads_everything_in_place(device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair()
    with running(model, placed(device, tier), swap_folder) as engine:
        train(engine, twin, 2)
        with engine.gathered():
            for name, p in model.named_parameters():
                assert type(p) is nn.Parameter
                assert torch.equal(p.data, twin.parameters[name]), name
        assert engine.resident_units() == []
        with engine.gathered(NAME):
            assert torch.equal(model.get_parameter(NAME).data, twin.parameters[NAME])
        with engine.gathered([model.get_parameter(NAME), FIRST]):
            assert torch.equal(model.lm_head.weight.data, twin.parameters[FIRST])
        train(engine, twin, 1, seed=2)
        assert_states_equal(states_of(engine), twin.states())


@cover({"way": ["in place", "data", "out", "init"], "dtype": ["fp32", "bf16"], "place": PLACES})
def test_what_is_written_under_gathered_stays(
    way: str, dtype: str, place: tuple[str, str], swap_folder: Path
) -> None:
    device, tier = place
    model, twin = pair(wide=True, dtype=dtype)

    def change(p: Tensor) -> None:
        with torch.no_grad():
            if way == "in place":
                p[1:3].mul_(2.0)
            elif way == "data":
                p.data[0].fill_(0.25)
            elif way == "out":
                torch.add(p.detach()[:2], 1.0, out=p.data[:2])
            else:
                nn.init.constant_(p, 0.125)

    with running(model, placed(device, tier, dtype=dtype), swap_folder) as engine:
        train(engine, twin, 2)
        for name in (NAME, FIRST, "norm.weight") if way == "in place" else (NAME, FIRST):
            with engine.gathered(name, modify=True):
                change(model.get_parameter(name))
            write(twin, name, change)
        assert_states_equal(states_of(engine), twin.states())
        train(engine, twin, 2, seed=3)
        assert_states_equal(states_of(engine), twin.states())


def test_gathered_whole_model_modify_and_untouched_values_keep_their_low_bits(swap_folder: Path) -> None:
    model, twin = pair(dtype="bf16")
    with running(model, placed("sim", "nvme", dtype="bf16"), swap_folder) as engine:
        train(engine, twin, 2)
        before = states_of(engine)
        assert not torch.equal(before[NAME]["parameter"], before[NAME]["weight"].float())
        with engine.gathered(modify=True):
            for p in model.parameters():
                p.data.mul_(1.0)
        assert_states_equal(states_of(engine), before)
        with engine.gathered(modify=True):
            model.get_parameter(NAME).data[0, 0] = 3.0
        after = states_of(engine)
        assert float(after[NAME]["parameter"][0, 0]) == 3.0
        after[NAME]["parameter"][0, 0] = before[NAME]["parameter"][0, 0]
        after[NAME]["weight"][0, 0] = before[NAME]["weight"][0, 0]
        assert_states_equal(after, before)


def test_gathered_survives_exceptions_and_nests(swap_folder: Path) -> None:
    model, twin = pair()
    with running(model, placed("sim", "nvme"), swap_folder) as engine:
        with pytest.raises(KeyError, match="mine"), engine.gathered(NAME), engine.gathered():
            raise KeyError("mine")
        assert engine.resident_units() == []
        ids, *_ = token_batches(1)
        with engine.gathered():
            engine.backward(engine(ids, labels=ids).loss)
            twin.backward(twin.model(ids, labels=ids).loss)
            with pytest.raises(OffloadError, match=r"leave gathered\(\)"):
                engine.step()
        assert engine.step().grad_norm == twin.step()
        train(engine, twin, 1, seed=5)
        with pytest.raises(ValueError, match="is not a parameter of this engine"), engine.gathered("nonsense"):
            pass
        with pytest.raises(ValueError, match=r"shape \(3,\) is not a parameter"), engine.gathered(torch.ones(3)):
            pass
        with pytest.raises(ValueError, match="7 is not a parameter"), engine.gathered([7]):
            pass


def test_a_change_between_forward_and_backward_is_noticed(swap_folder: Path) -> None:
    model, _ = pair()
    ids, *_ = token_batches(1)
    with running(model, placed("sim", "nvme"), swap_folder) as engine:

        def by_name() -> None:
            engine.set_full(NAME, "parameter", torch.ones(64, 24))

        def in_place() -> None:
            with torch.no_grad():
                model.get_parameter(NAME).mul_(2)

        def gathered() -> None:
            with engine.gathered(NAME, modify=True):
                model.get_parameter(NAME).data.mul_(2)

        for change in (by_name, in_place, gathered):
            loss = engine(ids, labels=ids).loss
            change()
            with pytest.raises(StaleWeightsError, match=r"layers\.1"):
                engine.backward(loss)
            engine.zero_grad()
        loss = engine(ids, labels=ids).loss
        engine.set_full(NAME, "exp_avg", torch.ones(64, 24))  # moments are not part of a forward
        assert model.get_parameter(NAME).data.shape == (64, 24)  # nor does reading change anything
        with engine.gathered():
            pass
        engine.backward(loss)
        assert engine.step().stepped


# Values by name


@pytest.mark.parametrize(("device", "tier"), PLACES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_set_full_and_get_full_of_every_kind(dtype: str, device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair(wide=True, dtype=dtype)
    shape = tuple(twin.parameters[NAME].shape)
    generator = torch.Generator().manual_seed(6)
    with running(model, placed(device, tier, dtype=dtype), swap_folder) as engine:
        train(engine, twin, 1)
        for kind in ("parameter", "exp_avg", "exp_avg_sq", "grad"):
            value = torch.rand(shape, generator=generator)
            engine.set_full(NAME, kind, value)
            found = engine.get_full(NAME, kind)
            if kind == "parameter":
                twin.masters[NAME].copy_(value.reshape(-1))
                reference.round_weight_(twin.masters[NAME], twin.parameters[NAME].data.reshape(-1))
                value = twin.masters[NAME].view(shape)
            elif kind == "grad":
                twin.gradients[NAME] = (value.reshape(-1), 1)
            else:
                twin.moments[NAME][kind == "exp_avg_sq"].copy_(value.reshape(-1))
            assert found is not None and found.dtype == torch.float32 and torch.equal(found, value), kind
        assert engine.step().grad_norm == twin.step()
        train(engine, twin, 1, seed=8)
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_value_set_while_a_copy_is_loaded_ahead_is_used(device: str, swap_folder: Path) -> None:
    model, twin = pair()
    ids, *_ = token_batches(1)
    with running(model, placed(device, "nvme", prefetch=3), swap_folder) as engine:
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(engine(ids).logits, twin.model(ids).logits)
            for name, p in twin.parameters.items():  # units may be loaded, for the forward that is expected next
                value = p.detach() * 1.5
                engine.set_full(name, "parameter", value)
                p.data.copy_(value)
            with torch.no_grad():
                assert torch.equal(engine(ids).logits, twin.model(ids).logits)
        with engine.gathered(NAME):
            engine.set_full(NAME, "parameter", torch.full((64, 24), 0.5))
            assert bool((model.get_parameter(NAME).data == 0.5).all())
        found = engine.get_full(NAME)
        assert found is not None and bool((found == 0.5).all())


def test_errors_of_get_full_and_set_full(swap_folder: Path) -> None:
    model, _ = pair()
    model.norm.weight.requires_grad_(False)
    with running(model, Case(), swap_folder) as engine:
        with pytest.raises(ValueError, match="'nonsense' is not a parameter"):
            engine.get_full("nonsense")
        with pytest.raises(ValueError, match=r"unknown kind 'momentum'.*exp_avg_sq"):
            engine.get_full(NAME, "momentum")
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            engine.set_full(NAME, "parameter", torch.ones(3))
        with pytest.raises(ValueError, match=r"known: parameter, .*set 'parameter'"):
            engine.set_full(NAME, "weight", torch.ones(64, 24))
        with pytest.raises(ValueError, match="is not trained, so it has no exp_avg"):
            engine.set_full("norm.weight", "exp_avg", torch.ones(24))
        with pytest.raises(GradientError, match=r"norm\.weight.*not trained"):
            engine.set_full("norm.weight", "grad", torch.ones(24))
        assert engine.get_full(NAME, "grad") is None
        assert set(KINDS) == {"weight", "parameter", "exp_avg", "exp_avg_sq", "grad"}
    for action in (lambda: engine.get_full(NAME), lambda: next(iter(engine.named_full_parameters()))):
        with pytest.raises(OffloadError, match="closed"):
            action()


def test_streams_of_parameters_and_states(swap_folder: Path) -> None:
    model, twin = pair(dtype="bf16")
    with running(model, placed("sim", "nvme", dtype="bf16"), swap_folder) as engine:
        train(engine, twin, 2)
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, _ in engine.named_full_parameters()] == names
        for name, value in engine.named_full_parameters():
            assert value.dtype == torch.bfloat16 and torch.equal(value, twin.parameters[name])
            value.zero_()  # a copy
        for name, entry in engine.named_full_states():
            assert set(entry) == {"parameter", "exp_avg", "exp_avg_sq", "step"} and entry["step"] == 2, name
        assert_states_equal(states_of(engine), twin.states())


# The module between steps


@pytest.mark.parametrize(("device", "tier"), PLACES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_writes_in_place_to_resting_parameters_stay(dtype: str, device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair(wide=True, dtype=dtype)

    def double(p: Tensor) -> None:
        with torch.no_grad():
            p.mul_(2)

    def assign(p: Tensor) -> None:
        with torch.no_grad():
            p[0] = 0.5

    def copied(p: Tensor) -> None:
        with torch.no_grad():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))

    def foreach(p: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_add_([p], 1.0)

    with running(model, placed(device, tier, dtype=dtype), swap_folder) as engine:
        train(engine, twin, 1)
        for change in (double, assign, copied, foreach):
            change(model.get_parameter(NAME))
            write(twin, NAME, change)
            assert torch.equal(model.get_parameter(NAME).detach().cpu(), twin.parameters[NAME].detach()), change
        train(engine, twin, 1, seed=4)
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize(("device", "tier"), PLACES)
def test_state_dict_is_right_between_steps(device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair()
    with running(model, placed(device, tier), swap_folder) as engine:
        train(engine, twin, 2)
        found, right = model.state_dict(), twin.model.state_dict()
        assert list(found) == list(right)
        for key, value in right.items():
            assert torch.equal(found[key].cpu(), value), key
        snapshot = {key: value.clone() for key, value in found.items()}
        train(engine, twin, 1, seed=2)
        for key, value in snapshot.items():
            assert torch.equal(found[key], value), f"{key}: a state_dict must not change with the next step"
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        for key, value in torch.load(buffer).items():
            assert torch.equal(value, snapshot[key]), key


@pytest.mark.parametrize(("device", "tier"), PLACES)
def test_load_state_dict_sets_the_weights(device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair()
    other = decoder(seed=7).state_dict()
    with running(model, placed(device, tier), swap_folder) as engine:
        train(engine, twin, 1)
        model.load_state_dict(other)
        twin.model.load_state_dict(other)
        train(engine, twin, 2, seed=2)
        assert_states_equal(states_of(engine), twin.states())
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**other, NAME: torch.ones(3, 3)})


def test_parameters_put_into_the_model_later_are_refused(swap_folder: Path) -> None:
    def assigned(model: Any) -> str:
        model.load_state_dict(decoder(seed=7).state_dict(), assign=True)
        return FIRST

    def replaced(model: Any) -> str:
        model.norm.weight = nn.Parameter(torch.ones(24))
        return "norm.weight"

    def added(model: Any) -> str:
        model.layers[0].adapter = nn.Linear(2, 2)
        return "layers.0.adapter.weight"

    (ids,) = token_batches(1)
    for change in (assigned, replaced, added):
        model, _ = pair()
        with running(model, Case(), swap_folder) as engine:
            engine.backward(engine(ids, labels=ids).loss)
            name = change(model)
            with pytest.raises(OffloadError, match=f"{name} is not a parameter of this engine"):
                engine(ids)
            with pytest.raises(OffloadError, match=f"{name} is not a parameter of this engine"):
                engine.step()


@pytest.mark.parametrize(("device", "tier"), PLACES)
def test_grad_is_read_and_replaced(device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair(wide=True)
    ids, *_ = token_batches(1)
    with running(model, placed(device, tier), swap_folder) as engine:
        p = model.get_parameter(NAME)
        assert p.grad is None
        engine.backward(engine(ids, labels=ids).loss)
        twin.backward(twin.model(ids, labels=ids).loss)
        assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype
        assert torch.equal(p.grad.reshape(-1).cpu(), twin.gradients[NAME][0])
        assert float(p.grad.norm()) == float(twin.gradients[NAME][0].view(p.shape).norm())
        strided = (torch.ones(p.shape[1], p.shape[0]) * 0.5).t()
        p.grad = strided
        twin.gradients[NAME] = (strided.reshape(-1).clone(), 1)
        model.get_parameter(FIRST).grad = None
        del twin.gradients[FIRST]
        model.norm.weight.grad = torch.ones(1).expand(24)
        twin.gradients["norm.weight"] = (torch.ones(24), 1)
        assert engine.step().grad_norm == twin.step()
        assert p.grad is None
        with pytest.raises((GradientError, ValueError, RuntimeError), match=r"shape|elements"):
            p.grad = torch.ones(5)
        assert_states_equal(states_of(engine), twin.states())


def test_data_is_a_copy_and_cannot_be_replaced(swap_folder: Path) -> None:
    model, twin = pair()
    with running(model, placed("sim", "nvme"), swap_folder) as engine:
        p = model.get_parameter(NAME)
        assert torch.equal(p.data, twin.parameters[NAME].data)
        with pytest.raises(GradientError, match="gathered"):
            p.data.mul_(2)
        with pytest.raises(OffloadError, match="gathered"):
            p.data = torch.ones_like(p)
        train(engine, twin, 1)


@pytest.mark.parametrize(("device", "tier"), PLACES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_the_model_are_ordinary_models(how: str, device: str, tier: str, swap_folder: Path) -> None:
    model, twin = pair()
    with running(model, placed(device, tier), swap_folder) as engine:
        train(engine, twin, 1)
        copied: Any
        if how == "deepcopy":
            copied = copy.deepcopy(model)
        elif how == "pickle":
            copied = pickle.loads(pickle.dumps(model))
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            copied = torch.load(buffer, weights_only=False)
        assert copied.lm_head.weight is copied.embed_tokens.weight
        train(engine, twin, 1, seed=2)
    plain = Reference(decoder())  # the copy goes on where the engine was after its first step
    ids, *_ = token_batches(1)
    plain.backward(plain.model(ids, labels=ids).loss)
    plain.step()
    for name, p in copied.named_parameters():
        assert type(p) is nn.Parameter and p.requires_grad and torch.equal(p, plain.parameters[name]), name
    loss, right = copied(ids, labels=ids).loss, plain.model(ids, labels=ids).loss
    assert torch.equal(loss, right)
    loss.backward()
    right.backward()
    assert torch.equal(copied.get_parameter(NAME).grad, plain.parameters[NAME].grad)


def test_engine_and_optimizer_are_not_copied(swap_folder: Path) -> None:
    model, _ = pair()
    with running(model, Case(), swap_folder) as engine:
        for thing in (engine, engine.optimizer):
            with pytest.raises(TypeError):
                copy.deepcopy(thing)
            with pytest.raises(TypeError):
                pickle.dumps(thing)


def test_resting_parameters_take_part_in_computation(swap_folder: Path) -> None:
    """A penalty on a weight, outside any forward, has its gradient."""
    model, twin = pair(wide=True)
    ids, *_ = token_batches(1)
    with running(model, placed("sim", "nvme"), swap_folder) as engine:
        assert isinstance(model.get_parameter(NAME), OffloadedParameter)
        for forward, module, backward in (
            (engine, model, engine.backward),
            (twin.model, twin.model, twin.backward),
        ):
            backward(forward(ids, labels=ids).loss + 0.01 * module.get_parameter(NAME).square().sum())
        assert engine.step().grad_norm == twin.step()
        assert_states_equal(states_of(engine), twin.states())
        assert engine.resident_units() == []
