"""`save_checkpoint` and `load_checkpoint` of an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from offload.checkpoint.boundary import Boundary, persistent_buffers, restore_rng
from offload.checkpoint.content import (
    describe,
    make_manifest,
    restore_groups,
    restore_scaler,
    restore_scheduler,
)
from offload.checkpoint.directory import (
    clean_up,
    commit,
    find_checkpoint,
    free_bytes,
    fsync_directory,
    is_complete,
    locked,
    remove_leftovers,
    retain,
    saved_file,
)
from offload.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DamagedCheckpointError,
)
from offload.checkpoint.export import Exported, Tensors, carried_from, export_tensors, fits, model_config
from offload.checkpoint.format import MANIFEST, decode_state, integer, rank_file, step_name
from offload.checkpoint.load import Loader, LoadReport, Match, check_match, match_parameters
from offload.checkpoint.manifest import SavedFile, read_manifest
from offload.checkpoint.peers import Peers, await_marker, fingerprints, own_values, put_marker
from offload.checkpoint.reader import Source
from offload.checkpoint.regions import make_regions
from offload.checkpoint.save import RankFile, RankSaver, unhook
from offload.checkpoint.streams import export_together
from offload.inspection import StateAccess
from offload.randomness import seed_everything
from offload.scaler import LossScaler
from swap.errors import BudgetError
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.config import Config
    from offload.optimizer import EngineOptimizer

log = logging.getLogger("offload")

Keep = Literal["refuse", "keep"]
Ignore = Literal["refuse", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A save: the directory, the step, bytes of all files. `complete` is False while it goes on beside training;
    `seconds` is the time until `save_checkpoint` returned.
    """

    path: Path
    step: int
    nbytes: int
    seconds: float
    complete: bool


class _Running:
    """A save beside training."""

    def __init__(self, saver: RankSaver, thread: threading.Thread) -> None:
        self.saver, self.thread = saver, thread
        self.error: BaseException | None = None


class CheckpointAccess(StateAccess):
    """The part of an engine that writes and reads checkpoints."""

    config: Config
    module: nn.Module
    optimizer: EngineOptimizer
    lr_scheduler: Any
    _scaler: LossScaler | None
    _step_count: int
    _skipped_steps: int
    _boundary: Boundary
    _saving: _Running | None = None
    _updated_early: bool
    _group_order: list[int]

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        data: Any = None,
        extra: Any = None,
        keep: int | None = None,
        keep_every: int | None = None,
        wait: bool = True,
        share: float = 1.0,
    ) -> SavedCheckpoint:
        """Writes `directory/step-<steps>/`: the state at the last step boundary, to be resumed exactly.

        What was accumulated since the last step is not part of it. The checkpoint is complete once its manifest is
        there, which is written last; a save that fails removes what it wrote and leaves older checkpoints alone.

        Args:
            data: where the data stream stands, given back by `load_checkpoint`; JSON-like values.
            extra: anything else of that kind.
            keep: then remove all complete checkpoints in `directory` but the newest `keep` and those whose step is a
                multiple of `keep_every`.
            wait: False saves beside training: the call returns once the moment is pinned. Where memory.host has no
                room for the writer's buffers beside the step's, the save is finished here all the same and says so.
            share: the part of the time that a save beside training may keep the disk busy.

        Raises:
            CheckpointSaveError: the save failed; training can go on.
            CheckpointError: scheduler, groups, `data` or `extra` hold something that JSON cannot.
        """
        self._check("save_checkpoint was called")
        _check_limits(keep, share)
        began = time.perf_counter()
        self._end_save(report=False)
        root, step = Path(directory), self._step_count + self._skipped_steps
        target = root / step_name(step)
        peers = Peers(self._cluster)
        stack = contextlib.ExitStack()
        saver: RankSaver | None = None
        try:
            with self._lock, stack:
                buffers = self._boundary.buffers()

                def begin() -> tuple[int, dict[str, int], tuple[int, str] | None]:
                    self._check_at_rest("save_checkpoint")
                    self._settle_states()
                    marks = fingerprints(data, extra, buffers) if peers.world > 1 else {}
                    opened = self._open_directory(root, target, peers.world, stack) if peers.rank == 0 else None
                    return step, marks, opened

                def open_file() -> tuple[bool, int]:
                    nonlocal saver
                    if marker:
                        await_marker(target, marker, peers.rank)
                    saver = RankSaver(
                        self._memory,
                        self._states,
                        RankFile(directory=target, name=name, rank=peers.rank, world=peers.world),
                        buffers=buffers if peers.rank == 0 else {},
                        rng=self._boundary.rng(),
                        share=1.0 if wait else share,
                        own=own_values(begun[peers.rank][1], begun[0][1], data, extra, buffers) if peers.rank else None,
                    )
                    saver.start()
                    return saver.tight, saver.nbytes

                described = describe(self, buffers, step=step, world=peers.world, data=data, extra=extra)
                begun = peers.together("begin a checkpoint", begin)
                peers.same("the number of steps that are to be saved", [steps for steps, _, _ in begun])
                assert begun[0][2] is not None
                generation, marker = begun[0][2]
                name = rank_file(peers.rank, peers.world, generation)
                opened = peers.together("open the files of a checkpoint", open_file)
                assert saver is not None
                if any(tight for tight, _ in opened) and not wait:
                    log.warning(
                        "%s: memory.host has room for one buffer only, so the checkpoint is saved between steps", target
                    )
                    wait = True
                finish = self._finisher(saver, stack.pop_all(), described, keep, keep_every, beside=not wait)
                if wait:
                    finish()
                else:
                    for key, state in self._states.items():
                        state.before_rewrite = saver.hook(key)
                    self._beside(saver, target, finish)
        except BaseException as error:
            unhook(list(self._states.values()))
            if saver is not None:
                saver.discard()
            if isinstance(error, (OSError, BudgetError)) and not isinstance(error, CheckpointError):
                raise _failed(target, error) from error
            raise
        seconds = time.perf_counter() - began
        nbytes = sum(nbytes for _, nbytes in opened)
        return SavedCheckpoint(path=target, step=step, nbytes=nbytes, seconds=seconds, complete=wait)

    def _finisher(
        self,
        saver: RankSaver,
        held: contextlib.ExitStack,
        described: dict[str, Any],
        keep: int | None,
        keep_every: int | None,
        *,
        beside: bool,
    ) -> Callable[[], None]:
        """Writes this rank's file and, once all ranks have, makes the checkpoint complete; then closes `held`."""
        aside = None if self._cluster is None or not beside else self._cluster.channel("save")
        peers, target = Peers(self._cluster, aside), saver.target.directory

        def write() -> SavedFile:
            saver.run()
            return saved_file(target, saver.target.name, peers.rank, peers.world)

        def finish() -> None:
            with held:
                files = peers.together("write a checkpoint", write)

                def complete() -> None:
                    if peers.rank == 0:
                        commit(target, make_manifest(described, tuple(files)))
                        retain(target.parent, keep, keep_every)

                peers.together("complete a checkpoint", complete)

        return finish

    def _check_at_rest(self, action: str) -> None:
        """Refuses within `train_batch` under the eager schedule: some parameters are a step ahead of the others."""
        if self._updated_early:
            raise CheckpointError(
                f"{action} within train_batch under the eager schedule, where some parameters are updated already and "
                "others are not: call it between two calls of train_batch"
            )

    def _open_directory(self, root: Path, target: Path, world: int, stack: contextlib.ExitStack) -> tuple[int, str]:
        """Makes and locks the directory; returns the generation of the new files in it, and a marker to look for."""
        root.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(root))
        stack.callback(clean_up, target)  # while the directory is still locked
        remove_leftovers(root)
        target.mkdir(exist_ok=True)
        fsync_directory(root)
        marker = put_marker(target) if world > 1 else ""
        if not is_complete(target):
            return 0, marker
        names = {file.name for file in read_manifest(target).files}
        generation = 1
        while any(rank_file(rank, world, generation) in names for rank in range(world)):
            generation += 1
        return generation, marker

    def _beside(self, saver: RankSaver, target: Path, finish: Callable[[], None]) -> None:
        states = list(self._states.values())

        def run() -> None:
            try:
                finish()
            except BaseException as error:
                running.error = error
                saver.discard()
                log.error("%s", _failed(target, error))
            finally:
                unhook(states)

        running = _Running(saver, threading.Thread(target=run, name="offload-checkpoint", daemon=True))
        self._saving = running
        running.thread.start()

    def checkpoint_bytes(self) -> int:
        """Bytes of the tensor files of a checkpoint of this engine, those of all ranks."""
        world = 1 if self._cluster is None else self._cluster.ranks.world
        tensors = sum(r.nbytes for rank in range(world) for r in make_regions(self._states, rank, world))
        return tensors + sum(buffer.nbytes for buffer in persistent_buffers(self.module).values())

    @property
    def saving(self) -> bool:
        """Whether a save beside training is under way."""
        return self._saving is not None and self._saving.thread.is_alive()

    def wait_checkpoint(self) -> None:
        """Waits for a save beside training.

        Raises:
            CheckpointSaveError: it failed.
        """
        self._end_save(report=True)

    def _end_save(self, *, report: bool) -> None:
        """Waits for a save beside training. An interrupt ends the save instead, and nothing of it remains."""
        running = self._saving
        if running is None:
            return
        try:
            while running.thread.is_alive():
                running.thread.join(0.5)
        except BaseException:
            running.saver.cancel(CheckpointSaveError("interrupted"))
            running.thread.join()
            self._saving = None
            raise
        self._saving = None
        if report and running.error is not None:
            raise _failed(running.saver.target.directory, running.error) from running.error

    def _before_edit(self) -> None:
        self._end_save(report=False)  # an edit in place would reach weights that are not saved yet

    def _settle_states(self) -> None:
        """Everything that steps have decided on is at rest in the planes."""
        for state in self._states.values():
            state.settle()
        self._step_queue.drain()

    def _aliases(self) -> dict[str, str]:
        """Every name of every parameter, also those of tied ones -> the name that the engine uses."""
        names = {id(record.parameter): name for name, record in self._records.items()}
        return {
            alias: names[id(p)] for alias, p in self.module.named_parameters(remove_duplicate=False) if id(p) in names
        }

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        missing: Keep = "refuse",
        extra: Ignore = "refuse",
        reshaped: Keep = "refuse",
        weights_only: bool = False,
    ) -> LoadReport:
        """Continues from a checkpoint: `path` is its directory, or one that holds several, of which the newest complete
        one is taken.

        World size, placement, state format and order of registration may be others than those of the saved run; only
        `compact` loses bits of what other formats saved. What does not fit is refused with a list before anything
        changes.

        Args:
            missing: "keep" leaves parameters (and buffers) that the checkpoint lacks as they are.
            extra: "ignore" passes over what the model lacks.
            reshaped: "keep" leaves parameters of another shape as they are.
            weights_only: takes weights (fp32 masters) and buffers only; moments and step counts start anew, while
                hyperparameters, scheduler, counters and random states stay as they are.

        Raises:
            IncompleteCheckpointError, DamagedCheckpointError: it cannot be read. Data are compared with their checksums
                as they are read: if one is wrong, part of the state is new, and the engine is failed.
            CheckpointMismatchError: it does not fit.
        """
        self._check("load_checkpoint was called")
        for option, value, allowed in (
            ("missing", missing, ("refuse", "keep")),
            ("extra", extra, ("refuse", "ignore")),
            ("reshaped", reshaped, ("refuse", "keep")),
        ):
            if value not in allowed:
                raise ValueError(f"load_checkpoint: {option} = {value!r}; it is {' or '.join(map(repr, allowed))}")
        self._end_save(report=False)
        options = {"missing": missing, "extra": extra, "reshaped": reshaped}
        peers = Peers(self._cluster)
        with contextlib.ExitStack() as stack:
            prepared = _Prepared()

            def prepare() -> tuple[int, str]:
                self._check_at_rest("load_checkpoint")
                directory = find_checkpoint(path)
                source = stack.enter_context(Source(directory, allocate=self._checkpoint_memory))
                prepared.take(self, source, options, peers, weights_only=weights_only)
                return source.manifest.step, source.manifest.created

            begun = peers.together("open a checkpoint", prepare)
            peers.same("the checkpoint to load (its step and when it was made)", begun)
            source, match = prepared.source, prepared.match
            loader = Loader(source, match.saved, self._step_queue, self._checkpoint_memory, weights_only=weights_only)

            def load() -> tuple[set[str], set[str]]:
                loader.load_all(self._states)
                for name, tensor in prepared.buffers:
                    own_buffer = prepared.own_buffers.get(name)
                    tensor.copy_(source.read_buffer(name) if own_buffer is None else own_buffer)
                for own, name in match.saved.items():
                    if own in self._steps:
                        self._steps[own] = 0 if weights_only else source.manifest.parameters[name].steps
                if not weights_only:
                    self._restore(prepared, peers)
                return loader.converted, loader.lossy

            with self._replacing_everything():
                loaded = peers.together("load a checkpoint", load)
                if self._cluster is not None:
                    self._cluster.updated({unit for unit, _ in self._states})
                    self._settle_states()
        self._boundary.mark()
        return LoadReport(
            path=source.directory,
            step=source.manifest.step,
            missing=tuple(match.missing),
            extra=tuple(match.extra),
            reshaped=tuple(match.reshaped),
            converted=tuple(sorted(set().union(*(converted for converted, _ in loaded)))),
            lossy=tuple(sorted(set().union(*(lossy for _, lossy in loaded)))),
            data=prepared.data,
            extra_state=prepared.extra,
        )

    def export_safetensors(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        *,
        max_shard_size: int | str = "5GB",
        carry: str | os.PathLike[str] | None = None,
    ) -> Exported:
        """Writes the weights as safetensors files that `from_pretrained` of `transformers` loads.

        A tied parameter is written once, under its first name. Nothing larger than a chunk is held, and every file is
        read back before it gets its name.

        Args:
            dtype: "bf16", "fp16" or "fp32" (the masters, where there are some); None: as each parameter computes.
            max_shard_size: bytes of a file at most (a single larger tensor is a file of its own).
            carry: a directory whose configuration and tokenizer files are copied along. The configuration of a
                `transformers` model is written anyway.

        Raises:
            CheckpointSaveError: the disk is full or the like; nothing of the export remains.
            CheckpointError: `directory` holds other weights.
        """
        self._check("export_safetensors was called")
        with self._lock:
            self._settle_states()

            def write(tensors: list[Tensors]) -> Exported:
                fits(tensors, Path(directory), free_bytes(Path(directory)))
                return export_tensors(
                    tensors,
                    directory,
                    max_shard_size=max_shard_size,
                    carried=carried_from(carry),
                    config=model_config(self.module, [t.dtype for t in tensors]),
                )

            return export_together(self, dtype, write)

    def _checkpoint_memory(self, nbytes: int) -> Tensor:
        return self._memory.host(nbytes, torch.uint8, "checkpoint", "a buffer of the checkpoint reader")

    def _match(self, source: Source) -> Match:
        wanted = {name: (r.slot.shape, self._state(r).flat.dtype) for name, r in self._records.items()}
        return match_parameters(wanted, self._aliases(), source.manifest.parameters)

    def _match_buffers(self, source: Source, match: Match) -> list[tuple[str, Tensor]]:
        own = dict(self.module.named_buffers())
        found = []
        for name, saved in source.manifest.buffers.items():
            tensor = own.get(name)
            if tensor is None:
                match.extra.append(name)
            elif tuple(tensor.shape) != saved.shape:
                match.reshaped.append(f"{name} (saved {list(saved.shape)}, here {list(tensor.shape)})")
            else:
                found.append((name, tensor))
        match.missing.extend(name for name in self._boundary.buffers() if name not in source.manifest.buffers)
        return found

    @contextlib.contextmanager
    def _replacing_everything(self) -> Iterator[None]:
        """Around a change of the whole state; an exception within fails the engine."""
        self._binding.end_step()
        self._drop_gradients()
        busy = self._residency.busy_units()
        if busy:
            raise CheckpointMismatchError(
                f"load_checkpoint while {', '.join(busy[:3])} in use: leave gathered(), and end every forward and "
                "backward, before it"
            )
        self._settle_states()
        with self._lock, self._residency.lock, torch.no_grad():
            self._residency.drop_prefetched()
            self._begin_change()
            try:
                yield
            except BaseException:
                self._end_change(failed=True)
                raise
            self._binding.weights_changed(list(self._records.values()))
            for unit in self._residency.units:
                self._residency.refresh(unit)
            self._end_change(failed=False)

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Forgets all gradients."""

    @abstractmethod
    def _begin_change(self) -> None:
        """The state is in between from now on."""

    @abstractmethod
    def _end_change(self, *, failed: bool) -> None:
        """The state is whole again, or never will be."""

    def _restore(self, prepared: _Prepared, peers: Peers) -> None:
        """Everything but weights, moments and buffers."""
        where, manifest = prepared.where, prepared.source.manifest
        if prepared.scheduler is not None:
            try:
                self.lr_scheduler.load_state_dict(prepared.scheduler)
            except Exception as error:
                raise DamagedCheckpointError(f"{where}: the scheduler does not take its state: {error}") from error
        for group, options in prepared.groups:
            if options is not None:
                group.update(options)
        restore_scaler(self, manifest, where)
        self._step_count, self._skipped_steps = prepared.counts
        if self._step_count:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        rng = prepared.source.rng(peers.rank) if manifest.world == peers.world else None
        if rng is not None:
            restore_rng(rng, where)
        else:
            # Random states of another number of ranks: a new, defined beginning.
            seed_everything(self.config.seed, sum(prepared.counts), peers.rank)


class _Prepared:
    """A checkpoint that has been read as far as it can be checked before anything changes."""

    source: Source
    match: Match
    where: str
    groups: list[tuple[dict[str, Any], Any]]
    scheduler: dict[str, Any] | None
    counts: list[int]
    data: Any
    extra: Any
    buffers: list[tuple[str, Tensor]]
    own_buffers: dict[str, Tensor]

    def take(
        self, engine: CheckpointAccess, source: Source, options: Mapping[str, str], peers: Peers, *, weights_only: bool
    ) -> None:
        """Raises CheckpointError for what does not fit the engine or is damaged."""
        self.source = source
        self.match = engine._match(source)
        self.buffers = engine._match_buffers(source, self.match)
        check_match(self.match, source.directory, options)
        manifest, where = source.manifest, str(source.directory / MANIFEST)
        self.where = where
        self.groups = [] if weights_only else restore_groups(engine, manifest, where)
        self.scheduler = None if weights_only else restore_scheduler(engine, manifest, where)
        self.counts = [integer(manifest.engine.get(k), f"{where}: engine.{k}") for k in ("steps", "skipped_steps")]
        values = source.own(peers.rank) if manifest.world == peers.world else {}
        self.data = decode_state(values.get("data", manifest.data), f"{where}: data")
        self.extra = decode_state(values.get("extra", manifest.extra), f"{where}: extra")
        self.own_buffers = {}
        for name, encoded in (values.get("buffers") or {}).items():
            value, saved = decode_state(encoded, f"{where}: buffer {name!r:.80}"), manifest.buffers.get(name)
            found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            if saved is None or found != (saved.shape, saved.dtype):
                raise DamagedCheckpointError(f"{where}: buffer {name!r:.80} of rank {peers.rank} is not what it says")
            self.own_buffers[name] = value


def _check_limits(keep: int | None, share: float) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"save_checkpoint: keep = {keep} must be at least 1, or None to keep all")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"save_checkpoint: share = {share} must be above 0 and at most 1")


def _failed(target: Path, error: BaseException) -> CheckpointSaveError:
    if isinstance(error, CheckpointSaveError):
        return error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointSaveError(
        f"{target}: the checkpoint could not be saved: {reason}; what was written of it is removed, older checkpoints "
        f"are as they were ({format_bytes(_free(target))} free there)"
    )


def _free(target: Path) -> int:
    try:
        return free_bytes(target)
    except OSError:
        return 0
