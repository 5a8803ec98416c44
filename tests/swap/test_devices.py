"""The device protocol, on every implementation: cpu, sim, and cuda under its marker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from swap.devices import Device, DeviceOutOfMemory, create_device

PAGE = 4096


@pytest.fixture(params=["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with create_device(request.param, capacity=1 << 20, seed=3) as created:
        yield created


def test_create_device_rejects_unknown_kinds_and_absent_hardware() -> None:
    with pytest.raises(ValueError, match="auto, cuda, cpu, sim, got 'tpu'"):
        create_device("tpu")
    with pytest.raises(ValueError, match="capacity"):
        create_device("cpu", capacity=-1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            create_device("cuda")
        with create_device("auto") as chosen:
            assert chosen.kind == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_round_trip_is_exact(device: Device, dtype: torch.dtype) -> None:
    source = torch.randint(0, 200, (33, 7)).to(dtype)
    buffer = device.empty(source.nbytes, what="weights").view(dtype).view(33, 7)
    result = torch.empty_like(source)
    arrived = device.copy_in(buffer, source)
    device.compute_wait(arrived)
    doubled = buffer + buffer
    out = device.copy_out(result, doubled)
    out.wait()
    assert out.done()
    assert torch.equal(result, source + source)
    device.synchronize()


def test_chain_of_copies_is_ordered_by_after(device: Device) -> None:
    first, second = torch.full((1000,), 1.0), torch.full((1000,), 2.0)
    buffer = device.empty(4000).view(torch.float32)
    results = [torch.empty(1000), torch.empty(1000)]
    arrived = device.copy_in(buffer, first)
    left = device.copy_out(results[0], buffer, after=[arrived])
    again = device.copy_in(buffer, second, after=[left])
    last = device.copy_out(results[1], buffer, after=[again])
    last.wait()
    assert torch.equal(results[0], first)
    assert torch.equal(results[1], second)


def test_empty_is_aligned_with_a_storage_of_its_own(device: Device) -> None:
    tensors = [device.empty(nbytes) for nbytes in (1, 300, PAGE, PAGE + 1)]
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors)
    assert [tensor.shape for tensor in tensors] == [(1,), (300,), (PAGE,), (PAGE + 1,)]
    assert all(tensor.dtype == torch.uint8 and tensor.device.type == device.torch_device.type for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    assert device.empty(0).numel() == 0
    with pytest.raises(ValueError, match=r"the size of head .* -1"):
        device.empty(-1, what="head")


def test_zero_element_copies_complete(device: Device) -> None:
    buffer = device.empty(0).view(torch.float32)
    event = device.copy_in(buffer, torch.empty(0))
    device.compute_wait(event)
    device.copy_out(torch.empty(0), buffer, after=[event]).wait()


def test_buffers_made_in_inference_mode_can_train_later(device: Device) -> None:
    with torch.inference_mode():
        buffer = device.empty(16)
    assert not buffer.is_inference()


def test_out_of_memory_names_everything(device: Device) -> None:
    held = device.empty(768 << 10)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.empty(512 << 10, what="layers.3 weights")
    error = caught.value
    assert (error.what, error.requested) == ("layers.3 weights", 512 << 10)
    assert (error.used, error.capacity) == (768 << 10, 1 << 20)
    for part in ("layers.3 weights", "524,288", "786,432", "1,048,576", "memory.device", device.kind):
        assert part in str(error)
    del held
    assert device.empty(1 << 20).numel() == 1 << 20


def test_used_and_peak_follow_the_storage_not_the_name(device: Device) -> None:
    buffer = device.empty(64 << 10)
    view = buffer.view(torch.float32)[10:20]
    view.fill_(5.0)
    assert device.used == device.peak == 64 << 10
    del buffer
    assert device.used == 64 << 10
    assert torch.equal(view.cpu(), torch.full((10,), 5.0))
    del view
    assert device.used == 0
    assert device.peak == 64 << 10


def test_a_view_outlives_the_device(device: Device) -> None:
    view = device.empty(PAGE).view(torch.float32)[:8]
    view.fill_(3.0)
    device.close()
    assert torch.equal(view.cpu(), torch.full((8,), 3.0))


def test_mismatched_copies_are_refused(device: Device) -> None:
    buffer = device.empty(64).view(torch.float32)
    with pytest.raises(ValueError, match="must match"):
        device.copy_in(buffer, torch.zeros(15))
    with pytest.raises(ValueError, match="must match"):
        device.copy_in(buffer, torch.zeros(16, dtype=torch.int32))
    with pytest.raises(ValueError, match="src of a copy must be contiguous"):
        device.copy_in(buffer, torch.zeros(4, 8)[:, ::2])
    with pytest.raises(ValueError, match="dst of a copy must be contiguous"):
        device.copy_out(torch.zeros(4, 8)[:, ::2], buffer)


def test_copies_leave_version_counters_alone(device: Device) -> None:
    buffer = device.empty(64).view(torch.float32)
    version = buffer._version
    device.compute_wait(device.copy_in(buffer, torch.ones(16)))
    assert buffer._version == version


def test_concurrent_use_from_two_threads(device: Device) -> None:
    failures: list[BaseException | str] = []

    def work(base: int) -> None:
        try:
            for step in range(30):
                source = torch.full((512,), float(base + step))
                buffer = device.empty(2048).view(torch.float32)
                result = torch.empty(512)
                arrived = device.copy_in(buffer, source)
                left = device.copy_out(result, buffer, after=[arrived])
                left.wait()
                if not torch.equal(result, source):
                    failures.append(f"thread {base}, step {step}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    device.synchronize()
    gc.collect()
    assert device.used == 0


def test_close_is_idempotent_final_and_leaves_no_thread(device: Device) -> None:
    before = set(threading.enumerate())
    with create_device(device.kind) as other:
        other.copy_in(other.empty(4), torch.zeros(4, dtype=torch.uint8)).wait()
    other.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        other.empty(4, what="late")


def test_memory_info_stays_within_capacity(device: Device) -> None:
    assert device.memory_info()[1] == 1 << 20
    buffer = device.empty(PAGE)
    free, total = device.memory_info()
    assert 0 <= free <= (1 << 20) - PAGE and total == 1 << 20
    assert buffer.numel() == PAGE


def test_host_registration_is_balanced(device: Device) -> None:
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    device.host_register(host.data_ptr(), host.nbytes)
    device.host_unregister(host.data_ptr())


def test_record_completes_with_the_compute_so_far(device: Device) -> None:
    buffer = device.empty(4096)
    buffer.fill_(7)
    event = device.record()
    event.wait(timeout=60)
    assert event.done()
    assert int(buffer.sum()) == 7 * 4096
