"""Bringing a checkpoint into an engine: chunk after chunk of each flat, from whatever pieces hold its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.errors import CheckpointMismatchError
from offload.checkpoint.format import stored_planes
from offload.checkpoint.manifest import SavedParameter
from offload.checkpoint.reader import Allocate, Source
from offload.checkpoint.regions import Key, encoding_of
from offload.layout import Slot
from offload.planes import Carver, Completion, Operand, SlotQueue
from offload.state import FlatState
from optimizer_cpu import kernels

_AT_ONCE = 1 << 18
"""Elements that are converted from one encoding to another at a time."""
LOSSY = {("fp32", "compact"), ("split", "compact")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did. `missing`, `extra` and `reshaped` list what an option let pass; `converted` the parameters whose
    state was converted between formats, `lossy` those of them that lost bits by it (a compact state is coarser).
    `data` and `extra_state` are what was given to `save_checkpoint`.
    """

    path: Path
    step: int
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    data: Any = None
    extra_state: Any = None


@dataclass(slots=True, kw_only=True)
class Match:
    """Which saved parameter each parameter of the engine gets."""

    saved: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)


def match_parameters(
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    aliases: Mapping[str, str],
    saved: Mapping[str, SavedParameter],
) -> Match:
    """Pairs by name. `aliases`: every name of a tied parameter -> the name that the engine uses."""
    match = Match()
    for name, parameter in saved.items():
        own = aliases.get(name)
        if own is None or own in match.saved:
            match.extra.append(name)
            continue
        shape, dtype = wanted[own]
        if shape != parameter.shape or dtype.is_floating_point != parameter.dtype.is_floating_point:
            match.reshaped.append(f"{name} (saved {list(parameter.shape)}, here {list(shape)})")
            continue
        match.saved[own] = name
    refused = {text.partition(" (")[0] for text in match.reshaped}
    refused_own = {aliases[name] for name in refused}
    match.missing = [name for name in wanted if name not in match.saved and name not in refused_own]
    return match


def check_match(match: Match, path: Path, options: Mapping[str, str]) -> None:
    """CheckpointMismatchError listing what does not fit and is not allowed by `options` ("missing", "extra",
    "reshaped" -> "refuse" or something else).
    """
    problems = []
    for kind, names, text in (
        ("missing", match.missing, "not in the checkpoint"),
        ("extra", match.extra, "in the checkpoint, not in the model"),
        ("reshaped", match.reshaped, "of another shape or kind"),
    ):
        if names and options[kind] == "refuse":
            shown = ", ".join(names[:20]) + (f", … and {len(names) - 20} more" if len(names) > 20 else "")
            other = "ignore" if kind == "extra" else "keep"
            problems.append(f"{len(names)} {text} ({kind}={other!r} accepts it): {shown}")
    if problems:
        raise CheckpointMismatchError(f"{path} does not fit this engine: " + "; ".join(problems))


class Loader:
    """Sets the planes of flats from a source. `names`: parameter of the engine -> saved parameter."""

    def __init__(
        self,
        source: Source,
        names: Mapping[str, str],
        queue: SlotQueue | None,
        allocate: Allocate,
        *,
        weights_only: bool,
    ) -> None:
        self.source, self.names, self.queue, self.weights_only = source, names, queue, weights_only
        self.converted: set[str] = set()
        self.lossy: set[str] = set()
        self._allocate = allocate
        self._scratch: dict[str, Tensor] = {}

    def load_all(self, states: Mapping[Key, FlatState]) -> None:
        """Loads what this rank updates of all flats; weights that others update are theirs to give."""
        for key in sorted(states):
            state = states[key]
            lo, hi = state.division.owned(state.flat)
            end = state.flat.trainable_end
            self._load_range(state, lo, min(hi, end), trained=True)
            self._load_range(state, max(lo, end), hi, trained=False)
        if self.queue is not None:
            self.queue.drain()

    def _load_range(self, state: FlatState, lo: int, hi: int, *, trained: bool) -> None:
        # The grid begins where the planes do, so that chunks fall on pages in all of them.
        for start in range(lo, hi, state.chunk):
            stop = min(hi, start + state.chunk)
            slots = [s for s in state.flat.slots if s.numel and s.offset < stop and start < s.end]
            wanted = [s for s in slots if s.name in self.names]
            if wanted:
                self._load_chunk(state, start, stop, slots, wanted, trained=trained)

    def _load_chunk(
        self, state: FlatState, lo: int, hi: int, slots: list[Slot], wanted: list[Slot], *, trained: bool
    ) -> None:
        assert self.queue is not None
        staging = self.queue.acquire()
        after: list[Completion] = []
        try:
            carver = Carver(staging)
            planes = {"weight": state.weight, **state.planes} if trained else {"weight": state.weight}
            operands = {n: Operand(plane, lo, hi, carver, on_device=False) for n, plane in planes.items()}
            if len(wanted) == len(slots):
                for operand in operands.values():
                    if not operand.in_place:
                        operand.tensor.zero_()  # the padding between parameters
            else:
                for operand in operands.values():
                    operand.fetch()
                for operand in operands.values():
                    operand.ready()
            for slot in wanted:
                begin, end = max(lo, slot.offset), min(hi, slot.end)
                parts = {name: op.tensor[op.plane.spec.slice_of(begin - lo, end - lo)] for name, op in operands.items()}
                self._load_part(state, slot, begin - slot.offset, end - slot.offset, parts)
            completions = [operand.put_back() for operand in operands.values()]
            after = [c for c in completions if c is not None]
        finally:
            self.queue.give_back(staging, after)

    def _load_part(self, state: FlatState, slot: Slot, lo: int, hi: int, parts: dict[str, Tensor]) -> None:
        """Elements `[lo, hi)` of a parameter, whose planes are `parts`."""
        name = self.names[slot.name]
        saved = self.source.manifest.parameters[name]
        encoding = encoding_of(state, slot)
        same = saved.encoding == encoding and (saved.dtype == state.flat.dtype or encoding == "fp32")
        if same and not (self.weights_only and encoding is not None):
            own_master = encoding == "fp32" and "master" not in parts
            for spec in stored_planes(saved.encoding, saved.dtype):
                target = parts["weight" if spec.name == "master" and own_master else spec.name]
                self.source.read(name, spec.name, lo, hi, target)
            if encoding == "fp32" and not own_master:
                kernels.round_weight_(parts["master"], parts["weight"])
            return
        if not same and encoding is not None and saved.encoding is not None:
            self.converted.add(slot.name)
            if (saved.encoding, encoding) in LOSSY:
                self.lossy.add(slot.name)
        for start in range(lo, hi, _AT_ONCE):
            stop = min(hi, start + _AT_ONCE)
            pieces = {
                key: tensor[plane.spec.slice_of(start - lo, stop - lo)]
                for key, tensor in parts.items()
                for plane in [state.weight if key == "weight" else state.planes[key]]
            }
            self._convert(state, name, saved, encoding, start, stop, pieces)

    def _convert(
        self,
        state: FlatState,
        name: str,
        saved: SavedParameter,
        encoding: str | None,
        lo: int,
        hi: int,
        parts: dict[str, Tensor],
    ) -> None:
        if encoding is None:
            self.read_weight(name, saved, lo, hi, parts["weight"])
            return
        master, exp_avg, exp_avg_sq = self.decode(name, saved, lo, hi)
        if self.weights_only:
            exp_avg = exp_avg_sq = None
        kernels.load_(state.fmt.name, parts, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def read_weight(self, name: str, saved: SavedParameter, lo: int, hi: int, out: Tensor) -> None:
        """The weight alone, in the dtype of `out`."""
        if saved.encoding == "fp32":
            master = self._buffer("master", hi - lo, torch.float32)
            self.source.read(name, "master", lo, hi, master)
            if out.dtype == torch.float32:
                out.copy_(master)
            else:
                kernels.round_weight_(master, out)
        elif saved.dtype == out.dtype:
            self.source.read(name, "weight", lo, hi, out)
        else:
            weight = self._buffer("weight", hi - lo, saved.dtype)
            self.source.read(name, "weight", lo, hi, weight)
            out.copy_(weight)

    def decode(self, name: str, saved: SavedParameter, lo: int, hi: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """fp32 master and moments of a saved parameter."""
        if saved.encoding is None:
            weight = self._buffer("weight", hi - lo, saved.dtype)
            self.source.read(name, "weight", lo, hi, weight)
            return weight.float(), None, None
        specs = stored_planes(saved.encoding, saved.dtype)
        if saved.encoding == "fp32" and self.weights_only:
            specs = specs[:1]
        found = {}
        for spec in specs:
            found[spec.name] = self._buffer(spec.name, spec.numel(hi - lo), spec.dtype)
            self.source.read(name, spec.name, lo, hi, found[spec.name])
        if saved.encoding == "fp32":
            return found["master"], found.get("exp_avg"), found.get("exp_avg_sq")
        state = kernels.read(saved.encoding, found)
        return state.master, state.exp_avg, state.exp_avg_sq

    def _buffer(self, plane: str, entries: int, dtype: torch.dtype) -> Tensor:
        """Memory for one plane of `_AT_ONCE` elements at most, kept for the next range."""
        nbytes = entries * dtype.itemsize
        buffer = self._scratch.get(plane)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._scratch[plane] = self._allocate(max(nbytes, _AT_ONCE * dtype.itemsize))
        return buffer[:nbytes].view(dtype)


def match_groups(own: Iterable[list[str]], saved: list[tuple[list[str], dict[str, Any]]], where: str) -> list[int]:
    """For each group of the engine (names) the number of the saved group whose options it takes; -1: keep its own.

    Raises:
        CheckpointMismatchError: parameters of one group come from saved groups with different options.
    """
    home = {name: number for number, (names, _) in enumerate(saved) for name in names}
    chosen = []
    for index, names in enumerate(own):
        numbers = sorted({home[name] for name in names if name in home})
        if not numbers:
            chosen.append(-1)
            continue
        if any(saved[n][1] != saved[numbers[0]][1] for n in numbers[1:]):
            raise CheckpointMismatchError(
                f"{where}: param_groups[{index}] holds parameters of saved groups {numbers}, whose hyperparameters "
                "differ; build the engine with the groups of the saved run, or load with weights_only=True"
            )
        chosen.append(index if index in numbers else numbers[0])
    return chosen
