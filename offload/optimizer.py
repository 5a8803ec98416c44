"""The optimizer that users see: a real `torch.optim.Optimizer` over the real parameters, whose step is the engine's."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from offload.config import Config, ConfigError
from offload.recipe import build_lr_scheduler
from optimizer_cpu import AdamWHyper

if TYPE_CHECKING:
    from offload.engine import Engine


class EngineOptimizer(torch.optim.Optimizer):
    """Hyperparameters per group, as schedulers and trainers expect them; moments live in the engine's planes.

    `state_dict()` gathers them into CPU memory in the layout of `torch.optim.AdamW`, and `load_state_dict()` takes such
    a state, ours or torch's. The fp32 masters of low-precision weights are in neither: read and set them with
    `engine.get_full(name)` and `engine.set_full(name, "parameter", value)`.
    """

    def __init__(self, engine: Engine, groups: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._engine = weakref.ref(engine)
        super().__init__(groups, defaults)
        for index, group in enumerate(self.param_groups):
            _check_group(index, group)

    def _owner(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("the engine of this optimizer is gone")
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step, and its result. With a closure, which must run the backward, the closure's result."""
        if closure is None:
            return self._owner().step()
        with torch.enable_grad():
            loss = closure()
        self._owner().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients; with offloaded parameters they are always set to None, and `set_to_none=False` warns."""
        if not set_to_none:
            warnings.warn(
                "zero_grad(set_to_none=False): gradients of offloaded parameters become None even so; a parameter that "
                "gets no new one is not updated, where zeros would decay its weight and moments",
                stacklevel=2,
            )
        self._owner().zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Trains parameters of the model from now on: frozen ones that were unfrozen, and new ones, which are taken
        over as `engine.adopt` does. A scheduler that has a base rate per group follows the new one too.
        """
        engine = self._engine()
        if engine is not None and getattr(engine, "_ready", False):
            engine.add_group(param_group)
        else:
            super().add_param_group(param_group)

    def append_group(self, param_group: dict[str, Any]) -> None:
        """torch's part of `add_param_group`, with our checks."""
        super().add_param_group(param_group)
        try:
            _check_group(len(self.param_groups) - 1, self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Groups and, per parameter that was ever updated, `step`, `exp_avg` and `exp_avg_sq` as fp32 CPU tensors."""
        packed: dict[str, Any] = super().state_dict()
        packed["state"] = self._owner().optimizer_states(self._numbered())
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hyperparameters, moments and step counts of a `state_dict()` of this class or of `torch.optim.AdamW`.

        Parameters without an entry start anew. Raises ValueError, before anything changes, for states that do not fit.
        """
        owner, numbered, states = self._owner(), self._numbered(), dict(state_dict["state"])
        for index, state in states.items():
            parameter = numbered.get(index)
            fits = parameter is not None and all(
                name in state and tuple(state[name].shape) == tuple(parameter.shape)
                for name in ("exp_avg", "exp_avg_sq")
            )
            if not fits or "step" not in state or "max_exp_avg_sq" in state:
                raise ValueError(f"load_state_dict: the state of parameter {index} is not an AdamW state of its shape")
        super().load_state_dict({**state_dict, "state": {}})
        owner.load_optimizer_states(numbered, states)

    def _numbered(self) -> dict[int, nn.Parameter]:
        """Parameters by the numbers that torch's state dicts give them: their order over all groups."""
        return dict(enumerate(p for group in self.param_groups for p in group["params"]))

    def __reduce__(self) -> Any:
        raise TypeError("an EngineOptimizer cannot be pickled: it belongs to a running engine")


def _check_group(index: int, group: dict[str, Any]) -> None:
    """ValueError for values that AdamW cannot take, and for variants that the engine does not compute."""
    for name in ("amsgrad", "maximize", "differentiable"):
        if group.get(name):
            raise ValueError(f"param_groups[{index}]: {name} is not supported")
    beta1, beta2 = group["betas"]
    try:
        AdamWHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=1,
        )
    except ValueError as error:
        raise ValueError(f"param_groups[{index}]: {error}") from None


def follow(scheduler: Any, group: dict[str, Any]) -> None:
    """Lets a scheduler with one base rate per group know of a new group; a rule per group is that of the last one."""
    for part in getattr(scheduler, "_schedulers", ()):
        follow(part, group)
    base = getattr(scheduler, "base_lrs", None)
    if isinstance(base, list):
        base.append(group["lr"])
        group.setdefault("initial_lr", group["lr"])
        rules = getattr(scheduler, "lr_lambdas", None)
        if isinstance(rules, list) and rules:
            rules.append(rules[-1])


def make_scheduler(given: Any, optimizer: EngineOptimizer) -> Any:
    """The scheduler that `step()` drives: `given(optimizer)` for a callable, or an object that is no scheduler of
    another optimizer.

    Raises:
        ValueError: a scheduler of another optimizer, which would change nothing here; one that needs a metric.
    """
    if given is None:
        return None
    made = given(optimizer) if isinstance(given, type) or not hasattr(given, "step") else given
    label = f"lr_scheduler {type(made).__name__}"
    if not callable(getattr(made, "step", None)):
        raise ValueError(f"{label} has no step(); pass a torch scheduler or a callable that makes one")
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            f"{label} needs a metric at each step: build it on engine.optimizer and call its step yourself"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"{label} belongs to another optimizer, so it would change nothing here: "
            "pass a callable, e.g. lambda optimizer: CosineAnnealingLR(optimizer, 100)"
        )
    return made


def configured_scheduler(config: Config) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A maker of the scheduler that `optimizer.scheduler` asks for, or None.

    Raises:
        ConfigError: the schedule needs a length and neither `optimizer.total_steps` nor `train.steps` is set.
    """
    settings = config.optimizer
    if settings.scheduler == "none":
        return None
    decays = settings.scheduler in ("linear", "cosine")
    if decays and settings.total_steps == "auto" and "steps" not in config.train.model_fields_set:
        raise ConfigError([f"optimizer.total_steps: scheduler = {settings.scheduler!r} needs it (or train.steps) set"])
    return lambda optimizer: build_lr_scheduler(optimizer, settings, steps=config.train.steps)


def default_groups(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group of every parameter that requires a gradient."""
    return [{"params": [p for _, p in parameters if p.requires_grad]}]
