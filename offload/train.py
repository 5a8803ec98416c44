"""The training loop of ``offload train``: model, data, engine, steps, evaluation, and the summary of the run."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

import offload
from offload.checkpoint.errors import CheckpointMismatchError
from offload.checkpoint.places import directory_of
from offload.checkpoint.run import RunCheckpoints
from offload.config import Config, ConfigError
from offload.config.checks import doubts
from offload.data import TextData
from offload.errors import ParallelError
from offload.interruption import Interrupted, Interruption
from offload.models import build_model
from offload.parallel.data import share
from offload.parallel.exits import is_forsaken
from offload.parallel.job import Follower, Job
from offload.parallel.placing import current
from offload.planner.comparison import RunComparison
from offload.recipe import build_lr_scheduler, build_param_groups, describe_groups
from offload.results import StepResult
from offload.telemetry import PhaseTimers, Progress, RunDirectory, format_bytes, peak_rss_bytes

POLL_SECONDS = 1.0
"""How often several ranks ask each other for signals within a step or an evaluation, besides after every step."""
MOVED = ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes")


def train(
    config: Config,
    *,
    run: RunDirectory | Follower,
    progress: Progress,
    interruption: Interruption,
    resume: Path | None = None,
    job: Job | None = None,
) -> dict[str, Any]:
    """Trains as ``config`` says, writes ``run``, and returns the summary that it wrote.

    ``resume``: the checkpoint to continue from. ``job``: the ranks that train together, all of which call this; they
    agree after every step, and about once a second within one, on whether a signal has arrived at any of them. An
    interruption ends the run in an orderly way, by SIGTERM or SIGUSR1 with a checkpoint of the last step boundary, and
    is named in the summary. Any other exception is raised again once the engine is closed and the summary, which names
    it, is written.
    """
    trainer = _Trainer(config, run, progress, interruption, resume, Job(config) if job is None else job)
    try:
        with interruption.raising():
            trainer.run_all()
    except Interrupted as interrupted:
        trainer.interrupted = interrupted.name
        if not trainer.ready:
            trainer.job.failed(interrupted)  # the others are somewhere in their set-up, and would wait for this rank
        if interrupted.saves:
            trainer.save_at_the_end()
    except BaseException as error:
        elsewhere = trainer.job.interrupted_elsewhere() if isinstance(error, ParallelError) else None
        if elsewhere is None:
            trainer.job.failed(error)
            trainer.error = str(error).partition("\n")[0] or type(error).__name__
            raise
        trainer.interrupted = elsewhere
    finally:
        # A run that is over is closed whole, whatever arrives meanwhile.
        try:
            trainer.close()
        finally:
            summary = trainer.summary()
            run.write_summary(summary)
    return summary


class _Trainer:
    """One run: what it needs, what it counted, and the order of its parts."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory | Follower,
        progress: Progress,
        interruption: Interruption,
        resume: Path | None,
        job: Job,
    ) -> None:
        self.config, self.recorder, self.job = config, run, job
        self.progress, self.interruption, self.resume = progress, interruption, resume
        self.checkpoints = RunCheckpoints(config, directory_of(config, run.path), progress.say, progress.warn)
        self.evaluated_at = -1
        self._checks, self._check_every, self._checked_at = 0, 1, time.monotonic()
        self.ready = False  # whether there is something that a checkpoint could save
        self.comparison = RunComparison(config, progress.say)
        self.timers = PhaseTimers()
        self.engine: offload.Engine | None = None
        self.swap_directory: Path | None = None
        self.memory: dict[str, Any] = {}
        self.moved = dict.fromkeys(MOVED, 0)
        self.communicated: dict[str, int] = {}
        self.wear: dict[str, dict[str, int | float | None]] = {}
        self.steps = self.tokens = self.skipped_steps = 0
        self.step_seconds, self.started = 0.0, time.perf_counter()
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        self.interrupted: str | bool = False
        self.error: str | None = None

    def run_all(self) -> None:
        """Sets up, evaluates, trains, evaluates."""
        settings = self.config.train
        try:
            engine = self._set_up()
        except ConfigError:
            raise
        except ValueError as error:
            # Until the first step every wrong value comes from the configuration.
            raise ConfigError(" ".join(str(error).split())) from error
        self.ready = True
        with self.interruption.polling(everything=self.job.world > 1):
            if self._evaluation_due(self.steps) and self.evaluated_at != self.steps:
                self._evaluate(engine)
            for step in range(self.steps, settings.steps):
                self._step(engine, step)
                done = step + 1
                if self._evaluation_due(done):
                    self._evaluate(engine)
                if self.checkpoints.due(done):
                    with self.progress.phase("saving"), self.timers.phase("checkpoint"):
                        last = done == settings.steps
                        self.checkpoints.save(engine, done, self._position(), self._counts(), final=last)
                self._end_together(engine)
        self.checkpoints.settle(engine)

    def _check(self, engine: offload.Engine) -> None:
        """Raises for a signal in the middle of something: `Interrupted`, on all ranks."""
        if self.job.world == 1:
            self.interruption.check()
            return
        self._checks += 1
        if self._checks >= self._check_every:
            self._end_together(engine)

    def _end_together(self, engine: offload.Engine) -> None:
        """Raises `Interrupted` on all ranks if a signal has arrived at any of them."""
        now = time.monotonic()
        seconds = (now - self._checked_at) / max(1, self._checks)
        self._checked_at, self._checks = now, 0
        signum = self.interruption.signum
        if signum is None and is_forsaken():
            self.progress.warn("the launcher is gone: this run ends as by SIGTERM")
            signum = signal.SIGTERM
        said = engine.all_of("agree on signals", (signum, seconds))
        found = [signum for signum, _ in said if signum is not None]
        if found:
            raise Interrupted(found[0])
        # All ranks have to ask at the same places, and short micro-batches should not wait for each other.
        self._check_every = math.ceil(POLL_SECONDS / max(1e-6, *(seconds for _, seconds in said)))

    def _evaluation_due(self, done: int) -> bool:
        """Whether there is an evaluation after `done` steps."""
        settings = self.config.train
        if done in (0, settings.steps):
            return True
        return settings.eval_interval > 0 and done % settings.eval_interval == 0

    def _position(self) -> dict[str, Any]:
        """Where the data stand, and what they are: a batch depends on nothing else."""
        config = self.config
        return {
            "step": self.steps,
            "train_bytes": self.data.train_bytes,
            "context": config.data.context,
            "batch_size": config.train.batch_size,
            "micro_batches": config.train.micro_batches,
            "seed": config.seed,
        }

    def _counts(self) -> dict[str, Any]:
        """What the summary of a resumed run goes on from."""
        return {
            "steps": self.steps,
            "evaluated_at": self.evaluated_at,
            "tokens": self.tokens,
            "skipped_steps": self.skipped_steps,
            "step_seconds": self.step_seconds,
            "losses": self.losses[:1] + self.losses[1:][-1:],
            "eval_losses": self.eval_losses[:1] + self.eval_losses[1:][-1:],
        }

    def _resume(self, engine: offload.Engine, path: Path) -> None:
        with self.progress.phase("loading checkpoint"):
            try:
                report = engine.load_checkpoint(path)
            except CheckpointMismatchError as error:
                # What may be let pass is an argument of load_checkpoint, which the command does not have.
                text = re.sub(r" \((missing|extra|reshaped)='\w+' accepts it\)", "", str(error))
                raise ConfigError(
                    f"--resume: {text}; resume with the model section of the saved run, or start from its "
                    "weights alone (offload convert, then model.weights)"
                ) from error
        self.steps = report.step
        self.checkpoints.resumed(report, self._position())
        if self.steps >= self.config.train.steps:
            self.progress.say(
                f"nothing to do: the saved run has {self.steps} steps, train.steps = {self.config.train.steps}; "
                "raise it to train on"
            )
        counts = report.extra_state
        if isinstance(counts, dict) and counts.get("steps") == report.step:
            self.tokens, self.skipped_steps = int(counts["tokens"]), int(counts["skipped_steps"])
            self.step_seconds, self.evaluated_at = float(counts["step_seconds"]), int(counts["evaluated_at"])
            self.losses, self.eval_losses = list(counts["losses"]), list(counts["eval_losses"])

    def save_at_the_end(self) -> None:
        """The checkpoint of a run that a signal ends; a second signal ends it at once, and leaves none."""
        if self.engine is None or not self.ready or not self.config.checkpoint.on_signal:
            return
        with self.progress.phase("saving"):
            self.checkpoints.save(self.engine, self.steps, self._position(), self._counts(), final=True)
            self.checkpoints.settle(self.engine)

    def _set_up(self) -> offload.Engine:
        config = self.config
        with self.progress.phase("reading text"):
            self.data = TextData(
                config.data.files,
                config.data.context,
                config.train.batch_size,
                config.seed,
                eval_fraction=config.data.eval_fraction,
            )
        share(config.train.batch_size, self.job.rank, self.job.world)  # refused before anything is built
        config = config.model_copy(update={"run_dir": str(self.recorder.path)})
        if config.train.threads != "auto":
            torch.set_num_threads(config.train.threads)
        elif (placing := current()) is not None:
            self.progress.say(f"{self.job.world} ranks; {placing}")
        torch.manual_seed(config.seed)
        if not config.memory.nvme_paths:
            # The run directory is where the user expects this run's files, and on a real disk more often than /tmp.
            self.swap_directory = self.recorder.path / "swap"
            self.swap_directory.mkdir(parents=True, exist_ok=True)
            memory = config.memory.model_copy(update={"nvme_paths": (str(self.swap_directory),)})
            config = config.model_copy(update={"memory": memory})
        if self.job.world == 1 and self.comparison.wanted:  # a plan is that of a single process
            with self.progress.phase("predicting"):
                self.comparison.predict(self.recorder.path / "config.toml", config.memory.nvme_paths)
        with self.progress.phase("building model"):
            with offload.empty_init():
                model = build_model(config.model, context=config.data.context)
            groups = build_param_groups(model, config.optimizer)
        with self.progress.phase("planning and creating state"):
            self.engine = offload.initialize(
                model, config, param_groups=groups, lr_scheduler=self._scheduler_maker(config)
            )
        self.engine.wear()  # what has been written so far is not what a step writes
        self.progress.say(self.engine.describe())
        self.progress.say(describe_groups(groups))
        self.comparison.say_why_not()
        for doubt in doubts(config, ranks=self.job.world, memory=psutil.virtual_memory().total):
            self.progress.warn(doubt)
        if self.resume is not None:
            self._resume(self.engine, self.resume)
        self.recorder.forget_after(self.steps if self.resume is not None else -1)
        self.checkpoints.check_space(self.engine, config.train.steps - self.steps)
        if config.checkpoint.dry_run and self.steps == 0:
            self.checkpoints.dry_run(self.engine, self._position(), self._counts())
        return self.engine

    @staticmethod
    def _scheduler_maker(config: Config) -> Callable[[torch.optim.Optimizer], Any] | None:
        if config.optimizer.scheduler == "none":
            return None
        return lambda optimizer: build_lr_scheduler(optimizer, config.optimizer, steps=config.train.steps)

    def _step(self, engine: offload.Engine, step: int) -> None:
        count = self.config.train.micro_batches
        start = time.perf_counter()
        lr = engine.optimizer.param_groups[0]["lr"]
        place = self.job.rank, self.job.world
        batches = [self.data.train_batch(step, micro_batch, *place) for micro_batch in range(count)]
        tokens = self._rows(count) * self.config.data.context
        waits_for_norm = self.config.optimizer.max_grad_norm is not None or self.config.optimizer.check_finite
        if count > 1 or not waits_for_norm or self.job.world > 1:
            # Only in there are losses averaged over ranks, and may units serve all micro-batches at once, or be updated
            # during backward.
            with self.timers.phase("micro-batches and step"):
                result = engine.train_batch(batches, lambda outputs, batch: self._loss_of(engine, outputs, batch))
            mean_loss = float(result.loss or 0.0)
        else:
            with self.timers.phase("forward"):
                loss = engine(**batches[0]).loss
            with self.timers.phase("backward"):
                engine.backward(loss)
            mean_loss = float(loss.detach())
            del loss
            with self.timers.phase("optimizer"):
                result = engine.step()
        with self.interruption.whole():  # or the counts of a run that a signal ends would not be those of its records
            self._count(engine, result, mean_loss, time.perf_counter() - start, tokens, lr)

    def _count(
        self, engine: offload.Engine, result: StepResult, loss: float, seconds: float, tokens: int, lr: float
    ) -> None:
        """Counts, records and shows a step."""
        self.timers.end_step()
        self.steps += 1
        self.tokens += tokens
        self.step_seconds += seconds
        self.losses.append(loss)
        before, self.moved = self.moved, self._moved(engine)
        moved = {name: self.moved[name] - before[name] for name in MOVED}
        self.comparison.note(seconds, moved, engine)
        worn, self.wear = self.wear, engine.wear(self.config.train.steps)
        if not result.stepped:
            self.skipped_steps += 1
            self.progress.say(f"step {self.steps} skipped: {result.skipped_reason}")
        if self.steps % self.config.log.interval == 0 or self.steps == self.config.train.steps:
            self.recorder.record(
                {
                    "step": self.steps,
                    "loss": self.losses[-1],
                    "lr": lr,
                    "grad_norm": result.grad_norm,
                    "loss_scale": result.loss_scale,
                    "stepped": result.stepped,
                    "skipped_reason": result.skipped_reason,
                    "tokens": self.tokens,
                    "seconds": seconds,
                    **moved,
                    **self._communicated(engine),
                    **self._resources(engine),
                    "nvme_write_bytes_by_path": {
                        path: int(entry["written_bytes"] or 0) - int(worn.get(path, {}).get("written_bytes") or 0)
                        for path, entry in self.wear.items()
                    },
                }
            )
        self.progress.step(
            self.steps,
            loss=self.losses[-1],
            tokens_per_second=tokens / seconds,
            read=self.moved["nvme_read_bytes"],
            written=self.moved["nvme_write_bytes"],
        )

    def _evaluate(self, engine: offload.Engine) -> None:
        count = self.config.train.eval_batches
        if count == 0 or self.config.data.eval_fraction == 0:
            return
        losses = []
        with self.progress.phase("evaluating"), self.timers.phase("evaluation"), _evaluation(engine):
            for batch in self.data.eval_batches(count, self.job.rank, self.job.world):
                self._check(engine)
                losses.append(float(engine(**batch).loss) * len(batch["input_ids"]))
        self.timers.end_step()
        loss = sum(engine.all_of("sum evaluation losses", sum(losses))) / self._rows(count)
        with self.interruption.whole():
            self.eval_losses.append(loss)
            self.evaluated_at = self.steps
            self.recorder.record({"step": self.steps, "eval_loss": loss})
        self.progress.say(f"held-out loss after {self.steps} steps: {self.eval_losses[-1]:.4f}")

    def _rows(self, batches: int) -> int:
        """Windows of that many batches, over all ranks."""
        return batches * self.config.train.batch_size

    def _loss_of(self, engine: offload.Engine, outputs: Any, batch: Any) -> torch.Tensor | tuple[torch.Tensor, int]:
        self._check(engine)  # a step of many micro-batches may be long
        loss: torch.Tensor = outputs.loss
        if self.config.train.batch_size % self.job.world == 0:
            return loss
        # Ranks have different numbers of windows: their means would weigh these differently.
        targets = batch["labels"].numel() - len(batch["labels"])
        return loss * targets, targets

    def _resources(self, engine: offload.Engine) -> dict[str, Any]:
        """Bytes in use by tier, resident memory, and with tracing the seconds in which each resource worked so far."""
        memory = engine.memory()
        in_use = {tier: sum(kinds.values()) for tier, kinds in memory.current.items()}
        found: dict[str, Any] = {"bytes_by_tier": in_use, "rss_bytes": memory.resident}
        if self.config.log.trace:
            found["busy_seconds"] = {track: total.seconds for track, total in engine.spans.totals().items()}
        return found

    def _communicated(self, engine: offload.Engine) -> dict[str, int]:
        """Bytes through collectives since the last record, by category; nothing on a single rank."""
        suffix = "_communicated_bytes"
        now = {name: int(value) for name, value in engine.counters().items() if name.endswith(suffix)}
        before, self.communicated = self.communicated, now
        return {name: value - before.get(name, 0) for name, value in now.items()}

    def _moved(self, engine: offload.Engine) -> dict[str, int]:
        counters = engine.counters()
        return {name: int(counters.get(name, 0)) for name in MOVED}

    def close(self) -> None:
        """Reads the last counters, closes the engine and removes the swap directory that this run made."""
        try:
            if self.engine is not None:
                self.moved = self._moved(self.engine)
                self.wear = self.engine.wear()
                self.memory = self.engine.memory().to_dict()
                self.engine.close()
        finally:
            if self.swap_directory is not None:
                with suppress(OSError):  # not empty, or another rank was here first
                    self.swap_directory.rmdir()

    def summary(self) -> dict[str, Any]:
        """What the run did. ``seconds`` counts training steps; ``total_seconds`` also set-up and evaluation."""
        return {
            "steps": self.steps,
            "ranks": self.job.world,
            "skipped_steps": self.skipped_steps,
            "tokens": self.tokens,
            "seconds": self.step_seconds,
            "total_seconds": time.perf_counter() - self.started,
            "tokens_per_second": self.tokens / self.step_seconds if self.step_seconds else 0.0,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "eval_loss_first": self.eval_losses[0] if self.eval_losses else None,
            "eval_loss": self.eval_losses[-1] if self.eval_losses else None,
            "peak_rss_bytes": peak_rss_bytes(),
            "memory": self.memory,
            **self.moved,
            **self.communicated,
            "wear": self.wear,
            **self.comparison.summary(),
            "step_seconds_median_by_phase": self.timers.medians(),
            "checkpoint": None if self.checkpoints.saved is None else str(self.checkpoints.saved),
            "failed_checkpoints": self.checkpoints.failures,
            "last_checkpoint_failed": self.checkpoints.last_failed,
            "checkpoint_error": self.checkpoints.last_failure,
            "resumed_from": None if self.resume is None else str(self.resume),
            "interrupted": self.interrupted,
            "error": self.error,
        }


@contextmanager
def _evaluation(engine: offload.Engine) -> Iterator[None]:
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train()


def closing_lines(summary: dict[str, Any], directory: Path) -> list[str]:
    """What a person reads at the end of a run."""
    lines = []
    if summary["eval_loss"] is not None and math.isfinite(summary["eval_loss"]):
        first, last = summary["eval_loss_first"], summary["eval_loss"]
        # The same twice is one evaluation, which shows no course.
        lines.append(f"held-out loss {last:.3f}" if first == last else f"held-out loss {first:.3f} -> {last:.3f}")
    if summary["steps"]:
        lines.append(
            f"{summary['steps']} steps, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s "
            f"({summary['tokens_per_second']:,.0f} tokens/s); {summary['skipped_steps']} skipped"
        )
    lines.append(
        f"nvme read {format_bytes(summary['nvme_read_bytes'])}, written {format_bytes(summary['nvme_write_bytes'])}; "
        f"peak resident memory {format_bytes(summary['peak_rss_bytes'])}"
    )
    if summary["interrupted"]:
        lines.append(f"interrupted by {summary['interrupted']} after {summary['steps']} steps")
    if failed := summary["failed_checkpoints"]:
        what = "1 checkpoint" if failed == 1 else f"{failed} checkpoints"
        lines.append(f"{what} could not be saved (the last: {summary['checkpoint_error']})")
    if summary["checkpoint"]:
        more = f"; continue with --resume auto --run-dir {directory}" if summary["interrupted"] else ""
        lines.append(f"checkpoint {summary['checkpoint']}{more}")
    elif summary["steps"] and not failed:
        lines.append("nothing that was trained is kept: checkpoint.interval saves it")
    lines.append(f"run directory {directory}")
    return lines
