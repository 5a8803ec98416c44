"""Writing a rank's part of a checkpoint: region after region, in the foreground or beside training.

[Note: copy on write] A save beside training is a snapshot of the moment it began. Each region goes from PENDING over
FILLING (its bytes are being copied to a buffer) to FILLED. Before the optimizer step, or anything else, changes a chunk
(`FlatState.before_rewrite`), the regions that meet it are brought to FILLED: by whoever comes first, the saver's own
thread or the step itself. So the old bytes are always saved before new ones exist, no second copy of the state is ever
made, and a step waits for at most the buffers that are being written.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.directory import fsync_directory, write_durably
from offload.checkpoint.format import index_file
from offload.checkpoint.manifest import Index, Piece
from offload.checkpoint.regions import (
    CHUNK,
    SMALLEST_CHUNK,
    Key,
    Region,
    fill,
    make_regions,
    scratch_bytes,
    tensors_of,
)
from offload.checkpoint.tensorfile import PagedFile, build_header
from offload.state import FlatState
from offload.tiers import TierMemory
from swap.checksums import crc32
from swap.errors import BudgetError

BUFFER_PLANE = "buffer"
_BUFFERS, _WRITERS = 3, 2


class _Stage(enum.Enum):
    PENDING = "pending"
    FILLING = "filling"
    FILLED = "filled"


@dataclass(slots=True)
class _Job:
    region: Region
    buffer: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """Where a rank writes: tensor file `name` and its index, in `directory`."""

    directory: Path
    name: str
    rank: int
    world: int


class Buffers:
    """The memory of a save, charged to the host budget: region buffers and scratch; as small as the budget demands."""

    def __init__(self, memory: TierMemory, states: dict[Key, FlatState], rank: int, world: int) -> None:
        chunk, count = CHUNK, _BUFFERS
        while True:
            self.regions = make_regions(states, rank, world, chunk)
            largest = max((region.nbytes for region in self.regions), default=0)
            # The step may have to fill a region while the saver's thread fills another one.
            scratch = 0 if all(_on_host(state) for state in states.values()) else scratch_bytes(chunk)
            try:
                self.regional = [_take(memory, largest) for _ in range(min(count, max(1, len(self.regions))))]
                self.scratch = [_take(memory, scratch) for _ in range(2)]
                self.tight = count == 1 < len(self.regions)
                return
            except BudgetError:
                self.regional = self.scratch = []
                if count > 1:
                    count = 1
                elif chunk > SMALLEST_CHUNK:
                    chunk //= 2
                else:
                    raise


def _take(memory: TierMemory, nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return memory.host(nbytes, torch.uint8, "checkpoint", "a buffer of the checkpoint writer")


def _on_host(state: FlatState) -> bool:
    return all(plane.on_host for plane in (state.weight, *state.planes.values()))


class RankSaver:
    """Writes one rank's file. `start` opens it; then either `run` in the foreground, or a thread that calls `run`.

    `share`: the part of the time that the writers may be writing; 1 is as fast as possible.
    """

    def __init__(
        self,
        memory: TierMemory,
        states: dict[Key, FlatState],
        target: RankFile,
        *,
        buffers: dict[str, Tensor],
        rng: Any,
        share: float = 1.0,
        own: dict[str, Any] | None = None,
    ) -> None:
        self._memory, self._states, self.target, self._rng, self._own = memory, states, target, rng, own
        self._small, self._share = buffers, share
        self._held = Buffers(memory, states, target.rank, target.world)
        self.regions = self._held.regions
        self._stage = dict.fromkeys(range(len(self.regions)), _Stage.PENDING)
        self._by_key: dict[Key, list[int]] = {}
        for number, region in enumerate(self.regions):
            self._by_key.setdefault(region.key, []).append(number)
        self._changed = threading.Condition()
        self._crc: dict[str, int] = {}
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._scratch: SimpleQueue[Tensor] = SimpleQueue()
        self._full: SimpleQueue[_Job | None] = SimpleQueue()
        self._writers: list[threading.Thread] = []
        self._file: PagedFile | None = None
        self._urgent = 0
        self._stop = threading.Event()
        self.error: BaseException | None = None
        tensors = list(tensors_of(self.regions))
        tensors += [(f"{BUFFER_PLANE}/0/{name}", t.dtype, tuple(t.shape)) for name, t in buffers.items()]
        self._header, self._data_bytes = build_header(tensors, {"format": "pt", "rank": str(target.rank)})
        for buffer in self._held.regional:
            self._free.put(buffer)
        for scratch in self._held.scratch:
            self._scratch.put(scratch)

    @property
    def tight(self) -> bool:
        """Whether the budget has room for one buffer only: beside training every step would wait for it."""
        return self._held.tight

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor file."""
        return len(self._header) + self._data_bytes

    def start(self) -> None:
        """Creates the file at its full size and starts the writers. OSError, of ENOSPC for one, leaves no file."""
        directory = self.target.directory
        self._file = PagedFile(directory / self.target.name, self.nbytes, self._header)
        for number in range(_WRITERS):
            thread = threading.Thread(target=self._write_loop, name=f"offload-checkpoint-{number}", daemon=True)
            thread.start()
            self._writers.append(thread)

    def hook(self, key: Key) -> Callable[[int, int], None]:
        """For `FlatState.before_rewrite`: returns once the old bytes of elements `[lo, hi)` are saved or safe."""

        def before(lo: int, hi: int) -> None:
            for number in self._by_key.get(key, ()):
                region = self.regions[number]
                if region.lo < hi and lo < region.hi and self._stage[number] is not _Stage.FILLED:
                    self._secure(number)

        return before

    def _secure(self, number: int) -> None:
        with self._changed:
            self._urgent += 1
        try:
            if not self._fill(number):
                self._wait_filled(number)
        finally:
            with self._changed:
                self._urgent -= 1

    def _wait_filled(self, number: int) -> None:
        """Waits for whoever fills a region."""
        with self._changed:
            while self._stage[number] is not _Stage.FILLED and self.error is None:
                self._changed.wait(1.0)

    def _fill(self, number: int) -> bool:
        """Fills a region if nobody has begun to; whether it did."""
        with self._changed:
            if self._stage[number] is not _Stage.PENDING or self.error is not None:
                return self.error is not None
            self._stage[number] = _Stage.FILLING
        region = self.regions[number]
        buffer = scratch = None
        try:
            buffer = self._free.get()
            if self.error is None:
                scratch = self._scratch.get()
                out = buffer[: region.nbytes]
                fill(self._states[region.key], region, out, scratch)
                self._full.put(_Job(region, buffer))
                buffer = None
        except BaseException as error:
            self._fail(error)
        finally:
            if scratch is not None:
                self._scratch.put(scratch)
            if buffer is not None:
                self._free.put(buffer)
            with self._changed:
                self._stage[number] = _Stage.FILLED
                self._changed.notify_all()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _write_loop(self) -> None:
        assert self._file is not None
        while (job := self._full.get()) is not None:
            began = time.monotonic()
            try:
                if self.error is None:
                    self._write(job)
            except BaseException as error:
                self._fail(error)
            self._free.put(job.buffer)
            del job
            self._rest(time.monotonic(), (time.monotonic() - began) * (1.0 / self._share - 1.0))

    def _rest(self, since: float, seconds: float) -> None:
        """Leaves the disk to others for a while, unless somebody waits for this save."""
        while time.monotonic() - since < seconds and not self._urgent and self.error is None:
            if self._stop.wait(min(0.02, seconds)):
                return

    def _write(self, job: _Job) -> None:
        assert self._file is not None
        data: memoryview = job.buffer.numpy().data[: job.region.nbytes]
        sums = {part.key: crc32(data[part.at : part.at + part.nbytes]) for part in job.region.parts}
        self._file.write(data, job.region.start)
        with self._changed:
            self._crc.update(sums)

    def run(self) -> Index:
        """Saves everything that is not saved yet, and waits until file and index are on the disk.

        Raises whatever a read or write raised; then nothing of this rank is left in the directory.
        """
        try:
            for number in range(len(self.regions)):
                if self.error is not None:
                    break
                self._fill(number)
            for number in range(len(self.regions)):  # a step may be filling one: the writers have to see it
                self._wait_filled(number)
            self._end_writers()
            if self.error is not None:
                raise self.error
            index = self._finish()
        except BaseException as error:
            self._fail(error)
            self.discard()
            raise
        self._release()
        return index

    def _end_writers(self) -> None:
        for _ in self._writers:
            self._full.put(None)
        while any(thread.is_alive() for thread in self._writers):
            for thread in self._writers:
                thread.join(0.5)  # in slices, so that an interrupt gets through
        self._writers = []

    def _finish(self) -> Index:
        assert self._file is not None
        at = self._data_bytes - sum(t.nbytes for t in self._small.values())
        pieces = [
            Piece(
                key=part.key,
                parameter=part.slot.name,
                plane=part.spec.name,
                offset=part.offset,
                length=part.length,
                crc32=self._crc[part.key],
            )
            for region in self.regions
            for part in region.parts
        ]
        for name, tensor in self._small.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            self._file.write_tail(data, at)
            at += len(data)
            pieces.append(
                Piece(
                    key=f"{BUFFER_PLANE}/0/{name}",
                    parameter=name,
                    plane=BUFFER_PLANE,
                    offset=0,
                    length=tensor.numel(),
                    crc32=crc32(data),
                )
            )
        self._file.finish()
        self._file = None
        index = Index(
            rank=self.target.rank, world=self.target.world, pieces=tuple(pieces), rng=self._rng, own=self._own
        )
        write_durably(self.target.directory / index_file(self.target.name), index.to_json())
        return index

    def _release(self) -> None:
        self._held.regional, self._held.scratch = [], []
        self._free, self._scratch = SimpleQueue(), SimpleQueue()

    def cancel(self, error: BaseException) -> None:
        """Makes a save beside training end soon, with `error`."""
        self._fail(error)
        self._stop.set()

    def discard(self) -> None:
        """Ends the writers and removes what was written. Idempotent."""
        self._stop.set()
        self._fail(RuntimeError("the save was given up"))
        self._end_writers()
        if self._file is not None:
            self._file.discard()
            self._file = None
        with contextlib.suppress(OSError):
            (self.target.directory / index_file(self.target.name)).unlink(missing_ok=True)
            fsync_directory(self.target.directory)
        self._release()


def unhook(states: Sequence[FlatState]) -> None:
    """No snapshot looks at these flats any more."""
    for state in states:
        state.before_rewrite = None
