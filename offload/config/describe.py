"""Turns validation errors into one line each: dotted key, value, what is legal, a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from offload.config.deepspeed import equivalent
from offload.config.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "finite_number": "must be a finite number",
}
_LIMITS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per problem in ``error``, which came from validating ``model``."""
    found: list[str] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        # A check that knows whole keys has written whole lines.
        found.extend(cause.problems if isinstance(cause, ConfigError) else [_line(detail, model)])
    return found


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of ``model`` that are sections themselves."""
    found = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = field.annotation
    return found


def _line(detail: ErrorDetails, model: type[BaseModel]) -> str:
    location = detail["loc"]
    key = _dotted(location)
    kind, value = detail["type"], detail["input"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return equivalent(key, value) or _unknown(key, location, model)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key} = {_shown(value)}: must be a section with keys of its own, like [{key}]"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{key} = {_shown(value)}: {words} {context[name]:g}"
    if kind == "literal_error":
        expected = str(context["expected"])
        words = "must be one of" if " or " in expected else "must be"
        return f"{key} = {_shown(value)}: {words} {expected}{_meant(value, expected)}"
    if kind == "value_error":
        message = str(context["error"])
        # A check over a whole section names its keys and values itself.
        if isinstance(value, Mapping):
            return f"{key}: {message}" if key else message
        return f"{key} = {_shown(value)}: {message}"
    return f"{key} = {_shown(value)}: {_TYPES.get(kind, detail['msg'])}"


def _dotted(location: Iterable[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _meant(value: Any, expected: str) -> str:
    if not isinstance(value, str):
        return ""
    legal = [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
    # Short words are all alike: "gpu" does not mean "cpu".
    close = difflib.get_close_matches(value, legal, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def _unknown(key: str, location: Sequence[int | str], model: type[BaseModel]) -> str:
    sections = sections_of(model)
    # In a single section's own error the location has no section in front.
    owner = sections.get(str(location[0]), model) if len(location) > 1 else model
    prefix = key.rpartition(".")[0]
    name = str(location[-1])
    near = [f"{prefix}.{match}" if prefix else match for match in _close(name, owner.model_fields)]
    if not near:
        everywhere = {field: f"{section}.{field}" for section, part in sections.items() for field in part.model_fields}
        near = [everywhere[match] for match in _close(name, everywhere)]
    where = f"section {prefix!r}" if prefix else "the top level"
    if near:
        return f"{key}: unknown key; did you mean {near[0]!r}?"
    return f"{key}: unknown key; {where} has {', '.join(owner.model_fields)}"


def _close(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
