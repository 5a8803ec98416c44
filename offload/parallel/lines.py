"""The TCP connections of a process group, and how to end them.

A message that waits for a rank which does not come can be waited for only: gloo has no call that ends it before the
group's timeout. A thread that is in such a wait when the interpreter ends brings the process down with it, since it may
not return to Python any more. A connection that is shut down ends the wait with an error, as a peer's death does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.parallel.meeting import Meeting

Address = tuple[str, int]


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket that this process has open now: what is looked at cannot become another one."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found


def _address(name: Any) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def listening() -> set[Address]:
    """The addresses on which this process accepts TCP connections."""
    found = set()
    for one in _sockets():
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.add(_address(one.getsockname()))
    return found


def connected_to(port: int) -> set[tuple[Address, Address]]:
    """(own, other) addresses of the connections to a port."""
    found = set()
    for one in _sockets():
        with contextlib.suppress(OSError):  # not connected
            ends = _address(one.getsockname()), _address(one.getpeername())
            if ends[1][1] == port:
                found.add(ends)
    return found


class Lines:
    """Connections that are known by their ends: those accepted at one of `own`, those made to one of `others`, and
    `pairs` of (own, other).
    """

    def __init__(
        self,
        *,
        own: Iterable[Address] = (),
        others: Iterable[Address] = (),
        pairs: Iterable[tuple[Address, Address]] = (),
    ) -> None:
        self._own, self._others, self._pairs = set(own), set(others), set(pairs)

    @classmethod
    def of_group(cls, before: set[Address], rank: int, meeting: Meeting) -> Lines:
        """Those of a group that was made since the process was `listening()` as `before`; all ranks come here, and tell
        each other where they listen.
        """
        own = listening() - before
        others: set[Address] = set()
        for peer, said in enumerate(meeting.exchange("listens", json.dumps(sorted(own)))):
            if peer != rank:
                others.update(_address(address) for address in json.loads(said))
        return cls(own=own, others=others)

    def count(self) -> int:
        """How many there are now."""
        return sum(1 for _ in self._found())

    def cut(self) -> None:
        """Shuts them down: what waits for them ends with an error, here and at the other end. Idempotent."""
        for one in self._found():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _found(self) -> Iterator[socket.socket]:
        for one in _sockets():
            try:
                here, there = _address(one.getsockname()), _address(one.getpeername())
            except OSError:
                continue
            if here in self._own or there in self._others or (here, there) in self._pairs:
                yield one
