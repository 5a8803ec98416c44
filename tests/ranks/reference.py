"""Training on many ranks in one process with plain torch: slow, and obviously right.

The gradients of each rank's micro-batches are computed one after another with the same weights, summed as a rank would,
rounded to what is sent, summed in rank order in fp32, divided, rounded again, and given to `optimizer_cpu.reference`
(or, in the compact format, to the kernel on a parameter of its own). No part of `offload.parallel` is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.scaler import LossScaler
from optimizer_cpu import AdamWHyper, kernels, reference
from optimizer_cpu.formats import get_format
from tests.engine.common import DTYPES, Reference, Trace

SCALE = 2.0**12
"""The loss scale that fp16 begins with: small enough for every gradient of the decoder."""
Loss = Callable[[nn.Module, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What bits depend on. `shard` ranks of `world` divide state; with `each`, micro-batches are reduced one by one."""

    world: int
    shard: int
    dtype: str = "fp32"
    state_format: str = "fp32"
    reduce: str = "auto"
    accumulate: str = "fp32"
    each: bool = False
    clip: float | None = None

    @property
    def wire(self) -> torch.dtype:
        return DTYPES[self.accumulate if self.reduce == "auto" else self.reduce]


def mean_in_rank_order(sent: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """((r0 + r1) + r2) ... in fp32, times 1 / n, rounded to what is sent."""
    total = sent[0].float()
    for of_rank in sent[1:]:
        total = total + of_rank.float()
    return (total * torch.tensor(1.0 / len(sent), dtype=torch.float32)).to(wire)


class RankReference(Reference):
    """A reference whose steps take the micro-batches of every rank."""

    def __init__(self, model: nn.Module, policy: Policy, *, loss: Loss, **options: Any) -> None:
        super().__init__(model, dtype=policy.dtype, max_grad_norm=policy.clip, **options)
        self.policy, self.loss_of = policy, loss
        self.planes: dict[str, dict[str, Tensor]] = {}
        if policy.state_format == "compact":
            self._encode()
        fp16 = policy.dtype == "fp16"
        self.scaler = LossScaler(scale=SCALE, dynamic=True, window=1000, minimum=1.0, hysteresis=2) if fp16 else None
        self.skipped = 0

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    # Gradients

    def train(self, by_rank: Sequence[Sequence[Any]]) -> tuple[float, float | None]:
        """One step; returns the loss and the norm before clipping. A micro-batch is what `loss` takes; where that gives
        a pair (sum, count), sums are divided by the counts of all.
        """
        policy = self.policy
        count = len(by_rank[0])
        windows = [[k] for k in range(count)] if policy.each else [list(range(count))]
        replicas = policy.world // policy.shard
        held: list[dict[str, tuple[Tensor, int]]] = [{} for _ in range(replicas)]
        losses: list[list[float]] = [[] for _ in by_rank]
        tokens: list[int | None] = []
        for window in windows:
            sent = [self._local(by_rank[rank], window, losses[rank], tokens) for rank in range(policy.world)]
            for r in range(replicas):
                self._reduce(sent[r * policy.shard : (r + 1) * policy.shard], held[r])
        gradients = self._over_replicas(held)
        counted = None if tokens[0] is None else sum(n or 0 for n in tokens)
        loss = sum(sum(of_rank) for of_rank in losses) / (policy.world if counted is None else counted)
        norm = self.update(gradients, 1.0 if counted is None else counted / policy.world)
        return loss, norm

    def _local(
        self, batches: Sequence[Any], window: Sequence[int], losses: list[float], tokens: list[int | None]
    ) -> dict[str, Tensor]:
        """What one rank sends for its micro-batches `window`."""
        assert not self.gradients
        for k in window:
            value = self.loss_of(self.model, batches[k])
            loss, count = value if isinstance(value, tuple) else (value, None)
            if count is None:
                loss = loss / len(batches)
            tokens.append(count)
            losses.append(float(loss.detach()))
            (loss * self.scale if self.scaler is not None else loss).backward()
            self._collect()
        gradients, self.gradients = self.gradients, {}
        return {name: gradient.to(self.policy.wire) for name, (gradient, _) in gradients.items()}

    def _collect(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None and name in self.steps:
                self._add(self.gradients, name, p.grad.detach().reshape(-1))
            p.grad = None

    def _add(self, held: dict[str, tuple[Tensor, int]], name: str, value: Tensor) -> None:
        """The first contribution stays as it is, with later ones the sum is taken in fp32 and kept as accumulated."""
        before, count = held.get(name, (value, 0))
        total = value.clone() if count == 0 else (before.float() + value.float()).to(DTYPES[self.policy.accumulate])
        held[name] = (total, count + 1)

    def _reduce(self, sent: Sequence[dict[str, Tensor]], held: dict[str, tuple[Tensor, int]]) -> None:
        for name in sorted({name for of_rank in sent for name in of_rank}):
            zero = next(torch.zeros_like(of_rank[name]) for of_rank in sent if name in of_rank)
            values = [of_rank.get(name, zero) for of_rank in sent]
            self._add(held, name, mean_in_rank_order(values, self.policy.wire))

    def _over_replicas(self, held: Sequence[dict[str, tuple[Tensor, int]]]) -> dict[str, Tensor]:
        if len(held) == 1:
            return {name: gradient for name, (gradient, _) in held[0].items()}
        found = {}
        for name in sorted({name for of_replica in held for name in of_replica}):
            zero = torch.zeros_like(next(of_replica[name][0] for of_replica in held if name in of_replica))
            values = [of_replica.get(name, (zero, 0))[0].to(self.policy.wire) for of_replica in held]
            found[name] = mean_in_rank_order(values, self.policy.wire)
        return found

    # Update

    def update(self, gradients: dict[str, Tensor], divisor: float) -> float | None:
        """AdamW with `gradients` / `divisor` / the loss scale; nothing if one of them is not finite."""
        raw = reference.total_norm([reference.square_sums(g) for g in gradients.values()])
        norm = raw / self.scale * (1.0 / divisor) if math.isfinite(raw) else raw
        if self.check_finite and not all(bool(torch.isfinite(g).all()) for g in gradients.values()):
            self.skipped += 1
            if self.scaler is not None:
                self.scaler.update(overflow=True)
            return norm
        factor = 1.0 / divisor
        if self.max_grad_norm is not None:
            factor *= min(1.0, self.max_grad_norm / (norm + 1e-6))
        self.apply(gradients, factor / self.scale)
        if self.scaler is not None:
            self.scaler.update(overflow=False)
        return norm if self.check_finite or self.max_grad_norm is not None else None

    def apply(self, gradients: dict[str, Tensor], factor: float) -> None:
        if not self.planes:
            super().apply(gradients, factor)
            return
        group = self.optimizer.param_groups[0]
        for name, gradient in gradients.items():
            self.steps[name] += 1
            beta1, beta2 = group["betas"]
            hyper = AdamWHyper(
                lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
                weight_decay=group["weight_decay"], step=self.steps[name],
            )  # fmt: skip
            planes = self.planes[name]
            padded = torch.zeros(planes["weight"].numel(), dtype=gradient.dtype)
            padded[: gradient.numel()] = gradient
            kernels.step_("compact", planes, grad=padded, hyper=hyper, grad_scale=factor)
            self._decode(name)

    def _encode(self) -> None:
        """The compact planes of every parameter, each padded to whole groups."""
        for name, master in self.masters.items():
            weight = self.parameters[name].data
            size = -(-master.numel() // 64) * 64
            specs = get_format("compact").planes(weight.dtype)
            self.planes[name] = {s.name: torch.zeros(s.numel(size), dtype=s.dtype) for s in specs}
            padded = torch.zeros(size)
            padded[: master.numel()] = master
            kernels.load_("compact", self.planes[name], master=padded)
            self._decode(name)

    def _decode(self, name: str) -> None:
        state = kernels.read("compact", self.planes[name])
        weight = self.parameters[name].data
        count = weight.numel()
        self.masters[name] = state.master[:count].clone()
        self.moments[name] = (state.exp_avg[:count].clone(), state.exp_avg_sq[:count].clone())
        weight.copy_(self.planes[name]["weight"][:count].view(weight.shape))


def digest(trace: Trace) -> str:
    """A hash of everything in it."""
    found = hashlib.sha256(repr((trace.losses, trace.norms)).encode())
    for name, entry in sorted(trace.states.items()):
        for kind, value in sorted(entry.items()):
            found.update(f"{name} {kind} ".encode())
            if isinstance(value, Tensor):
                found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(value).encode())
    return found.hexdigest()
