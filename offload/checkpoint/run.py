"""The checkpoints of a run of the command line: when they are written, where they lie, what a resumed run continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.checkpoint.directory import remove_checkpoint
from offload.checkpoint.errors import (
    CheckpointError,
    CheckpointSaveError,
    DamagedCheckpointError,
)
from offload.checkpoint.load import LoadReport
from offload.checkpoint.peers import Peers
from offload.checkpoint.places import complete_checkpoints, free_bytes
from offload.checkpoint.reader import Source
from offload.config import Config, ConfigError
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.engine import Engine

COMPARED = ("seed", "data", "model", "precision", "optimizer", "train")
_OWN = ("optimizer.state_format", "train.steps", "train.eval_interval", "train.eval_batches", "train.threads")


class RunCheckpoints:
    """Saves at intervals and at the end; a save that fails is said and training goes on."""

    def __init__(
        self, config: Config, directory: Path, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self.settings, self.config, self.directory, self._say, self._warn = (
            config.checkpoint,
            config,
            directory,
            say,
            warn,
        )
        self.saved: Path | None = None
        self.failures = 0
        self.last_failure: str | None = None
        self.last_failed = False
        self._saved_step: int | None = None

    def check_space(self, engine: Engine, steps_left: int) -> None:
        """Refuses, with both figures, a run whose checkpoints cannot fit the disk.

        Raises:
            ConfigError: too little is free for the checkpoints that will be kept and the one being written.
        """
        one = engine.checkpoint_bytes()
        free = free_bytes(self.directory)
        if self.settings.interval is None:
            if self.settings.on_signal and free < one:
                self._warn(
                    f"{self.directory}: {format_bytes(free)} free, less than the {format_bytes(one)} of a checkpoint: "
                    "nothing can be saved when a signal ends the run"
                )
            return
        last, interval = self.config.train.steps, self.settings.interval
        saves = max(1, -(-last // interval) - (last - steps_left) // interval)
        have = len(complete_checkpoints(self.directory))
        keep = self.settings.keep
        at_once = saves if keep is None else min(saves, keep + 1 - min(have, keep))
        if free < one * at_once:
            # Of one that is kept the new one is written beside the old.
            advice = (
                "set checkpoint.keep" if keep is None else "lower checkpoint.keep" if keep > 1 else "free some space"
            )
            need = f"{at_once} checkpoints of {format_bytes(one)} need {format_bytes(one * at_once)}"
            if at_once == 1:
                advice, need = "free some space", f"a checkpoint needs {format_bytes(one)}"
            raise ConfigError(
                f"checkpoint.directory = {str(self.directory)!r}: {format_bytes(free)} free, but {need}; {advice}, or "
                "choose another directory"
            )

    def dry_run(self, engine: Engine, position: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint before the first step and reads every byte of it back, each rank its own. What fails is
        raised, on all ranks, and leaves no checkpoint.
        """
        saved = self._save(engine, position, extra, wait=True)
        peers = Peers(engine._cluster)

        def verify() -> int:
            with Source(saved) as source:
                return source.verify(rank=peers.rank)

        try:
            nbytes = sum(peers.together("verify the first checkpoint", verify))
        except DamagedCheckpointError as error:
            if peers.rank == 0:
                remove_checkpoint(saved)
            raise CheckpointSaveError(f"checkpoint.dry_run: not what was written comes back: {error}") from error
        self._say(f"checkpoint.dry_run: {saved} written and verified, {format_bytes(nbytes)}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` steps: at each interval and after the last step."""
        interval = self.settings.interval
        return interval is not None and (step % interval == 0 or step == self.config.train.steps)

    def save(
        self, engine: Engine, step: int, position: Mapping[str, Any], extra: Mapping[str, Any], *, final: bool = False
    ) -> bool:
        """Saves unless this step is saved already; a failure is said. Whether there is a checkpoint of this step."""
        if self._saved_step == step:
            return True
        try:
            path = self._save(engine, position, extra, wait=final or not self.settings.background)
        except (CheckpointSaveError, CheckpointError) as error:
            self._failed(error)
            return False
        self._saved_step, self.saved, self.last_failed = step, path, False
        return True

    def settle(self, engine: Engine) -> None:
        """Waits for a save beside training; a failure is said."""
        try:
            engine.wait_checkpoint()
        except CheckpointSaveError as error:
            self.saved = self._saved_step = None
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_failure, self.last_failed = " ".join(str(error).split()), True
        self._warn(self.last_failure)

    def _save(self, engine: Engine, position: Mapping[str, Any], extra: Mapping[str, Any], *, wait: bool) -> Path:
        self.settle(engine)
        saved = engine.save_checkpoint(
            self.directory,
            data=dict(position),
            extra=dict(extra),
            keep=self.settings.keep,
            keep_every=self.settings.keep_every,
            wait=wait,
            share=1.0 if wait else self.settings.bandwidth_share,
        )
        return saved.path

    def resumed(self, report: LoadReport, position: Mapping[str, Any]) -> None:
        """Says where the run continues, and what is not as it was."""
        self._saved_step = report.step if report.path.parent == self.directory else None
        self.saved = report.path
        self._say(f"resumed from {report.path} after {report.step} steps")
        if report.lossy:
            self._warn(f"{len(report.lossy)} parameters lost bits: the state format is coarser than the saved one")
        saved = report.data if isinstance(report.data, dict) else {}
        for key, value in position.items():
            if key != "step" and key in saved and saved[key] != value:
                self._warn(f"data.{key} is {value}, the saved run had {saved[key]}: other batches will follow")
        with Source(report.path) as source:
            before = source.manifest.config
        changed = sorted(_changes(before, self.config.to_dict()))
        if changed:
            self._warn(
                f"the configuration differs from the saved run's in {', '.join(changed)}; learning rates, "
                "other hyperparameters and the schedule continue as saved"
            )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys of `COMPARED` sections whose values differ."""
    found = []
    for section in COMPARED:
        old, new = before.get(section), now.get(section)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            if old != new:
                found.append(section)
            continue
        for key in {*old, *new}:
            name = f"{section}.{key}"
            if name not in _OWN and old.get(key) != new.get(key):
                found.append(name)
    return found
