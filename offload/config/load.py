"""Reads a configuration from a file, a mapping or a `Config`, applies ``section.key=value`` overrides, checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from offload.config.describe import sections_of
from offload.config.errors import ConfigError
from offload.config.schema import Config

COMMAND_LINE = "command line"
"""Where overrides come from, in messages."""

DEFAULT_FILE = Path(__file__).with_name("default.toml")
"""The configuration that ``offload train`` uses when it is given none."""


def load_config(source: Config | Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration.

    ``source``: a `Config`, a mapping of sections, the path of a ``.toml`` or ``.json`` file, or ``None`` for defaults.
    ``overrides``: ``section.key=value`` strings; values are read as TOML, and as plain strings where that fails.

    Raises `ConfigError` with one line for every problem; lines name the file, or the command line where an override is
    the cause.
    """
    prefix = ""
    if source is None:
        values: dict[str, Any] = {}
    elif isinstance(source, Config):
        if not overrides:
            return source
        values = source.to_dict()
    elif isinstance(source, Mapping):
        values = _copied(source)
    elif isinstance(source, (str, Path)):
        values = _read(Path(source))
        prefix = f"{source}: "
    else:
        raise ConfigError(f"a configuration is a Config, a dict or the path of a file, not {type(source).__name__}")
    # Of the file alone: what is wrong with it does not become the command line's fault.
    in_source = set(_problems(values)) if overrides else None
    problems = [f"{COMMAND_LINE}: {line}" for text in overrides if (line := _apply(values, text)) is not None]
    if source == DEFAULT_FILE:
        _prefer_factory(values, overrides)
    try:
        config = Config(**values)
    except ConfigError as error:
        for line in error.problems:
            from_source = in_source is None or line in in_source
            problems.append(f"{prefix if from_source else COMMAND_LINE + ': '}{line}")
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _problems(values: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        Config(**values)
    except ConfigError as error:
        return error.problems
    return ()


def _prefer_factory(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Takes the preset out of the packaged default when an override names a factory: nobody asked for both."""
    model = values.get("model")
    named = {override.partition("=")[0].strip() for override in overrides}
    if isinstance(model, dict) and model.get("factory") not in (None, "none") and "model.preset" not in named:
        model.pop("preset", None)


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [key for key in source if not isinstance(key, str)]
    if wrong:
        raise ConfigError([f"{key!r}: keys of a configuration are strings" for key in wrong])
    # Sections may be given as their models; overrides need plain, unshared dicts.
    return {
        key: value.model_dump(exclude_unset=True)
        if hasattr(value, "model_dump")
        else dict(value)
        if isinstance(value, Mapping)
        else value
        for key, value in source.items()
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}") from None
    if path.suffix == ".toml":
        try:
            return tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: a JSON configuration is an object of sections, not a {type(values).__name__}")
        return values
    raise ConfigError(f"{path}: a configuration file ends in .toml or .json")


def _apply(values: dict[str, Any], override: str) -> str | None:
    """Sets one override in ``values``; returns the problem when it is not one."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return f"{override!r}: an override is section.key=value"
    value = _value(parts, text.strip())
    table = values
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            return f"{override!r}: {part!r} is not a section"
        table = inner
    table[parts[-1]] = value
    return None


def _value(parts: Sequence[str], text: str) -> Any:
    if _is_text(parts):
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _is_text(parts: Sequence[str]) -> bool:
    """Whether the key holds a free string: ``run_dir=2024`` names a directory, not a number."""
    model: Any = Config
    for part in parts[:-1]:
        model = sections_of(model).get(part)
        if model is None:
            return False
    field = model.model_fields.get(parts[-1])
    return field is not None and field.annotation in (str, str | None)
