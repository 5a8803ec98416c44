"""The memory of a transfer, and how a transfer is cut into requests: at segments, blocks, and the last whole page."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swap.checksums import PageChecksums
from swap.extents import Extent
from swap.files import SwapFile
from swap.geometry import PAGE, align_up


class Region:
    """Memory that is transferred often, looked at once: contiguous, in host memory. Cheaper than its ``tensor``, and
    keeps it alive.
    """

    __slots__ = ("address", "nbytes", "tensor", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = bytes_of_buffer(tensor, "a region")
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.view = _all_bytes_of(tensor)


@dataclass(slots=True, eq=False)
class Piece:
    """One request: ``view`` and ``position`` in the file of ``path``, ``inside`` of the extent.

    ``target``: the memory that gets the first bytes of ``view`` when they have been read and found good.
    """

    path: int
    position: int
    inside: int
    view: memoryview
    bounce: bool
    address: int = 0
    target: memoryview | None = None


class Cutter:
    """Cuts transfers for ``files`` into requests of ``block`` bytes at most.

    ``splits``: for each file, whether the engine cuts what is whole pages itself; it gets that in one piece.
    """

    def __init__(self, files: Sequence[SwapFile], block: int, splits: Sequence[bool]) -> None:
        self._files, self._block, self._splits = files, block, splits

    def cut(
        self, extent: Extent, buffer: torch.Tensor | Region, offset: int, nbytes: int, *, write: bool
    ) -> list[Piece]:
        """The requests that move the first ``nbytes`` of ``buffer`` from or to ``extent`` at ``offset``."""
        padded = align_up(nbytes, PAGE)
        if isinstance(buffer, Region) and padded == nbytes:
            base = buffer.address
            view = buffer.view if nbytes == buffer.nbytes else buffer.view[:nbytes]
        else:
            tensor = buffer.tensor if isinstance(buffer, Region) else buffer
            base = tensor.data_ptr()
            if padded == nbytes:
                view = _all_bytes_of(tensor)[:nbytes]
            else:
                # Writing may read on to the page's end in the buffer's own storage. Reading must not touch those bytes.
                start = _start_of(tensor)
                roomy = write and tensor.untyped_storage().nbytes() - start >= padded
                view = _bytes_of(tensor, start, padded if roomy else nbytes)
        aligned = base % PAGE == 0
        segments = extent.segments
        if aligned and len(segments) == 1 and padded == nbytes and nbytes:
            segment = segments[0]
            if self._files[segment.path].direct and (nbytes <= self._block or self._splits[segment.path]):
                return [Piece(segment.path, segment.offset + offset, offset, view, False, base)]
        return self._pieces(extent, view, base, offset, padded)

    def _pieces(self, extent: Extent, view: memoryview, base: int, offset: int, padded: int) -> list[Piece]:
        aligned = base % PAGE == 0
        pieces: list[Piece] = []
        done = 0
        for segment in extent.slices(offset, padded):
            direct = self._files[segment.path].direct
            end = done + segment.nbytes
            position = segment.offset
            # An engine that cuts requests itself gets them whole: one submission and one completion.
            most = segment.nbytes if aligned and self._splits[segment.path] else self._block
            while done < end:
                size = min(most, end - done)
                part = view[done : done + size]
                whole = part.nbytes // PAGE * PAGE
                inside = offset + done
                if not direct or (aligned and whole == part.nbytes):
                    pieces.append(Piece(segment.path, position, inside, part, False, base + done))
                elif aligned:
                    if whole:
                        pieces.append(Piece(segment.path, position, inside, part[:whole], False, base + done))
                    pieces.append(Piece(segment.path, position + whole, inside + whole, part[whole:], True))
                else:
                    pieces.append(Piece(segment.path, position, inside, part, True))
                done += size
                position += size
        return pieces


def read_last_page_whole(pieces: list[Piece], sums: PageChecksums) -> None:
    """Where a read ends within what was written of a page, read all of that, or it could not be verified."""
    last = pieces[-1]
    whole = last.view.nbytes // PAGE * PAGE
    if last.view.nbytes == whole or sums.length(last.inside + whole) <= last.view.nbytes - whole:
        return
    scratch = memoryview(mmap.mmap(-1, PAGE))
    tail = Piece(last.path, last.position + whole, last.inside + whole, scratch, False, 0, last.view[whole:])
    if whole:
        last.view = last.view[:whole]
        pieces.append(tail)
    else:
        pieces[-1] = tail


def bytes_of_buffer(buffer: torch.Tensor | Region, label: str) -> int:
    """Bytes of ``buffer``; ValueError, which names the extent ``label``, if its memory cannot be moved as it lies."""
    if isinstance(buffer, Region):
        return buffer.nbytes
    problem = ""
    if buffer.device.type != "cpu":
        problem = f"is on {buffer.device}, not in host memory"
    elif buffer.layout != torch.strided or not buffer.is_contiguous():
        problem = "is not contiguous"
    elif (buffer.is_complex() and buffer.is_conj()) or buffer.is_neg():
        problem = "is a lazy conjugate or negative view"
    if problem:
        shape = tuple(buffer.shape)
        raise ValueError(f"extent {label!r}: the buffer of shape {shape} and dtype {buffer.dtype} {problem}")
    return buffer.numel() * buffer.element_size()


def bytes_to_sum(buffer: torch.Tensor | Region, nbytes: int) -> memoryview:
    """The first ``nbytes`` of ``buffer``."""
    if isinstance(buffer, Region):
        return buffer.view[:nbytes]
    return _bytes_of(buffer, _start_of(buffer), nbytes)


def _start_of(buffer: torch.Tensor) -> int:
    """Bytes from the start of the buffer's storage to its first element."""
    return int(buffer.storage_offset()) * buffer.element_size()


def _all_bytes_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of the buffer; the view keeps its storage alive. The fast way, for requests of whole pages."""
    flat = buffer if buffer.dim() == 1 and not buffer.requires_grad else buffer.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _bytes_of(buffer: torch.Tensor, start: int, nbytes: int) -> memoryview:
    """The bytes ``[start, start + nbytes)`` of the buffer's storage; the view keeps the storage alive."""
    # Explicitly on the CPU: the caller may have made another device the default.
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(buffer.untyped_storage(), start, (nbytes,), (1,))
    return flat.numpy().data
