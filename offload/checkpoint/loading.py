"""One load: a checkpoint is read as far as it can be checked before anything changes, and only then taken over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offload.checkpoint.boundary import restore_rng
from offload.checkpoint.content import restore_groups, restore_scaler, restore_scheduler
from offload.checkpoint.errors import DamagedCheckpointError
from offload.checkpoint.format import decode_state, integer
from offload.checkpoint.load import Loader, LoadReport, Match, check_match, match_parameters
from offload.checkpoint.peers import Peers
from offload.checkpoint.places import MANIFEST, find_checkpoint
from offload.checkpoint.reader import Source
from offload.randomness import seed_everything

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess


class Load:
    """A load: `prepare`, `take_over`, `report`, in that order, each by all ranks together.

    `accepted`: what may be `missing`, `extra` or `reshaped`; see `load_checkpoint`.
    """

    source: Source
    match: Match
    _where: str
    _groups: list[tuple[dict[str, Any], Any]]
    _scheduler: dict[str, Any] | None
    _counts: list[int]
    _data: Any
    _extra: Any
    _buffers: list[tuple[str, Tensor]]
    _own_buffers: dict[str, Tensor]

    def __init__(self, engine: CheckpointAccess, accepted: Mapping[str, str], *, weights_only: bool) -> None:
        self._engine, self._accepted, self._weights_only = engine, accepted, weights_only
        self._peers = Peers(engine._cluster)
        self._loaded: list[tuple[set[str], set[str]]] = []

    def prepare(self, path: str | os.PathLike[str], stack: ExitStack) -> None:
        """Finds the checkpoint, opens it (closed by `stack`) and compares it with the engine.

        Raises:
            CheckpointError: it does not fit, is damaged, or the ranks have found different ones.
        """

        def open_it() -> tuple[int, str]:
            self._engine._check_at_rest("load_checkpoint")
            self.source = stack.enter_context(Source(find_checkpoint(path), allocate=self._engine._checkpoint_memory))
            self._take()
            return self.source.manifest.step, self.source.manifest.created

        begun = self._peers.together("open a checkpoint", open_it)
        self._peers.same("the checkpoint to load (its step and when it was made)", begun)

    def _take(self) -> None:
        """Reads everything but tensors. Raises CheckpointError for what does not fit the engine or is damaged."""
        engine, source, weights_only = self._engine, self.source, self._weights_only
        self.match = self._match()
        self._buffers = self._match_buffers()
        check_match(self.match, source.directory, self._accepted)
        manifest, where = source.manifest, str(source.directory / MANIFEST)
        self._where = where
        self._groups = [] if weights_only else restore_groups(engine, manifest, where)
        self._scheduler = None if weights_only else restore_scheduler(engine, manifest, where)
        self._counts = [integer(manifest.engine.get(k), f"{where}: engine.{k}") for k in ("steps", "skipped_steps")]
        values = source.own(self._peers.rank) if manifest.world == self._peers.world else {}
        self._data = decode_state(values.get("data", manifest.data), f"{where}: data")
        self._extra = decode_state(values.get("extra", manifest.extra), f"{where}: extra")
        self._own_buffers = {}
        own = values.get("buffers") or {}
        if not isinstance(own, dict):
            raise DamagedCheckpointError(f"{where}: the buffers of rank {self._peers.rank} are not an object")
        for name, encoded in own.items():
            value, saved = decode_state(encoded, f"{where}: buffer {name!r:.80}"), manifest.buffers.get(name)
            found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            if saved is None or found != (saved.shape, saved.dtype):
                raise DamagedCheckpointError(
                    f"{where}: buffer {name!r:.80} of rank {self._peers.rank} is not what it says"
                )
            self._own_buffers[name] = value

    def _match(self) -> Match:
        engine = self._engine
        wanted = {name: (r.slot.shape, engine._state(r).flat.dtype) for name, r in engine._records.items()}
        return match_parameters(wanted, engine._aliases(), self.source.manifest.parameters)

    def _match_buffers(self) -> list[tuple[str, Tensor]]:
        own = dict(self._engine.module.named_buffers())
        found = []
        for name, saved in self.source.manifest.buffers.items():
            tensor = own.get(name)
            if tensor is None:
                self.match.extra.append(name)
            elif tuple(tensor.shape) != saved.shape:
                self.match.reshaped.append(f"{name} (saved {list(saved.shape)}, here {list(tensor.shape)})")
            else:
                found.append((name, tensor))
        wanted = self._engine._boundary.buffers()
        self.match.missing.extend(name for name in wanted if name not in self.source.manifest.buffers)
        return found

    def take_over(self) -> None:
        """Replaces weights, moments, buffers and (unless `weights_only`) everything else."""
        self._loaded = self._peers.together("load a checkpoint", self._read)

    def _read(self) -> tuple[set[str], set[str]]:
        """Names of parameters that were converted, and of those that lost bits by it."""
        engine, source, match = self._engine, self.source, self.match
        loader = Loader(
            source, match.saved, engine._step_queue, engine._checkpoint_memory, weights_only=self._weights_only
        )
        loader.load_all(engine._states)
        for name, tensor in self._buffers:
            own_buffer = self._own_buffers.get(name)
            tensor.copy_(source.read_buffer(name) if own_buffer is None else own_buffer)
        for own, name in match.saved.items():
            if own in engine._steps:
                engine._steps[own] = 0 if self._weights_only else source.manifest.parameters[name].steps
        if not self._weights_only:
            self._restore()
        return loader.converted, loader.lossy

    def _restore(self) -> None:
        """Everything but weights, moments and buffers."""
        engine, where, manifest = self._engine, self._where, self.source.manifest
        if self._scheduler is not None:
            try:
                engine.lr_scheduler.load_state_dict(self._scheduler)
            except Exception as error:
                raise DamagedCheckpointError(f"{where}: the scheduler does not take its state: {error}") from error
        for group, options in self._groups:
            if options is not None:
                group.update(options)
        restore_scaler(engine, manifest, where)
        engine._step_count, engine._skipped_steps = self._counts
        if engine._step_count:
            engine.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        rng = self.source.rng(self._peers.rank) if manifest.world == self._peers.world else None
        if rng is not None:
            restore_rng(rng, where)
        else:
            # Random states of another number of ranks: a new, defined beginning.
            seed_everything(engine.config.seed, sum(self._counts), self._peers.rank)

    def report(self) -> LoadReport:
        """What was loaded, on all ranks."""
        return LoadReport(
            path=self.source.directory,
            step=self.source.manifest.step,
            missing=tuple(self.match.missing),
            extra=tuple(self.match.extra),
            reshaped=tuple(self.match.reshaped),
            converted=tuple(sorted(set().union(*(converted for converted, _ in self._loaded)))),
            lossy=tuple(sorted(set().union(*(lossy for _, lossy in self._loaded)))),
            data=self._data,
            extra_state=self._extra,
        )
