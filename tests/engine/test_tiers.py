"""Every placement, I/O engine, staging size, chunk size, prefetch depth and delay: the bits of training in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from offload.planes import FutureCompletion, Loader, SlotQueue
from offload.tiers import TierMemory
from swap.faults import FaultPlan
from swap.store import SwapStore

from .common import (
    CLIP,
    HYPER,
    TIERS,
    Case,
    Reference,
    Trace,
    assert_equal,
    decoder,
    pairwise,
    placed,
    product,
    running,
    states_of,
    token_batches,
    train_engine,
    train_reference,
    two_groups,
    warmup_cosine,
)

STEPS = 30
FEW = 8  # more than the warm-up
FACTORS: dict[str, Any] = {
    "parameters": TIERS,
    "gradients": TIERS,
    "optimizer": TIERS,
    "engine": ("threads", "aiofiles"),
    "staging": (512 << 10, 2 << 20),
    "chunk": (16 << 10, 64 << 10),
    "device": ("cpu", "sim"),
}
MORE = {"dtype": ("fp32", "bf16"), "prefetch": (0, 1, 3), "seed": (0, 1, 2)}


@cache
def expected(dtype: str, wide: bool, steps: int) -> Trace:
    return train_reference(decoder(wide=wide), token_batches(steps), dtype=dtype)


def run(case: Case, folder: Path, steps: int = STEPS, **options: Any) -> Trace:
    return train_engine(decoder(wide=case.wide), case, folder, token_batches(steps), **options)


def test_the_reference_is_a_real_training() -> None:
    for dtype in ("fp32", "bf16"):
        trace = expected(dtype, False, STEPS)
        assert min(n for n in trace.norms if n is not None) > 2 * CLIP  # clipping binds at every step
        assert trace.losses[-1] < trace.losses[0]
        assert all(bool(torch.isfinite(entry["parameter"]).all()) for entry in trace.states.values())


@pytest.mark.parametrize("case", [Case(**row) for row in pairwise({**FACTORS, **MORE})], ids=str)
def test_every_pair_of_choices_equals_the_reference(case: Case, swap_folder: Path) -> None:
    assert_equal(run(case, swap_folder, FEW), expected(case.dtype, False, FEW))


@pytest.mark.parametrize("case", [Case(**row, wide=True) for row in pairwise({**FACTORS, **MORE}, seed=1)], ids=str)
def test_parameters_of_several_chunks_equal_the_reference(case: Case, swap_folder: Path) -> None:
    assert_equal(run(case, swap_folder, 4), expected(case.dtype, True, 4))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_staging_slot_is_enough(device: str, dtype: str, swap_folder: Path) -> None:
    case = placed(device, "nvme", dtype=dtype, wide=True, staging=80 << 10)
    assert_equal(run(case, swap_folder, 4), expected(dtype, True, 4))


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_all_combinations_equal_the_reference(device: str, dtype: str, wide: bool, swap_folder: Path) -> None:
    for index, row in enumerate(product({**FACTORS, "device": (device,)})):
        case = Case(**row, dtype=dtype, wide=wide, seed=index)
        try:
            assert_equal(run(case, swap_folder), expected(dtype, wide, STEPS))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_long_random_delays_change_nothing(seed: int, dtype: str, swap_folder: Path) -> None:
    rows = pairwise({key: FACTORS[key] for key in ("parameters", "gradients", "optimizer")}, seed=seed)
    for row in rows[:2]:
        case = Case(device="sim", seed=seed, delay=2e-3, wide=True, dtype=dtype, staging=160 << 10, **row)
        faults = FaultPlan(seed=seed).delay(2e-3)
        assert_equal(run(case, swap_folder, 2, faults=faults), expected(dtype, True, 2))


def test_two_steps_of_warm_up_and_cosine_from_torch(swap_folder: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> SequentialLR:
        warm = LinearLR(optimizer, start_factor=0.1, total_iters=3)
        return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 10)], milestones=[3])

    batches = token_batches(8)
    right = train_reference(decoder(), batches, lr_scheduler=scheduler)
    found = train_engine(decoder(), placed("sim", "nvme"), swap_folder, batches, lr_scheduler=scheduler)
    assert_equal(found, right)


def test_close_to_torch_adamw(swap_folder: Path) -> None:
    model, twin, batches = decoder(), decoder(), token_batches(STEPS)
    theirs = torch.optim.AdamW(two_groups(twin), **HYPER, foreach=False, fused=False)
    schedule = warmup_cosine(theirs)
    with running(model, Case(), swap_folder, param_groups=two_groups(model), lr_scheduler=warmup_cosine) as engine:
        moved = 0.0
        for ids in batches:
            loss, other = engine(ids, labels=ids).loss, twin(ids, labels=ids).loss
            assert float(loss.detach()) == pytest.approx(float(other.detach()), rel=1e-6)
            engine.backward(loss)
            other.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            assert engine.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
            moved += 0.01 * theirs.param_groups[0]["lr"]
            theirs.step()
            schedule.step()
            theirs.zero_grad()
            for name, value in engine.named_full_parameters():
                assert float((value - twin.get_parameter(name)).detach().abs().max()) <= moved, name


def test_adamw_with_the_same_gradients_stays_within_a_millionth(swap_folder: Path) -> None:
    model, twin = decoder(), decoder()
    theirs = torch.optim.AdamW(twin.parameters(), **HYPER, foreach=False, fused=False)
    generator = torch.Generator().manual_seed(3)
    with running(model, Case(), swap_folder, max_grad_norm=None) as engine:
        for _ in range(100):
            for name, p in twin.named_parameters():
                p.grad = torch.randn(p.shape, generator=generator)
                engine.set_full(name, "grad", p.grad)
            engine.step()
            theirs.step()
        for name, value in engine.named_full_parameters():
            theirs_value = twin.get_parameter(name).detach()
            assert float((value - theirs_value).abs().max()) <= 1e-6 * float(theirs_value.abs().max()), name


# The simulated device detects a missing wait: each test leaves one wait out and must not get the right result.


class _NotAwaited:
    """An event that nobody waits for."""

    clock = (0, 0)

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


def leave_out(patch: pytest.MonkeyPatch, owner: type, method: str, caller: str) -> None:
    """What `method` returns to the function `caller` is no longer waited for."""
    original: Callable[..., Any] = getattr(owner, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        event = original(self, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name in ("submit_read", "submit_write"):
            frame = frame.f_back
        return _NotAwaited() if frame.f_code.co_name == caller else event

    patch.setattr(owner, method, changed)


def detected(case: Case, folder: Path, *, slow_io: bool = False) -> bool:
    """Whether a run is wrong, in its numbers or by raising, with long delays of copies or of I/O."""
    losses: list[float] = []
    ids, *_ = token_batches(1)
    faults = FaultPlan(seed=1).delay(0.02, operation="read") if slow_io else None
    try:
        with running(
            decoder(wide=case.wide, layers=1), case, folder, faults=faults, max_grad_norm=CLIP, optimizer={"lr": 0.1}
        ) as engine:
            if case.device == "sim":
                engine._memory.device.delay = 0.0 if slow_io else (5e-3, 8e-3)
            for _ in range(2):
                loss = engine(ids, labels=ids).loss
                engine.backward(loss)
                losses.append(float(loss.detach()))
            norm = engine.step().grad_norm
            with torch.no_grad():
                losses.append(float(engine(ids, labels=ids).loss))
            found = Trace(losses=losses, norms=[norm], states=states_of(engine))
        assert_equal(found, accumulated(case.wide))
    except Exception:
        return True
    return False


@cache
def accumulated(wide: bool) -> Trace:
    twin = Reference(decoder(wide=wide, layers=1), lr=0.1)
    ids, *_ = token_batches(1)
    losses = []
    for _ in range(2):
        loss = twin.model(ids, labels=ids).loss
        twin.backward(loss)
        losses.append(float(loss.detach()))
    norm = twin.step()
    with torch.no_grad():
        losses.append(float(twin.model(ids, labels=ids).loss))
    return Trace(losses=losses, norms=[norm], states=twin.states())


WAITS = {
    "weights copied in from the host": ("copy_in", "load", Case(device="sim", parameters="host")),
    "weights read into staging": ("read", "_staged", Case(device="sim", parameters="nvme")),
    "weights copied in from staging": ("copy_in", "_staged", Case(device="sim", parameters="nvme")),
    "weights read in place": ("read", "load", Case(device="cpu", parameters="nvme")),
    "first gradient copied out": ("copy_out", "_put", Case(device="sim", gradients="host", wide=True)),
    "first small gradients copied out": ("copy_out", "_move_late", Case(device="sim", gradients="host")),
    "later gradient copied out": ("copy_out", "_add_transferred", Case(device="sim", gradients="host")),
    "gradient copied out to staging": ("copy_out", "_add_streamed", Case(device="sim", wide=True)),
    "earlier gradient read": ("read", "_add_streamed", Case(device="sim", wide=True)),
    "state read for the step": ("read", "fetch", Case(device="cpu", optimizer="nvme")),
    "state copied out for the step": ("copy_out", "fetch", Case(device="sim", gradients="device", optimizer="host")),
    "state copied in for a step on the device": (
        "copy_in",
        "ready",
        Case(device="sim", parameters="nvme", optimizer="device"),
    ),
    "weights copied out after a step on the device": (
        "copy_out",
        "put_back",
        Case(device="sim", optimizer="device", parameters="nvme"),
    ),
    "weights copied in after a step on the host": (
        "copy_in",
        "put_back",
        Case(device="sim", optimizer="host", parameters="device"),
    ),
}


@pytest.mark.parametrize("what", list(WAITS))
def test_a_missing_wait_is_detected(what: str, swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, caller, case = WAITS[what]
    slow_io = method == "read"
    assert not detected(case, swap_folder, slow_io=slow_io)
    leave_out(monkeypatch, SwapStore if slow_io else TierMemory, method, caller)
    # On a loaded machine whoever does not wait may come late enough all the same.
    assert any(detected(case, swap_folder, slow_io=slow_io) for _ in range(3))


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_load_that_is_not_settled_is_detected(tier: str, swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "settle", lambda self, completion: None)
    assert detected(Case(device="sim", parameters=tier), swap_folder)
    monkeypatch.undo()
    monkeypatch.setattr(FutureCompletion, "wait", lambda self, timeout=None: None)
    assert detected(Case(device="sim", parameters=tier), swap_folder) == (tier == "nvme")


@pytest.mark.parametrize("awaited", [True, False])
def test_writes_of_the_step_are_awaited(awaited: bool, swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads right after the step find what its last writes, which are slow, brought; they do not if nobody waits."""
    twin = Reference(decoder())
    ids, *_ = token_batches(1)
    twin.backward(twin.model(ids, labels=ids).loss)
    twin.step()
    expected = twin.states()["norm.weight"]
    if not awaited:
        monkeypatch.setattr(SlotQueue, "drain", lambda self: None)
    faults = FaultPlan(seed=1).delay(0.5, operation="write")
    with running(decoder(), Case(), swap_folder, faults=faults) as engine:
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        kinds = ("exp_avg", "exp_avg_sq", "parameter")
        found = {kind: engine.get_full("norm.weight", kind) for kind in kinds}  # of the last unit
    assert all(torch.equal(found[kind], expected[kind]) for kind in kinds) == awaited
