"""Value types of the configuration: sizes in bytes, ``"auto"``, lists that accept one string, optional values.

Each is an annotated type whose validator raises ``ValueError`` with the legal values; the loader adds key and value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator

from swap.geometry import parse_bytes

Auto = Literal["auto"]
T = TypeVar("T")

_SIZE = "a size such as '8GiB' or '500MB', or a whole number of bytes"


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or (isinstance(value, int) and value < 0):
        raise ValueError(f"must be {_SIZE}")
    # A string of digits alone is refused: "8" on its own more often means 8 GiB than 8 bytes.
    if isinstance(value, str) and value.strip().isdigit():
        raise ValueError(f"has no unit: must be {_SIZE}")
    try:
        return parse_bytes(value)
    except ValueError:
        raise ValueError(f"must be {_SIZE}") from None


def _positive_size(value: Any) -> int:
    size = _size(value)
    if size == 0:
        raise ValueError(f"must be greater than 0: {_SIZE}")
    return size


def _size_or_auto(value: Any) -> int | Auto:
    if value == "auto":
        return "auto"
    try:
        return _size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _positive_size_or_auto(value: Any) -> int | Auto:
    if value == "auto":
        return "auto"
    try:
        return _positive_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _count_or_auto(value: Any) -> int | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number of at least 1, or 'auto'")
    return value


def _steps_or_auto(value: Any) -> int | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a whole number of at least 0, or 'auto'")
    return value


def _flag_or_auto(value: Any) -> bool | Auto:
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise ValueError("must be true, false or 'auto'")
    return value


def _flag_or_count(value: Any) -> bool | int:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("must be true, false or a number of ranks (at least 1)")


def _loss_scale(value: Any) -> float | Literal["dynamic"]:
    if value == "dynamic":
        return "dynamic"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError("must be 'dynamic' or a number greater than 0")
    return float(value)


def _names(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise ValueError("must be a list of non-empty strings")
    return tuple(items)


def _names_or_auto(value: Any) -> tuple[str, ...] | Auto:
    if value == "auto":
        return "auto"
    try:
        names = _names(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None
    if not names:
        raise ValueError("must not be empty: a list of class names, or 'auto'")
    return names


def _none(value: Any) -> Any:
    # TOML has no null; on the command line a preset value must still be removable.
    return None if value == "none" else value


def _listed(value: Any) -> Any:
    # TOML and JSON have lists only; frozen models hold tuples.
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


def _pair(value: Any) -> tuple[float, float]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(isinstance(item, (int, float)) and not isinstance(item, bool) and 0 <= item < 1 for item in value)
    ):
        raise ValueError("must be two numbers, each at least 0 and less than 1")
    return (float(value[0]), float(value[1]))


Size = Annotated[int, PlainValidator(_size)]
SizeOrAuto = Annotated[int | Auto, PlainValidator(_size_or_auto)]
PositiveSizeOrAuto = Annotated[int | Auto, PlainValidator(_positive_size_or_auto)]
CountOrAuto = Annotated[int | Auto, PlainValidator(_count_or_auto)]
StepsOrAuto = Annotated[int | Auto, PlainValidator(_steps_or_auto)]
FlagOrAuto = Annotated[bool | Auto, PlainValidator(_flag_or_auto)]
FlagOrCount = Annotated[bool | int, PlainValidator(_flag_or_count)]
LossScale = Annotated[float | Literal["dynamic"], PlainValidator(_loss_scale)]
Names = Annotated[tuple[str, ...], PlainValidator(_names)]
NamesOrAuto = Annotated[tuple[str, ...] | Auto, PlainValidator(_names_or_auto)]
Betas = Annotated[tuple[float, float], PlainValidator(_pair)]
Sinks = Annotated[tuple[Literal["jsonl"], ...], BeforeValidator(_listed)]
OrNone = Annotated[T | None, BeforeValidator(_none)]

Count = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
