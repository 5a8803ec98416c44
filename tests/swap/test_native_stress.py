"""The native driver alone, under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "swap/csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.acceptance
@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-DSWAP_IO_URING=1", "-pthread"]
    names = ("crc32c", "ring", "transfers")
    sources = [ROOT / "tests/swap/driver_stress.cpp", *(CSRC / f"{name}.cpp" for name in names)]
    built = subprocess.run(
        [COMPILER, *flags, f"-fsanitize={sanitizers}", f"-I{CSRC}", *map(str, sources), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode and "sanitize" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("the sanitizers' libraries are not installed")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program), str(tmp_path)], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() in ("ok", "no io_uring")
