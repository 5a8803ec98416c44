"""The one directory that a run writes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from offload.config import Config, ConfigError


class RunDirectory:
    """``config.toml``, ``metrics.jsonl`` (one record a line, flushed at once) and ``summary.json`` of one run.

    ``path``: the directory, made if it is missing; ``None`` makes ``runs/<date>-<time>`` under the working directory.
    ``resume``: continue the run that the directory holds, if it holds one; `forget_after` says from where.
    Raises `ConfigError` when the directory cannot be made or written, already holds a run, or one writes it now.
    """

    def __init__(self, path: str | Path | None, *, resume: bool = False) -> None:
        self.path = _numbered(Path("runs") / time.strftime("%Y%m%d-%H%M%S")) if path is None else Path(path)
        self.records = 0
        self._made = [directory for directory in (self.path, *self.path.parents) if not directory.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in () if resume else ("metrics.jsonl", "summary.json"):
                if (self.path / name).exists():
                    raise ConfigError(f"run_dir = {str(self.path)!r}: already holds a run ({name}); choose another")
            mode = "a+" if resume else "x+"
            self._metrics = open(self.path / "metrics.jsonl", mode, encoding="utf-8")  # noqa: SIM115 - closed in close()
            self._continued = self._metrics.tell() > 0
            if not _lock(self._metrics.fileno()):
                self._metrics.close()
                raise ConfigError(f"run_dir = {str(self.path)!r}: another process writes it now")
        except OSError as error:
            raise ConfigError(f"run_dir = {str(self.path)!r}: cannot be written: {error.strerror}") from None

    def forget_after(self, step: int) -> None:
        """Drops the records of later steps, which the resumed run makes anew, and a record that was cut short."""
        self._metrics.seek(0)
        kept = []
        for line in self._metrics:
            with contextlib.suppress(ValueError, AttributeError):
                if line.endswith("\n") and json.loads(line).get("step", 0) <= step:
                    kept.append(line)
        self._metrics.seek(0)
        self._metrics.truncate()
        self._metrics.writelines(kept)
        self._metrics.flush()
        (self.path / "summary.json").unlink(missing_ok=True)

    def write_config(self, config: Config) -> None:
        """Writes the configuration with every default filled in, for another run: all but the directory of this one."""
        values = config.to_dict()
        values.pop("run_dir", None)
        _replace(self.path / "config.toml", tomli_w.dumps(values))

    def record(self, values: Mapping[str, Any]) -> None:
        """Appends one record. Numbers that JSON lacks are written as the strings ``nan``, ``inf``, ``-inf``."""
        self._metrics.write(json.dumps(_portable(values), allow_nan=False) + "\n")
        self._metrics.flush()
        self.records += 1

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Writes ``summary.json`` whole or not at all."""
        _replace(self.path / "summary.json", dump_json(values) + "\n")

    def close(self) -> None:
        """Closes ``metrics.jsonl``; a second call does nothing."""
        self._metrics.close()

    def discard(self) -> None:
        """Removes what this object wrote, for a run that was refused before it began; not an earlier run's files."""
        self.close()
        if self._continued:
            return
        for name in ("config.toml", "metrics.jsonl", "summary.json"):
            (self.path / name).unlink(missing_ok=True)
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _lock(fd: int) -> bool:
    """Whether nobody else holds the file; filesystems without locks have no say."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def dump_json(values: Mapping[str, Any]) -> str:
    """Indented JSON that every reader accepts."""
    return json.dumps(_portable(values), indent=2, allow_nan=False)


def _portable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _numbered(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate
