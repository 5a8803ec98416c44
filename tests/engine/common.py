"""Shared by the engine's tests: a tiny decoder, a slow reference that needs no engine, and a runner for any placement.

The reference holds the whole model and fp32 masters in memory, collects gradients with torch alone and updates every
parameter with `optimizer_cpu.reference`. Every run of the engine must equal it bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import offload
from offload.models import Llama, LlamaConfig
from optimizer_cpu import reference

TIERS = ("device", "host", "nvme")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.25  # below the norm of every step of the decoder, so that clipping binds
VOCABULARY, WIDTH = 97, 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run the same training; `delay` is the longest pause before a copy of the simulated device."""

    device: str = "cpu"
    parameters: str = "nvme"
    gradients: str = "nvme"
    optimizer: str = "nvme"
    engine: str = "threads"
    staging: int = 512 << 10
    chunk: int = 16 << 10
    dtype: str = "fp32"
    wide: bool = False
    prefetch: int | str = "auto"
    schedule: str = "auto"
    seed: int = 0
    delay: float = 1e-4

    def __str__(self) -> str:
        where = f"{self.parameters[0]}{self.gradients[0]}{self.optimizer[0]}"
        kind = "wide" if self.wide else "small"
        return (
            f"{self.device}-{where}-{self.engine}-{self.staging >> 10}K-{self.chunk >> 10}K-{self.dtype}-{kind}"
            f"-ahead_{self.prefetch}-{self.schedule}-seed{self.seed}"
        )


def placed(device: str, tier: str, **changes: Any) -> Case:
    """Everything on one tier."""
    return Case(device=device, parameters=tier, gradients=tier, optimizer=tier, **changes)


def config_of(case: Case, folder: Path, *, max_grad_norm: float | None = CLIP, **sections: Any) -> dict[str, Any]:
    """The engine's configuration; `sections` are merged into it."""
    config: dict[str, Any] = {
        "device": case.device,
        "seed": case.seed,
        "memory": {"nvme_paths": [str(folder)], "nvme": 256 << 20, "host": 256 << 20},
        "placement": {"parameters": case.parameters, "gradients": case.gradients, "optimizer": case.optimizer},
        "swap": {"engine": case.engine, "staging": case.staging, "chunk": case.chunk},
        "schedule": {"prefetch_units": case.prefetch, "optimizer_step": case.schedule},
        "optimizer": {**HYPER},
        "precision": {"compute_dtype": "auto" if case.dtype == "fp32" else case.dtype},
    }
    if max_grad_norm is not None:
        config["optimizer"]["max_grad_norm"] = max_grad_norm
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    return config


@contextmanager
def running(model: nn.Module, case: Case, folder: Path, **options: Any) -> Iterator[offload.Engine]:
    """An engine for `model`. `options` of `initialize` are passed on, the rest goes to `config_of`."""
    arguments = {k: options.pop(k) for k in ("param_groups", "lr_scheduler", "init_fn", "faults") if k in options}
    engine = offload.initialize(model, config_of(case, folder, **options), **arguments)
    try:
        if case.device == "sim":
            engine._memory.device.delay = case.delay
        yield engine
    finally:
        engine.close()


def decoder(*, wide: bool = False, dropout: float = 0.0, seed: int = 0, layers: int = 3) -> Llama:
    """Three blocks, vocabulary 97, width 24, tied head. A `wide` one has matrices of three and a half layout blocks."""
    torch.manual_seed(seed)
    return Llama(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=600 if wide else 64,
            layers=layers,
            heads=3,
            max_positions=32,
            tie_embeddings=True,
            dropout=dropout,
        )
    )


def token_batches(count: int, *, size: int = 2, time: int = 12, seed: int = 1) -> list[Tensor]:
    """`count` batches of token ids (size, time)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (size, time), generator=generator) for _ in range(count)]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases do not and learn faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 6e-3}]


def warmup_cosine(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Five steps of warm-up, then cosine decay over 30 steps."""
    half = torch.pi / 2

    def factor(step: int) -> float:
        if step < 5:
            return (step + 1) / 5
        return 0.1 + 0.9 * float(torch.cos(torch.tensor(half * (step - 5) / 25, dtype=torch.float64)))

    return LambdaLR(optimizer, factor)


class _Groups(torch.optim.Optimizer):
    """Parameter groups for schedulers; the reference reads them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class Reference:
    """Training in memory, one parameter after another, with no part of the engine."""

    def __init__(
        self,
        model: nn.Module,
        *,
        groups: list[dict[str, Any]] | None = None,
        dtype: str = "fp32",
        max_grad_norm: float | None = CLIP,
        check_finite: bool = True,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        keep: Sequence[str] = (),
        **hyper: Any,
    ) -> None:
        self.model, self.max_grad_norm, self.check_finite = model, max_grad_norm, check_finite
        self.masters: dict[str, Tensor] = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[str, tuple[Tensor, int]] = {}
        self.steps: dict[str, int] = {}
        chosen = groups if groups is not None else [{"params": [p for p in model.parameters() if p.requires_grad]}]
        self.optimizer = _Groups(chosen, {**HYPER, **hyper})
        self.scheduler = None if lr_scheduler is None else lr_scheduler(self.optimizer)
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        for name, p in model.named_parameters():
            master = p.detach().float().clone().reshape(-1) if p.is_floating_point() else None
            if p.dtype == torch.float32 and name not in keep:
                p.data = p.data.to(DTYPES[dtype])
            if id(p) not in trained:
                continue
            assert master is not None
            if p.dtype == torch.float32:
                master = p.data.reshape(-1)  # the weight is the master
            reference.round_weight_(master, p.data.reshape(-1))
            self.masters[name] = master
            self.moments[name] = (torch.zeros_like(master), torch.zeros_like(master))
            self.steps[name] = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)  # type: ignore[no-untyped-call]
        self.collect()

    def collect(self) -> None:
        """Moves what `backward` left in `.grad` to the sums: the first in its dtype, with later ones in fp32."""
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            gradient, p.grad = p.grad.detach().reshape(-1), None
            if name not in self.steps:
                continue
            before, count = self.gradients.get(name, (gradient, 0))
            total = gradient.clone() if count == 0 else before.float() + gradient.float()
            self.gradients[name] = (total, count + 1)

    def norm(self) -> float:
        return reference.total_norm([reference.square_sums(g) for g, _ in self.gradients.values()])

    def step(self) -> float:
        """One step; returns the norm before clipping. A gradient that is not finite changes nothing."""
        norm = self.norm()
        gradients, self.gradients = self.gradients, {}
        if self.check_finite and not all(bool(torch.isfinite(g).all()) for g, _ in gradients.values()):
            return norm
        factor = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        self.apply({name: gradient for name, (gradient, _) in gradients.items()}, factor)
        if self.scheduler is not None:
            self.optimizer.step()  # does nothing, but schedulers want to see it
            self.scheduler.step()
        return norm

    def apply(self, gradients: dict[str, Tensor], factor: float) -> None:
        group_of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        parameters = self.parameters
        for name, gradient in gradients.items():
            self.steps[name] += 1
            group = group_of[id(parameters[name])]
            reference.adamw_(
                master=self.masters[name],
                exp_avg=self.moments[name][0],
                exp_avg_sq=self.moments[name][1],
                grad=gradient,
                hyper=reference.AdamWHyper(
                    lr=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=self.steps[name],
                ),
                grad_scale=factor,
                weight=parameters[name].data.reshape(-1),
            )

    def states(self) -> dict[str, dict[str, Any]]:
        """What the engine's `named_full_states` must give, with the weight in its own dtype."""
        found: dict[str, dict[str, Any]] = {}
        for name, p in self.model.named_parameters():
            entry: dict[str, Any] = {"weight": p.detach().clone(), "parameter": p.detach().clone()}
            if name in self.steps:
                entry["parameter"] = self.masters[name].view(p.shape).clone()
                entry["exp_avg"], entry["exp_avg_sq"] = (m.view(p.shape).clone() for m in self.moments[name])
                entry["step"] = self.steps[name]
            found[name] = entry
        return found


def states_of(engine: offload.Engine) -> dict[str, dict[str, Any]]:
    """Every parameter's weight, fp32 value, moments and step count."""
    weights = dict(engine.named_full_parameters())
    return {name: {"weight": weights[name], **entry} for name, entry in engine.named_full_states()}


def assert_states_equal(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    """Bit for bit, all kinds of all parameters."""
    assert set(found) == set(expected)
    for name, entry in expected.items():
        assert set(found[name]) == set(entry), name
        for kind, value in entry.items():
            got = found[name][kind]
            if not isinstance(value, Tensor):
                assert got == value, f"{name} {kind}: {got} is not {value}"
                continue
            assert got.dtype == value.dtype and got.shape == value.shape, f"{name} {kind}: {got.dtype} {got.shape}"
            if not torch.equal(got, value):
                different = (got != value).reshape(-1).nonzero().reshape(-1)
                raise AssertionError(
                    f"{name} {kind}: {different.numel()} of {value.numel()} differ, first {different[:4]}"
                )


@dataclasses.dataclass(slots=True, kw_only=True)
class Trace:
    """What a training run produced."""

    losses: list[float]
    norms: list[float | None]
    states: dict[str, dict[str, Any]]


def assert_equal(found: Trace, expected: Trace) -> None:
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert_states_equal(found.states, expected.states)


def train_engine(
    model: nn.Module, case: Case, folder: Path, batches: Iterable[Tensor], *, groups: bool = True, **options: Any
) -> Trace:
    """Trains on `batches`, one step each, with the engine."""
    if groups:
        options.setdefault("param_groups", two_groups(model))
    options.setdefault("lr_scheduler", warmup_cosine)
    losses, norms = [], []
    with running(model, case, folder, **options) as engine:
        for ids in batches:
            loss = engine(ids, labels=ids).loss
            engine.backward(loss)
            losses.append(float(loss.detach()))
            norms.append(engine.step().grad_norm)
            assert engine.resident_units() == []
        return Trace(losses=losses, norms=norms, states=states_of(engine))


def train_reference(
    model: nn.Module, batches: Iterable[Tensor], *, dtype: str = "fp32", groups: bool = True, **options: Any
) -> Trace:
    """The same training in memory."""
    chosen = two_groups(model) if groups else None
    options.setdefault("lr_scheduler", warmup_cosine)
    twin = Reference(model, groups=chosen, dtype=dtype, **options)
    losses, norms = [], []
    for ids in batches:
        loss = twin.model(ids, labels=ids).loss
        twin.backward(loss)
        losses.append(float(loss.detach()))
        norms.append(twin.step())
    return Trace(losses=losses, norms=norms, states=twin.states())


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two independent copies of a model."""
    return copy.deepcopy(model), copy.deepcopy(model)


def product(factors: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs (greedy, the same at every call)."""
    names = list(factors)
    missing = {
        ((a, va), (b, vb)) for a, b in itertools.combinations(names, 2) for va in factors[a] for vb in factors[b]
    }
    generator = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while missing:
        candidates = []
        for _ in range(50):
            row = {name: generator.choice(list(values)) for name, values in factors.items()}
            (a, va), (b, vb) = generator.choice(sorted(missing, key=str))
            row[a], row[b] = va, vb
            covered = {((x, row[x]), (y, row[y])) for x, y in itertools.combinations(names, 2)} & missing
            candidates.append((len(covered), len(candidates), row, covered))
        _, _, row, covered = max(candidates, key=lambda item: item[:2])
        rows.append(row)
        missing -= covered
    return rows


def cover(factors: dict[str, Sequence[Any]], seed: int = 0) -> Any:
    """`pytest.mark.parametrize` of all factors: a pairwise cover ordinarily, the others under `acceptance`."""
    import pytest  # scripts that only want a model need not wait for it

    chosen = pairwise(factors, seed)
    params = []
    for row in product(factors):
        marks = () if row in chosen else (pytest.mark.acceptance,)
        params.append(pytest.param(*row.values(), id="-".join(map(str, row.values())), marks=marks))
    return pytest.mark.parametrize(tuple(factors), params)
