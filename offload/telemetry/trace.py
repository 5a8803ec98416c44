"""Spans: what each resource does when, for Perfetto (`trace.json`), for `torch.profiler` and as sums for every step.

A thread is in one span at a time: one that begins inside another interrupts it, so a track never counts a moment twice,
and waiting is not counted as computing. Requests to the disk overlap; each is shown from the end of the one before it
in its direction, if it was submitted earlier, so the spans of a disk track add up to the time in which it had work.

Off, a hook costs a call and two comparisons. On, the latest `MOST_SPANS` spans are kept.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from swap.devices import Event
from swap.transfer import Transfer

STEP, COMPUTE, WAIT, OPTIMIZER = "step", "compute", "wait", "optimizer"
TO_DEVICE, FROM_DEVICE, DISK_READ, DISK_WRITE = "host to device", "device to host", "disk read", "disk write"
TRACKS = (STEP, COMPUTE, WAIT, OPTIMIZER, TO_DEVICE, FROM_DEVICE, DISK_READ, DISK_WRITE)
"""In the order in which they are shown."""

MOST_SPANS = 200_000
_SHORTEST_WAIT = 20_000
"""Nanoseconds below which a wait is not worth a span."""

_BACKGROUND = ("offload-optimizer", "offload-loader", "offload-spill", "offload-checkpoint")
"""How the names of the engine's own threads begin; those of micro-batches compute."""


class Span(NamedTuple):
    """One span; times are `time.perf_counter_ns`."""

    track: str
    name: str
    begun_ns: int
    ended_ns: int
    nbytes: int


class Totals(NamedTuple):
    """Seconds in which a track was busy, bytes and spans on it, so far."""

    seconds: float
    nbytes: int
    spans: int


class _Open:
    """A span that has not ended; `begun` is when the thread last came back to it."""

    __slots__ = ("begun", "key", "name", "range", "track")

    def __init__(self, track: str, name: str, key: object, begun: int) -> None:
        self.track, self.name, self.key, self.begun = track, name, key, begun
        self.range: Any = None


class _Local(threading.local):
    stack: list[_Open] | None = None


class Spans:
    """Collects the spans of one engine. All methods may be called from any thread; none raises.

    `sample`, if set, gives bytes by tier, noted whenever a span on the compute track begins.
    """

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.sample: Callable[[], Mapping[str, int]] | None = None
        self._local = _Local()
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._samples: deque[tuple[int, dict[str, int]]] = deque(maxlen=MOST_SPANS // 10)
        self._totals: dict[str, list[int]] = {track: [0, 0, 0] for track in TRACKS}
        self._latest: dict[str, int] = {}
        self._copies: deque[tuple[str, int, int, Event]] = deque()
        self._began = time.perf_counter_ns()
        self._step_began: int | None = None

    # Spans of threads

    def begin(self, track: str, name: str, key: object) -> None:
        """The current thread begins `name`; `key` tells `end` which span it is."""
        profiled = profiler._is_profiler_enabled
        if not self.recording and not profiled:
            return
        if track == WAIT and threading.current_thread().name.startswith(_BACKGROUND):
            return  # nobody computes there, so nothing is kept from it
        stack = self._local.stack
        if stack is None:
            stack = self._local.stack = []
        now = time.perf_counter_ns()
        if stack:
            self._slice(stack[-1], now)
        span = _Open(track, name, key, now)
        stack.append(span)
        if profiled:
            span.range = profiler.record_function(f"offload::{name}")
            span.range.__enter__()
        if self.recording and track == COMPUTE:
            if self._step_began is None and torch.is_grad_enabled():
                self._step_began = now
            self._sample(now)

    def end(self, key: object) -> None:
        """The current thread has ended the span of `key`, and those within it; nothing if there is none."""
        stack = self._local.stack
        if not stack or all(span.key is not key for span in stack):
            return
        now = time.perf_counter_ns()
        self._slice(stack[-1], now)
        while stack:
            span = stack.pop()
            if span.range is not None:
                span.range.__exit__(None, None, None)
            if span.key is key:
                break
        if stack:
            stack[-1].begun = now

    def replace(self, track: str, name: str, key: object) -> None:
        """`end(key)`, if there is such a span, and `begin`."""
        self.end(key)
        self.begin(track, name, key)

    def pause(self) -> None:
        """The current thread sleeps so that another one may work: what it is in does not go on."""
        stack = self._local.stack
        if stack:
            self._slice(stack[-1], time.perf_counter_ns())

    def resume(self) -> None:
        """The opposite of `pause`."""
        stack = self._local.stack
        if stack:
            stack[-1].begun = time.perf_counter_ns()

    def end_step(self, number: int) -> None:
        """An optimizer step is over; it began with the first computation with gradients since the last one."""
        begun, self._step_began = self._step_began, None
        if self.recording and begun is not None:
            self._add(Span(STEP, f"step {number}", begun, time.perf_counter_ns(), 0))

    def _slice(self, span: _Open, now: int) -> None:
        begun, span.begun = span.begun, now
        if self.recording and (span.track != WAIT or now - begun >= _SHORTEST_WAIT):
            self._add(Span(span.track, span.name, begun, now, 0))

    def _add(self, span: Span) -> None:
        with self._lock:
            self._put(span)

    def _put(self, span: Span) -> None:
        self._spans.append(span)
        totals = self._totals[span.track]
        totals[0] += max(0, span.ended_ns - span.begun_ns)
        totals[1] += span.nbytes
        totals[2] += 1

    def _sample(self, now: int) -> None:
        self.poll()
        if self.sample is not None:
            self._samples.append((now, dict(self.sample())))

    # Transfers

    def transferred(self, transfer: Transfer) -> None:
        """A request to the disk has ended: an observer for the swap store."""
        if not self.recording:
            return
        track = DISK_WRITE if transfer.write else DISK_READ
        with self._lock:
            # Taken anew, so that the ends on a track never go backwards.
            ended = max(transfer.ended_ns, self._latest.get(track, 0))
            begun = max(transfer.begun_ns, self._latest.get(track, 0))
            self._latest[track] = ended
            self._put(Span(track, transfer.label, min(begun, ended), ended, transfer.nbytes))

    def copying(self, track: str, nbytes: int, event: Event) -> None:
        """A copy between host and device was issued.

        Its end is seen when somebody next looks (`poll`), which is at the latest when a unit begins to compute.
        """
        if not self.recording:
            return
        self._copies.append((track, nbytes, time.perf_counter_ns(), event))
        self.poll()

    def poll(self) -> None:
        """Notes which copies have ended."""
        if not self._copies:
            return
        with self._lock:
            now, left = time.perf_counter_ns(), []
            while self._copies:
                track, nbytes, begun, event = self._copies.popleft()
                if not event.done():
                    left.append((track, nbytes, begun, event))
                    continue
                begun = min(now, max(begun, self._latest.get(track, 0)))
                self._latest[track] = now
                self._put(Span(track, track, begun, now, nbytes))
            self._copies.extend(left)

    # What was collected

    def totals(self) -> dict[str, Totals]:
        """By track, since the beginning; what is still open is not counted."""
        self.poll()
        with self._lock:
            return {track: Totals(ns / 1e9, nbytes, count) for track, (ns, nbytes, count) in self._totals.items()}

    def spans(self) -> list[Span]:
        """What is kept, by track and time, without overlap within a track.

        Where two threads were in spans of one track at once, the one that began later has the time from then on.
        """
        self.poll()
        with self._lock:
            kept = list(self._spans)
        order = {track: index for index, track in enumerate(TRACKS)}
        kept.sort(key=lambda span: (order[span.track], span.begun_ns, span.ended_ns))
        found: list[Span] = []
        for span in kept:
            if found and found[-1].track == span.track and found[-1].ended_ns > span.begun_ns:
                found[-1] = found[-1]._replace(ended_ns=span.begun_ns)
            found.append(span)
        return found

    def write(self, path: str | os.PathLike[str], **about: Any) -> None:
        """Writes `trace.json` in Chrome's format, which Perfetto opens; `about` goes into its metadata."""
        spans = self.spans()
        with self._lock:
            samples = list(self._samples)
            lost = sum(count for _, _, count in self._totals.values()) - len(self._spans)
        write_trace(path, spans, samples, began=self._began, about={**about, "spans_not_kept": lost})


def write_trace(
    path: str | os.PathLike[str],
    spans: Iterable[Span],
    samples: Iterable[tuple[int, Mapping[str, int]]],
    *,
    began: int,
    about: Mapping[str, Any],
) -> None:
    """Chrome's JSON: complete events ("X") in microseconds from `began`, a thread per track, counters for memory."""
    threads = {track: index + 1 for index, track in enumerate(TRACKS)}
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "offload"}}]
    for track, number in threads.items():
        for kind, value in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": number})):
            events.append({"name": kind, "ph": "M", "pid": 1, "tid": number, "args": value})
    for span in spans:
        event = {"name": span.name, "ph": "X", "pid": 1, "tid": threads[span.track], "cat": span.track}
        event |= {"ts": (span.begun_ns - began) / 1000, "dur": (span.ended_ns - span.begun_ns) / 1000}
        if span.nbytes:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    for now, sizes in samples:
        event = {"name": "memory", "ph": "C", "pid": 1, "ts": (now - began) / 1000, "args": dict(sizes)}
        events.append(event)
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}, file)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def read_trace(path: str | os.PathLike[str]) -> tuple[list[Span], list[tuple[int, dict[str, int]]]]:
    """Spans and memory samples of a file that `write_trace` wrote; times in nanoseconds from the run's beginning.

    Raises:
        ValueError: the file is no such trace.
    """
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        spans = [
            Span(
                e["cat"],
                e["name"],
                round(e["ts"] * 1000),
                round((e["ts"] + e["dur"]) * 1000),
                e.get("args", {}).get("bytes", 0),
            )
            for e in events
            if e["ph"] == "X"
        ]
        samples = [(round(e["ts"] * 1000), dict(e["args"])) for e in events if e["ph"] == "C"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no trace of a run: {error}") from error
    return spans, samples


def coincidence(spans: Iterable[Span], one: Iterable[str], other: Iterable[str]) -> tuple[float, float, float]:
    """Seconds in which any track of `one` is busy, any of `other`, and both at once."""
    first, second = (_union([s for s in spans if s.track in set(tracks)]) for tracks in (list(one), list(other)))
    both, index = 0, 0
    for begun, ended in first:
        while index < len(second) and second[index][1] <= begun:
            index += 1
        at = index
        while at < len(second) and second[at][0] < ended:
            both += min(ended, second[at][1]) - max(begun, second[at][0])
            at += 1
    return _length(first) / 1e9, _length(second) / 1e9, both / 1e9


def _union(spans: Iterable[Span]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda s: s.begun_ns):
        if merged and span.begun_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.ended_ns))
        else:
            merged.append((span.begun_ns, span.ended_ns))
    return merged


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(ended - begun for begun, ended in intervals)
