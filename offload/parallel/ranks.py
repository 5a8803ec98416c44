"""This process among the ranks of a job: a grid of replicas times shards over `torch.distributed`.

Ranks of a shard group are neighbours, so that with one group a node its traffic stays on the node. Data goes from rank
to rank in point-to-point messages of the gloo backend (or NCCL's collectives on CUDA), so groups are lists of ranks.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # ahead of any group: its functions' defaults would keep that one for ever
from torch.distributed.rendezvous import rendezvous

from offload.errors import ParallelError
from offload.parallel.counters import Counters
from offload.parallel.lines import Address, Lines, listening
from offload.parallel.meeting import AbsentError, Meeting, answers, await_server
from offload.parallel.reach import Reach

_PREFIX = "offload"
_FAILURE = "failure"
_LOST = "lost"
_CLOSED = "closed"
_REACH = 5.0  # seconds in which the store has to answer


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else default


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def grid(world: int, shard_size: int | None, replicate_size: int | None) -> tuple[int, int]:
    """(ranks that divide state among them, groups of them).

    Raises:
        ValueError: the sizes do not make up the number of ranks.
    """
    if shard_size is None:
        shard_size = world if replicate_size is None else world // max(replicate_size, 1)
    if replicate_size is None:
        replicate_size = world // max(shard_size, 1)
    if shard_size < 1 or replicate_size < 1 or shard_size * replicate_size != world:
        raise ValueError(
            f"parallel.shard_size = {shard_size} times parallel.replicate_size = {replicate_size} must be the number "
            f"of ranks, which is {world}"
        )
    return shard_size, replicate_size


class Ranks:
    """The place of this process; `close()` when done.

    `rank` = `replicate_rank` x `shard_size` + `shard_rank`. `local_rank` and `local_world` count processes of this job
    on this machine. `on_device`: whether data goes from device to device (NCCL), not through host memory. `close` calls
    what is in `on_close`.

    A process group that `open` has made ends with the last of the `Ranks` that use it. What ranks publish is seen by
    the same `Ranks` of the others only, the first, second, ... that each has opened: nothing of an engine that is
    closed is held against a later one.
    """

    _open: ClassVar[weakref.WeakSet[Ranks]] = weakref.WeakSet()
    _inits: ClassVar[int] = 0
    _served: ClassVar[Any] = None

    def __init__(
        self,
        *,
        shard_size: int | None,
        replicate_size: int | None,
        timeout: float,
        device_kind: str,
        owned: bool,
        before: set[Address] | None = None,
    ) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.local_world = _number(os.environ, "LOCAL_WORLD_SIZE", 1)
        self.local_rank = _number(os.environ, "LOCAL_RANK", 0)
        self.timeout, self._owned = timeout, owned
        self.shard_size, self.replicate_size = grid(self.world, shard_size, replicate_size)
        self.replicate_rank, self.shard_rank = divmod(self.rank, self.shard_size)
        self.counters = Counters()
        self.come_to: dict[str, int] = {}
        """Operations that were submitted, by channel of which all ranks take part in all."""
        self.on_close: list[Callable[[], None]] = []
        self.closed = False
        self.on_device = device_kind == "cuda" and dist.get_backend() == "nccl"
        first = self.replicate_rank * self.shard_size
        self._members: dict[str, list[int]] = {
            "world": list(range(self.world)),
            "shard": list(range(first, first + self.shard_size)),
            "replicate": list(range(self.shard_rank, self.world, self.shard_size)),
        }
        self._groups: dict[str, Any] = {}
        common = dist.distributed_c10d.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        own = dist.distributed_c10d.PrefixStore(str(common.add(f"opened/{self.rank}", 1)), common)
        self._reach = Reach(own, _REACH)
        self._said_closed = False
        self.meeting = Meeting(self._reach, self.rank, self.world, timeout, self.first_failure)
        self.meeting.exchange("come")  # or making a group would wait for those that do not
        before = listening() if before is None else before
        self._messages: Any = self._host_group(timeout)
        self._lines = Lines.of_group(before, self.rank, self.meeting)
        if self.on_device:
            self._device_groups()
        self._open.add(self)

    @classmethod
    def open(
        cls, *, shard_size: int | None, replicate_size: int | None, timeout: float, device_kind: str
    ) -> Ranks | None:
        """The ranks of the process group that is there, or that the launcher's environment asks for; None for a single
        process.

        Raises:
            ValueError: sizes of groups that do not make up the number of ranks.
            ParallelError: some ranks do not come.
        """
        try:
            return cls._open_all(shard_size, replicate_size, timeout, device_kind)
        except AbsentError as error:
            raise ParallelError(
                f"{error} to offload.initialize within parallel.timeout = {timeout:g} s, and no rank has said why"
            ) from error
        except RuntimeError as error:
            if isinstance(error, ParallelError):
                raise
            raise ParallelError(
                f"not all ranks came to offload.initialize within parallel.timeout = {timeout:g} s, or they cannot "
                f"reach each other: {' '.join(str(error).split())[:300]}"
            ) from error

    @classmethod
    def _open_all(
        cls, shard_size: int | None, replicate_size: int | None, timeout: float, device_kind: str
    ) -> Ranks | None:
        owned, before = False, None
        if not (dist.is_available() and dist.is_initialized()):
            world = _number(os.environ, "WORLD_SIZE", 1)
            if world < 2:
                return None
            grid(world, shard_size, replicate_size)  # refused before anybody is waited for
            local = _number(os.environ, "LOCAL_RANK", 0)
            if device_kind == "cuda":
                torch.cuda.set_device(local)
            backend = "cpu:gloo,cuda:nccl" if device_kind == "cuda" else "gloo"
            before = cls._init(backend, timedelta(seconds=timeout))
            owned = True
        elif dist.get_world_size() < 2:
            return None
        try:
            return cls(
                shard_size=shard_size,
                replicate_size=replicate_size,
                timeout=timeout,
                device_kind=device_kind,
                owned=owned,
                before=before,
            )
        except BaseException:
            if owned:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            raise

    @classmethod
    def _init(cls, backend: str, timeout: timedelta) -> set[Address]:
        """Makes the default process group from the launcher's environment. Returns where this process listened before.

        Groups made one after the other need keys of their own in the store that they have in common: addresses that the
        last one has left there are those of connections that are closed.
        """
        serves = os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not serves:
            await_server(timeout.total_seconds())
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        if serves:
            cls._served = store  # no client of the launcher's but the server, which others use for as long as they run
        cls._inits += 1
        keys = dist.distributed_c10d.PrefixStore(f"{_PREFIX}/group{cls._inits}", store)
        reach = Reach(keys, _REACH)
        try:
            Meeting(reach, rank, world, timeout.total_seconds(), lambda: reach.look_up(_FAILURE)).exchange("come")
        finally:
            reach.close()
        before = listening()
        dist.init_process_group(backend, store=keys, rank=rank, world_size=world, timeout=timeout)
        return before

    @classmethod
    def announce(cls, error: BaseException) -> None:
        """Tells ranks that wait for this one to open its `Ranks` that it does not, and why. It may try again: all that
        have failed alike then meet as they would have now.
        """
        said = f"rank {_number(os.environ, 'RANK', 0)}: {_in_one_line(error)}"
        if dist.is_available() and dist.is_initialized():
            common = dist.distributed_c10d.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
            said = f"rank {dist.get_rank()}: {_in_one_line(error)}"
            keys = dist.distributed_c10d.PrefixStore(str(common.add(f"opened/{dist.get_rank()}", 1)), common)
        else:
            found = cls._served
            if found is None:
                if not answers():
                    return
                found = next(rendezvous("env://", timeout=timedelta(seconds=_REACH)))[0]
            cls._inits += 1
            keys = dist.distributed_c10d.PrefixStore(f"{_PREFIX}/group{cls._inits}", found)
        reach = Reach(keys, _REACH)
        try:
            reach.call(lambda store: store.compare_set(_FAILURE, "", said))
        finally:
            reach.close()

    def _host_group(self, timeout: float) -> Any:
        """The group whose messages carry host tensors."""
        if self._owned and "gloo" in str(dist.get_backend_config()):
            return dist.group.WORLD
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def _device_groups(self) -> None:
        size = self.shard_size
        layout = {
            "world": [list(range(self.world))],
            "shard": [list(range(i, i + size)) for i in range(0, self.world, size)],
            "replicate": [list(range(i, self.world, size)) for i in range(size)],
        }
        for name, groups in layout.items():
            self._make_device_groups(name, groups)

    def _make_device_groups(self, name: str, groups: list[list[int]]) -> None:
        for members in groups:  # every rank takes part in making every group
            made = dist.new_group(members, backend="nccl", timeout=timedelta(seconds=self.timeout))
            if self.rank in members:
                self._groups[name] = made

    def divide_shards(self, name: str, size: int) -> None:
        """Makes the group `name`: `size` neighbours of a shard group, whose ranks they divide. On all ranks."""
        groups = [list(range(i, i + size)) for i in range(0, self.world, size)]
        self._members[name] = groups[self.rank // size]
        if self.on_device:
            self._make_device_groups(name, groups)

    @property
    def messages(self) -> Any:
        """The group whose messages carry host tensors.

        Raises:
            ParallelError: these ranks are closed.
        """
        if self._messages is None:
            raise ParallelError("the engine is closed")
        return self._messages

    def members(self, group: str) -> list[int]:
        """Ranks of this rank's group `shard`, `replicate` or `world`, ascending."""
        return self._members[group]

    def device_group(self, group: str) -> Any:
        """The NCCL group of that name."""
        return self._groups[group]

    # What ranks tell each other outside of collectives

    @property
    def store(self) -> Any:
        """The key-value store of these `Ranks`, whose calls may wait for long; None once closed."""
        return self._reach.store

    def publish(self, key: str, text: str) -> None:
        """Makes `text` readable to all ranks; silently nothing if the store is gone."""
        self._reach.call(lambda store: store.set(key, text))

    def look_up(self, key: str) -> str | None:
        """What was published under `key`, if anything was and the store can be reached."""
        return self._reach.look_up(key)

    def report_failure(self, error: BaseException) -> None:
        """Tells the others that this rank fails, unless another one has failed before."""
        if self.closed or isinstance(error, ParallelError) or self.first_failure() is not None:
            return
        said = f"rank {self.rank}: {_in_one_line(error)}"
        self._reach.call(lambda store: store.compare_set(_FAILURE, "", said))  # of several at once, one is the first

    def first_failure(self) -> str | None:
        """What the rank that failed first has said, here or through other `Ranks` that this process has open."""
        for ranks in [self, *self._open]:
            if (said := ranks.look_up(_FAILURE)) is not None or ranks._reach.lost:
                return said  # who cannot be reached once is not waited for again
        return None

    def abandon(self, error: BaseException) -> None:
        """Closes because of `error`, which the others are told."""
        self.report_failure(error)
        self.close()

    def say_closed(self) -> None:
        """Tells the others that this rank takes part in nothing more. Idempotent."""
        if not (self._said_closed or self.closed):
            self._said_closed = True
            self.publish(f"{_CLOSED}/{self.rank}", "1")

    def is_closed(self, rank: int) -> bool:
        """Whether a rank has said so."""
        return self.look_up(f"{_CLOSED}/{rank}") is not None

    def report_loss(self, rank: int) -> int:
        """Tells the others that `rank` does not answer. The first one that was missed: who misses it may end too."""
        said = self._reach.call(lambda store: int(store.compare_set(_LOST, "", str(rank))))
        return rank if said is None else said

    def cut(self) -> None:
        """Ends all messages that wait for other ranks, with an error, here and there."""
        self._lines.cut()

    def close(self) -> None:
        """Ends what `open` began. Idempotent; does not wait for other ranks."""
        if self.closed:
            return
        self.closed = True
        while self.on_close:
            self.on_close.pop()()
        self._reach.close()
        self._open.discard(self)
        try:
            self._leave()
        finally:
            self._messages = None  # a group lives, with its threads and connections, as long as anything refers to it
            self._groups.clear()

    def _leave(self) -> None:
        if not dist.is_initialized():
            return
        heir = next(iter(self._open), None)
        if self._owned and heir is None:
            own = [dist.group.WORLD]
        else:
            own = [group for group in (self._messages, *self._groups.values()) if group is not dist.group.WORLD]
            if heir is not None:
                heir._owned = heir._owned or self._owned
        for group in own:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
