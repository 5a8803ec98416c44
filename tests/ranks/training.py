"""The same training on every rank of a pool, and what it is compared with."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn

from offload.cli import main
from tests.engine.common import CLIP, Case, Trace, decoder, running, states_of, token_batches
from tests.ranks.reference import SCALE, Policy, RankReference, digest

STEPS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to train the decoder on several ranks; `shard` None: all ranks divide state."""

    world: int
    shard: int | None = None
    stage: int = 3
    device: str = "cpu"
    parameters: str = "host"
    gradients: str = "host"
    optimizer: str = "host"
    schedule: str = "barrier"
    order: str = "batch_major"
    activations: str = "keep"
    numbers: tuple[str, str] = ("fp32", "fp32")
    reduce: str = "auto"
    accumulate: str = "auto"
    sums: str = "fp32"
    clip: bool = True
    micro: int = 1
    wide: bool = False
    persistent: int = 0
    kept: bool | int = True
    limit: int | str = "auto"
    steps: int = STEPS

    def __str__(self) -> str:
        where = f"{self.parameters[0]}{self.gradients[0]}{self.optimizer[0]}"
        grid = f"{self.world}" if self.shard is None else f"{self.world // self.shard}x{self.shard}"
        return (
            f"{grid}-stage{self.stage}-{self.device}-{where}-{self.schedule}-{self.order}-{self.activations}-"
            f"{'_'.join(self.numbers)}-wire_{self.reduce}-{self.accumulate}-sums_{self.sums}-clip{self.clip:d}-"
            f"{self.micro}x-{'wide' if self.wide else 'small'}-persistent{self.persistent}"
            f"-reshard_{self.kept}-limit_{self.limit}"
        )

    @property
    def each(self) -> bool:
        """Whether every micro-batch is reduced by itself."""
        if self.stage < 2 or self.order == "layer_major" or self.micro == 1:
            return False
        return self.stage == 3 if self.accumulate == "auto" else self.accumulate == "reduced"

    @property
    def policy(self) -> Policy:
        divided = self.stage > 0 and self.shard is not None
        dtype, state_format = self.numbers
        return Policy(
            world=self.world,
            shard=self.shard if divided and self.shard is not None else self.world,
            dtype=dtype,
            state_format="compact" if state_format == "compact" else "fp32",
            reduce=self.reduce,
            accumulate=self.sums,
            each=self.each,
            clip=CLIP if self.clip else None,
        )


def batches_of(world: int, micro: int, step: int) -> list[list[Tensor]]:
    """The micro-batches of one step by rank."""
    everything = token_batches(world * micro, seed=step)
    return [everything[rank * micro : (rank + 1) * micro] for rank in range(world)]


def sections_of(run: Run) -> dict[str, Any]:
    """What `tests.engine.common.running` needs beside a case."""
    parallel: dict[str, Any] = {
        "stage": run.stage,
        "timeout": 120.0,
        "accumulate": run.accumulate,
        "place_ranks": False,
    }
    if run.shard is not None:
        parallel["shard_size"] = run.shard
    if run.stage == 3:
        parallel |= {"reshard_after_forward": run.kept, "limit_gathers": run.limit}
    return {
        "parallel": parallel,
        "placement": {"activations": run.activations},
        "precision": {"reduce_dtype": run.reduce, "accumulate_dtype": run.sums, "initial_loss_scale": SCALE},
        "schedule": {"micro_batch_order": run.order},
        "optimizer": {"check_finite": run.schedule != "eager", "state_format": run.numbers[1]},
        "units": {"persistent_below": run.persistent},
        "max_grad_norm": CLIP if run.clip else None,
    }


def case_of(run: Run) -> Case:
    return Case(
        device=run.device,
        parameters=run.parameters,
        gradients=run.gradients,
        optimizer=run.optimizer,
        dtype=run.numbers[0],
        wide=run.wide,
        schedule=run.schedule,
        delay=1e-4,
        staging=1 << 20,
    )


def own_folder(folder: Path) -> Path:
    """This rank's folder for swap files."""
    own = folder / f"rank{dist.get_rank()}"
    own.mkdir(parents=True, exist_ok=True)
    return own


def trained(run: Run, folder: Path, **options: Any) -> Trace:
    """On a rank: the training with the engine; `options` of `tests.engine.common.running`."""
    torch.manual_seed(0)
    own, rank = own_folder(folder), dist.get_rank()
    losses: list[float] = []
    norms: list[float | None] = []
    with running(decoder(wide=run.wide), case_of(run), own, **sections_of(run), **options) as engine:
        for step in range(run.steps):
            mine = batches_of(run.world, run.micro, step)[rank]
            result = engine.train_batch([{"input_ids": ids, "labels": ids} for ids in mine])
            assert result.loss is not None
            losses.append(result.loss)
            norms.append(result.grad_norm)
            assert engine.resident_units() == []
        trace = Trace(losses=losses, norms=norms, states=states_of(engine))
    assert list(own.iterdir()) == []
    return trace


def trained_digest(run: Run, folder: Path) -> tuple[str, Trace | None]:
    """On a rank: a hash of the training's trace, and on rank 0 the trace."""
    trace = trained(run, folder)
    return digest(trace), trace if dist.get_rank() == 0 else None


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids).loss
    return loss


@lru_cache(maxsize=256)
def expected(policy: Policy, micro: int, wide: bool, check_finite: bool, steps: int = STEPS) -> Trace:
    """The same training with the reference."""
    twin = RankReference(decoder(wide=wide), policy, loss=loss_of, check_finite=check_finite)
    losses, norms = [], []
    for step in range(steps):
        loss, norm = twin.train(batches_of(policy.world, micro, step))
        losses.append(loss)
        norms.append(norm)
    return Trace(losses=losses, norms=norms, states=twin.states())


def expected_of(run: Run) -> Trace:
    return expected(run.policy, run.micro, run.wide, run.schedule != "eager", run.steps)


def runs_of(rows: Sequence[dict[str, Any]], **fixed: Any) -> list[Run]:
    """Rows of a product or a pairwise cover as runs; combinations that are refused are changed to their neighbours."""
    found: dict[str, Run] = {}
    for row in rows:
        values = {**row, **fixed}
        schedule, clip = values.pop("step")
        if schedule == "eager" and values["numbers"][0] == "fp16":
            values["numbers"] = ("bf16", "fp32")
        if values["numbers"][0] == "fp16" and values["reduce"] == "fp16":
            values["reduce"] = "bf16"  # would overflow: sums of scaled gradients
        run = Run(schedule=schedule, clip=clip, **values)
        found[str(run)] = run
    return list(found.values())


def trained_by_command(run: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """(exit status, what was said) of `offload train`, in this process, which is one of several ranks."""
    result = CliRunner().invoke(main, ["train", *arguments, "--run-dir", str(run)])
    trace = "" if result.exc_info is None else "".join(traceback.format_exception(*result.exc_info))
    return result.exit_code, result.output + trace
