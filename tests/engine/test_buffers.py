"""Buffers that serve one load after the other: only those that nobody else has a view of."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.buffers import Buffers, Loaded
from offload.layout import Slot
from offload.planes import Loader
from offload.residency import Residency
from offload.tiers import TierMemory
from swap.budget import Budget
from swap.devices import create_device
from swap.errors import BudgetError
from tests.engine.binding_models import WIDTH, Pair, Stack, inputs, paired, square
from tests.engine.common import Case, Reference, decoder, placed, running, token_batches

SLOTS = [
    Slot(name="a", shape=(3, 4), offset=0, numel=12, trainable=True),
    Slot(name="none", shape=(0, 4), offset=12, numel=0, trainable=True),
    Slot(name="b", shape=(5,), offset=12, numel=5, trainable=True),
]


@pytest.fixture
def memory() -> Iterator[TierMemory]:
    made = TierMemory(device=create_device("cpu"), budget=Budget({"device": 1 << 20}))
    yield made
    made.close()


def used(memory: TierMemory) -> int:
    return memory.budget.used("device")


def test_the_next_load_of_the_same_layout_gets_the_buffer(memory: TierMemory) -> None:
    buffers = Buffers(memory)
    layout = buffers.layout(4096, torch.float32, SLOTS)
    assert buffers.layout(4096, torch.float32, list(SLOTS)) is layout
    assert buffers.layout(4096, torch.bfloat16, SLOTS) is not layout
    loaded = buffers.take(layout, "one")
    loaded.tensor.copy_(torch.arange(4096.0))
    assert [tuple(v.shape) for v in loaded.show()] == [(3, 4), (0, 4), (5,)]
    assert torch.equal(loaded.views[0], torch.arange(12.0).view(3, 4)) and float(loaded.views[2][4]) == 16
    assert loaded.addresses == [v.data_ptr() for v in loaded.views]
    buffers.give_back(loaded)
    assert buffers.idle_bytes == layout.nbytes == used(memory)
    assert buffers.take(layout, "two") is loaded and buffers.idle_bytes == 0
    assert buffers.take(layout, "three") is not loaded


def test_nothing_waits_beside_a_new_buffer(memory: TierMemory) -> None:
    buffers = Buffers(memory)
    one, other = buffers.layout(4096, torch.float32, SLOTS), buffers.layout(8192, torch.float32, SLOTS)
    first = buffers.take(one, "one")
    assert first.show()
    buffers.give_back(first)
    del first
    second = buffers.take(other, "other")
    assert used(memory) == memory.budget.peak("device") == other.nbytes
    assert second.show()
    buffers.give_back(second)
    del second
    assert buffers.drop() and not buffers.drop()
    assert used(memory) == 0


TAKE: dict[str, Callable[[Loaded], Any]] = {
    "view": lambda loaded: loaded.tensor[3:],
    "of a parameter": lambda loaded: loaded.views[2].detach(),
    "data": lambda loaded: loaded.views[0].data,
    "empty": lambda loaded: loaded.views[1].detach(),
    "array": lambda loaded: loaded.views[0].numpy(),
    "bytes": lambda loaded: memoryview(loaded.tensor.numpy()),
    "storage": lambda loaded: loaded.views[0].untyped_storage(),
    "saved": lambda loaded: (loaded.views[2].detach() * torch.ones(5, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("what", TAKE)
def test_a_buffer_that_somebody_has_is_not_kept(memory: TierMemory, what: str) -> None:
    buffers = Buffers(memory)
    loaded = buffers.take(buffers.layout(4096, torch.float32, SLOTS), "one")
    assert loaded.show() and loaded.alone
    held = TAKE[what](loaded)
    assert not loaded.alone
    buffers.give_back(loaded)
    assert buffers.idle_bytes == 0
    del held
    assert loaded.alone
    nbytes = loaded.layout.nbytes
    buffers.give_back(loaded)
    assert buffers.idle_bytes == nbytes


def test_memory_that_another_process_was_given_is_not_kept(memory: TierMemory) -> None:
    """Sharing puts other memory into the Storage and leaves no user of it here."""
    buffers = Buffers(memory)
    loaded = buffers.take(buffers.layout(4096, torch.float32, SLOTS), "one")
    loaded.tensor.zero_()
    assert loaded.show() and loaded.alone
    loaded.views[0].detach().share_memory_()
    assert not loaded.alone
    buffers.give_back(loaded)
    assert buffers.idle_bytes == 0


class Watched(torch.autograd.Function):
    """A product that hands out what autograd has saved for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight)
        return gradient @ weight, gradient.t() @ x, None


class Leaking(nn.Module):
    """Hands out its weight in the way that `keep` says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.keep: Callable[[nn.Parameter], Any] | None = None
        self.kept: list[Any] = []
        self.watched = False

    def forward(self, x: Tensor) -> Tensor:
        if self.keep is not None:
            self.kept.append(self.keep(self.weight))
        return torch.tanh(Watched.apply(x, self.weight, self.kept if self.watched else []) + self.bias)


def shared(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory that another process gets which is sent the tensor."""
    storage = tensor.untyped_storage()
    descriptor, size = storage._share_fd_cpu_()
    array = np.frombuffer(mmap.mmap(os.dup(descriptor), size), dtype=np.float32)
    start = int(tensor.storage_offset())
    return array[start : start + tensor.numel()].reshape(tensor.shape)


KEEP: dict[str, Callable[[nn.Parameter], Any]] = {
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight[1:].t(),
    "array": lambda weight: weight.detach().numpy(),
    "storage": lambda weight: weight.untyped_storage(),
    "shared": lambda weight: shared(weight.detach()),
    "as a parameter": lambda weight: nn.Parameter(weight.data),
    "put in its place": lambda weight: setattr(weight, "data", weight.data.view(-1).view(WIDTH, WIDTH)),
}


def content(kept: Any, like: Tensor) -> Tensor:
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0).set_(kept, 0, (kept.nbytes() // 4,), (1,))
        return kept[: like.numel()].view(like.shape).clone()
    return torch.as_tensor(kept).detach().clone()


@pytest.mark.parametrize("what", KEEP)
def test_what_a_user_keeps_of_a_unit_keeps_its_values(what: str, swap_folder: Path) -> None:
    model = Stack(6, block=Leaking)
    with paired(model, placed("cpu", "nvme"), swap_folder) as pair:
        pair.train(square(inputs()), steps=2)
        for index in (1, 3):
            pair.offloaded.blocks[index].keep = KEEP[what]
        for block in pair.offloaded.blocks:
            block.watched = True
        before = [block.weight.detach().clone() for block in pair.plain.blocks]
        pair.backward(square(inputs()))
        for index, block in enumerate(pair.offloaded.blocks):
            *kept, saved = block.kept
            assert torch.equal(saved, before[index]), f"what block {index} saved"
            assert len(kept) == (index in (1, 3))
            if kept and kept[0] is not None:
                expected = before[index][1:].t() if what == "view" else before[index]
                assert torch.equal(content(kept[0], expected), expected), f"what was kept of block {index}"
        kept = saved = None
        for block in pair.offloaded.blocks:
            block.kept.clear()
            block.keep, block.watched = None, False
        pair.step()
        pair.train(square(inputs()), steps=2)


def made_in(pair: Pair, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> int:
    """Buffers for leases that were made meanwhile."""
    count, memory = 0, pair.engine._memory
    make = memory.on_device

    def counting(numel: int, dtype: torch.dtype, kind: str, what: str = "") -> Tensor:
        nonlocal count
        count += kind == "leases"
        return make(numel, dtype, kind, what)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "on_device", counting)
        run()
    return count


def test_a_pass_makes_fewer_buffers_than_it_loads(swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(Stack(8), placed("cpu", "nvme"), swap_folder) as pair:
        pair.train(square(inputs()), steps=2)
        pair.engine.synchronize()
        units = pair.engine._residency.units
        loads = sum(unit.loads for unit in units)
        made = made_in(pair, monkeypatch, lambda: pair.backward(square(inputs())))
        assert sum(unit.loads for unit in units) - loads >= 2 * 8
        assert made < 8
        pair.step()


def test_a_unit_that_must_wait_for_room_gets_that_of_a_buffer_that_waits(swap_folder: Path) -> None:
    """A budget of the largest unit alone: whatever waits gives way."""
    block = 4 * 4096
    with paired(Stack(4), placed("cpu", "nvme"), swap_folder, memory={"device": 2 * block}) as pair:
        pair.train(square(inputs()), steps=3)


def test_gradients_on_the_device_get_the_room_of_buffers_that_wait(swap_folder: Path) -> None:
    """A budget of what is planned: gradients arrive while buffers wait."""
    case, ids = Case(parameters="nvme", gradients="device", optimizer="nvme"), token_batches(3)
    with running(decoder(), case, swap_folder) as engine:
        planned = sum(engine.memory().planned["device"].values())
    with running(decoder(), case, swap_folder, memory={"device": planned}) as engine:
        twin = Reference(decoder())
        for batch in ids:
            engine.backward(engine(batch, labels=batch).loss)
            twin.backward(twin.model(batch, labels=batch).loss)
            engine.step()
            twin.step()
        for name, value in engine.named_full_parameters():
            assert torch.equal(value, twin.parameters[name].detach()), name


def test_what_waits_is_let_go_of_for_any_other_memory_of_the_device(memory: TierMemory) -> None:
    residency = Residency(memory, [], Loader(memory), 0)
    loaded = residency.buffers.take(residency.buffers.layout(1 << 17, torch.float32, SLOTS), "one")
    residency.buffers.give_back(loaded)
    del loaded
    assert used(memory) == 1 << 19
    other = memory.on_device(1 << 17, torch.uint8, "gradients")
    assert used(memory) == (1 << 19) + (1 << 17)
    more = memory.on_device(7 << 17, torch.uint8, "gradients")
    assert used(memory) == other.nbytes + more.nbytes and residency.buffers.idle_bytes == 0
    with pytest.raises(BudgetError):
        memory.on_device(1, torch.uint8, "gradients")
    del other, more
    residency.buffers.give_back(residency.buffers.take(residency.buffers.layout(4096, torch.float32, SLOTS), "two"))
    assert residency.buffers.idle_bytes > 0
    residency.drop_prefetched()
    assert used(memory) == 0
    residency.loader.close()


@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupt_leaves_no_buffer_to_two_units(
    kept: bool, swap_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back, calls = Buffers.give_back, 0

    def interrupted(self: Buffers, loaded: Loaded) -> None:
        nonlocal calls
        calls += 1
        if kept or calls != 3:
            give_back(self, loaded)
        if calls == 3:
            raise KeyboardInterrupt

    with paired(Stack(6), placed("cpu", "nvme"), swap_folder) as pair:
        pair.train(square(inputs()), steps=2)
        pair.engine.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(Buffers, "give_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pair.engine(inputs())
        pair.train(square(inputs()), steps=2)
