"""Spans and traces: structure and byte counts, on every kind of device; never how long anything takes."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

import offload
from offload.telemetry.trace import (
    COMPUTE,
    DISK_READ,
    DISK_WRITE,
    FROM_DEVICE,
    OPTIMIZER,
    STEP,
    TO_DEVICE,
    TRACKS,
    WAIT,
    Span,
    Spans,
    coincidence,
    read_trace,
)
from swap.store import SwapStore
from swap.transfer import Transfer
from tests.engine.common import config_of, decoder, placed, token_batches


def trained(tmp_path: Path, device: str, tier: str, **sections: object) -> tuple[offload.Engine, dict[str, int]]:
    """Two steps of a small decoder with tracing; the engine is closed, its counters from before that."""
    config = config_of(placed(device, tier), tmp_path, log={"trace": True}, run_dir=str(tmp_path / "run"), **sections)
    engine = offload.initialize(decoder(), config)
    created = engine.spans.totals()
    before = engine.counters()
    for ids in token_batches(2):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    engine.synchronize()
    counters = engine.counters()
    created_bytes = {track: total.nbytes for track, total in created.items()}
    assert created_bytes[DISK_WRITE] == before["nvme_write_bytes"]
    engine.close()
    return engine, counters


@pytest.mark.parametrize(("device", "tier"), [("cpu", "nvme"), ("sim", "nvme"), ("sim", "host"), ("cpu", "host")])
def test_a_run_leaves_a_trace_whose_bytes_are_the_counters(tmp_path: Path, device: str, tier: str) -> None:
    engine, counters = trained(tmp_path, device, tier)
    spans, samples = read_trace(tmp_path / "run" / "trace.json")
    moved = {track: sum(s.nbytes for s in spans if s.track == track) for track in TRACKS}
    assert moved[DISK_READ] == counters["nvme_read_bytes"]
    assert moved[DISK_WRITE] == counters["nvme_write_bytes"]
    assert moved[TO_DEVICE] == counters["h2d_bytes"] and moved[FROM_DEVICE] == counters["d2h_bytes"]
    assert (counters["nvme_read_bytes"] > 0) == (tier == "nvme") and (counters["h2d_bytes"] > 0) == (device == "sim")
    names = {s.name for s in spans if s.track == COMPUTE}
    assert {f"{direction} layers.{i}" for direction in ("forward", "backward") for i in range(3)} <= names
    assert [s.name for s in spans if s.track == STEP] == ["step 1", "step 2"]
    assert any(s.name == "update layers.1" for s in spans if s.track == OPTIMIZER)
    for track in TRACKS:
        ours = [s for s in spans if s.track == track]
        assert all(a.ended_ns <= b.begun_ns + 1 for a, b in itertools.pairwise(ours)), track  # a nanosecond of rounding
        assert all(s.begun_ns <= s.ended_ns for s in ours)
    assert samples and set(samples[0][1]) == {"device", "host", "nvme"} and max(s["host"] for _, s in samples) > 0
    totals = engine.spans.totals()
    assert totals[DISK_READ].nbytes == counters["nvme_read_bytes"]


def test_the_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    trained(tmp_path, "cpu", "nvme")
    content = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert content["otherData"]["spans_not_kept"] == 0 and content["otherData"]["steps"] == 2
    threads = {e["args"]["name"]: e["tid"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert list(threads) == list(TRACKS)
    for event in content["traceEvents"]:
        assert event["ph"] in "MXC" and event["pid"] == 1
        if event["ph"] == "X":
            assert event["tid"] == threads[event["cat"]] and event["dur"] >= 0 and event["ts"] >= 0


def test_without_tracing_nothing_is_recorded(tmp_path: Path) -> None:
    config = config_of(placed("cpu", "nvme"), tmp_path, run_dir=str(tmp_path / "run"))
    with offload.initialize(decoder(), config) as engine:
        ids = token_batches(1)[0]
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        assert engine.spans.spans() == [] and engine.spans.totals()[COMPUTE].spans == 0
        engine.write_trace(tmp_path / "late" / "trace.json")
    assert read_trace(tmp_path / "late" / "trace.json") == ([], [])
    assert not (tmp_path / "run").exists()


def test_spans_show_in_the_profiler(tmp_path: Path) -> None:
    with offload.initialize(decoder(), config_of(placed("cpu", "nvme"), tmp_path)) as engine:
        ids = token_batches(1)[0]
        with profile() as profiler:
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        names = {event.key for event in profiler.key_averages()}
    assert {"offload::forward layers.2", "offload::backward layers.2"} <= names


def test_a_span_inside_another_interrupts_it() -> None:
    spans = Spans(recording=True)
    outer, inner = object(), object()
    spans.begin(COMPUTE, "outer", outer)
    spans.begin(WAIT, "inner", inner)
    time.sleep(0.001)  # long enough to be worth a span
    spans.end(inner)
    spans.end(outer)
    spans.end(outer)  # nothing is open
    found = spans.spans()
    assert [(s.track, s.name) for s in found] == [(COMPUTE, "outer"), (COMPUTE, "outer"), (WAIT, "inner")]
    assert found[0].ended_ns == found[2].begun_ns and found[2].ended_ns == found[1].begun_ns


def test_ending_a_span_ends_those_that_an_error_left_within_it() -> None:
    spans = Spans(recording=True)
    keys = [object() for _ in range(3)]
    for key in keys:
        spans.begin(COMPUTE, f"span {keys.index(key)}", key)
    spans.end(keys[1])
    spans.end(keys[2])
    spans.end(keys[0])
    assert [s.name for s in spans.spans()] == ["span 0", "span 1", "span 2", "span 0"]


def test_paused_threads_do_not_count() -> None:
    spans = Spans(recording=True)
    mine, theirs = object(), object()

    def other() -> None:
        spans.begin(COMPUTE, "theirs", theirs)
        time.sleep(0.001)
        spans.end(theirs)

    spans.begin(COMPUTE, "mine", mine)
    spans.pause()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    spans.resume()
    spans.end(mine)
    assert [s.name for s in spans.spans()] == ["mine", "theirs", "mine"]
    ends = [s.ended_ns for s in spans.spans()]
    assert ends == sorted(ends)


def test_overlapping_requests_share_the_time_of_their_track() -> None:
    spans = Spans(recording=True)
    for label, begun, ended in (("a", 10, 30), ("b", 15, 50), ("c", 60, 70)):
        spans.transferred(Transfer(label, False, 0, 100, begun, ended))
    assert spans.spans() == [
        Span(DISK_READ, "a", 10, 30, 100),
        Span(DISK_READ, "b", 30, 50, 100),
        Span(DISK_READ, "c", 60, 70, 100),
    ]
    assert spans.totals()[DISK_READ] == (50 / 1e9, 300, 3)


def test_coincidence() -> None:
    compute = [Span(COMPUTE, "", 0, 100, 0), Span(COMPUTE, "", 100, 200, 0)]
    disk = [Span(DISK_READ, "", 50, 150, 1), Span(DISK_WRITE, "", 140, 160, 1), Span(DISK_WRITE, "", 300, 400, 1)]
    seconds = coincidence([*compute, *disk], [COMPUTE], [DISK_READ, DISK_WRITE])
    assert seconds == (200 / 1e9, 210 / 1e9, 110 / 1e9)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="no trace of a run"):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize("engine", ["threads", "io_uring", "aiofiles"])
def test_a_store_tells_its_observer_of_every_request(tmp_path: Path, engine: str) -> None:
    seen: list[Transfer] = []
    with SwapStore([tmp_path], engine=engine, block=4096) as store:
        extent = store.allocate(16384, "thing")
        data = torch.arange(16384, dtype=torch.int64).to(torch.uint8)
        store.write(extent, data).wait()
        assert seen == []
        store.observer = seen.append
        store.write(extent, data).wait()
        store.read(extent, data[:10000].clone()).wait()
        store.observer = None
        store.read(extent, data).wait()
    assert {(t.label, t.path) for t in seen} == {("thing", 0)}
    assert sum(t.nbytes for t in seen if t.write) == 16384 and all(t.begun_ns <= t.ended_ns for t in seen)
    assert sum(t.nbytes for t in seen if not t.write) in (10000, 12288)
