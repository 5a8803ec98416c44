"""What ends a program on one rank is told to the others, wherever it was raised: in a user's own loop too.

While ranks are watched, `sys.excepthook` reports an exception that nobody has caught before it does what it did. So the
others, which find this rank gone, can say why; a launcher then ends what is left.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from offload.parallel.ranks import Ranks

_AGENT = "TORCHELASTIC_RUN_ID"
"""Set by `torchrun`, whose agent is the parent of its ranks."""
_parent = os.getppid()

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_lock = threading.Lock()
_watched: list[Ranks] = []
_before: _Hook | None = None


def watch(ranks: Ranks) -> Callable[[], None]:
    """From now on an exception that ends this program is reported through `ranks`. Returns what ends that."""
    global _before
    with _lock:
        if not _watched:
            _before, sys.excepthook = sys.excepthook, _report
        _watched.append(ranks)
    return lambda: _forget(ranks)


def _forget(ranks: Ranks) -> None:
    global _before
    with _lock:
        if ranks not in _watched:
            return
        _watched.remove(ranks)
        # A hook that somebody has put on top of ours goes on calling it; it then only passes on.
        if not _watched and sys.excepthook is _report and _before is not None:
            sys.excepthook, _before = _before, None


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for ranks in list(_watched):
        ranks.report_failure(error)
    (_before or sys.__excepthook__)(kind, error, trace)


def is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether an exception that leaves a `with` block says that something went wrong."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def is_forsaken() -> bool:
    """Whether `torchrun` has ended without a signal to its ranks, as when it is killed: nobody ends them any more but
    they themselves. Of other launchers nothing is known; a shell that started ranks may well be gone.
    """
    return _AGENT in os.environ and os.getppid() != _parent
