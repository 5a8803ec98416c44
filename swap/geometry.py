"""Byte arithmetic: pages, alignment, and sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

PAGE = 4096
"""Alignment in bytes of every extent, pinned region and direct transfer."""

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgtpe")},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgtpe")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def align_up(nbytes: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is at least ``nbytes``."""
    if alignment <= 0:
        raise ValueError(f"alignment must be positive, got {alignment}")
    return -(-nbytes // alignment) * alignment


def parse_bytes(size: str | int) -> int:
    """Bytes meant by ``size``: an int, or text with a binary or decimal suffix ("8GiB", "500MB", "1.5 GiB").

    Fractions of a byte are cut off. ValueError, naming the text: negative, a string without a unit, an unknown
    unit, a bool, or any other type.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{size!r} is not a size: write bytes as an integer or text such as '8GiB' or '500MB'")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"{size} is not a size: bytes cannot be negative")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        why = "it needs a unit" if re.fullmatch(r"\s*[\d.]+\s*", size) else "it is not a number and a unit"
        raise ValueError(f"{size!r} is not a size ({why}): write '8GiB' or '500MB', or bytes as an integer")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{size!r} is not a size: unknown unit {unit!r}; use B, KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    return int(Fraction(number.rstrip(".")) * factor)


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for people, in binary units with at most two decimals ("1.5 GiB")."""
    value = float(abs(nbytes))
    sign = "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.999 would print as "1024": go on to the next unit instead.
        if round(value, 2) < 1024 or unit == "PiB":
            text = f"{value:.2f}".rstrip("0").rstrip(".")
            return f"{sign}{text} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
