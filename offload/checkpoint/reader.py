"""Reading a checkpoint by parameter name and element range, whatever ranks wrote it; every byte is checked."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.errors import DamagedCheckpointError
from offload.checkpoint.format import PIECE_LIMIT, open_regular, stored_planes
from offload.checkpoint.manifest import Index, Manifest, Piece, read_index, read_manifest
from offload.checkpoint.readahead import ReadAhead, aligned, make_pool
from offload.checkpoint.save import BUFFER_PLANE
from offload.checkpoint.tensorfile import Entry, read_header
from optimizer_cpu.formats import PlaneSpec
from swap.checksums import crc32
from swap.geometry import format_bytes

_OPEN_READERS = 2

Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A piece and where it lies: file `file`, byte `start`."""

    offset: int
    length: int
    file: int
    start: int
    nbytes: int
    crc32: int
    key: str

    @property
    def end(self) -> int:
        return self.offset + self.length


class Source:
    """An open checkpoint. Opening reads manifest, indices and headers and checks that they fit each other; `read`
    checks the CRC of each piece it touches.

    Raises:
        IncompleteCheckpointError, DamagedCheckpointError: what is wrong, and in which file.
    """

    def __init__(self, directory: Path, *, allocate: Allocate | None = None) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self.indices: list[Index] = []
        self._fds: list[int] = []
        self._allocate = allocate or aligned
        self._pieces: dict[tuple[str, str], list[_Stored]] = {}
        self._cache: dict[str, tuple[_Stored, Tensor]] = {}
        self._pool = make_pool()
        self._readers: dict[int, ReadAhead] = {}
        try:
            if len(self.manifest.files) != self.manifest.world:
                raise DamagedCheckpointError(
                    f"{directory}: {len(self.manifest.files)} files of a world of {self.manifest.world} ranks"
                )
            for number in range(self.manifest.world):
                self._open(number)
            self._check_coverage()
        except BaseException:
            self.close()
            raise

    def _open(self, number: int) -> None:
        saved = self.manifest.files[number]
        path = self.directory / saved.name
        fd = open_regular(self.directory, saved.name)
        self._fds.append(fd)
        size = os.fstat(fd).st_size
        if size != saved.nbytes:
            raise DamagedCheckpointError(
                f"{path}: {format_bytes(size)} ({size:,} bytes), the manifest says {saved.nbytes:,}: it was cut off "
                "or replaced; load an older checkpoint by naming its directory"
            )
        index = read_index(self.directory, saved)
        if (index.rank, index.world) != (number, self.manifest.world):
            raise DamagedCheckpointError(f"{path}: its index is of rank {index.rank} of {index.world}")
        self.indices.append(index)
        entries, _ = read_header(fd, path)
        for piece in index.pieces:
            self._add(number, path, piece, entries.get(piece.key))

    def _add(self, number: int, path: Path, piece: Piece, entry: Entry | None) -> None:
        where = f"{path}: piece {piece.key!r:.80}"
        if entry is None:
            raise DamagedCheckpointError(f"{where} is in the index, not in the file")
        spec = self._spec(where, piece)
        group = spec.group
        elements = self._numel(piece)
        if piece.offset % group or piece.offset + piece.length > elements:
            raise DamagedCheckpointError(f"{where}: elements {piece.offset:,} + {piece.length:,} of {elements:,}")
        if entry.dtype != spec.dtype or entry.nbytes != spec.nbytes(piece.length):
            raise DamagedCheckpointError(f"{where}: {entry.nbytes:,} bytes of {entry.dtype} do not fit its range")
        if entry.nbytes > PIECE_LIMIT and piece.plane != BUFFER_PLANE:
            raise DamagedCheckpointError(f"{where}: larger than {format_bytes(PIECE_LIMIT)}")
        stored = _Stored(piece.offset, piece.length, number, entry.start, entry.nbytes, piece.crc32, piece.key)
        self._pieces.setdefault((piece.parameter, piece.plane), []).append(stored)

    def _spec(self, where: str, piece: Piece) -> PlaneSpec:
        if piece.plane == BUFFER_PLANE:
            buffer = self.manifest.buffers.get(piece.parameter)
            if buffer is None:
                raise DamagedCheckpointError(f"{where}: the manifest knows no such buffer")
            return PlaneSpec(name=BUFFER_PLANE, dtype=buffer.dtype)
        spec = self.spec(piece.parameter, piece.plane)
        if spec is None:
            raise DamagedCheckpointError(f"{where}: the manifest knows no such plane or parameter")
        return spec

    def _numel(self, piece: Piece) -> int:
        if piece.plane == BUFFER_PLANE:
            return self.manifest.buffers[piece.parameter].numel
        return self.manifest.parameters[piece.parameter].numel

    def spec(self, parameter: str, plane: str) -> PlaneSpec | None:
        """The plane of a saved parameter, or None."""
        saved = self.manifest.parameters.get(parameter)
        if saved is None:
            return None
        return next((s for s in stored_planes(saved.encoding, saved.dtype) if s.name == plane), None)

    def _check_coverage(self) -> None:
        expected = [
            (name, spec.name, p.numel)
            for name, p in self.manifest.parameters.items()
            for spec in stored_planes(p.encoding, p.dtype)
        ]
        expected += [(name, BUFFER_PLANE, b.numel) for name, b in self.manifest.buffers.items()]
        for name, plane, numel in expected:
            pieces = self._pieces.setdefault((name, plane), [])
            pieces.sort(key=lambda p: (p.offset, p.length))
            at = 0
            for piece in pieces:
                if piece.offset != at:
                    what = "overlap" if piece.offset < at else "leave a gap"
                    raise DamagedCheckpointError(
                        f"{self.directory}: pieces of {name} {plane} {what} at element {piece.offset:,}"
                    )
                at = piece.end
            if at != numel:
                raise DamagedCheckpointError(
                    f"{self.directory}: {name} {plane} ends at element {at:,} of {numel:,}; a rank's part is missing"
                )

    def largest_piece(self) -> int:
        """Bytes of the largest piece of a parameter."""
        planes = [pieces for (_, plane), pieces in self._pieces.items() if plane != BUFFER_PLANE]
        return max((piece.nbytes for pieces in planes for piece in pieces), default=0)

    def read(self, parameter: str, plane: str, lo: int, hi: int, out: Tensor) -> None:
        """Copies elements `[lo, hi)` of a plane to the contiguous CPU tensor `out` of the plane's dtype.

        `lo` is a multiple of the plane's group. Pieces that `[lo, hi)` covers go straight to `out`; others through a
        buffer of one piece for each plane.
        """
        spec = self.spec(parameter, plane)
        assert spec is not None
        pieces = self._pieces[parameter, plane]
        number = bisect_right(pieces, lo, key=lambda p: p.offset) - 1
        while lo < hi:
            piece = pieces[number]
            stop = min(hi, piece.end)
            target = out[: spec.numel(stop - lo)]
            if lo == piece.offset and stop == piece.end:
                self._load(piece, target, f"{parameter} {plane}")
            else:
                data = self._cached(piece, plane, f"{parameter} {plane}").view(spec.dtype)
                target.copy_(data[spec.slice_of(lo - piece.offset, stop - piece.offset)])
            out = out[target.numel() :]
            lo, number = stop, number + 1

    def _load(self, piece: _Stored, target: Tensor, what: str) -> None:
        data: memoryview = target.view(torch.uint8).numpy().data
        path = self.directory / self.manifest.files[piece.file].name
        self._reader(piece.file).read(data, piece.start)
        if crc32(data) != piece.crc32:
            raise DamagedCheckpointError(
                f"{path}: checksum mismatch in {what}, elements {piece.offset:,} to {piece.end:,} (bytes "
                f"{piece.start:,} to {piece.start + piece.nbytes:,}): the file has changed since it was written; load "
                "an older checkpoint by naming its directory"
            )

    def _reader(self, file: int) -> ReadAhead:
        """The reader of a file; others give their buffers up, since files are read one after another."""
        reader = self._readers.get(file)
        if reader is None:
            while len(self._readers) >= _OPEN_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            path = self.directory / self.manifest.files[file].name
            reader = self._readers[file] = ReadAhead(self._fds[file], path, self._pool, self._allocate)
        return reader

    def _cached(self, piece: _Stored, plane: str, what: str) -> Tensor:
        known = self._cache.get(plane)
        if known is not None and known[0] is piece:
            return known[1][: piece.nbytes]
        buffer = known[1] if known is not None else torch.empty(0, dtype=torch.uint8)
        self._cache.pop(plane, None)
        if buffer.numel() < piece.nbytes:
            del buffer
            buffer = self._allocate(piece.nbytes)
        part = buffer[: piece.nbytes]
        self._load(piece, part, what)
        self._cache[plane] = piece, buffer
        return part

    def read_buffer(self, name: str) -> Tensor:
        """A persistent buffer of the module, as saved."""
        saved = self.manifest.buffers[name]
        out = torch.empty(saved.numel, dtype=saved.dtype)
        for piece in self._pieces[name, BUFFER_PLANE]:
            if piece.length:
                self._load(piece, out[piece.offset : piece.end], f"buffer {name}")
        return out.view(saved.shape)

    def verify(self, progress: Callable[[int], None] | None = None, *, rank: int | None = None) -> int:
        """Reads everything, or what `rank` has saved, and compares every checksum; returns the bytes read."""
        total = 0
        order = sorted(
            (
                (p, f"{name} {plane}")
                for (name, plane), ps in self._pieces.items()
                for p in ps
                if rank is None or p.file == rank
            ),
            key=lambda item: (item[0].file, item[0].start),
        )
        buffer = torch.empty(max((p.nbytes for p, _ in order), default=0), dtype=torch.uint8)
        for piece, what in order:
            if piece.nbytes:
                self._load(piece, buffer[: piece.nbytes], what)
            total += piece.nbytes
            if progress is not None:
                progress(total)
        return total

    def rng(self, rank: int) -> Any:
        """The encoded random states of a rank of the saved world."""
        return self.indices[rank].rng

    def own(self, rank: int) -> Mapping[str, Any]:
        """What a rank of the saved world said in other words than rank 0: encoded `data`, `extra`, `buffers`."""
        return self.indices[rank].own or {}

    def close(self) -> None:
        """Closes the files and gives the buffers up. Idempotent."""
        self._cache.clear()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._pool.shutdown()
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
