"""Property tests: formats, groups and hyperparameters drawn at random."""

import math

import hypothesis.strategies as st
import torch
from hypothesis import example, given, settings

from optimizer_cpu import CPUAdamW, kernels, native
from optimizer_cpu.formats import format_names, get_format
from optimizer_cpu.reference import AdamWHyper, adamw_, round_weight_

GROUP = 32
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
HYPERS = st.builds(
    AdamWHyper,
    lr=st.floats(0, 1, width=32),
    beta1=st.floats(0, 0.999),
    beta2=st.floats(0, 0.99999),
    eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
    weight_decay=st.floats(0, 1),
    step=st.integers(1, 10_000),
    decoupled=st.booleans(),
)


def planes_for(fmt, dtype, numel):
    return {p.name: torch.zeros(p.numel(numel), dtype=p.dtype) for p in get_format(fmt).planes(dtype)}


def random_values(seed, numel, low, high):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=g) * 10 ** (torch.rand(numel, generator=g) * (high - low) + low)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from(format_names()),
    grad_dtype=DTYPES,
    weight_dtype=DTYPES,
    hyper=HYPERS,
    numel=st.integers(0, 700),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1.0, 1e-4, 1024.0]),
)
def test_the_facade_equals_the_reference(fmt, grad_dtype, weight_dtype, hyper, numel, seed, scale):
    if weight_dtype not in get_format(fmt).weight_dtypes:
        weight_dtype = torch.bfloat16
    ours, want = (planes_for(fmt, weight_dtype, numel) for _ in range(2))
    value, grad = random_values(seed, numel, -6, 2), random_values(seed + 1, numel, -8, 4).to(grad_dtype)
    for planes, isa in ((ours, None), (want, "reference")):
        native.force(isa)
        kernels.load_(fmt, planes, master=value)
        for _ in range(2):
            kernels.step_(fmt, planes, grad=grad, hyper=hyper, grad_scale=scale)
    native.force(None)
    for name in ours:
        a, b = ours[name], want[name]
        if a.dtype == torch.float32:
            assert torch.equal(a.isnan(), b.isnan()), name
            a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
        assert torch.equal(bits(a), bits(b)), name


@settings(max_examples=60, deadline=None)
@given(hyper=HYPERS, numel=st.integers(1, 300), seed=st.integers(0, 2**20), steps=st.integers(1, 4))
def test_split_equals_fp32(hyper, numel, seed, steps):
    states = {}
    for fmt in ("fp32", "split"):
        planes = planes_for(fmt, torch.bfloat16, numel)
        value = random_values(seed, numel, -20, 20)
        value.view(torch.int32)[::3] = (value.view(torch.int32)[::3] & ~0xFFFF) | 0x8000  # ties
        kernels.load_(fmt, planes, master=value)
        for step in range(steps):
            kernels.step_(fmt, planes, grad=random_values(seed + step, numel, -30, 30), hyper=hyper)
        states[fmt] = (planes["weight"], kernels.read(fmt, planes))
    (w, a), (u, b) = states["fp32"], states["split"]
    assert torch.equal(bits(w), bits(u))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(bits(x.nan_to_num()), bits(y.nan_to_num())), name


@settings(max_examples=80, deadline=None)
@given(numel=st.integers(1, 300), seed=st.integers(0, 2**20), low=st.integers(-44, 30), span=st.integers(0, 40))
@example(numel=284, seed=0, low=-43, span=0)
def test_compact_codes_are_stable_and_near(numel, seed, low, span):
    high = min(low + span, 36)
    master, m = random_values(seed, numel, low, high), random_values(seed + 1, numel, min(low, 17), min(high, 17))
    v = random_values(seed + 2, numel, max(low, -40), min(high, 34)).abs()
    planes = planes_for("compact", torch.bfloat16, numel)
    kernels.load_("compact", planes, master=master, exp_avg=m, exp_avg_sq=v)
    once = kernels.read("compact", planes)
    again = planes_for("compact", torch.bfloat16, numel)
    kernels.load_("compact", again, master=once.master, exp_avg=once.exp_avg, exp_avg_sq=once.exp_avg_sq)
    twice = kernels.read("compact", again)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(getattr(once, name)), bits(getattr(twice, name))), name
    # Several roots may have the same square where that is subnormal, and so few bits that it does not tell them apart.
    told_apart = once.exp_avg_sq >= torch.finfo(torch.float32).tiny
    for name in planes:
        a, b = bits(planes[name]), bits(again[name])
        if name == "exp_avg_sq":
            a, b = a[told_apart], b[told_apart]
        elif name == "exp_avg_sq_scale":
            whole = [told_apart[start : start + GROUP].all() for start in range(0, numel, GROUP)]
            a, b = a[torch.tensor(whole)], b[torch.tensor(whole)]
        assert torch.equal(a, b), name
    rounded = torch.empty(numel, dtype=torch.bfloat16)
    round_weight_(once.master.clone(), rounded)
    assert torch.equal(bits(rounded), bits(planes["weight"]))
    normal = master.abs() > 1e-37
    assert ((once.master - master).abs()[normal] <= master.abs()[normal] * 1.5 * 2**-15).all()
    assert (once.exp_avg_sq[v > 0] > 0).all() and (once.exp_avg_sq[v == 0] == 0).all()
    for start in range(0, numel, GROUP):
        part = slice(start, start + GROUP)
        top = m[part].abs().max().item()
        near = (m[part].abs() >= top / 100) & (m[part].abs() > 1e-36)
        assert ((once.exp_avg[part] - m[part]).abs()[near] <= m[part].abs()[near] * 0.033).all()
        root, got = v[part].sqrt(), once.exp_avg_sq[part].sqrt()
        big = root >= root.max().item() / 100
        assert ((got - root).abs()[big] <= root[big] * 0.017).all()
        assert (got >= root * 0.98).all(), "a variance that reads too small would make the update too large"


GRADS = st.sampled_from([0.0, 1e-38, 1e-30, 1e-20, 1e-8, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**20), skew=st.floats(0, 12), steps=st.integers(1, 40))
def test_no_compact_update_exceeds_a_few_lr(data, seed, skew, steps):
    """Skewed groups, tiny and huge gradients, sudden changes of scale: |update| stays below 8 lr.

    fp32 AdamW itself reaches (1 - beta1) / sqrt(1 - beta2) = 3.2 lr, and more while moments forget at different speeds.
    """
    numel, lr = 64, 1e-3
    planes = planes_for("compact", torch.bfloat16, numel)
    kernels.load_("compact", planes, master=torch.zeros(numel))
    g = torch.Generator().manual_seed(seed)
    shape = 10 ** (-skew * torch.rand(numel, generator=g))
    scale = data.draw(GRADS)
    for step in range(1, steps + 1):
        if step % 7 == 0:
            scale = data.draw(GRADS)
        grad = torch.randn(numel, generator=g) * shape * scale
        before = kernels.read("compact", planes).master.clone()
        hyper = AdamWHyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step)
        kernels.step_("compact", planes, grad=grad, hyper=hyper)
        moved = (kernels.read("compact", planes).master - before).abs()
        assert moved.isfinite().all() and moved.max() <= 8 * lr


SHAPES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    dtype=DTYPES,
    groups=st.integers(1, 2),
    weight_decay=st.floats(0, 0.3),
    lr=st.floats(1e-5, 1e-1),
    seed=st.integers(0, 2**16),
    tensor_lr=st.booleans(),
)
def test_the_optimizer_follows_torch(shapes, dtype, groups, weight_decay, lr, seed, tensor_lr):
    g = torch.Generator().manual_seed(seed)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]
    masters = [torch.nn.Parameter(p.detach().float()) for p in ours]
    cut = len(ours) if groups == 1 else len(ours) // 2

    def grouped(parameters):
        parts = [(parameters[:cut], {}), (parameters[cut:], {"weight_decay": 0.0, "eps": 1e-6})]
        return [{"params": p, **extra} for p, extra in parts if p]

    rate = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
    mine = CPUAdamW(grouped(ours), lr=rate, weight_decay=weight_decay)
    twin = torch.optim.AdamW(grouped(masters), lr=lr, weight_decay=weight_decay, foreach=False)
    for _ in range(5):
        for p, master in zip(ours, masters, strict=True):
            p.grad = torch.randn(p.shape, generator=g).to(dtype)
            master.grad = p.grad.float()
        mine.step()
        twin.step()
    for p, master in zip(ours, masters, strict=True):
        if p.numel():
            value = p.detach() if dtype == torch.float32 else mine.state[p]["master"]
            assert (value - master).abs().max() <= 1e-6 * master.abs().max() + 1e-7 * lr


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(1, 9000), seed=st.integers(0, 2**20), cut=st.integers(0, 9000))
def test_partials_do_not_depend_on_the_split(numel, seed, cut):
    x = random_values(seed, numel, -10, 10)
    cut = min(cut // 4096 * 4096, numel)
    parts = torch.cat([kernels.square_sums(x[:cut]), kernels.square_sums(x[cut:])])
    whole = kernels.square_sums(x)
    assert torch.equal(whole, parts)
    assert math.isclose(kernels.total_norm([whole]), x.double().norm().item(), rel_tol=1e-12)


def test_adamw_reference_is_the_facade_without_native():
    native.force("reference")
    try:
        p, m, v, g = torch.ones(10), torch.zeros(10), torch.zeros(10), torch.linspace(-1, 1, 10)
        q, n, u = p.clone(), m.clone(), v.clone()
        h = AdamWHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)
        kernels.adamw_(master=p, exp_avg=m, exp_avg_sq=v, grad=g, hyper=h)
        adamw_(master=q, exp_avg=n, exp_avg_sq=u, grad=g, hyper=h)
        assert torch.equal(p, q) and torch.equal(m, n) and torch.equal(v, u)
    finally:
        native.force(None)


def test_small_updates_drift_through_every_master_of_compact():
    """Updates far below one step of the 24-bit master are not lost, and no bf16 boundary stops them, up or down."""
    numel, steps, lr = 320, 3_000, 2e-6
    planes = planes_for("compact", torch.bfloat16, numel)
    start = torch.linspace(0.9, 1.0, numel)
    kernels.load_("compact", planes, master=start)
    grad = torch.where(torch.arange(numel) % 2 == 0, 1.0, -1.0)
    for step in range(1, steps + 1):
        hyper = AdamWHyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step)
        kernels.step_("compact", planes, grad=grad, hyper=hyper)
    moved = (start - kernels.read("compact", planes).master) * grad
    assert lr * steps > 2**-8, "every element passes a boundary of bf16"
    assert (moved / (lr * steps) - 1).abs().max() < 0.05
