"""Bytes of text files as training data: token ids are byte values, windows are drawn by (seed, step, micro-batch).

Files are one long text in the order given. Nothing is kept open or in memory but sizes: a batch reads its windows.
The last part of the text is held out for evaluation and never trained on.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.parallel.data import share
from offload.text_files import find_files

Bytes = npt.NDArray[np.uint8]


class ByteTokenizer:
    """256 token ids, one for each byte value; any bytes are valid text."""

    vocab_size = 256

    def encode(self, text: str | bytes) -> Tensor:
        """int64 ids of shape (bytes,); a ``str`` is encoded as UTF-8."""
        data = text.encode() if isinstance(text, str) else text
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int64))

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Text of a row of ids; bytes that are not UTF-8 become U+FFFD."""
        values = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
        wrong = [value for value in values if not 0 <= value < self.vocab_size]
        if wrong:
            raise ValueError(f"token ids of bytes are 0 to 255, got {wrong[0]}")
        return bytes(values).decode(errors="replace")


class TextData:
    """Batches of ``batch_size`` windows of ``context`` bytes from text files.

    ``files``: paths or globs (``**`` included); none means the English text that ships with CPython. ``eval_fraction``
    of the bytes, at the end, are held out. ``ValueError`` for a path that is not there, cannot be read or matches
    nothing, and for text too short for one window in each split.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | None,
        context: int,
        batch_size: int,
        seed: int,
        eval_fraction: float = 0.05,
    ) -> None:
        if context < 2:
            raise ValueError(f"data.context must be at least 2 bytes (one to read, one to predict), got {context}")
        if batch_size < 1:
            raise ValueError(f"train.batch_size must be at least 1, got {batch_size}")
        if not 0 <= eval_fraction < 1:
            raise ValueError(f"data.eval_fraction must be at least 0 and below 1, got {eval_fraction}")
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.tokenizer = ByteTokenizer()
        self._text: _Files | _Memory = _Files(find_files(files)) if files else _Memory(_shipped_text())
        total = self._text.size
        self.eval_bytes = int(total * eval_fraction)
        """Bytes held out."""
        self.train_bytes = total - self.eval_bytes
        """Bytes to train on."""
        self._check_length(eval_fraction)

    def _check_length(self, eval_fraction: float) -> None:
        where = f"data.files ({self._text.name}) has {self._text.size:,} bytes"
        if self.train_bytes < self.context:
            raise ValueError(
                f"{where}, {self.train_bytes:,} of them for training; data.context = {self.context} "
                f"needs at least {self.context:,}"
            )
        if eval_fraction > 0 and self.eval_bytes < self.context:
            needed = math.ceil(self.context / eval_fraction)
            needed += int(needed * eval_fraction) < self.context  # the quotient may have been rounded down
            raise ValueError(
                f"{where}, too few to hold out one window of data.context = {self.context} from data.eval_fraction = "
                f"{eval_fraction}; give at least {needed:,} bytes, or raise the fraction, or set it to 0"
            )

    def train_batch(self, step: int, micro_batch: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """``input_ids`` and ``labels``, int64 (rows, context), the same values; random by ``step`` and ``micro_batch``
        alone. A rank gets its `offload.parallel.data.share` of the ``batch_size`` rows.
        """
        # A hash, because neighbouring seeds of one generator are not independent enough to be summed into one number.
        digest = hashlib.sha256(f"{self.seed}/{step}/{micro_batch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        last = self.train_bytes - self.context
        starts = torch.randint(0, last + 1, (self.batch_size,), generator=generator, dtype=torch.int64)
        mine = share(self.batch_size, rank, world)
        return self._batch(starts[mine.start : mine.stop].tolist())

    def eval_batches(self, count: int, rank: int = 0, world: int = 1) -> Iterator[dict[str, Tensor]]:
        """``count`` batches of windows spread evenly over the held-out bytes, the same on every call; a rank gets its
        share of the rows of each.
        """
        if count < 0:
            raise ValueError(f"the number of evaluation batches must not be negative, got {count}")
        if count and not self.eval_bytes:
            raise ValueError("data.eval_fraction = 0 holds out no text to evaluate on")
        windows = count * self.batch_size
        last = self.eval_bytes - self.context
        starts = [self.train_bytes + last * window // max(windows - 1, 1) for window in range(windows)]
        mine = share(self.batch_size, rank, world)
        return (
            self._batch(starts[begin + mine.start : begin + mine.stop]) for begin in range(0, windows, self.batch_size)
        )

    def _batch(self, starts: Sequence[int]) -> dict[str, Tensor]:
        rows = np.stack([self._text.read(start, self.context) for start in starts]).astype(np.int64)
        input_ids = torch.from_numpy(rows)
        return {"input_ids": input_ids, "labels": input_ids.clone()}


class _Memory:
    """Text that is in memory."""

    def __init__(self, data: bytes) -> None:
        self.name = "the text that ships with Python"
        self._data = np.frombuffer(data, dtype=np.uint8)
        self.size = len(data)

    def read(self, start: int, count: int) -> Bytes:
        return self._data[start : start + count]


class _Files:
    """Files as one text; each read opens the file it needs, so that nothing is left open."""

    def __init__(self, paths: Sequence[Path]) -> None:
        sizes = [path.stat().st_size for path in paths]
        self.name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._paths = paths
        self._ends = list(accumulate(sizes))
        self.size = self._ends[-1]

    def read(self, start: int, count: int) -> Bytes:
        """``count`` bytes from ``start``; ``ValueError`` if a file has become shorter than it was."""
        parts: list[Bytes] = []
        position, end = start, start + count
        index = bisect_right(self._ends, start)
        while position < end:
            begins = self._ends[index - 1] if index else 0
            wanted = min(end, self._ends[index]) - position
            if wanted:
                part = np.fromfile(self._paths[index], dtype=np.uint8, count=wanted, offset=position - begins)
                if part.size != wanted:
                    raise ValueError(
                        f"data.files: {str(self._paths[index])!r} has become shorter during the run: "
                        f"{wanted:,} bytes wanted at offset {position - begins:,}, {part.size:,} there"
                    )
                parts.append(part)
            position += wanted
            index += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shipped_text() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "data.files is empty and this Python ships no pydoc_data.topics; name some text files"
        ) from None
    return "\n".join(topics.values()).encode()
