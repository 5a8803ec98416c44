"""What changes for an engine that trains together with others, one a rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offload.batches import BatchTraining
from offload.errors import ParallelError
from offload.parallel.alike import check_alike, counted, group_values, settings_of
from offload.parallel.exits import watch
from offload.parallel.job import launched_ranks
from offload.parallel.kept import after_forward
from offload.parallel.placing import place
from offload.parallel.ranks import Ranks, grid
from offload.parallel.replicas import compare, hash_weights
from offload.parameters import ParameterRecord
from offload.schedule.micro_batches import MicroBatches
from offload.tiers import Tier

if TYPE_CHECKING:
    from offload.build import Blueprint
    from offload.config import Config
    from offload.config.schema import ParallelConfig
    from offload.optimizer import EngineOptimizer
    from offload.parallel.cluster import Cluster
    from offload.schedule.choice import Schedule

T = TypeVar("T")


def open_ranks(config: Config) -> Ranks | None:
    """This process among the ranks that the launcher started, or that `torch.distributed` knows of; None if alone.

    Raises:
        ValueError: sizes of groups that do not make up the number of ranks.
    """
    with announced():
        shard_size, replicate_size = _sizes(config.parallel)
        check_settings(config.parallel, shard_size, replicate_size)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks.open(
        shard_size=shard_size,
        replicate_size=replicate_size,
        timeout=config.parallel.timeout,
        device_kind=device,
    )
    if ranks is not None:
        ranks.on_close.append(watch(ranks))
        if config.parallel.place_ranks:
            ranks.on_close.append(place(ranks.local_rank, ranks.local_world))
    return ranks


def _sizes(parallel: ParallelConfig) -> tuple[int | None, int | None]:
    """`shard_size` and `replicate_size` as far as they are set."""
    shard_size = None if parallel.shard_size == "auto" else parallel.shard_size
    if shard_size is None and parallel.replicate_size == "auto" and parallel.within_machine:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        shard_size = int(local) if local.isdigit() else None
    return shard_size, None if parallel.replicate_size == "auto" else parallel.replicate_size


@contextmanager
def announced() -> Iterator[None]:
    """Around what comes before ranks meet: an exception is told to those that wait for this one."""
    try:
        yield
    except Exception as error:
        there = dist.is_available() and dist.is_initialized()
        if (dist.get_world_size() if there else launched_ranks()) > 1 and not isinstance(error, ParallelError):
            with suppress(Exception):
                Ranks.announce(error)
        raise


def check_settings(parallel: ParallelConfig, shard_size: int | None, replicate_size: int | None) -> None:
    """Refuses sizes that do not suit the number of ranks, before any of them is waited for.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """
    there = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if there else launched_ranks()
    if world > 1:
        shard_size, _ = grid(world, shard_size, replicate_size)
        after_forward(parallel.reshard_after_forward, shard_size)


class Together(BatchTraining):
    """The part of an engine that reduces gradients over ranks and reads what is divided among them."""

    config: Config
    optimizer: EngineOptimizer
    lr_scheduler: Any
    _blueprint: Blueprint
    _schedule: Schedule

    def _join(self, blueprint: Blueprint) -> Cluster | None:
        """Opens this engine's channels to the others, if there are any."""
        if blueprint.ranks is None or blueprint.wire is None:
            return None
        from offload.parallel.cluster import Cluster

        cluster = Cluster(
            blueprint.ranks,
            self._memory,
            self._residency,
            self._states,
            blueprint.specs,
            division=blueprint.division,
            wire=blueprint.wire,
            kept=blueprint.kept,
        )
        cluster.reduction.settle_local = self._gradient_queue.drain
        cluster.reduction.step = lambda: self._step_count + self._skipped_steps
        try:
            own = settings_of(self.config, blueprint, self.optimizer, self.lr_scheduler)
            said = cluster.all_of("compare settings and first values", (own, blueprint.hashes))
            check_alike([settings for settings, _ in said], "ranks are not set up alike")
            compare([hashes for _, hashes in said], [blueprint.ranks.members("world")], "at the start")
            if cluster.divides_weights:
                leases = blueprint.plan.planned[str(Tier.DEVICE)].get("leases", 0)
                room = cluster.agree_on_least("agree on room for gathered weights", leases)
                limit = self.config.parallel.limit_gathers
                self._residency.prefetch_limit = room
                cluster.gathering.in_flight.limit = room if limit == "auto" else limit
                self._residency.gather = cluster.gathering
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _prefetch_depth(self) -> int | None:
        """Units loaded ahead; None for as many as measured times ask for, which differ between ranks."""
        depth = self.config.schedule.prefetch_units
        if depth != "auto":
            return depth
        return self._blueprint.prefetch if self._residency.gather is not None else None

    @property
    def ranks(self) -> Ranks | None:
        """This process's place among the ranks; None on a single one."""
        return self._blueprint.ranks

    def all_of(self, what: str, value: T) -> list[T]:
        """`value` of every rank, by rank; picklable and small. Every rank has to come here, in the same order with
        other exchanges; `what` names the exchange in errors. On a single rank `[value]`.
        """
        return [value] if self._cluster is None else self._cluster.all_of(what, value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within add to this rank's own gradients; they are reduced with those of the next backward outside
        of it, or by `step()`. In stages 2 and 3 every other backward is reduced by itself. Nothing on a single rank.
        """
        if self._cluster is None:
            yield
            return
        reduction = self._cluster.reduction
        before, reduction.syncing = reduction.syncing, False
        try:
            yield
        finally:
            reduction.syncing = before

    def _reduce(self, *, on_all_ranks: bool = False) -> None:
        """Every rank gets the mean over ranks of the gradients that it updates."""
        if self._cluster is None:
            return
        self._gradient_queue.drain()
        self._cluster.reduction.finish(on_all_ranks=on_all_ranks)
        self._cluster.reduction.across_replicas()

    def _holds_gradients(self) -> bool:
        return super()._holds_gradients() if self._cluster is None else self._cluster.reduction.held()

    def _note_step(self, grad_scale: float) -> None:
        """Takes note of what a step is made with: the other ranks must do the same."""
        if self._cluster is None:
            return
        values: dict[str, object] = {"its number": self._step_count, "the factor of gradients": grad_scale}
        # A gradient that a rank does not have counts as zero, so one that trains less than others would not be seen.
        frozen = sorted(name for name, record in self._trainable.items() if not record.parameter.requires_grad)
        values["what was frozen"] = f"{counted(frozen)} ({', '.join(frozen[:3])})" if frozen else "nothing"
        for index, group in enumerate(self.optimizer.param_groups):
            values |= group_values(index, group)
        self._cluster.reduction.last_step = values

    def _communicated(self) -> dict[str, int]:
        """Bytes through collectives so far, for `counters()`."""
        return {} if self._cluster is None else self._cluster.bytes_moved()

    def verify_replicas(self) -> None:
        """Compares the weights that several ranks keep: all of them in stages 0 to 2, else shards with their replicas.
        A step does so every `parallel.verify_every` steps.

        Raises:
            ParallelError: they differ; names the unit.
        """
        if self._cluster is None:
            return
        ranks, units = self._cluster.ranks, self._residency.units
        hashes: dict[str, int] = {}
        for (index, flat), state in sorted(self._states.items()):
            if not (state.division.divides_weights(state.flat) and ranks.replicate_size == 1):
                shard = f" (shard {ranks.shard_rank})" if state.division.divides_weights(state.flat) else ""
                hashes[f"{units[index].name}, {state.flat.dtype} flat {flat}{shard}"] = hash_weights(
                    state, self._step_queue
                )
        found = self._cluster.all_of("compare replicas", hashes)
        everybody = [{k: v for k, v in of_rank.items() if "(shard" not in k} for of_rank in found]
        shards = [{k: v for k, v in of_rank.items() if "(shard" in k} for of_rank in found]
        when = f"after step {self._step_count}"
        compare(everybody, [ranks.members("world")], when)
        columns = [list(range(i, ranks.world, ranks.shard_size)) for i in range(ranks.shard_size)]
        compare(shards, columns, when)

    def _verify_now_and_then(self) -> None:
        every = self.config.parallel.verify_every
        if self._cluster is not None and every and self._step_count % every == 0:
            self.verify_replicas()

    # Micro-batches

    def _check_alike(self, count: int) -> None:
        if self._cluster is None:
            return
        counts = self._cluster.all_of("compare the numbers of micro-batches", count)
        if len(set(counts)) > 1:
            raise ValueError(
                f"train_batch: {counts} micro-batches on ranks 0 to {len(counts) - 1}; all ranks need the same number "
                "(give those that have less data smaller micro-batches, and count target tokens)"
            )

    def _micro_batch_begins(self, k: int, count: int) -> None:
        if self._cluster is not None and not self._cluster.reduction.holding and self._sums_locally:
            self._cluster.reduction.syncing = k == count - 1

    @property
    def _sums_locally(self) -> bool:
        """Whether the micro-batches of a batch-major step are summed on each rank and reduced once."""
        wanted, stage = self.config.parallel.accumulate, self._blueprint.division.stage
        # Stages 0 and 1 keep whole sums anyway, so each has one reduction a step, under eager as elsewhere.
        return stage < 2 or (stage < 3 if wanted == "auto" else wanted == "local")

    @contextmanager
    def _as_one(self, *, layer_major: bool) -> Iterator[None]:
        if self._cluster is None:
            yield
            return
        reduction = self._cluster.reduction
        before, reduction.holding = reduction.syncing, layer_major
        try:
            yield
            if layer_major:
                reduction.holding = False
                reduction.backward_ended()
        finally:
            reduction.holding, reduction.syncing = False, before

    def _known_divisor(self, work: MicroBatches) -> float | None:
        tokens = work.tokens()
        if tokens is None or self._cluster is None:
            return tokens
        return self._over_ranks(work, 0.0)[1]

    def _over_ranks(self, work: MicroBatches, loss: float) -> tuple[float, float]:
        if self._cluster is None:
            return super()._over_ranks(work, loss)
        world = self._cluster.ranks.world
        mine = (*work.sums(), loss, work.counted) if work.counted else (0.0, 0, loss, False)
        sums = self._cluster.all_of("sum the losses and target tokens", mine)
        counted = [rank for rank, (*_, of_rank) in enumerate(sums) if of_rank]
        if counted and len(counted) < world:
            raise ValueError(
                f"train_batch: loss_fn gave token counts on ranks {', '.join(map(str, counted))} of {world} only; all "
                "ranks need them, or none"
            )
        tokens = sum(count for _, count, *_ in sums)
        if not tokens:
            return sum(of_rank for _, _, of_rank, _ in sums) / world, 1.0
        # The reduced gradients are divided by the number of ranks already.
        return sum(total for total, *_ in sums) / tokens, tokens / world

    # Reading what is divided

    def _whole_weight(self, record: ParameterRecord, out: Tensor) -> None:
        if self._cluster is not None:
            self._cluster.assemble(out, record, states=False)

    def _whole_state(self, record: ParameterRecord, out: Tensor) -> None:
        if self._cluster is not None:
            self._cluster.assemble(out, record, states=True)

    def _read_gradient(self, record: ParameterRecord) -> Tensor | None:
        """The accumulated gradient as a new 1-D CPU tensor in the accumulation dtype, or None; as it rests."""
        if self._cluster is None:
            return super()._read_gradient(record)
        self._reduce()
        if record.name not in self._cluster.reduction.present():
            return None
        gradients = self._gradients(record)
        out = torch.zeros(math.prod(record.slot.shape), dtype=self._blueprint.accumulate)
        part = gradients.part(record.name)
        if part is not None and part.numel:
            out[part.start : part.start + part.numel] = gradients.read(record.name, self._gradient_queue)
        self._cluster.assemble(out, record, states=True)
        return out
