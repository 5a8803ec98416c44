"""`offload.plan`: from a model and a configuration to bytes, seconds, the binding resource and what would help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import Blueprint, draw_up, weight_dtype
from offload.config import Config, ConfigError, load_config
from offload.errors import PlanError
from offload.initialization import empty_init
from offload.parallel.job import without_launcher
from offload.planner.machine import (
    OperationCosts,
    disk_of,
    kernel_seconds,
    link_rate,
    measure_operations,
    rates_of,
    stream_rate,
)
from offload.planner.predict import Prediction, Setting, Speeds, predict
from offload.planner.settings import activations_of, layer_major, schedule_of
from offload.planner.shapes import StepShapes, trace_step
from offload.planner.text import plan_text
from offload.planner.work import Course
from offload.tiers import Tier

Model = nn.Module | Callable[[], nn.Module]
_BASE_CODE = """
import sys, tempfile, torch
for name in sys.argv[1:]:
    __import__(name)
import offload, offload.train
places = {"parameters": "host", "gradients": "host", "optimizer": "nvme"}
with tempfile.TemporaryDirectory() as folder:
    config = {"device": "cpu", "memory": {"host": 1 << 26, "nvme_paths": [folder]}, "placement": places}
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2)))
    with offload.initialize(model, config) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(64, 256, dtype=torch.bfloat16)).float().sum())
            engine.step()
        engine.synchronize()
        print(engine.memory().workspace)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change to the configuration, and what it does to seconds per token (below 1: faster)."""

    what: str
    key: str
    relative_seconds: float
    peak_rss: int
    binding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What `offload plan` prints; `to_dict` is its JSON.

    `planned`: bytes by tier and kind. `smallest`: for each tier the smallest budget that works with the others as they
    are. `peaks`: resident bytes at set-up and while a checkpoint is written. `changes`: best first.
    """

    parameters: int
    tokens: int
    micro_batches: int
    schedule: str
    order: str
    activations: str
    planned: Mapping[str, Mapping[str, int]]
    limits: Mapping[str, int | None]
    smallest: Mapping[str, int | None]
    peaks: Mapping[str, int]
    prediction: Prediction
    flops: int
    speeds: Mapping[str, float]
    endurance_steps: int | None
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for JSON."""
        found = {name: getattr(self, name) for name in self.__slots__ if name not in ("prediction", "changes")}
        return {
            **found,
            "planned": {tier: dict(kinds) for tier, kinds in self.planned.items()},
            "prediction": self.prediction.to_dict(),
            "changes": [asdict(change) for change in self.changes],
        }

    def __str__(self) -> str:
        return plan_text(self.to_dict())


def plan(
    model: Model,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    sample_batch: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    micro_batches: int | None = None,
    param_groups: Any = None,
) -> PlanReport:
    """Predicts what training `model` under `config` takes. Nothing is placed, and the model is not touched.

    Measures the machine for some seconds: memory, the optimizer's kernel, the model's operations one by one, and a
    drive that no run has used yet.

    Args:
        model: a module, best built under `offload.empty_init()`, or a function that builds one.
        config: as for `offload.initialize`.
        sample_batch: one micro-batch, as for `Engine.train_batch`; its shapes count, not its values.
        loss_fn: as for `Engine.train_batch`.
        micro_batches: accumulated into a step; by default `train.micro_batches`.
        param_groups: as for `offload.initialize`.

    Raises:
        ConfigError, PlanError, UnsupportedModelError: as `offload.initialize`.
        OffloadError: the model's operations depend on values.
    """
    resolved = load_config(dict(config) if isinstance(config, Mapping) else config)
    if not isinstance(model, nn.Module):
        with empty_init():
            model = model()
    count = resolved.train.micro_batches if micro_batches is None else micro_batches
    return _Planner(model, resolved, sample_batch, loss_fn, count, param_groups).report()


class _Planner:
    """What is measured once and used for every variant of a configuration."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        micro_batches: int,
        param_groups: Any,
    ) -> None:
        self.model, self.config, self.count, self.param_groups = model, config, micro_batches, param_groups
        self.blueprint = self._draw(config)
        device = self.blueprint.device
        self.aliases_host, self.torch_device = device.aliases_host, device.torch_device
        self.base = base_bytes(model)
        self.stream = stream_rate()
        self.link = link_rate(device) if device.kind == "cuda" else 0.0
        nvme = self.blueprint.plan.total(Tier.NVME)
        paths = config.memory.nvme_paths if nvme else ()
        self.disk = disk_of(paths, config.swap.engine, shared_cores=self.aliases_host)
        self.shapes = self._shapes(batch, loss_fn)
        self.costs: OperationCosts = measure_operations(
            self.shapes.operations, device=self.torch_device, stream=self.stream
        )
        self._kernels: dict[str, float] = {}
        self._limits = self.blueprint.limits

    def _draw(self, config: Config) -> Blueprint:
        return draw_up(self.model, config, self.param_groups, None)

    def _shapes(self, batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> StepShapes:
        dtypes = {name: weight_dtype(name, p, self.config) for name, p in self.model.named_parameters()}
        trainable = frozenset(n for n, p in self.model.named_parameters() if id(p) in self.blueprint.optimized)
        return trace_step(
            self.model,
            self.blueprint.specs,
            dtypes,
            batch,
            device=self.torch_device,
            loss_fn=loss_fn,
            trainable=trainable,
        )

    def _kernel(self, blueprint: Blueprint) -> float:
        """Seconds that updating one element takes."""
        flats = [f for unit in blueprint.layouts for f in unit.flats if f.trainable_end]
        if not flats or not self.aliases_host:
            return 0.0
        largest = max(flats, key=lambda flat: flat.trainable_end)
        gradient = largest.dtype if self.count == 1 else blueprint.accumulate
        key = f"{blueprint.fmt.name} {largest.dtype} {gradient}"
        if key not in self._kernels:
            self._kernels[key] = kernel_seconds(blueprint.fmt.name, largest.dtype, gradient)
        return self._kernels[key]

    def setting(self, blueprint: Blueprint, count: int) -> Setting:
        """What a step of `blueprint` with `count` micro-batches depends on."""
        visits = self.shapes.visits or [[spec.index, *spec.borrows] for spec in blueprint.specs]
        course = Course(
            schedule=schedule_of(blueprint),
            layer_major=layer_major(blueprint, count),
            micro_batches=count,
            visits=visits,
            aliases_host=self.aliases_host,
            last=self.shapes.last,
        )
        return Setting(
            units=blueprint.layouts,
            plan=blueprint.plan,
            fmt=blueprint.fmt,
            accumulate=blueprint.accumulate,
            course=course,
            shapes=self.shapes,
            activations=activations_of(blueprint, self.shapes.kept * (count if course.layer_major else 1)),
            base=self.base,
            buffers=sum(b.numel() * b.element_size() for b in self.model.buffers()),
            host_limit=blueprint.limits.host,
        )

    def speeds(self, blueprint: Blueprint, *, drives: float = 1.0) -> Speeds:
        """What was measured; `drives`: times as many of them."""
        rates = rates_of(self.stream, self.disk, self.link, aliases_host=self.aliases_host)
        rates = replace(rates, disk_read=rates.disk_read * drives, disk_write=rates.disk_write * drives)
        return Speeds(rates=rates, costs=self.costs, kernel=self._kernel(blueprint))

    def report(self) -> PlanReport:
        blueprint = self.blueprint
        setting, speeds = self.setting(blueprint, self.count), self.speeds(blueprint)
        prediction = predict(setting, speeds)
        endurance = self.config.swap.endurance_tbw
        worn = prediction.disk_write / max(1, len(self.config.memory.nvme_paths))
        limits = blueprint.limits
        return PlanReport(
            parameters=sum(slot.numel for unit in blueprint.layouts for flat in unit.flats for slot in flat.slots),
            tokens=self.shapes.tokens,
            micro_batches=self.count,
            schedule=setting.course.schedule,
            order="layer_major" if setting.course.layer_major else "batch_major",
            activations=setting.activations,
            planned=setting.bytes_in_use(),
            limits={"device": limits.device, "host": limits.host, "nvme": limits.nvme},
            smallest={str(tier): self._smallest(tier) for tier in Tier},
            peaks=setting.peaks(prediction.workspace),
            prediction=prediction,
            flops=(self.shapes.flops(self.shapes.forward) + self.shapes.flops(self.shapes.backward)) * self.count,
            speeds=self._measured(speeds),
            endurance_steps=int(endurance * 10**12 / worn) if endurance and worn else None,
            changes=self._changes(prediction),
        )

    def _measured(self, speeds: Speeds) -> dict[str, float]:
        rates = speeds.rates
        return {
            "stream_bytes_per_s": rates.stream,
            "gemm_flops_per_s": self.costs.flops_per_s,
            "kernel_parameters_per_s": 1 / speeds.kernel if speeds.kernel else 0.0,
            "disk_read_bytes_per_s": rates.disk_read,
            "disk_write_bytes_per_s": rates.disk_write,
            "disk_mixing_penalty": rates.mixing,
            "compute_beside_disk": rates.compute_beside,
            "disk_beside_compute": rates.disk_beside,
            "link_bytes_per_s": rates.link,
        }

    def _variant(self, key: str, value: object) -> Config:
        section, _, name = key.partition(".")
        part = getattr(self.config, section)
        return self.config.model_copy(update={section: part.model_copy(update={name: value})})

    def _smallest(self, tier: Tier) -> int | None:
        """The smallest budget of `tier` with which the run still fits, found by halving; None if it is not asked."""
        low, high = 0, self.blueprint.plan.total(tier)
        if high == 0:
            return 0
        if not self._fits(tier, high):
            return None
        step = max(1 << 20, high // 256)
        while high - low > step:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(tier, middle) else (middle, high)
        return high

    def _fits(self, tier: Tier, nbytes: int) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about budgets that nobody asked for
                self._draw(self._variant(f"memory.{tier}", nbytes)).device.close()
        except (PlanError, ConfigError):
            return False
        return True

    def _changes(self, now: Prediction) -> tuple[Change, ...]:
        """Every single change that makes a token cheaper, the best first."""
        found: list[Change] = []

        def add(what: str, key: str, blueprint: Blueprint, count: int, drives: float = 1.0) -> None:
            then = predict(self.setting(blueprint, count), self.speeds(blueprint, drives=drives))
            relative = (then.seconds / count) / (now.seconds / self.count)
            found.append(
                Change(what=what, key=key, relative_seconds=relative, peak_rss=then.peak_rss, binding=then.binding)
            )

        more = 4 * self.count
        add(f"accumulate {more} micro-batches in a step", f"train.micro_batches={more}", self.blueprint, more)
        if self.disk is not None:
            add("a second drive as fast as the first", "memory.nvme_paths", self.blueprint, self.count, 2.0)
        for what, key, value in self._alternatives():
            try:
                blueprint = self._draw(self._variant(key, value))
            except ValueError:  # it does not fit, or not this model
                continue
            add(what, f"{key}={value}", blueprint, self.count)
            blueprint.device.close()
        found.sort(key=lambda change: change.relative_seconds)
        return tuple(change for change in found if change.relative_seconds < 0.99)

    def _alternatives(self) -> list[tuple[str, str, str]]:
        config = self.config
        found = []
        if config.optimizer.state_format != "compact":
            found.append(("compact optimizer states", "optimizer.state_format", "compact"))
        for kind in ("optimizer", "parameters", "gradients"):
            if getattr(config.placement, kind) not in ("auto", "host", "device"):
                found.append((f"{kind} in host memory", f"placement.{kind}", "host"))
        if activations_of(self.blueprint, 0) != "keep":
            found.append(("keep activations", "placement.activations", "keep"))
        else:
            found.append(("recompute activations", "placement.activations", "recompute"))
        return found


def base_bytes(model: nn.Module) -> int:
    """Resident bytes of a process that has loaded all it needs and trained a model of no size; 0 if that fails.

    Measured in a process of its own, since this one has more loaded.
    """
    names = {type(module).__module__.partition(".")[0] for module in model.modules()}
    extra = sorted(name for name in names if name not in ("torch", "offload", "__main__", "builtins"))
    root = str(Path(__file__).resolve().parents[2])
    environment = without_launcher(os.environ) | {"PYTHONPATH": os.pathsep.join([root, *sys.path[:1]])}
    command = [sys.executable, "-c", _BASE_CODE, *extra]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return int(json.loads(done.stdout.strip().splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def token_batch(config: Config) -> dict[str, torch.Tensor]:
    """One micro-batch of `offload train` under a configuration."""
    ids = torch.zeros((config.train.batch_size, config.data.context), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def plan_config(config: Config) -> PlanReport:
    """What `offload train` with this configuration will take."""
    from offload.models import build_model

    if not config.memory.nvme_paths:
        # Where a run makes its swap folder by itself.
        memory = config.memory.model_copy(update={"nvme_paths": (os.getcwd(),)})
        config = config.model_copy(update={"memory": memory})
    build = partial(build_model, config.model, context=config.data.context)
    return plan(build, config, sample_batch=token_batch(config))
