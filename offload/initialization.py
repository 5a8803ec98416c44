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
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from offload.errors import UnsupportedModelError

_OWN_MAPPING = 1 << 20

InitFn = Callable[[nn.Module], object]
_patch_lock = threading.Lock()
_patch_users = 0
_original_register: Any = None


class _Context(threading.local):
    """What `empty_init` keeps per thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.twins: Any = None
        self.watch: _WriteCounter | None = None


_writes: Any = WeakIdKeyDictionary()
"""Meta parameter -> number of operations that wrote it within `empty_init`, as a list of one."""


def _written(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The tensor that `func` writes in place, by torch's naming rules (a trailing underscore, augmented assignment)."""
    name = getattr(func, "__name__", "")
    if not ((name.endswith("_") and not name.startswith("__")) or name in _IN_PLACE) or name == "requires_grad_":
        return None
    target = args[0] if args else next(iter(kwargs.values()), None)
    return target if isinstance(target, torch.Tensor) else None


def _run_write(func: Any, target: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)`, but a meta tensor is filled with zeros instead of normal values: one write too.

    Torch would load its compiler for the latter: seconds, memory, and a directory among the temporary files.
    """
    if target is not None and target.device.type == "meta" and getattr(func, "__name__", "") == "normal_":
        with torch.no_grad():
            return target.zero_()
    return func(*args, **kwargs)


_IN_PLACE = frozenset(["__setitem__", *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "pow"))])


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and functional tensors have none
        return None


class _WriteCounter(TorchFunctionMode):
    """Counts the operations that write known storages in place, also through views and `.data`.

    A parameter's own version does not show what was written through `.data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, list[int]] = {}

    def watch(self, tensor: torch.Tensor) -> list[int]:
        """The counter of a tensor, from zero on."""
        key = _storage_key(tensor)
        assert key is not None
        self.counts[key] = counter = [0]
        return counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = _written(func, args, kwargs)
        if target is not None:
            counter = self.counts.get(_storage_key(target) or 0)
            if counter is not None:
                counter[0] += 1
        return _run_write(func, target, args, kwargs)


def _register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    _original_register(module, name, parameter)
    # Lazy and quantised parameters are left alone: `initialize` refuses them by name.
    if not _context.depth or type(parameter) is not nn.Parameter or parameter.device.type == "meta":
        return
    # A parameter registered a second time (a tie) must stay one object, so its meta twin is known for as long as the
    # original lives; the original's memory goes when its maker lets go of it.
    twin = _context.twins.get(parameter)
    if twin is None:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        _context.twins[parameter] = twin
        assert _context.watch is not None
        _writes[twin] = _context.watch.watch(twin)
    module._parameters[name] = twin


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
    _context.depth += 1
    try:
        if _context.depth > 1:
            yield
            return
        _context.twins, _context.watch = WeakIdKeyDictionary(), _WriteCounter()
        with _context.watch:
            yield
    finally:
        _context.depth -= 1
        if _context.depth == 0:
            _context.twins = _context.watch = None
        with _patch_lock:
            _patch_users -= 1
            if _patch_users == 0:
                nn.Module.register_parameter = _original_register  # type: ignore[method-assign]


_context = _Context()


def seed_for(seed: int, name: str) -> int:
    """A 63-bit seed that depends on the run's seed and a name only (SHA-256)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


class _SeedPerParameter(TorchFunctionMode):
    """Seeds the global generators before and after every operation that writes a parameter in place.

    Before: so that its values depend on its name only. After: so that what is drawn next does not depend on whether
    this parameter had memory or was a stand-in, which draws nothing.
    """

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        super().__init__()
        self.seed, self.names, self.counts = seed, names, dict[str, int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = _written(func, args, kwargs)
        owner = None if target is None else self.names.get(_storage_key(target) or 0)
        if owner is None:
            return func(*args, **kwargs)
        count = self.counts[owner] = self.counts.get(owner, 0) + 1
        if count == 1:
            torch.manual_seed(seed_for(self.seed, owner))
        result = _run_write(func, target, args, kwargs)
        torch.manual_seed(seed_for(self.seed, f"{owner} after write {count}"))
        return result


def _on_meta(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.device.type == "meta"


@contextmanager
def _stand_ins(module: nn.Module, replace: Callable[[nn.Parameter], bool]) -> Iterator[dict[int, nn.Parameter]]:
    """For a while, parameters in the subtree of `module` are meta stand-ins where `replace` says so, and buffers are
    copies, since initialisers may reset them; yields {id(original): stand-in}.
    """
    saved: list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]] = []
    made: dict[int, nn.Parameter] = {}
    copies: dict[int, torch.Tensor] = {}
    try:
        for child in module.modules():
            saved.append((child, dict(child._parameters), dict(child._buffers)))
            for key, parameter in child._parameters.items():
                if parameter is not None and replace(parameter):
                    if id(parameter) not in made:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                        made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                        made[id(parameter)].__dict__.update(parameter.__dict__)
                    child._parameters[key] = made[id(parameter)]
            for key, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[key] = copies.setdefault(id(buffer), buffer.clone())
        yield made
    finally:
        for child, parameters, buffers in saved:
            child._parameters.update(parameters)
            child._buffers.update(buffers)


class Creator:
    """Creates the meta parameters of a model in place, keeping their identity (parameter groups and ties refer to it).

    Which module's initialiser writes which parameter is found beforehand by running every initialiser once on meta
    stand-ins, children before parents, as constructors run. `create` then runs just the ones that write the parameters
    asked for.

    Raises:
        UnsupportedModelError: no initialiser writes a meta parameter, or an initialisation written elsewhere (in a
            parent's `__init__`) was lost on the meta device; the message names the module and the parameter.
    """

    def __init__(self, model: nn.Module, *, seed: int, init_fn: InitFn | None) -> None:
        self._seed = seed
        self._names: dict[int, str] = {}
        self._writers: dict[int, list[int]] = {}
        self._initialisers: list[tuple[str, nn.Module, Callable[[], object]]] = []
        if not any(_on_meta(p) for p in model.parameters()):
            return
        hosts = _init_weights_hosts(model)
        versions: dict[int, int] = {}
        writes: dict[int, int] = {}
        for name, module in _children_first(model):
            run = _initialiser(module, init_fn, hosts)
            if run is None or not any(_on_meta(p) for p in module.parameters()):
                continue
            counter = _WriteCounter()
            with _stand_ins(module, lambda p: True) as made, torch.random.fork_rng(devices=[]):
                counters = {key: counter.watch(stand_in) for key, stand_in in made.items()}
                with counter, torch.inference_mode(False), torch.no_grad():
                    self._run(name, module, run)
            for key, stand_in in made.items():
                if stand_in._version or counters[key][0]:
                    versions[key] = versions.get(key, 0) + stand_in._version
                    writes[key] = writes.get(key, 0) + counters[key][0]
                    self._writers.setdefault(key, []).append(len(self._initialisers))
            self._initialisers.append((name, module, run))
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._names:
                    continue
                self._names[id(parameter)] = f"{name}.{key}" if name else key
                if not _on_meta(parameter):
                    continue
                label = f"{name or '(root)'} ({type(module).__name__})"
                if id(parameter) not in self._writers and parameter.numel():
                    raise UnsupportedModelError(_not_written(label, key, init_fn))
                own_rules = init_fn is None and id(module) not in hosts
                seen = _writes.get(parameter, [0])[0]
                lost = parameter._version > versions.get(id(parameter), 0) or seen > writes.get(id(parameter), 0)
                if own_rules and lost:
                    raise UnsupportedModelError(
                        f"{label}: parameter {key} was initialised outside reset_parameters() (in a parent's "
                        "__init__?), which is lost on the meta device; move it into reset_parameters(), pass init_fn "
                        "to offload.initialize, or build without offload.empty_init()"
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
        written, nor any buffer.
        """
        pending = [p for p in parameters if _on_meta(p)]
        if not pending:
            return
        wanted = {id(p) for p in pending}
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.no_grad():
            for parameter in pending:
                _materialise(parameter)
            names = {_storage_key(p) or 0: self._names[id(p)] for p in pending}
            for index in sorted({i for p in pending for i in self._writers.get(id(p), ())}):
                name, module, run = self._initialisers[index]
                torch.manual_seed(seed_for(self._seed, name))  # for random draws before the first write
                with _stand_ins(module, lambda p: id(p) not in wanted) as made:
                    others = {_storage_key(stand_in) or 0: self._names[key] for key, stand_in in made.items()}
                    with _SeedPerParameter(self._seed, {**names, **others}):
                        self._run(name, module, run)


def materialise(parameters: Sequence[nn.Parameter]) -> None:
    """Gives those of `parameters` that are on the meta device memory, whose pages take none until they are touched."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            if _on_meta(parameter):
                _materialise(parameter)


def _materialise(parameter: nn.Parameter) -> None:
    """Host memory for a meta parameter, which stays the same object."""
    nbytes = parameter.numel() * parameter.element_size()
    if nbytes < _OWN_MAPPING:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    else:
        # A mapping of its own goes back to the system when the parameter has been stored; the C library's heap keeps
        # freed blocks of up to 32 MiB, and one small block in each stops the next unit from using them again.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        empty = torch.frombuffer(memory, dtype=torch.uint8).view(parameter.dtype).view(parameter.shape)
    created = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    created.__dict__.update(parameter.__dict__)
    # `torch.utils.swap_tensors` refuses tensors with weak references (recurrent modules keep some), for fear that these
    # would see the other tensor's memory. Here they shall: only the parameter's memory changes.
    torch._C._swap_tensor_impl(parameter, created)


def _not_written(label: str, key: str, init_fn: InitFn | None) -> str:
    if init_fn is not None:
        return f"{label}: parameter {key} is on the meta device and init_fn does not write it; let it give it a value"
    return (
        f"{label}: parameter {key} is on the meta device and no reset_parameters() or _init_weights() writes it; give "
        "it one, pass init_fn to offload.initialize, or build the model without offload.empty_init()"
    )


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
