"""Imports point downwards only: `offload` composes `swap` and `optimizer_cpu`, which know nothing of each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("swap", "optimizer_cpu", "offload")
LEAVES = {"swap": ("offload", "optimizer_cpu"), "optimizer_cpu": ("offload", "swap")}
AUTOGRAD_INTERNALS = ("torch.autograd.graph", "torch._C._autograd", "torch._C._functorch")
LONGEST_FILE = 700


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, wherever it stands in the file."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def attributes(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain that starts at a plain name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts: list[str] = []
        inner: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield inner.lineno, ".".join([inner.id, *reversed(parts)])


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_neither_each_other_nor_offload(leaf: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(leaf)
        for line, name in imported(path)
        if name.split(".")[0] in LEAVES[leaf]
    ]
    assert sources(leaf), f"no source of {leaf} found"
    assert found == []


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_load_alone(leaf: str) -> None:
    code = (
        f"import importlib, pkgutil, sys, {leaf}\n"
        f"for found in pkgutil.walk_packages({leaf}.__path__, '{leaf}.'):\n"
        "    importlib.import_module(found.name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert leaf in loaded
    assert [name for name in LEAVES[leaf] if name in loaded] == []


def test_only_binding_touches_autograd_internals() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for package in PACKAGES
        for path in sources(package)
        if path.parent != ROOT / "offload" or not path.stem.startswith("binding")
        for line, name in [*imported(path), *attributes(path)]
        if name.startswith(AUTOGRAD_INTERNALS)
    ]
    assert found == []


def test_files_stay_readable_in_one_sitting() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for p in PACKAGES for path in sources(p)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST_FILE} == {}
