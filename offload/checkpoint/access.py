"""`save_checkpoint` and `load_checkpoint` of an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
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
    commit,
    find_checkpoint,
    free_bytes,
    fsync_directory,
    is_complete,
    locked,
    remove_checkpoint,
    remove_leftovers,
    retain,
    saved_files,
)
from offload.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DamagedCheckpointError,
)
from offload.checkpoint.export import Exported, carried_from, export_tensors, fits, model_config
from offload.checkpoint.format import MANIFEST, decode_state, integer, rank_file, step_name
from offload.checkpoint.load import Loader, LoadReport, Match, check_match, match_parameters
from offload.checkpoint.manifest import read_manifest
from offload.checkpoint.reader import Source
from offload.checkpoint.regions import make_regions
from offload.checkpoint.save import RankFile, RankSaver, unhook
from offload.checkpoint.streams import engine_tensors
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
        stack = contextlib.ExitStack()
        target = root / step_name(step)
        try:
            with self._lock, stack:
                self._settle_states()
                buffers = self._boundary.buffers()
                described = describe(self, buffers, step=step, world=1, data=data, extra=extra)
                generation = self._open_directory(root, target, stack)
                saver = RankSaver(
                    self._memory,
                    self._states,
                    RankFile(directory=target, name=rank_file(0, 1, generation), rank=0, world=1),
                    buffers=buffers,
                    rng=self._boundary.rng(),
                    share=1.0 if wait else share,
                )
                if saver.tight and not wait:
                    log.warning(
                        "%s: memory.host has room for one buffer only, so the checkpoint is saved between steps", target
                    )
                    wait = True
                saver.start()
                if not wait:
                    for key, state in self._states.items():
                        state.before_rewrite = saver.hook(key)
                held = stack.pop_all()

                def finish() -> None:
                    with held:
                        saver.run()
                        manifest = make_manifest(described, saved_files(target, [saver.target.name]))
                        commit(target, manifest)
                        retain(root, keep, keep_every)

                if wait:
                    finish()
                else:
                    self._beside(saver, target, finish)
        except BaseException as error:
            unhook(list(self._states.values()))
            if isinstance(error, (OSError, BudgetError)) and not isinstance(error, CheckpointError):
                raise _failed(target, error) from error
            raise
        seconds = time.perf_counter() - began
        return SavedCheckpoint(path=target, step=step, nbytes=saver.nbytes, seconds=seconds, complete=wait)

    def _open_directory(self, root: Path, target: Path, stack: contextlib.ExitStack) -> int:
        """Makes and locks the directory; returns the generation of the new files in it."""
        root.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(root))
        stack.callback(_clean_up, target)  # while the directory is still locked
        remove_leftovers(root)
        target.mkdir(exist_ok=True)
        fsync_directory(root)
        if not is_complete(target):
            return 0
        names = {file.name for file in read_manifest(target).files}
        generation = 1
        while rank_file(0, 1, generation) in names:
            generation += 1
        return generation

    def _beside(self, saver: RankSaver, target: Path, finish: Any) -> None:
        states = list(self._states.values())

        def run() -> None:
            try:
                finish()
            except BaseException as error:
                running.error = error
                log.error("%s", _failed(target, error))
            finally:
                unhook(states)

        running = _Running(saver, threading.Thread(target=run, name="offload-checkpoint", daemon=True))
        self._saving = running
        running.thread.start()

    def checkpoint_bytes(self) -> int:
        """Bytes of the tensor files of a checkpoint of this engine."""
        tensors = sum(region.nbytes for region in make_regions(self._states, 0, 1))
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
        directory = find_checkpoint(path)
        options = {"missing": missing, "extra": extra, "reshaped": reshaped}
        with Source(directory, allocate=self._checkpoint_memory) as source:
            match = self._match(source)
            buffers = self._match_buffers(source, match)
            check_match(match, directory, options)
            manifest, where = source.manifest, str(directory / MANIFEST)
            groups = [] if weights_only else restore_groups(self, manifest, where)
            scheduler = None if weights_only else restore_scheduler(self, manifest, where)
            counts = [integer(manifest.engine.get(k), f"{where}: engine.{k}") for k in ("steps", "skipped_steps")]
            data = decode_state(manifest.data, f"{where}: data")
            extra_state = decode_state(manifest.extra, f"{where}: extra")
            loader = Loader(source, match.saved, self._step_queue, self._checkpoint_memory, weights_only=weights_only)
            with self._replacing_everything():
                loader.load_all(self._states)
                for name, tensor in buffers:
                    tensor.copy_(source.read_buffer(name))
                for own, name in match.saved.items():
                    if own in self._steps:
                        self._steps[own] = 0 if weights_only else manifest.parameters[name].steps
                if not weights_only:
                    self._restore(source, groups, scheduler, counts, where)
            converted, lossy = loader.converted, loader.lossy
            del loader  # and its buffers
        self._boundary.mark()
        return LoadReport(
            path=directory,
            step=manifest.step,
            missing=tuple(match.missing),
            extra=tuple(match.extra),
            reshaped=tuple(match.reshaped),
            converted=tuple(sorted(converted)),
            lossy=tuple(sorted(lossy)),
            data=data,
            extra_state=extra_state,
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
            tensors = engine_tensors(self, dtype)
            fits(tensors, Path(directory), free_bytes(Path(directory)))
            return export_tensors(
                tensors,
                directory,
                max_shard_size=max_shard_size,
                carried=carried_from(carry),
                config=model_config(self.module, [t.dtype for t in tensors]),
            )

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

    def _restore(self, source: Source, groups: Any, scheduler: Any, counts: list[int], where: str) -> None:
        """Everything but weights, moments and buffers."""
        if scheduler is not None:
            try:
                self.lr_scheduler.load_state_dict(scheduler)
            except Exception as error:
                raise DamagedCheckpointError(f"{where}: the scheduler does not take its state: {error}") from error
        for group, options in groups:
            if options is not None:
                group.update(options)
        restore_scaler(self, source.manifest, where)
        self._step_count, self._skipped_steps = counts
        if self._step_count:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        rng = source.rng(0) if source.manifest.world == 1 else None
        if rng is not None:
            restore_rng(rng, where)
        else:
            # Random states of another number of ranks: a new, defined beginning.
            seed_everything(self.config.seed, sum(counts), 0)


def _clean_up(target: Path) -> None:
    """Removes what a failed save left."""
    with contextlib.suppress(OSError):
        if target.is_dir() and not is_complete(target):
            remove_checkpoint(target)


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
