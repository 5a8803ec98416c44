"""Micro-batches that go through the model unit by unit give the bits of one after another, and load each unit twice."""

from __future__ import annotations

import contextvars
import copy
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import OffloadError
from offload.randomness import RandomState, seed_everything
from tests.engine.binding_models import NVME, WIDTH, Block, Stack, checkpointed, inputs, nested
from tests.engine.common import (
    CLIP,
    Case,
    Reference,
    assert_states_equal,
    decoder,
    pairwise,
    placed,
    product,
    running,
    states_of,
    token_batches,
)
from tests.engine.resources import nothing_left_of, threads

LAYER_MAJOR = {"micro_batch_order": "layer_major"}
LossFn = Callable[[Any, Any], Any]


class Twin:
    """An engine in layer-major order, and the slow reference that runs one micro-batch after another."""

    def __init__(self, engine: offload.Engine, model: nn.Module, case: Case, **options: Any) -> None:
        self.engine, self.case, self.steps = engine, case, 0
        self.reference = Reference(model, dtype=case.dtype, **options)

    def step(self, batches: Sequence[Any], loss_fn: LossFn | None = None) -> offload.StepResult:
        """One step of both; the mean losses and norms must be equal."""
        total = 0.0
        model = self.reference.model
        for k, batch in enumerate(batches):
            seed_everything(self.case.seed, self.steps, k)
            outputs = model(**batch) if isinstance(batch, dict) else model(batch)
            loss = (outputs.loss if loss_fn is None else loss_fn(outputs, batch)) / len(batches)
            self.reference.backward(loss)
            total += float(loss.detach())
        after = RandomState.take()
        norm = self.reference.step()
        result = self.engine.train_batch(batches, loss_fn)
        assert torch.equal(torch.get_rng_state(), after.cpu)
        assert result.loss == total and result.grad_norm == norm
        self.steps += 1
        return result

    def equal(self) -> None:
        """All states are, and nothing is resident."""
        assert_states_equal(states_of(self.engine), self.reference.states())
        assert self.engine.resident_units() == [] and self.engine._residency.busy_units() == []

    def loads(self) -> dict[str, int]:
        return {unit.name: unit.loads for unit in self.engine._residency.units}


@contextmanager
def twin(
    model: nn.Module, case: Case, folder: Path, *, max_grad_norm: float | None = CLIP, **sections: Any
) -> Iterator[Twin]:
    sections["schedule"] = {**LAYER_MAJOR, "prefetch_units": case.prefetch, **sections.get("schedule", {})}
    ours = copy.deepcopy(model)
    gc.collect()
    before = threads()
    with running(ours, case, folder, max_grad_norm=max_grad_norm, **sections) as engine:
        if hasattr(model, "config") and hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # the engine builds none, and attention on a cache may have other bits
        pair = Twin(engine, model, case, max_grad_norm=max_grad_norm)
        yield pair
        pair.equal()
        assert not [name for name in threads() - before if "micro-batch" in name]


def labelled(count: int, step: int = 0, **options: Any) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in token_batches(count, seed=10 + step, **options)]


FACTORS: dict[str, Sequence[Any]] = {
    "device": ["cpu", "sim"],
    "parameters": ["device", "host", "nvme"],
    "gradients": ["host", "nvme"],
    "optimizer": ["host", "nvme"],
    "dtype": ["fp32", "bf16"],
    "wide": [False, True],
    "prefetch": [0, 1, 3],
    "delay": [0.0, 2e-3],
    "count": [1, 2, 4],
    "dropout": [0.0, 0.2],
    "clip": [None, CLIP],
}


def train_any(row: dict[str, Any], folder: Path) -> None:
    count, dropout, clip = row.pop("count"), row.pop("dropout"), row.pop("clip")
    case = Case(**row)
    with twin(decoder(wide=case.wide, dropout=dropout), case, folder, max_grad_norm=clip) as pair:
        for step in range(2):
            pair.step(labelled(count, step))


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_bits_equal_batch_major(row: dict[str, Any], swap_folder: Path) -> None:
    train_any(dict(row), swap_folder)


@pytest.mark.acceptance
def test_bits_equal_batch_major_everywhere(swap_folder: Path) -> None:
    few = {"wide": [True], "prefetch": [0, 2], "delay": [2e-3], "count": [1, 4], "clip": [CLIP]}
    for row in product({**FACTORS, **few}):
        train_any(row, swap_folder)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("case", NVME, ids=str)
def test_each_unit_is_loaded_twice_a_step(case: Case, count: int, swap_folder: Path) -> None:
    with twin(Stack(depth=5), case, swap_folder) as pair:
        for step in range(3):
            before = pair.loads()
            pair.step([inputs(seed=step * 10 + k) for k in range(count)], square_loss)
            loads = {name: n - before[name] for name, n in pair.loads().items()}
            # The head's backward follows its forward at once.
            assert loads == {**{f"blocks.{i}": 2 for i in range(5)}, "head": 1}


def square_loss(outputs: Any, _batch: Any) -> Tensor:
    loss: Tensor = outputs.square().mean()
    return loss


def test_auto_is_layer_major_where_weights_are_loaded(swap_folder: Path) -> None:
    for tier, order in (("nvme", "layer_major"), ("host", "batch_major")):
        with running(decoder(), placed("cpu", tier), swap_folder) as engine:
            assert f"micro-batches of a step: {order}" in engine.describe()
            ids: list[int] = []

            def loss_fn(outputs: Any, _batch: Any, ids: list[int] = ids) -> Tensor:
                ids.append(threading.get_ident())
                return outputs.loss  # type: ignore[no-any-return]

            engine.train_batch(labelled(2), loss_fn)
            assert (len(set(ids)) == 2) == (order == "layer_major")
            ids.clear()
            engine.train_batch(labelled(1), loss_fn)
            assert ids == [threading.get_ident()]


def hugging_face() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    import transformers as hf

    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    kv = {**small, "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    gpt = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    yield "Llama", lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**kv))
    yield "GPT-2 with dropout, tied", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt))
    yield "Mixtral with router loss", lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**kv, **experts))
    yield (
        "Qwen2 in bf16, tied",
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**kv, tie_word_embeddings=True)).bfloat16(),
    )


NAMES = ["Llama", "GPT-2 with dropout, tied", "Mixtral with router loss", "Qwen2 in bf16, tied"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [placed("cpu", "nvme"), placed("sim", "nvme", delay=1e-3)], ids=["cpu", "sim"])
def test_models_of_transformers(case: Case, name: str, swap_folder: Path) -> None:
    torch.manual_seed(0)
    model = dict(hugging_face())[name]().train()
    with twin(model, case, swap_folder) as pair:
        blocks = [unit.name for unit in pair.engine._residency.units if unit.name.rpartition(".")[2].isdigit()]
        assert len(blocks) == 3
        for step in range(2):
            before = pair.loads()
            pair.step(labelled(3, step, time=10))
            assert {pair.loads()[block] - before[block] for block in blocks} == {2}


@pytest.mark.parametrize(
    "run",
    [checkpointed(False, 1), checkpointed(True, 1), checkpointed(False, 2), checkpointed(True, 2), nested(False)],
    ids=["hooks", "reentrant", "hooks over two", "reentrant over two", "nested"],
)
@pytest.mark.parametrize("case", NVME, ids=str)
def test_the_models_own_checkpointing(case: Case, run: Any, swap_folder: Path) -> None:
    with twin(Stack(run=run), case, swap_folder) as pair:
        for step in range(2):
            before = sum(pair.loads().values())
            pair.step([inputs(seed=step * 10 + k, grad=True) for k in range(2)], square_loss)
            few = sum(pair.loads().values()) - before
            before = sum(pair.loads().values())
            pair.step([inputs(seed=step * 10 + k, grad=True) for k in range(5)], square_loss)
            # Where checkpoints are nested, what is prefetched and dropped may differ by a few.
            assert sum(pair.loads().values()) - before <= few + 2


class Skipping(nn.Module):
    """Batches visit different blocks, in different orders, one of them several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: Sequence[int]) -> Any:
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


ORDERS = [[0, 1, 2, 3], [3, 0], [1], [2, 1, 2, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("case", NVME, ids=str)
def test_micro_batches_may_visit_units_as_they_like(case: Case, swap_folder: Path) -> None:
    with twin(Skipping(), case, swap_folder) as pair:
        for step in range(3):
            batches = [
                {"x": inputs(3 + k, WIDTH, seed=step * 10 + k), "order": order}
                for k, order in enumerate(ORDERS[step:] + ORDERS[:step])
            ]
            pair.step(batches, square_loss)


class Recurrent(nn.Module):
    """One block used again and again, each time under reentrant checkpointing: several contributions a micro-batch."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(lambda h, b=block: b(h) + self.bias, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", NVME, ids=str)
def test_sums_keep_their_order_when_a_micro_batch_contributes_often(
    case: Case, reentrant: bool, swap_folder: Path
) -> None:
    found = []
    for order in ("batch_major", "layer_major"):
        schedule = {"micro_batch_order": order}
        with running(Recurrent(reentrant), case, swap_folder, schedule=schedule) as engine:
            for step in range(2):
                engine.train_batch([inputs(seed=step * 10 + k, grad=True) for k in range(4)], square_loss)
            found.append(states_of(engine))
    assert_states_equal(found[1], found[0])


@pytest.mark.parametrize("case", NVME, ids=str)
def test_gradient_penalty_and_evaluation_on_the_side(case: Case, swap_folder: Path) -> None:
    model = Stack()

    def loss_fn(outputs: Tensor, batch: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(outputs.square().sum(), batch, create_graph=True)
        with torch.no_grad():
            target = where[threading.current_thread() is not threading.main_thread()](batch).detach()
        return (outputs - 0.5 * target).square().mean() + gradient.square().mean()

    with twin(model, case, swap_folder) as pair:
        where = {False: model, True: pair.engine.module}
        with pytest.warns(UserWarning, match="create_graph"):
            for step in range(2):
                pair.step([inputs(seed=step * 10 + k, grad=True) for k in range(3)], loss_fn)


def test_a_lease_for_the_others_gives_way(swap_folder: Path) -> None:
    """With room for one unit and a half, nothing can be kept for others, nor loaded ahead."""
    unit = sum(p.numel() * 4 for p in Block(64).parameters())
    batches = [{"x": inputs(3, 64, seed=k), "order": ORDERS[k]} for k in range(4)]
    torch.manual_seed(0)
    model = Skipping()
    model.blocks = nn.ModuleList(Block(64) for _ in range(4))
    model.head = nn.Linear(64, 3)
    case = placed("sim", "nvme", delay=1e-3)
    with twin(model, case, swap_folder, memory={"device": unit * 3 // 2}) as pair:
        for _ in range(2):
            pair.step(batches, square_loss)
        assert pair.engine.memory().peak["device"]["leases"] <= unit * 3 // 2


REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


class Curious(nn.Module):
    """Notes what is in force where its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen.append(
            (REQUEST.get(), torch.is_autocast_enabled("cpu"), torch.get_num_threads(), torch.get_default_device().type)
        )
        return x


def test_what_is_in_force_around_the_call_is_in_force_inside(swap_folder: Path) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(threading.get_ident())
        return tensor

    model = Curious()
    with running(model, placed("cpu", "nvme"), swap_folder, schedule=LAYER_MAJOR) as engine:
        token = REQUEST.set("mine")
        threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with (
                torch.autocast("cpu", torch.float32, enabled=False),
                torch.device("cpu"),
                saved_tensors_hooks(pack, lambda t: t),
            ):
                engine.train_batch([inputs(seed=k) for k in range(2)], square_loss)
        finally:
            torch.set_num_threads(threads_before)
            REQUEST.reset(token)
        assert model.seen == [("mine", False, 1, "cpu")] * 2
        assert len(set(packed)) == 2 and threading.get_ident() not in packed


class Failing(Exception):
    pass


class Fuse(nn.Module):
    """A block that runs `action` in its `armed` phase (forward, backward), in the given micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.armed, self.at = Block(), "", 0
        self.action: Callable[[], None] = lambda: None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        mine = self.calls == self.at
        self.calls += 1
        if self.armed == "forward" and mine:
            self.action()
        if self.armed == "backward" and mine:
            x = x * 1.0
            x.register_hook(lambda _gradient: self.action())
        return x


def fail() -> None:
    raise Failing("fuse")


def interrupt() -> None:
    while True:  # until the first signal has been seen and the second one cuts this short
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(20):
            threading.Event().wait(0.001)


def interrupt_once() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.05)


@pytest.mark.parametrize("action", [fail, interrupt, interrupt_once], ids=["error", "two Ctrl-C", "Ctrl-C"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("case", NVME[1:], ids=str)
def test_an_error_or_an_interrupt_ends_all_and_the_engine_goes_on(
    case: Case, where: str, action: Callable[[], None], swap_folder: Path
) -> None:
    batches = [inputs(seed=k) for k in range(4)]
    with nothing_left_of(swap_folder), twin(Stack(block=Fuse), case, swap_folder) as pair:
        pair.step(batches, square_loss)
        for at in (0, 2):
            fuse = pair.engine.module.blocks[1]  # type: ignore[union-attr, index]
            fuse.calls, fuse.at, fuse.armed, fuse.action = 0, at, where, action
            before = states_of(pair.engine)
            with pytest.raises(Failing if action is fail else KeyboardInterrupt):
                pair.engine.train_batch(batches, square_loss)
            fuse.armed = ""
            assert not [name for name in threads() if "micro-batch" in name]
            assert all(pair.engine.get_full(name, "grad") is None for name in before)
            assert_states_equal(states_of(pair.engine), before)
            assert pair.engine.resident_units() == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        pair.step(batches, square_loss)


def test_the_first_error_is_raised_as_it_was(swap_folder: Path) -> None:
    """Also past a model that swallows exceptions."""

    class Stubborn(Stack):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x.sum()[None]

    model = Stubborn(block=Fuse)
    with running(model, placed("cpu", "nvme"), swap_folder, schedule=LAYER_MAJOR) as engine:

        def loss_fn(outputs: Tensor, batch: Tensor) -> Tensor:
            if batch is batches[1]:
                raise Failing("loss")
            return outputs.square().mean()

        batches = [inputs(seed=k) for k in range(3)]
        with pytest.raises(Failing, match="loss") as caught:
            engine.train_batch(batches, loss_fn)
        assert caught.traceback[-1].name == "loss_fn"
        assert engine.train_batch(batches, square_loss).stepped


def test_a_failed_step_keeps_nothing_alive(swap_folder: Path) -> None:
    """Without help of the garbage collector."""
    with running(Stack(block=Fuse), placed("sim", "nvme"), swap_folder, schedule=LAYER_MAJOR) as engine:
        fuse = engine.module.blocks[2]  # type: ignore[union-attr, index]
        fuse.at, fuse.armed, fuse.action = 1, "forward", fail
        batches = [inputs(seed=k) for k in range(3)]
        gc.collect()
        gc.disable()
        try:
            references = [weakref.ref(batch) for batch in batches]
            with suppress(Failing):
                engine.train_batch(batches, square_loss)
            del batches
            assert [r() for r in references] == [None] * 3
            assert engine.memory().current["device"].get("leases", 0) == 0
        finally:
            gc.enable()


def test_token_counts_and_losses_as_in_batch_major(swap_folder: Path) -> None:
    def loss_fn(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        targets = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return loss, int(targets.numel())

    found = []
    for order in ("batch_major", "layer_major"):
        batches = [*labelled(2), *labelled(1, 1, size=3, time=7), *labelled(1, 2, size=1, time=16)]
        with running(
            decoder(dropout=0.1), placed("cpu", "nvme"), swap_folder, schedule={"micro_batch_order": order}
        ) as engine:
            results = [engine.train_batch(batches, loss_fn) for _ in range(2)]
            found.append(([(r.loss, r.grad_norm) for r in results], states_of(engine)))
    assert found[0][0] == found[1][0]
    assert_states_equal(found[1][1], found[0][1])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_backward_within_the_loss_is_right_or_refused(device: str, swap_folder: Path) -> None:
    """Its gradients would come after those of later micro-batches, and the sum would have other bits."""
    model, batches = Stack(), [inputs(seed=seed) for seed in range(3)]

    def loss_fn(outputs: Tensor, batch: Tensor) -> Tensor:
        owner(batch * 2.0).square().sum().backward()
        return outputs.square().sum()

    case = placed(device, "nvme")
    owner: nn.Module
    with running(copy.deepcopy(model), case, swap_folder, max_grad_norm=None, schedule=LAYER_MAJOR) as engine:
        owner = engine.module
        with pytest.raises(OffloadError, match=r"micro-batch 0 adds to it again.*'batch_major'"):
            engine.train_batch(batches, loss_fn)
        assert engine.resident_units() == []
    schedule = {"micro_batch_order": "batch_major"}
    with running(copy.deepcopy(model), case, swap_folder, max_grad_norm=None, schedule=schedule) as engine:
        owner = engine.module
        engine.train_batch(batches, loss_fn)
        found = states_of(engine)
    owner, reference = model, Reference(model, max_grad_norm=None)
    for batch in batches:
        outputs = model(batch)
        loss = loss_fn(outputs, batch) / len(batches)
        reference.collect()
        reference.backward(loss)
    reference.step()
    assert_states_equal(found, reference.states())
