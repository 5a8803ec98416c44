"""What the CUDA device asks of the runtime, against a stand-in runtime that logs; no GPU needed.

The same device on a real GPU is covered by ``test_devices.py`` under the ``gpu`` marker.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import swap.devices.cuda as cuda_module
from swap.devices import CopyError, CudaDevice, DeviceOutOfMemory


class Runtime:
    """Streams and events that only log. Work on a stream 'ends' when ``finish`` is called."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.finished = True
        self.fault: RuntimeError | None = None
        self.names = iter(["h2d", "d2h"])
        self.compute = Stream(self, "compute")
        self.active = self.compute
        self.refuse_register_after: int | None = None
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, begin: int, nbytes: int, flags: int) -> int:
        if self.refuse_register_after is not None and len(self.registered) >= self.refuse_register_after:
            return 2
        self.registered[begin] = nbytes
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        return 0 if self.registered.pop(begin, None) is not None else 1


class Stream:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_event(self, event: Event) -> None:
        self.runtime.log.append((self.name, "waits for", event.stream))


class Event:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.stream = runtime, ""

    def record(self, stream: Stream) -> None:
        self.stream = stream.name

    def query(self) -> bool:
        if self.runtime.fault is not None:
            raise self.runtime.fault
        return self.runtime.finished


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    stand_in = Runtime()

    def enter(stream: Stream) -> AbstractContextManager[None]:
        stand_in.log.append((stream.name, "copies"))
        return nullcontext()

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "Stream": lambda device: Stream(stand_in, next(stand_in.names)),
        "Event": lambda: Event(stand_in),
        "current_stream": lambda device: stand_in.compute,
        "stream": enter,
        "device": lambda device: nullcontext(),
        "cudart": lambda: stand_in,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return stand_in


@pytest.fixture
def device(runtime: Runtime) -> Iterator[CudaDevice]:
    created = CudaDevice(capacity=1 << 20)
    created.torch_device = torch.device("cpu")
    yield created
    runtime.finished, runtime.fault = True, None
    created.close()


def test_copies_are_ordered_against_compute_and_given_events(device: CudaDevice, runtime: Runtime) -> None:
    buffer, host = device.empty(64), torch.arange(64, dtype=torch.uint8)
    arrived = device.copy_in(buffer, host)
    assert runtime.log == [("h2d", "waits for", "compute"), ("h2d", "copies")]
    runtime.log.clear()
    device.copy_out(torch.empty_like(host), buffer, after=[arrived])
    assert runtime.log == [("d2h", "waits for", "compute"), ("d2h", "waits for", "h2d"), ("d2h", "copies")]
    runtime.log.clear()
    device.compute_wait(arrived)
    device.compute_wait(device.record())
    assert runtime.log == [("compute", "waits for", "h2d"), ("compute", "waits for", "compute")]
    assert torch.equal(buffer, host)


def test_both_ends_live_until_the_copy_has_ended(device: CudaDevice, runtime: Runtime) -> None:
    runtime.finished = False
    buffer = device.empty(4096)
    event = device.copy_in(buffer, torch.zeros(4096, dtype=torch.uint8))
    del buffer
    gc.collect()
    assert not event.done() and device.used == 4096
    with pytest.raises(TimeoutError):
        event.wait(timeout=0.01)
    runtime.finished = True
    event.wait()
    assert device.used == 0 and device.peak == 4096


def test_faults_of_the_device_reach_the_waiter(device: CudaDevice, runtime: Runtime) -> None:
    event = device.record()
    runtime.fault = RuntimeError("an illegal memory access was encountered")
    assert event.done()
    with pytest.raises(CopyError, match="illegal memory access"):
        event.wait()


def test_out_of_memory_of_the_gpu_is_ours(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    held = device.empty(1000)
    message = r"head weights needs 500 bytes, 1,000 bytes are in use.*Tried to"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(DeviceOutOfMemory, match=message) as error:
            device.empty(500, what="head weights")
    assert (error.value.requested, error.value.used) == (500, 1000)
    assert device.used == held.numel()


def test_registration_is_chunked_and_undone(
    device: CudaDevice, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "REGISTER_CHUNK", 1000)
    device.host_register(5000, 2500)
    assert runtime.registered == {5000: 1000, 6000: 1000, 7000: 500}
    device.host_unregister(5000)
    assert runtime.registered == {}
    with pytest.raises(ValueError, match="not registered"):
        device.host_unregister(5000)


def test_refused_registration_leaves_nothing(
    device: CudaDevice, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "REGISTER_CHUNK", 1000)
    runtime.refuse_register_after = 2
    with pytest.raises(RuntimeError, match=r"500 bytes \(error 2\) after 2,000 of 2,500; .*ulimit -l"):
        device.host_register(5000, 2500)
    assert runtime.registered == {}


def test_close_unregisters(device: CudaDevice, runtime: Runtime) -> None:
    device.host_register(5000, 2500)
    device.close()
    assert runtime.registered == {}
    with pytest.raises(RuntimeError, match="closed"):
        device.copy_in(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(("offset", "count"), [(0, 600), (100, 100), (150, 300), (250, 10), (400, 200)])
def test_a_copy_never_crosses_two_registered_chunks(
    device: CudaDevice, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, offset: int, count: int
) -> None:
    monkeypatch.setattr(cuda_module, "REGISTER_CHUNK", 1024)  # 256 floats
    host = torch.arange(600, dtype=torch.float32)
    device.host_register(host.data_ptr(), host.nbytes)
    source = host[offset : offset + count]
    pieces = list(device._pieces(source))
    assert [low for low, _ in pieces][1:] == [high for _, high in pieces][:-1]
    assert (pieces[0][0], pieces[-1][1]) == (0, count)
    for low, high in pieces:
        assert (offset + low) // 256 == (offset + high - 1) // 256
    buffer = device.empty(count * 4).view(torch.float32)
    device.copy_in(buffer, source).wait()
    assert torch.equal(buffer, source)


def test_bad_arguments(runtime: Runtime) -> None:
    with pytest.raises(ValueError, match="no CUDA device 3; torch finds 1"):
        CudaDevice(index=3)
    with pytest.raises(ValueError, match="capacity"):
        CudaDevice(capacity=-5)
