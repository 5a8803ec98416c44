"""Models that are never held whole: parameters on the meta device, created module by module with the model's own
initialisers.

`empty_init` moves each parameter to the meta device as it is registered; buffers are made for real, because nothing
could recompute them. `Creator` gives meta parameters memory and values: through the caller's `init_fn(module)`, the
`_init_weights` of an enclosing module (the convention of `transformers`), or the module's own `reset_parameters`.
Random values of a parameter come from a seed derived from (seed, parameter name): before the first random operation on
a parameter the global generators are seeded for it, so that values depend neither on the order of creation nor on the
tier nor on the world size.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offload.errors import UnsupportedModelError

InitFn = Callable[[nn.Module], object]
_local = threading.local()
_patch_lock = threading.Lock()
_patch_users = 0
_original_register: Any = None


def _register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    _original_register(module, name, parameter)
    if not getattr(_local, "depth", 0) or parameter is None or parameter.device.type == "meta":
        return
    # A parameter registered a second time (a tie) must stay one object, so the meta twin is remembered for as long as
    # the original lives.
    twins: dict[int, tuple[nn.Parameter, nn.Parameter]] = _local.twins
    if id(parameter) not in twins:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        # Holding the original would hold its memory: keep only a shell of it, whose identity is what matters.
        shell = parameter
        with torch.no_grad():
            shell.data = torch.empty(0, dtype=parameter.dtype)
        twins[id(parameter)] = (shell, twin)
    module._parameters[name] = twins[id(parameter)][1]


@contextmanager
def empty_init() -> Iterator[None]:
    """Within this context new modules keep their parameters on the meta device (no memory); buffers are made for real.

    `offload.initialize` creates the parameters later, unit by unit. Thread-local and re-entrant.
    """
    global _patch_users, _original_register
    with _patch_lock:
        if _patch_users == 0:
            _original_register = nn.Module.register_parameter
            nn.Module.register_parameter = _register_on_meta  # type: ignore[method-assign, assignment]
        _patch_users += 1
    _local.depth = getattr(_local, "depth", 0) + 1
    if _local.depth == 1:
        _local.twins = {}
    try:
        yield
    finally:
        _local.depth -= 1
        if _local.depth == 0:
            _local.twins = {}
        with _patch_lock:
            _patch_users -= 1
            if _patch_users == 0:
                nn.Module.register_parameter = _original_register  # type: ignore[method-assign]


def seed_for(seed: int, name: str) -> int:
    """A 63-bit seed that depends on the run's seed and a name only (SHA-256)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


class _SeedPerParameter(TorchFunctionMode):
    """Seeds the global generators before the first operation that writes a parameter in place."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        super().__init__()
        self.seed, self.names, self.seeded = seed, names, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        if (
            name.endswith("_")
            and not name.startswith("__")
            and isinstance(target, torch.Tensor)
            and target.device.type != "meta"
        ):
            owner = self.names.get(target.untyped_storage()._cdata)
            if owner is not None and owner not in self.seeded:
                self.seeded.add(owner)
                torch.manual_seed(seed_for(self.seed, owner))
        return func(*args, **kwargs)


def _on_meta(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.device.type == "meta"


@contextmanager
def _stand_ins(module: nn.Module, replace: Callable[[nn.Parameter], bool]) -> Iterator[dict[int, nn.Parameter]]:
    """Replaces parameters in the subtree of `module` by meta stand-ins for a while; yields {id(original): stand-in}."""
    saved: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
    made: dict[int, nn.Parameter] = {}
    try:
        for child in module.modules():
            saved.append((child, dict(child._parameters)))
            for key, parameter in child._parameters.items():
                if parameter is not None and replace(parameter):
                    if id(parameter) not in made:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                        made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                    child._parameters[key] = made[id(parameter)]
        yield made
    finally:
        for child, parameters in saved:
            child._parameters.update(parameters)


class Creator:
    """Creates the meta parameters of a model in place, keeping their identity (parameter groups and ties refer to it).

    Which module's initialiser writes which parameter is found beforehand by running every initialiser once on meta
    stand-ins, children before parents, as constructors run. `create` then runs just the ones that write the parameters
    asked for.

    Raises:
        UnsupportedModelError: no initialiser writes a meta parameter, or an initialisation written outside the
        initialisers (in a parent's
            `__init__`) was lost on the meta device; the message names the module and the parameter.
    """

    def __init__(self, model: nn.Module, *, seed: int, init_fn: InitFn | None) -> None:
        self._seed = seed
        self._names: dict[int, str] = {}
        self._writers: dict[int, list[int]] = {}
        self._initialisers: list[tuple[str, nn.Module, Callable[[], object]]] = []
        if not any(_on_meta(p) for p in model.parameters()):
            return
        hosts = _init_weights_hosts(model)
        written: dict[int, int] = {}
        for name, module in _children_first(model):
            run = _initialiser(module, init_fn, hosts)
            if run is None or not any(_on_meta(p) for p in module.parameters()):
                continue
            with _stand_ins(module, lambda p: True) as made, torch.no_grad(), torch.random.fork_rng(devices=[]):
                self._run(name, module, run)
                counts = {key: stand_in._version for key, stand_in in made.items() if stand_in._version}
            for key, count in counts.items():
                written[key] = written.get(key, 0) + count
                self._writers.setdefault(key, []).append(len(self._initialisers))
            self._initialisers.append((name, module, run))
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not _on_meta(parameter) or id(parameter) in self._names:
                    continue
                self._names[id(parameter)] = f"{name}.{key}" if name else key
                exact = init_fn is None and id(module) not in hosts
                self._check(
                    f"{name or '(root)'} ({type(module).__name__})",
                    key,
                    parameter,
                    written.get(id(parameter), 0),
                    exact,
                )

    @staticmethod
    def _check(label: str, key: str, parameter: nn.Parameter, written: int, exact: bool) -> None:
        remedy = "give it one, pass init_fn to offload.initialize, or build the model without offload.empty_init()"
        if written == 0 and parameter.numel():
            raise UnsupportedModelError(
                f"{label}: parameter {key} is on the meta device and no reset_parameters() or "
                f"_init_weights() writes it; {remedy}"
            )
        if exact and parameter._version > written:
            raise UnsupportedModelError(
                f"{label}: parameter {key} was initialised outside reset_parameters() (in a parent's __init__?), "
                "which is lost on the meta device; move it into reset_parameters(), pass init_fn to "
                "offload.initialize, or build without offload.empty_init()"
            )

    @staticmethod
    def _run(name: str, module: nn.Module, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as error:
            raise UnsupportedModelError(
                f"{name or '(root)'} ({type(module).__name__}): its initialiser failed: {error}"
            ) from error

    def create(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives those of `parameters` that are on the meta device memory and initial values; no other parameter is
        written.
        """
        pending = [p for p in parameters if _on_meta(p)]
        if not pending:
            return
        by_storage: dict[int, str] = {}
        for parameter in pending:
            created = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
            )
            created.__dict__.update(parameter.__dict__)
            # `torch.utils.swap_tensors` refuses tensors with weak references (recurrent modules keep some), for fear
            # that these would see the other tensor's memory. Here they shall: the parameter stays the object it was and
            # only its memory changes.
            torch._C._swap_tensor_impl(parameter, created)
            by_storage[parameter.untyped_storage()._cdata] = self._names[id(parameter)]
        wanted = {id(p) for p in pending}
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for index in sorted({i for p in pending for i in self._writers.get(id(p), ())}):
                name, module, run = self._initialisers[index]
                torch.manual_seed(seed_for(self._seed, name))  # for random draws that are not made on a parameter
                with _stand_ins(module, lambda p: id(p) not in wanted), _SeedPerParameter(self._seed, by_storage):
                    self._run(name, module, run)


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return sorted(model.named_modules(), key=lambda item: -(item[0].count(".") + 1) if item[0] else 0)


def _initialiser(module: nn.Module, init_fn: InitFn | None, hosts: dict[int, nn.Module]) -> Callable[[], object] | None:
    if init_fn is not None:
        return lambda: init_fn(module)
    if id(module) in hosts:
        host = hosts[id(module)]
        return lambda: host._init_weights(module)  # type: ignore[operator]
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            return getattr(module, name)  # type: ignore[no-any-return]
    return None


def _init_weights_hosts(model: nn.Module) -> dict[int, nn.Module]:
    """For every module at or below one with `_init_weights`, the innermost such module."""
    hosts: dict[int, nn.Module] = {}

    def visit(module: nn.Module, current: nn.Module | None) -> None:
        if callable(getattr(module, "_init_weights", None)):
            current = module
        if current is not None:
            hosts.setdefault(id(module), current)
        for child in module.children():
            visit(child, current)

    visit(model, None)
    return hosts
