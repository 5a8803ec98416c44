"""One save of all ranks: begun together, written by each, and made complete by rank 0 once all have written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offload.checkpoint.content import describe, make_manifest
from offload.checkpoint.directory import (
    clean_up,
    commit,
    fsync_directory,
    locked,
    remove_leftovers,
    retain,
    saved_file,
)
from offload.checkpoint.errors import CheckpointError, CheckpointSaveError
from offload.checkpoint.format import rank_file, step_name
from offload.checkpoint.manifest import SavedFile, read_manifest
from offload.checkpoint.peers import Peers, await_marker, fingerprints, own_values, put_marker
from offload.checkpoint.places import free_bytes, is_complete
from offload.checkpoint.save import RankFile, RankSaver, unhook
from swap.checksums import crc32
from swap.errors import BudgetError
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess

log = logging.getLogger("offload")

WRITTEN = "written"
"""Key of the fingerprint of what the program has written to weights, states and gradients since the last step."""

_Begun = tuple[tuple[int, bool], dict[str, int], tuple[int, str] | None]
"""What a rank says as a save begins: the step, and whether it waits for the save; fingerprints; of rank 0 the
generation of the files, and its marker.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `save_checkpoint` was asked for; see there."""

    root: Path
    step: int
    data: Any
    extra: Any
    keep: int | None
    keep_every: int | None
    wait: bool
    share: float

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"save_checkpoint: keep = {self.keep} must be at least 1, or None to keep all")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"save_checkpoint: share = {self.share} must be above 0 and at most 1")

    @property
    def target(self) -> Path:
        """The directory of the checkpoint."""
        return self.root / step_name(self.step)


class Save:
    """A save: `open`, then once what `finisher` returns; `give_up` after an exception at any point.

    `beside`: it is written beside training; decided by `open`, since there must be room for that on every rank.
    """

    def __init__(self, engine: CheckpointAccess, wanted: Wanted) -> None:
        self._engine, self._wanted = engine, wanted
        self._peers = Peers(engine._cluster)
        self._states = list(engine._states.values())
        self._described: dict[str, Any] = {}
        self.saver: RankSaver | None = None
        self.nbytes = 0
        self.beside = not wanted.wait
        self.error: BaseException | None = None

    def open(self, stack: contextlib.ExitStack) -> None:
        """Pins the moment: locks the directory (undone by `stack`), describes the state, opens this rank's file."""
        wanted, peers = self._wanted, self._peers
        buffers = self._engine._boundary.buffers()
        begun = peers.together("begin a checkpoint", lambda: self._begin(buffers, stack))
        peers.same("(the number of steps that are to be saved, whether to wait)", [said for said, _, _ in begun])
        written = [marks.get(WRITTEN, 0) for _, marks, _ in begun]
        peers.same("what was written to weights, states or gradients since the last step (CRC-32)", written)
        opened = peers.together("open the files of a checkpoint", lambda: self._open_file(buffers, begun))
        self.nbytes = sum(nbytes for _, nbytes in opened)
        if any(tight for tight, _ in opened) and self.beside:
            log.warning(
                "%s: memory.host has room for one buffer only, so the checkpoint is saved between steps", wanted.target
            )
            self.beside = False

    def _begin(self, buffers: dict[str, Tensor], stack: contextlib.ExitStack) -> _Begun:
        engine, wanted, peers = self._engine, self._wanted, self._peers
        engine._check_at_rest("save_checkpoint")
        self._described = describe(
            engine, buffers, step=wanted.step, world=peers.world, data=wanted.data, extra=wanted.extra
        )
        engine._settle_states()
        marks = fingerprints(wanted.data, wanted.extra, buffers) if peers.world > 1 else {}
        if engine._cluster is not None:
            marks[WRITTEN] = crc32(repr(sorted(engine._cluster.reduction.written.items())).encode())
        directory = open_directory(wanted.root, wanted.target, peers.world, stack) if peers.rank == 0 else None
        return (wanted.step, wanted.wait), marks, directory

    def _open_file(self, buffers: dict[str, Tensor], begun: list[_Begun]) -> tuple[bool, int]:
        """Starts this rank's saver; whether it has too little room to run beside training, and bytes of its file."""
        engine, wanted, rank, world = self._engine, self._wanted, self._peers.rank, self._peers.world
        first = begun[0]
        assert first[2] is not None  # rank 0 opened the directory
        generation, marker = first[2]
        if marker:
            await_marker(wanted.target, marker, rank)
        own = own_values(begun[rank][1], first[1], wanted.data, wanted.extra, buffers) if rank else None
        self.saver = RankSaver(
            engine._memory,
            engine._states,
            RankFile(directory=wanted.target, name=rank_file(rank, world, generation), rank=rank, world=world),
            buffers={} if rank else buffers,
            rng=engine._boundary.rng(),
            share=1.0 if wanted.wait else wanted.share,
            own=own,
        )
        self.saver.start()
        return self.saver.tight, self.saver.nbytes

    def hook(self) -> None:
        """From now on nothing changes before its old bytes are saved."""
        assert self.saver is not None
        for key, state in self._engine._states.items():
            state.before_rewrite = self.saver.hook(key)

    def unhook(self) -> None:
        """Nothing looks at the states any more. Idempotent."""
        unhook(self._states)

    def finisher(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        """Writes this rank's file and, once all ranks have, makes the checkpoint complete; takes over, and closes, what
        `stack` holds.
        """
        assert self.saver is not None
        saver, wanted, cluster = self.saver, self._wanted, self._engine._cluster
        aside = cluster.channel("save") if cluster is not None and self.beside else None
        peers, held = Peers(cluster, aside), stack.pop_all()

        def write() -> SavedFile:
            saver.run()
            return saved_file(wanted.target, saver.target.name, peers.rank, peers.world)

        def finish() -> None:
            with held:
                files = peers.together("write a checkpoint", write)

                def complete() -> None:
                    if peers.rank == 0:
                        commit(wanted.target, make_manifest(self._described, tuple(files)))
                        retain(wanted.root, wanted.keep, wanted.keep_every)

                peers.together("complete a checkpoint", complete)

        return finish

    def give_up(self) -> None:
        """Removes what this rank has written. Idempotent."""
        self.unhook()
        if self.saver is not None:
            self.saver.discard()

    def cancel(self) -> None:
        """Ends a save beside training soon."""
        assert self.saver is not None
        self.saver.cancel(CheckpointSaveError("interrupted"))

    def failed(self, error: BaseException) -> CheckpointSaveError:
        """What a user is told of `error`."""
        if isinstance(error, CheckpointSaveError):
            return error
        target = self._wanted.target
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return CheckpointSaveError(
            f"{target}: the checkpoint could not be saved: {reason}; what was written of it is removed, older "
            f"checkpoints are as they were ({format_bytes(_free(target))} free there)"
        )


def is_fault(error: BaseException) -> bool:
    """Whether the disk or a budget failed a save, and not what the caller gave."""
    return isinstance(error, (OSError, BudgetError)) and not isinstance(error, CheckpointError)


def open_directory(root: Path, target: Path, world: int, stack: contextlib.ExitStack) -> tuple[int, str]:
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


def _free(target: Path) -> int:
    try:
        return free_bytes(target)
    except OSError:
        return 0
