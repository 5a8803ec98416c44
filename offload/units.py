"""Splits any module into units: modules gathered, computed and released together.

Units are the repeated blocks, the largest subtrees outside them, and the parameters that a container of blocks owns
directly. A parameter belongs to the innermost unit that holds it; a tied one to the first. The module at which a unit's
parameters are acquired is its root. A root also acquires the units of parameters that its modules share with others, so
tied and borrowed parameters need no special case.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn


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


def split_units(model: nn.Module, wrap: str | Sequence[str] = "auto") -> list[UnitSpec]:
    """Splits `model` into units; `wrap` is "auto" or the class names of the repeated blocks.

    Raises:
        ValueError: a class name in `wrap` matches no module that has parameters.
    """
    blocks = _blocks_by_name(model, wrap) if not isinstance(wrap, str) or wrap != "auto" else _find_blocks(model)
    roots: dict[str, tuple[nn.Module, str]] = {}
    _collect_roots(model, "", {id(module) for _, module in blocks}, roots)
    if not blocks:
        roots = _split_without_blocks(model)
    owner_of_module = _owners(model, {id(module): name for name, (module, _) in roots.items()})
    units: dict[str, UnitSpec] = {}
    owner_of_parameter: dict[int, str] = {}
    borrows: dict[str, set[str]] = {}
    for module_name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            root_name = owner_of_module[id(module)]
            first = owner_of_parameter.setdefault(id(parameter), root_name)
            root, kind = roots[root_name]
            unit = units.setdefault(root_name, UnitSpec(index=0, name=root_name or "(root)", root=root, kind=kind))
            if first != root_name:
                borrows.setdefault(root_name, set()).add(first)
            elif all(known is not parameter for _, known in unit.parameters):
                unit.parameters.append((f"{module_name}.{key}" if module_name else key, parameter))
    ordered = list(units.values())
    for index, unit in enumerate(ordered):
        unit.index = index
    for root_name, names in borrows.items():
        units[root_name].borrows = sorted(units[name].index for name in names)
    owning = [unit for unit in ordered if unit.parameters]
    if len(owning) == 1:
        unit = owning[0]
        warnings.warn(
            f"the whole model is one unit ({unit.name}, {sum(p.numel() for _, p in unit.parameters):,} parameters): "
            "it is loaded as a whole. Name the classes of its repeated blocks in units.wrap, "
            'e.g. units.wrap = ["Block"].',
            stacklevel=2,
        )
    return ordered


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks_by_name(model: nn.Module, wrap: str | Iterable[str]) -> list[tuple[str, nn.Module]]:
    wanted = [wrap] if isinstance(wrap, str) else list(wrap)
    known = {type(m).__name__ for m in model.modules() if m is not model and _has_parameters(m)}
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; classes in the model: {', '.join(sorted(known))}"
            raise ValueError(f"units.wrap: no module of class {name} with parameters in {type(model).__name__}{hint}")
    return [
        (n, m) for n, m in model.named_modules() if type(m).__name__ in wanted and m is not model and _has_parameters(m)
    ]


def _find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Blocks by the hint that `transformers` models carry, else the outermost lists of two or more modules of one
    class.
    """
    hint = getattr(model, "_no_split_modules", None)
    if hint:
        named = [
            (n, m)
            for n, m in model.named_modules()
            if type(m).__name__ in hint and m is not model and _has_parameters(m)
        ]
        if len(named) > 1:
            return named
    blocks: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [(n, m) for n, m in module.named_children() if _has_parameters(m)]
            if len(children) > 1 and len({type(m) for _, m in children}) == 1:
                blocks.extend((f"{name}.{n}" if name else n, m) for n, m in children)
                return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    return blocks


def _collect_roots(
    module: nn.Module, name: str, blocks: set[int], roots: dict[str, tuple[nn.Module, str]], inside: bool = False
) -> None:
    """Blocks (nested ones too) and, outside them, the largest subtrees without blocks and containers that own
    parameters directly.
    """
    if id(module) in blocks:
        roots[name] = (module, "block")
        inside = True
    elif not inside:
        if not any(id(m) in blocks for m in module.modules()):
            if _has_parameters(module):
                roots[name] = (module, "rest")
            return
        if any(p is not None for p in module._parameters.values()):
            roots[name] = (module, "container")
    for child_name, child in module.named_children():
        _collect_roots(child, f"{name}.{child_name}" if name else child_name, blocks, roots, inside)


def _split_without_blocks(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """One unit per child that has parameters, below the wrappers that only hold one such child."""
    roots: dict[str, tuple[nn.Module, str]] = {}
    module, name = model, ""
    while True:
        if any(p is not None for p in module._parameters.values()):
            roots[name] = (module, "container")
        children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children() if _has_parameters(m)]
        if len(children) != 1 or name in roots:
            break
        name, module = children[0]
    if not children and not roots and _has_parameters(module):
        roots[name] = (module, "rest")
    for child_name, child in children:
        roots[child_name] = (child, "rest")
    return roots


def _owners(model: nn.Module, roots: dict[int, str]) -> dict[int, str]:
    """For every module the name of the innermost unit root that holds it."""
    owners: dict[int, str] = {}

    def visit(module: nn.Module, current: str) -> None:
        current = roots.get(id(module), current)
        if id(module) in owners:
            return
        owners[id(module)] = current
        for child in module.children():
            visit(child, current)

    visit(model, "")
    return owners
