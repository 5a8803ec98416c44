"""Splits any module into units: modules gathered, computed and released together.

Units are the repeated blocks, the largest subtrees outside them, and the parameters that a container of blocks owns
directly. A parameter belongs to the innermost unit that holds it; a tied one to the first. The module at which a unit's
parameters are acquired is its root. A root also acquires the units of parameters that its modules share with others, so
tied and borrowed parameters need no special case.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn


class _Root(NamedTuple):
    """A module at which a unit is acquired, with its qualified name and the unit's kind."""

    module: nn.Module
    name: str
    kind: str


@dataclass(slots=True, kw_only=True, eq=False)
class UnitSpec:
    """One unit: its root module and the parameters it owns, as (qualified name, parameter) in registration order.

    `borrows` holds the indices of other units that own a parameter registered below this root.
    """

    index: int
    name: str
    root: nn.Module
    kind: str
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    borrows: list[int] = field(default_factory=list)


def split_units(model: nn.Module, wrap: str | Sequence[str] = "auto", *, advise: bool = True) -> list[UnitSpec]:
    """Splits `model` into units; `wrap` is "auto" or the class names of the repeated blocks. `advise`: warn where that
    gives a single unit.

    Raises:
        ValueError: a class name in `wrap` matches no module that has parameters.
    """
    found = _blocks_by_name(model, wrap) if not isinstance(wrap, str) or wrap != "auto" else _find_blocks(model)
    blocks = {id(member) for block in found for member in _called(block)}
    roots: dict[int, _Root] = {}
    if blocks:
        _collect_roots(model, "", blocks, roots)
    else:
        _split_without_blocks(model, roots)
    owners = _owners(model, roots)
    units: dict[int, UnitSpec] = {}
    owner_of_parameter: dict[int, int] = {}
    for module_name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            root = roots[owners[id(module)]]
            unit = units.setdefault(
                id(root.module), UnitSpec(index=0, name=root.name or "(root)", root=root.module, kind=root.kind)
            )
            if id(parameter) not in owner_of_parameter:
                owner_of_parameter[id(parameter)] = id(root.module)
                unit.parameters.append((f"{module_name}.{key}" if module_name else key, parameter))
    ordered = list(units.values())
    for index, unit in enumerate(ordered):
        unit.index = index
    for unit in ordered:
        needed = {owner_of_parameter[id(p)] for p in _parameters_used(unit.root, roots)}
        unit.borrows = sorted(units[owner].index for owner in needed if owner != id(unit.root))
    if advise:
        _warn_if_one(ordered)
    return ordered


def find_homes(
    model: nn.Module, units: Sequence[UnitSpec], fresh: Sequence[tuple[str, nn.Parameter]], wrap: str | Sequence[str]
) -> tuple[list[UnitSpec], dict[int, list[tuple[str, nn.Parameter]]]]:
    """Where parameters belong that were put into a model after it was split into `units`: (all units, new ones last;
    the `fresh` parameters, with their names, by unit).

    Those below the root of a block or another leaf unit join that unit. A subtree outside them that is new as a whole
    is split as a model is. What a container owns directly joins its unit, or becomes one.
    """
    names = {id(parameter): name for name, parameter in fresh}
    left = set(names)
    specs, roots = list(units), {id(spec.root): spec for spec in units}
    homes: dict[int, list[tuple[str, nn.Parameter]]] = {}
    seen: set[int] = set()

    def settle(index: int, parameter: nn.Parameter) -> None:
        left.discard(id(parameter))
        homes.setdefault(index, []).append((names[id(parameter)], parameter))

    def split(module: nn.Module, name: str) -> None:
        classes = {type(m).__name__ for m in module.modules() if m is not module and _has_parameters(m)}
        wanted = [wrap] if isinstance(wrap, str) else list(wrap)
        chosen = [word for word in wanted if word in classes]
        base = len(specs)
        for spec in split_units(module, chosen or "auto", advise=False):
            spec.index += base
            spec.borrows = [index + base for index in spec.borrows]
            spec.name = name if spec.name == "(root)" else f"{name}.{spec.name}"
            specs.append(spec)
            for _, parameter in spec.parameters:
                settle(spec.index, parameter)

    def visit(module: nn.Module, name: str, home: UnitSpec | None, caller: tuple[nn.Module, str]) -> None:
        if id(module) in seen or not left:
            return
        seen.add(id(module))
        home = roots.get(id(module), home)
        apart = (home is None or home.kind == "container") and module is not model and id(module) not in roots
        if _is_called(module):
            caller = (module, name)
            if apart and _has_parameters(module) and all(id(p) in left for p in module.parameters()):
                split(module, name)
                return
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) not in left:
                continue
            if home is None:
                root, label = caller
                home = UnitSpec(index=len(specs), name=label or "(root)", root=root, kind="container")
                specs.append(home)
                roots[id(root)] = home
            settle(home.index, parameter)
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, home, caller)

    visit(model, "", None, (model, ""))
    return specs, homes


def _warn_if_one(units: Sequence[UnitSpec]) -> None:
    owning = [unit for unit in units if unit.parameters]
    if len(owning) == 1:
        unit = owning[0]
        warnings.warn(
            f"the whole model is one unit ({unit.name}, {sum(p.numel() for _, p in unit.parameters):,} parameters): "
            "it is loaded as a whole. Name the classes of its repeated blocks in units.wrap, "
            'e.g. units.wrap = ["Block"].',
            stacklevel=2,
        )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_called(module: nn.Module) -> bool:
    """Whether anybody can call the module: lists and dictionaries of modules have no forward, so hooks on them never
    run.
    """
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or what is called in its place: the members of a list without a forward."""
    if _is_called(module):
        return [module]
    return [member for child in module.children() if _has_parameters(child) for member in _called(child)]


def _owns_directly(module: nn.Module) -> bool:
    """Whether the module's own forward uses parameters of no child that is called: its own, or a `ParameterList`'s."""
    if any(p is not None for p in module._parameters.values()):
        return True
    return any(not _is_called(child) and _owns_directly(child) for child in module.children())


def _blocks_by_name(model: nn.Module, wrap: str | Iterable[str]) -> list[nn.Module]:
    wanted = [wrap] if isinstance(wrap, str) else list(wrap)
    known = {type(m).__name__ for m in model.modules() if m is not model and _has_parameters(m)}
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; classes in the model: {', '.join(sorted(known))}"
            raise ValueError(f"units.wrap: no module of class {name} with parameters in {type(model).__name__}{hint}")
    return _of_classes(model, wanted)


def _of_classes(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    wanted = set(names)
    return [m for m in model.modules() if type(m).__name__ in wanted and m is not model and _has_parameters(m)]


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks by the hint that `transformers` models carry, else the outermost lists of two or more modules of one
    class. A `ModuleList` may hold others between them, as models with a few special layers do.
    """
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        hint = getattr(module, "_no_split_modules", None)
        named = _of_classes(module, hint) if isinstance(hint, (list, tuple, set, frozenset)) else []
        if len(named) > 1:
            blocks.extend(named)
            return
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [m for m in module.children() if _has_parameters(m)]
            counts = Counter(type(m) for m in children)
            repeated = max(counts.values(), default=0) > 1
            if repeated and (len(counts) == 1 or isinstance(module, nn.ModuleList)):
                blocks.extend(children)
                return
        for child in module.children():
            visit(child)

    visit(model)
    return blocks


def _collect_roots(
    module: nn.Module, name: str, blocks: set[int], roots: dict[int, _Root], inside: bool = False
) -> None:
    """Blocks (nested ones too) and, outside them, the largest subtrees that are called and hold no block, and
    containers whose own forward uses parameters.
    """
    if id(module) in roots:  # one instance in two places
        return
    if id(module) in blocks:
        roots[id(module)] = _Root(module, name, "block")
        inside = True
    elif not inside:
        if not any(id(m) in blocks for m in module.modules()) and (_is_called(module) or not name):
            if _has_parameters(module):
                roots[id(module)] = _Root(module, name, "rest")
            return
        if (_is_called(module) or not name) and _owns_directly(module):
            roots[id(module)] = _Root(module, name, "container")
    for child_name, child in module.named_children():
        _collect_roots(child, f"{name}.{child_name}" if name else child_name, blocks, roots, inside)


def _split_without_blocks(model: nn.Module, roots: dict[int, _Root]) -> None:
    """One unit per child that has parameters and is called, below the wrappers that only hold one such child."""
    module, name = model, ""
    while True:
        children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children() if _has_parameters(m)]
        if _owns_directly(module) and (_is_called(module) or not name):
            roots[id(module)] = _Root(module, name, "container" if children else "rest")
        if len(children) != 1 or id(module) in roots:
            break
        name, module = children[0]
    for child_name, child in children:
        _collect_roots(child, child_name, set(), roots)


def _owners(model: nn.Module, roots: dict[int, _Root]) -> dict[int, int]:
    """For every module the innermost unit root that holds it, by identity."""
    owners: dict[int, int] = {}

    def visit(module: nn.Module, current: int) -> None:
        current = id(module) if id(module) in roots else current
        if id(module) in owners:
            return
        owners[id(module)] = current
        for child in module.children():
            visit(child, current)

    visit(model, -1)
    return owners


def _parameters_used(root: nn.Module, roots: dict[int, _Root]) -> Iterator[nn.Parameter]:
    """Parameters registered below `root`, outside the roots below it; those of modules shared with others too."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen or (module is not root and id(module) in roots):
            continue
        seen.add(id(module))
        yield from (p for p in module._parameters.values() if p is not None)
        pending.extend(module.children())
