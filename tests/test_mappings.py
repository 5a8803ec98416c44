"""Documents that name tests name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MAPPINGS = [HERE / "models" / "README.md", HERE / "ranks" / "README.md"]
NAMES = HERE.parent / "offload" / "bench" / "architectures.py"
"""Where models that some tests are parametrized with have their names."""
FILE = r"(?:[a-z_]+/)?test_[a-z_]+\.py"


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def referenced(text: str) -> list[tuple[str, str | None, str | None]]:
    """(file, test, parameter) of every reference; what lacks a file or a folder has that of the one named before it in
    its line."""
    found: list[tuple[str, str | None, str | None]] = []
    for line in text.splitlines():
        file: str | None = None
        for code in re.findall(r"`([^`]+)`", line):
            match = re.fullmatch(rf"({FILE})?(?:::)?(test_\w+)?(\.\.\.)?(?:\[(.+)\])?", code)
            if match is None or not (match[1] or match[2]):
                continue
            if match[1] is not None:
                folder = "" if file is None or "/" in match[1] else f"{Path(file).parent}/"
                file = match[1] if (HERE / match[1]).exists() else folder + match[1]
            assert file is not None, f"{code}: a test without a file"
            found.append((file, None if match[3] else match[2], match[4]))
    return found


REFERENCES = sorted({(m.parent.name, *found) for m in MAPPINGS for found in referenced(m.read_text())}, key=str)


@pytest.mark.parametrize(("folder", "file", "test", "parameter"), REFERENCES, ids=lambda value: str(value))
def test_what_a_mapping_names_exists(folder: str, file: str, test: str | None, parameter: str | None) -> None:
    path = next((p for p in (HERE / file, HERE / folder / file) if p.is_file()), None)
    assert path is not None
    text = path.read_text() + NAMES.read_text()
    if test is not None:
        assert test in functions(path)
    for word in (parameter or "").split(", "):
        assert word in text


def test_references_are_found() -> None:
    text = "| 1 | `models/test_a.py::test_one[two words]`, `test_three`, not `offload/step.py` or `empty_init` |"
    assert referenced(text) == [("models/test_a.py", "test_one", "two words"), ("models/test_a.py", "test_three", None)]
    assert len(REFERENCES) > 100
