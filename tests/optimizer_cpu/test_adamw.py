import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from optimizer_cpu import CPUAdamW
from optimizer_cpu.formats import format_names


@pytest.fixture(autouse=True)
def one_thread():
    """The networks are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 7)).to(dtype)


def backward(model, seed, dtype=torch.float32, scale=1.0):
    x = torch.randn(16, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model.zero_grad()
    ((model(x) - x[:, :7]).float().pow(2).mean() * scale).backward()


def groups_of(model, weight_decay):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "lr": 3e-4, "betas": (0.8, 0.99)},
    ]


def close(a, b, what=""):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        p, q = p.detach().double(), q.detach().double()
        assert (p - q).abs().max() <= 1e-6 * q.abs().max(), what


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_follows_torch_for_100_steps_in_groups_with_a_schedule(weight_decay, tensor_lr):
    ours, theirs = network(), network()
    lr = torch.tensor(1e-3) if tensor_lr else 1e-3
    mine = CPUAdamW(groups_of(ours, weight_decay), lr=lr)
    twin = torch.optim.AdamW(groups_of(theirs, weight_decay), lr=lr.clone() if tensor_lr else lr, foreach=False)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[2e-3, 1e-3], total_steps=120) for o in (mine, twin)]
    for step in range(100):
        backward(theirs, step, scale=10.0 ** (step % 5 - 2))
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad.clone()
        for optimizer, schedule in zip((mine, twin), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in twin.param_groups]
    close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_masters(dtype):
    model = network(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    mine, twin = CPUAdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(masters, lr=1e-3, foreach=False)
    for step in range(100):
        backward(model, step, dtype)
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        mine.step()
        twin.step()
        with torch.no_grad():  # both continue from one set of weights
            for p, master in zip(model.parameters(), masters, strict=True):
                assert torch.equal(p, mine.state[p]["master"].to(dtype))
                assert (mine.state[p]["master"] - master).abs().max() <= 1e-6 * master.abs().max()


def test_fp64_parameters_are_stepped_in_fp64():
    ours, theirs = network(torch.float64), network(torch.float64)
    mine, twin = CPUAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), foreach=False)
    for step in range(20):
        for model in (ours, theirs):
            backward(model, step, torch.float64)
        mine.step()
        twin.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.dtype == torch.float64 and (p - q).abs().max() < 1e-13
    twin.load_state_dict(copy.deepcopy(mine.state_dict()))


def test_split_equals_fp32_and_compact_is_near():
    models = {name: network(torch.bfloat16) for name in format_names()}
    optimizers = {name: CPUAdamW(m.parameters(), lr=1e-2, state_format=name) for name, m in models.items()}
    losses = {}
    for step in range(100):
        for name, model in models.items():
            backward(model, step, torch.bfloat16)
            optimizers[name].step()
    for name, model in models.items():
        x = torch.randn(64, 33, generator=torch.Generator().manual_seed(999)).bfloat16()
        losses[name] = float((model(x) - x[:, :7]).detach().float().pow(2).mean())
    assert same(models["fp32"], models["split"])
    assert losses["fp32"] < 0.5 and abs(losses["compact"] - losses["fp32"]) < 0.1 * losses["fp32"]
    for p, q in zip(models["fp32"].parameters(), models["split"].parameters(), strict=True):
        a, b = (optimizers[n].state_dict()["state"] for n in ("fp32", "split"))
        assert p.shape == q.shape and all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


def test_state_goes_to_torch_and_back_in_fp32():
    ours, theirs = network(), network()
    mine, twin = CPUAdamW(ours.parameters(), weight_decay=0.1), torch.optim.AdamW(theirs.parameters(), foreach=False)
    for step in range(10):
        backward(ours, step)
        mine.step()
    theirs.load_state_dict(ours.state_dict())
    twin.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert twin.param_groups[0]["weight_decay"] == 0.1
    for step in range(10, 20):
        for model, optimizer in ((ours, mine), (theirs, twin)):
            backward(model, step)
            optimizer.step()
    close(ours, theirs)
    fresh = network()
    fresh.load_state_dict(theirs.state_dict())
    third = CPUAdamW(fresh.parameters())
    third.load_state_dict(twin.state_dict())
    for key in ("exp_avg", "exp_avg_sq", "step"):
        a, b = third.state_dict()["state"], twin.state_dict()["state"]
        assert a.keys() == b.keys() and all(torch.equal(a[i][key], b[i][key]) for i in a)


@pytest.mark.parametrize("state_format", format_names())
@pytest.mark.parametrize("weights_first", [True, False])
def test_resuming_is_exact_in_every_format(state_format, weights_first):
    model = network(torch.bfloat16)
    optimizer = CPUAdamW(model.parameters(), lr=1e-3, state_format=state_format)
    for step in range(5):
        backward(model, step, torch.bfloat16)
        optimizer.step()
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    other = network(torch.bfloat16, seed=5)
    resumed = CPUAdamW(other.parameters(), lr=9.0, state_format=state_format)
    if weights_first:
        other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    if not weights_first:
        other.load_state_dict(loaded["model"])
    assert resumed.param_groups[0]["lr"] == 1e-3 and resumed.param_groups[0]["state_format"] == state_format
    again = resumed.state_dict()["state"]  # saved right after loading, before any step
    assert all(torch.equal(v, again[i][k]) for i, e in loaded["optimizer"]["state"].items() for k, v in e.items())
    for step in range(5, 10):
        for m, o in ((model, optimizer), (other, resumed)):
            backward(m, step, torch.bfloat16)
            o.step()
    assert same(model, other)


def test_state_moves_between_formats():
    model = network(torch.bfloat16)
    optimizer = CPUAdamW(model.parameters(), lr=1e-3, state_format="split")
    for step in range(5):
        backward(model, step, torch.bfloat16)
        optimizer.step()
    for state_format in ("fp32", "compact"):
        other = copy.deepcopy(model)
        moved = CPUAdamW(other.parameters(), state_format=state_format)
        moved.load_state_dict(optimizer.state_dict())
        assert moved.param_groups[0]["state_format"] == state_format
        backward(other, 9, torch.bfloat16)
        moved.step()
        twin, reference = copy.deepcopy((model, optimizer))
        backward(twin, 9, torch.bfloat16)
        reference.step()
        if state_format == "fp32":
            assert same(other, twin)
        for p, q in zip(other.parameters(), twin.parameters(), strict=True):
            assert (p.float() - q.float()).abs().max() <= 0.02 * 1e-3 + 2**-7 * q.float().abs().max()


@pytest.mark.parametrize("state_format", format_names())
def test_pickle_and_deepcopy(state_format):
    model = network(torch.bfloat16)
    optimizer = CPUAdamW(model.parameters(), state_format=state_format)
    backward(model, 0, torch.bfloat16)
    optimizer.step()
    for clone in (pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))):
        other, copied = clone
        twin, reference = copy.deepcopy((model, optimizer))
        for m, o in ((other, copied), (twin, reference)):
            backward(m, 3, torch.bfloat16)
            o.step()
        assert same(other, twin) and type(copied) is CPUAdamW


def test_closure_zero_grad_and_hooks():
    model = network()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 33)).pow(2).mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    for _ in range(20):
        last = optimizer.step(closure).item()
    assert last < first and calls[:2] == ["before", "after"]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_gradientless_empty_and_scalar_parameters():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    unused, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0, 8))
    scalar = nn.Parameter(torch.tensor(2.0))
    integer = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    optimizer = CPUAdamW([frozen, unused, empty, scalar, integer], lr=0.1, weight_decay=0.0)
    (scalar * 3 + empty.sum()).backward()
    optimizer.step()
    assert torch.equal(frozen, torch.ones(3)) and torch.equal(unused, torch.ones(3))
    assert scalar.item() == pytest.approx(1.9, abs=1e-6) and empty.shape == (0, 8)
    assert frozen not in optimizer.state and unused not in optimizer.state
    frozen.requires_grad_(True)  # unfrozen later: takes part from the next step, with its own step count
    (frozen.sum() + scalar).backward()
    optimizer.step()
    assert torch.allclose(frozen, torch.full((3,), 0.9)) and optimizer.state[frozen]["step"] == 1


def test_a_later_group_and_a_format_of_its_own():
    model = network(torch.bfloat16)
    norm = nn.LayerNorm(7)
    optimizer = CPUAdamW(model.parameters(), state_format="compact")
    with pytest.raises(ValueError, match=r"'compact' cannot hold float32 weights"):
        optimizer.add_param_group({"params": list(norm.parameters())})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(norm.parameters()), "state_format": "fp32", "lr": 0.5})
    norm(torch.randn(4, 7)).pow(3).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[1]["lr"] == 0.5 and len(optimizer.state) == 2


def test_a_weight_written_by_someone_else_wins():
    for state_format in format_names():
        model = network(torch.bfloat16)
        optimizer = CPUAdamW(model.parameters(), lr=1e-3, state_format=state_format, weight_decay=0.0)
        for step in range(3):
            backward(model, step, torch.bfloat16)
            optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        backward(model, 4, torch.bfloat16)
        optimizer.step()
        assert (model[0].weight.float() - 0.5).abs().max() < 0.01, state_format


def test_autograd_sees_the_step():
    p = nn.Parameter(torch.ones(4))
    optimizer = CPUAdamW([p])
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradscaler_skips_a_step_with_an_overflow():
    p = nn.Parameter(torch.ones(4))
    optimizer = CPUAdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((p * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones(4)) and scaler.get_scale() == 4.0


def test_bad_arguments_are_named():
    p = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        CPUAdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        CPUAdamW([p], lr=-1.0)
    with pytest.raises(ValueError, match=r"beta2=1\.5"):
        CPUAdamW([p], betas=(0.9, 1.5))
    with pytest.raises(ValueError, match="unknown state_format 'tiny'"):
        CPUAdamW([p], state_format="tiny")
    with pytest.raises(ValueError, match=r"parameter 0 .*'split' cannot hold float32"):
        CPUAdamW([p], state_format="split")
    with pytest.raises(ValueError, match=r"parameter 'w'.* is not contiguous"):
        CPUAdamW([("w", nn.Parameter(torch.ones(4, 5).t()))])
    optimizer = CPUAdamW([p])
    p.grad = torch.ones(8)[::2]
    with pytest.raises(ValueError, match=r"gradient of parameter 0 .* is not contiguous"):
        optimizer.step()
    p.grad = torch.ones(4)
    optimizer.step()
    p.data = torch.ones(6)
    p.grad = torch.ones(6)
    with pytest.raises(ValueError, match=r"now has shape \(6,\), its optimizer state \(4,\)"):
        optimizer.step()


def test_states_that_do_not_fit_are_named():
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    theirs = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match=r"param_groups\[0\] was saved with amsgrad=True"):
        CPUAdamW([p]).load_state_dict(theirs.state_dict())
    mine = CPUAdamW([p])
    p.grad = torch.ones(4)
    mine.step()
    with pytest.raises(ValueError, match=r"exp_avg has shape \(4,\), its parameter \(5,\)"):
        CPUAdamW([q]).load_state_dict(mine.state_dict())
    sgd = torch.optim.SGD([p], momentum=0.9)
    sgd.step()
    with pytest.raises(ValueError, match="lacks exp_avg"):
        CPUAdamW([p]).load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="group"):
        CPUAdamW([p, q]).load_state_dict(mine.state_dict())
