"""Parameters on an accelerator: its streams and events are played by a recorder, its memory by the host's."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

from optimizer_cpu import CPUAdamW, staging
from optimizer_cpu.formats import format_names

POISON = 777.0


class Event:
    def __init__(self, log):
        self.log, self.done = log, False

    def synchronize(self):
        self.done = True
        self.log.append("synchronize")


class Stream:
    def __init__(self, device=None, log=None):
        self.log = [] if log is None else log

    def wait_stream(self, other):
        self.log.append("wait_stream")

    def wait_event(self, event):
        event.done = True
        self.log.append("wait_event")

    def record_event(self):
        self.log.append("record_event")
        return Event(self.log)


class Runtime:
    def __init__(self):
        self.log = []
        self.current = Stream(log=self.log)

    def Stream(self, device):
        return Stream(device, self.log)

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        yield


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(staging, "needs_mirror", lambda parameter: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(staging, "pinned", lambda n, dtype, device: torch.full((n,), POISON, dtype=dtype))
    return runtime


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 20), nn.GELU(), nn.Linear(20, 3)).to(dtype)


def train(model, optimizer, dtype, steps=6, clip=True):
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + micro)).to(dtype)
            model(x).float().pow(2).mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


@pytest.mark.parametrize("state_format", format_names())
@pytest.mark.parametrize("clip", [True, False])
def test_mirrored_parameters_take_the_same_steps(monkeypatch, runtime, state_format, clip):
    model = network(torch.bfloat16)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2, state_format=state_format)
    train(model, optimizer, torch.bfloat16, clip=clip)
    with torch.no_grad():
        model[0].bias.fill_(0.25)  # a write that the mirror must fetch
    train(model, optimizer, torch.bfloat16, clip=clip)
    saved = optimizer.state_dict()
    assert runtime.log.count("synchronize") and runtime.log.count("wait_event")
    monkeypatch.setattr(staging, "needs_mirror", lambda parameter: False)
    twin = network(torch.bfloat16)
    plain = CPUAdamW(twin.parameters(), lr=1e-2, state_format=state_format)
    train(twin, plain, torch.bfloat16, clip=clip)
    with torch.no_grad():
        twin[0].bias.fill_(0.25)
    train(twin, plain, torch.bfloat16, clip=clip)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    other = plain.state_dict()
    assert all(torch.equal(saved["state"][i][k], v) for i, e in other["state"].items() for k, v in e.items())


def test_gradients_travel_as_they_arrive_and_no_buffer_is_read_early(runtime):
    p = nn.Parameter(torch.ones(4))
    optimizer = CPUAdamW([p], lr=0.1)
    (p * 2).sum().backward()
    assert runtime.log == ["wait_stream", "record_event"], "the copy starts in the backward pass"
    runtime.log.clear()
    optimizer.step()
    # the gradient is complete before the step, and the device waits for the weight
    assert runtime.log == ["synchronize", "wait_stream", "record_event", "wait_event"]


def test_close_releases_hooks_and_buffers_and_the_optimizer_still_works(runtime):
    model = network(torch.float32)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, torch.float32)
    optimizer.close()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    train(model, optimizer, torch.float32)
    other, again = copy.deepcopy((model, optimizer))
    train(other, again, torch.float32)
    train(model, optimizer, torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_exact_host_memory():
    tensor = staging.pinned(1000, torch.bfloat16, torch.device("cpu"))
    tensor.fill_(1.0)
    assert tensor.shape == (1000,) and tensor.untyped_storage().nbytes() <= 4096 and tensor.data_ptr() % 4096 == 0
    view = tensor[3:]
    del tensor
    gc.collect()
    assert bool((view == 1).all())
    assert staging.pinned(0, torch.float32, torch.device("cpu")).numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    gpu, host = network(torch.bfloat16).cuda(), network(torch.bfloat16)
    mine, twin = CPUAdamW(gpu.parameters(), lr=1e-2), CPUAdamW(host.parameters(), lr=1e-2)
    for step in range(20):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step)).bfloat16()
        gpu.zero_grad()
        gpu(x.cuda()).float().pow(2).mean().backward()
        for p, q in zip(gpu.parameters(), host.parameters(), strict=True):
            q.grad = p.grad.cpu()
        mine.step()
        twin.step()
    assert all(torch.equal(p.cpu(), q) for p, q in zip(gpu.parameters(), host.parameters(), strict=True))
    mine.close()
