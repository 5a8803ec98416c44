"""`save_checkpoint` and `load_checkpoint` of an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from offload.checkpoint.boundary import Boundary, persistent_buffers
from offload.checkpoint.errors import CheckpointError, CheckpointMismatchError
from offload.checkpoint.export import Exported, Tensors, carried_from, export_tensors, fits, model_configs
from offload.checkpoint.load import LoadReport
from offload.checkpoint.loading import Load
from offload.checkpoint.places import free_bytes
from offload.checkpoint.regions import make_regions
from offload.checkpoint.saving import Save, Wanted, is_fault
from offload.checkpoint.streams import export_together
from offload.inspection import StateAccess
from offload.scaler import LossScaler

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


@dataclass(frozen=True, slots=True)
class _Running:
    """A save beside training, and the thread that does it."""

    save: Save
    thread: threading.Thread


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
        wanted = Wanted(
            root=Path(directory),
            step=self._step_count + self._skipped_steps,
            data=data,
            extra=extra,
            keep=keep,
            keep_every=keep_every,
            wait=wait,
            share=share,
        )
        began = time.perf_counter()
        self._end_save(report=False)
        save = Save(self, wanted)
        try:
            with self._lock, contextlib.ExitStack() as stack:
                save.open(stack)
                finish = save.finisher(stack)
                if save.beside:
                    self._beside(save, finish)
                else:
                    finish()
        except BaseException as error:
            save.give_up()
            if is_fault(error):
                raise save.failed(error) from error
            raise
        return SavedCheckpoint(
            path=wanted.target,
            step=wanted.step,
            nbytes=save.nbytes,
            seconds=time.perf_counter() - began,
            complete=not save.beside,
        )

    def _check_at_rest(self, action: str) -> None:
        """Refuses within `train_batch` under the eager schedule: some parameters are a step ahead of the others."""
        if self._updated_early:
            raise CheckpointError(
                f"{action} within train_batch under the eager schedule, where some parameters are updated already and "
                "others are not: call it between two calls of train_batch"
            )

    def _beside(self, save: Save, finish: Callable[[], None]) -> None:
        def run() -> None:
            try:
                finish()
            except BaseException as error:
                save.error = error
                save.give_up()
                log.error("%s", save.failed(error))
            finally:
                save.unhook()

        save.hook()
        thread = threading.Thread(target=run, name="offload-checkpoint", daemon=True)
        self._saving = _Running(save, thread)
        thread.start()

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
            running.save.cancel()
            running.thread.join()
            self._saving = None
            raise
        self._saving = None
        if report and running.save.error is not None:
            raise running.save.failed(running.save.error) from running.save.error

    def _before_edit(self) -> None:
        self._end_save(report=False)  # an edit in place would reach weights that are not saved yet

    def _settle_states(self) -> None:
        """Everything that steps have decided on, and what was written in place, is at rest in the planes."""
        self._residency.see_writes(self._residency.units)
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
        load = Load(self, {"missing": missing, "extra": extra, "reshaped": reshaped}, weights_only=weights_only)
        with contextlib.ExitStack() as stack:
            load.prepare(path, stack)
            with self._replacing_everything():
                load.take_over()
                if self._cluster is not None:
                    self._cluster.updated({unit for unit, _ in self._states})
                    self._settle_states()
        self._boundary.mark()
        return load.report()

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
                    configs=model_configs(self.module, [t.dtype for t in tensors]),
                )

            return export_together(self, dtype, write)

    def _checkpoint_memory(self, nbytes: int) -> Tensor:
        return self._memory.host(nbytes, torch.uint8, "checkpoint", "a buffer of the checkpoint reader")

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
