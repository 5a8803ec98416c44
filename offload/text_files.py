"""The files that `data.files` names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """The readable files that paths and globs name, in that order, globs sorted, none twice; else ``ValueError``."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        text = os.path.expanduser(str(pattern))
        if os.path.isdir(text):
            raise ValueError(f"data.files: {str(pattern)!r} is a directory; use a glob such as '{pattern}/**/*.txt'")
        if os.path.exists(text):
            matches = [text]
        else:
            matches = sorted(match for match in glob.glob(text, recursive=True) if os.path.isfile(match))
            if not matches and glob.has_magic(text):
                raise ValueError(f"data.files: {str(pattern)!r} matches no file")
            if not matches:
                raise ValueError(f"data.files: {str(pattern)!r} does not exist")
        for match in matches:
            if not os.access(match, os.R_OK):
                raise ValueError(f"data.files: {match!r} cannot be read: permission denied")
            found.setdefault(os.path.realpath(match), Path(match))
    return list(found.values())
