"""An offloaded parameter outside its unit's forward: true metadata and values; changes arrive or are refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.errors import GradientError, OffloadError
from offload.held import make_stub
from offload.parameters import OffloadedParameter
from tests.engine.binding_models import NVME, Pair, Stack, inputs, paired, square
from tests.engine.common import placed

PLACES = [*NVME, placed("cpu", "host"), placed("sim", "device")]


@pytest.fixture(scope="module", params=PLACES, ids=str)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair for the tests that only read."""
    before = set(threading.enumerate())
    with paired(Stack(), request.param, tmp_path_factory.mktemp("swap")) as pair:
        yield pair
    assert not [t for t in threading.enumerate() if t not in before]


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Replaces the check per test: the shared pair's threads live longer."""


def weights(pair: Pair) -> tuple[nn.Parameter, nn.Parameter]:
    return pair.offloaded.blocks[1].up.weight, pair.plain.blocks[1].up.weight


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda w: w[0, 0].item(),
    "float": lambda w: float(w.sum()),
    "tolist": lambda w: w.tolist(),
    "argmax": lambda w: w.argmax(),
    "max of rows": lambda w: w.max(dim=0),
    "comparison": lambda w: (w > 0).sum(),
    "equality": lambda w: bool((w == w).all()),
    "isnan": lambda w: torch.isnan(w).any(),
    "topk": lambda w: torch.topk(w, 3).indices,
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "numpy": lambda w: w.detach().numpy().copy().tolist(),
    "array": lambda w: np.asarray(w.detach()).tolist(),
    "iteration": lambda w: list(w),
    "contains": lambda w: w[0, 0].item() in w.detach(),
    "transpose": lambda w: (w.T, w.mT, w.t(), w.transpose(0, 1)),
    "foreach": lambda w: torch._foreach_mul([w, w], 2.0),
    "stack": lambda w: torch.stack([w, w]),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "right operand": lambda w: (2 * w, 1 - w, inputs() @ w.t()),
    "functional": lambda w: torch.nn.functional.linear(inputs(), w),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "float dtype": lambda w: w.double(),
    "copied from": lambda w: torch.zeros(w.shape).copy_(w.detach()),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "einsum": lambda w: torch.einsum("ij,ij->", w, w),
    "deepcopy": lambda w: copy.deepcopy(w).detach(),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)).detach(),
}

FACTS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda w: (w.shape, w.size(), w.size(0), w.dim(), w.ndim, w.numel(), w.nelement(), len(w)),
    "strides": lambda w: (w.stride(), w.stride(0), w.is_contiguous()),
    "dtype": lambda w: (w.dtype, w.element_size(), w.is_floating_point(), w.is_complex(), w.itemsize, w.nbytes),
    "layout": lambda w: (w.layout, w.is_sparse, w.is_quantized, w.is_meta),
    "autograd": lambda w: (w.requires_grad, w.is_leaf, w.grad_fn, w.grad),
    "class": lambda w: (isinstance(w, nn.Parameter), isinstance(w, Tensor), torch.is_tensor(w)),
}


@pytest.mark.parametrize("what", READS)
def test_reads_are_right(shared: Pair, what: str) -> None:
    ours, theirs = (READS[what](w) for w in weights(shared))
    flat_ours, flat_theirs = (torch.utils._pytree.tree_leaves(v) for v in (ours, theirs))
    for a, b in zip(flat_ours, flat_theirs, strict=True):
        assert torch.equal(a.detach(), b.detach()) if isinstance(b, Tensor) else a == b
    del ours, flat_ours, a
    shared.nothing_resident()


@pytest.mark.parametrize("what", FACTS)
def test_metadata_is_true_and_loads_nothing(shared: Pair, what: str) -> None:
    loads = shared.engine.counters()["unit_loads"]
    ours, theirs = weights(shared)
    assert FACTS[what](ours) == FACTS[what](theirs)
    assert ours.device == shared.engine._memory.device.torch_device
    assert shared.engine.counters()["unit_loads"] == loads


def test_printing_loads_nothing(shared: Pair) -> None:
    loads = shared.engine.counters()["unit_loads"]
    text = repr(weights(shared)[0])
    assert "blocks.1.up.weight" in text and "(32, 16)" in text
    assert "Linear" in repr(shared.offloaded)
    assert shared.engine.counters()["unit_loads"] == loads


def test_identity_and_hashing(shared: Pair) -> None:
    ours = weights(shared)[0]
    assert {ours: 1}[ours] == 1
    assert any(p is ours for p in shared.offloaded.parameters())
    assert any(p is ours for group in shared.engine.optimizer.param_groups for p in group["params"])


def test_state_dict_holds_values(shared: Pair) -> None:
    ours, theirs = shared.offloaded.state_dict(), shared.plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name].clone()) is Tensor and torch.equal(ours[name], value)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["head.weight"], theirs["head.weight"])


def test_stubs_are_loud() -> None:
    cpu = torch.device("cpu")
    assert torch.isnan(make_stub((2, 3), torch.bfloat16, cpu)).all()
    assert (make_stub((4,), torch.int32, cpu) == torch.iinfo(torch.int32).min).all()
    first, second = (make_stub((4,), torch.float32, cpu) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert first.untyped_storage().nbytes() == 4


def test_gradients_read_and_replaced(swap_folder: Path) -> None:
    with paired(Stack(), NVME[0], swap_folder) as pair:
        ours = weights(pair)[0]
        pair.backward(square(inputs()))
        assert torch.equal(ours.grad, pair.engine.get_full("blocks.1.up.weight", "grad"))
        assert float(ours.grad.norm()) > 0
        ours.grad = torch.ones(ours.shape)
        held = pair.reference.gradients["blocks.1.up.weight"][0]
        pair.reference.gradients["blocks.1.up.weight"] = (torch.ones_like(held), 1)
        ours_bias = pair.offloaded.blocks[1].up.bias
        ours_bias.grad = None
        del pair.reference.gradients["blocks.1.up.bias"]
        assert ours_bias.grad is None
        pair.step()
        assert ours.grad is None
        with pytest.raises(GradientError, match="elements"):
            ours.grad = torch.ones(3)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.ones(w.shape)),
    "operator": lambda w: w.__imul__(2),
    "item": lambda w: w.__setitem__((slice(0, 2), 3), 5.0),
    "init": lambda w: nn.init.constant_(w, 0.25),
    "out": lambda w: torch.mul(torch.ones(w.shape), 3, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.5),
    "fill through where": lambda w: w.masked_fill_(torch.ones(w.shape, dtype=torch.bool), 2.0),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("case", [NVME[1], placed("cpu", "host")], ids=str)
def test_writes_in_place_arrive(case: Any, swap_folder: Path, what: str) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        with torch.no_grad():
            for weight in weights(pair):
                WRITES[what](weight)
        pair.weights_equal()
        pair.nothing_resident()
        pair.train(square(inputs()), steps=1)


def test_load_state_dict(swap_folder: Path) -> None:
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        values = {name: value + 0.5 for name, value in pair.plain.state_dict().items()}
        pair.offloaded.load_state_dict(values)
        pair.plain.load_state_dict(values)
        pair.weights_equal()
        pair.train(square(inputs()))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to dtype": lambda m: m.to(torch.float64),
    "data": lambda m: setattr(m.head.weight, "data", torch.zeros(3, 16)),
    "data in place": lambda m: m.head.weight.data.zero_(),
    "share": lambda m: m.share_memory(),
    "resize": lambda m: m.head.weight.resize_(4, 16),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_detach_a_parameter_is_refused_by_name(swap_folder: Path, what: str) -> None:
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"weight|would be lost"):
            REFUSED[what](pair.offloaded)
        assert isinstance(pair.offloaded.head.weight, OffloadedParameter)
        pair.weights_equal()
        pair.train(square(inputs()), steps=1)


@pytest.mark.parametrize("case", [NVME[0], placed("cpu", "host")], ids=str)
def test_a_write_past_the_engine_does_not_go_unnoticed(case: Any, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        with torch.no_grad():
            pair.offloaded.head.weight.set_(torch.zeros(3, 16))  # torch does not show this one to subclasses
        with pytest.raises(OffloadError, match=r"head\.weight: written to by a call that goes past the engine"):
            pair.offloaded(inputs())
        pair.engine.zero_grad()
        pair.nothing_resident()


def test_a_move_that_changes_nothing_is_allowed(swap_folder: Path) -> None:
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        assert pair.offloaded.to("cpu").float() is pair.offloaded
        pair.train(square(inputs()), steps=1)


def test_plain_within_the_forward_only(swap_folder: Path) -> None:
    seen: list[type] = []
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        up = pair.offloaded.blocks[1].up
        handle = up.register_forward_hook(lambda m, _a, _o: seen.append(type(m.weight)))
        gradient = up.register_full_backward_hook(lambda m, _i, _o: seen.append(type(m.weight)))
        pair.backward(square(inputs(grad=True)))
        handle.remove()
        gradient.remove()
        assert seen == [nn.Parameter, OffloadedParameter]
        assert type(up.weight) is OffloadedParameter


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "multiplied": lambda t: t.mul_(2.0),
    "a view": lambda t: t.view(-1)[:3].zero_(),
    "a row": lambda t: next(iter(t)).zero_(),
    "a split": lambda t: t.split(1)[0].zero_(),
    "an element": lambda t: t.__setitem__((0, 0), 1.0),
    "detached": lambda t: t.detach().zero_(),
    "the same dtype and device": lambda t: t.float().cpu().contiguous().zero_(),
    "in a list": lambda t: torch._foreach_mul_([t], 0.5),
    "as output": lambda t: torch.add(t, 1.0, out=t),
    "a function": lambda t: nn.functional.relu(t, inplace=True),
    "data": lambda t: setattr(t, "data", torch.zeros(3, 16)),
    "an array": lambda t: t.numpy().fill(0.0),
    "an array by numpy": lambda t: np.asarray(t).fill(0.0),
}
SHOWN: dict[str, Callable[[nn.Module], Tensor]] = {
    "slice of grad": lambda model: model.head.weight.grad[:],
    "view of grad": lambda model: model.head.weight.grad.view(3, 16),
    "data": lambda model: model.head.weight.data,
    "detached": lambda model: model.head.weight.detach(),
    "state dict": lambda model: model.state_dict()["head.weight"],
}


@pytest.mark.parametrize("case", [NVME[1], placed("cpu", "host")], ids=str)
def test_no_edit_of_a_copy_is_lost_silently(case: Any, swap_folder: Path) -> None:
    """Where torch would have the memory itself, and the engine shows a copy."""
    with paired(Stack(2), case, swap_folder) as pair:
        pair.backward(square(inputs()))
        for show in SHOWN.values():
            for name, edit in EDITS.items():
                with pytest.raises((GradientError, ValueError), match=r"would be lost|read-only"):
                    edit(show(pair.offloaded))
                    pytest.fail(name)
        pair.step()


def test_copies_of_copies_are_plain(swap_folder: Path) -> None:
    with paired(Stack(2), NVME[0], swap_folder) as pair:
        shown = pair.offloaded.state_dict()
        for value in (shown["head.weight"].clone(), shown["head.weight"] + 1, copy.deepcopy(shown)["head.weight"]):
            assert type(value) is Tensor
        file = io.BytesIO()
        torch.save(shown, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert {type(value) for value in loaded.values()} == {Tensor}
        other = Stack(2)
        other.load_state_dict(shown, assign=True)
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        with torch.no_grad():
            other.head.weight.zero_()
        pair.weights_equal()
        pair.train(square(inputs()), steps=1)


@pytest.mark.parametrize("read", ["step", "named_full_parameters", "get_full", "save_checkpoint"])
@pytest.mark.parametrize("case", [NVME[0], placed("cpu", "host")], ids=str)
def test_a_write_through_a_view_is_noticed_before_anything_hides_it(
    read: str, case: Any, swap_folder: Path, tmp_path: Path
) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        engine = pair.engine
        engine.backward(engine(inputs()).square().sum())
        with torch.no_grad():
            pair.offloaded.head.weight.view(-1)[0] = 3.0
        with pytest.raises(OffloadError, match=r"head\.weight: written to by a call that goes past the engine"):
            if read == "step":
                engine.step()
            elif read == "named_full_parameters":
                list(engine.named_full_parameters())
            elif read == "get_full":
                engine.get_full("head.weight")
            else:
                engine.save_checkpoint(tmp_path)
        assert list(tmp_path.glob("step-*")) == []
        engine.zero_grad()


@pytest.mark.parametrize("case", [*NVME, placed("cpu", "host")], ids=str)
def test_reading_by_name_within_gathered_shows_what_was_written(case: Any, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        with pair.engine.gathered(modify=True), torch.no_grad():
            pair.offloaded.head.weight.fill_(2.0)
            assert bool((pair.engine.get_full("head.weight") == 2.0).all())
            assert bool((dict(pair.engine.named_full_parameters())["head.weight"] == 2.0).all())
            pair.plain.head.weight.fill_(2.0)
        pair.train(square(inputs()), steps=1)
