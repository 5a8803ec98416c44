import math
import struct

import pytest
import torch

from optimizer_cpu import kernels, reference
from optimizer_cpu.formats import get_format
from optimizer_cpu.reference import BLOCK, AdamWHyper, AdamWScalars

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENORMAL = 1e-42


def hyper(**changes):
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    return AdamWHyper(**{**values, **changes})


def varied(numel, seed=0):
    """fp32 values over many magnitudes, with denormals and signed zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=g) * 10 ** (torch.rand(numel, generator=g) * 16 - 12)
    x[::17] = DENORMAL
    x[3::19] = 0.0
    x[5::19] = -0.0
    return x


def state(numel, weight_dtype, seed=0):
    p, m, v = varied(numel, seed), varied(numel, seed + 1), varied(numel, seed + 2).abs()
    planes = {"master": p, "exp_avg": m, "exp_avg_sq": v}
    if weight_dtype != torch.float32:
        planes["weight"] = torch.empty(numel, dtype=weight_dtype)
    return planes


def scalar_adamw(p, m, v, g, s):
    """The contract once more, one element at a time, on Python floats rounded to fp32 after every operation."""

    def f(x):
        try:
            return struct.unpack("f", struct.pack("f", x))[0]
        except OverflowError:
            return math.copysign(math.inf, x)

    g = f(g * s.grad_scale)
    if s.l2:
        g = f(g + f(p * s.l2))
    p = f(p * s.decay)
    m = f(f(m * s.beta1) + f(g * s.one_minus_beta1))
    v = f(f(v * s.beta2) + f(f(g * s.one_minus_beta2) * g))
    p = f(p - f(f(m / f(f(f(math.sqrt(v)) * s.root_scale) + s.eps)) * s.step_size))
    return p, m, v


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_every_operation_is_rounded_as_written(grad_dtype, decoupled):
    planes = state(400, torch.float32)
    grad = varied(400, 9).to(grad_dtype)
    h = hyper(decoupled=decoupled)
    s = AdamWScalars.of(h, 0.37)
    columns = [planes[k].tolist() for k in ("master", "exp_avg", "exp_avg_sq")]
    expected = [scalar_adamw(*values, s) for values in zip(*columns, grad.tolist(), strict=True)]
    before = grad.clone()
    reference.adamw_(**planes, grad=grad, hyper=h, grad_scale=0.37)
    want = torch.tensor(expected, dtype=torch.float64).float()
    for column, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
        assert torch.equal(planes[name], want[:, column]), name
    assert torch.equal(grad, before)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_chunks_equal_the_whole(monkeypatch, weight_dtype, grad_dtype):
    numel = 10_007
    whole, parts = state(numel, weight_dtype), state(numel, weight_dtype)
    for step in range(1, 6):
        grad = varied(numel, 100 + step).to(grad_dtype)
        reference.adamw_(**whole, grad=grad, hyper=hyper(step=step))
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_RANGE", 333)
            for start, stop in ((0, 1), (1, 64), (64, 5_001), (5_001, numel)):
                piece = {k: t[start:stop] for k, t in parts.items()}
                reference.adamw_(**piece, grad=grad[start:stop], hyper=hyper(step=step))
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_follows_torch_over_100_steps(weight_decay, decoupled):
    torch.manual_seed(1)
    p = torch.randn(5_000)
    twin = torch.nn.Parameter(p.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([twin], lr=1e-3, weight_decay=weight_decay, foreach=False)
    m, v = torch.zeros(5_000), torch.zeros(5_000)
    for step in range(1, 101):
        grad = torch.randn(5_000) * 10 ** (torch.rand(5_000) * 4 - 3)
        twin.grad = grad.clone()
        optimizer.step()
        h = hyper(weight_decay=weight_decay, step=step, decoupled=decoupled)
        reference.adamw_(master=p, exp_avg=m, exp_avg_sq=v, grad=grad, hyper=h)
    assert (p - twin.detach()).abs().max() <= 1e-6 * twin.detach().abs().max()


def test_scale_is_folded_in_exactly():
    grad = varied(1000, 4)
    a, b = state(1000, torch.bfloat16), state(1000, torch.bfloat16)
    reference.adamw_(**a, grad=grad, hyper=hyper(), grad_scale=1 / 1024)
    reference.adamw_(**b, grad=grad * (1 / 1024), hyper=hyper())
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_nonfinite_gradients_stay_where_they_are():
    planes = state(300, torch.bfloat16)
    clean = state(300, torch.bfloat16)
    grad = varied(300, 6)
    reference.adamw_(**clean, grad=grad, hyper=hyper())
    bad = grad.clone()
    bad[7], bad[80] = math.inf, math.nan
    reference.adamw_(**planes, grad=bad, hyper=hyper())
    keep = torch.ones(300, dtype=torch.bool)
    keep[[7, 80]] = False
    for name in planes:
        assert torch.equal(planes[name][keep], clean[name][keep]), name
    assert planes["master"][80].isnan() and planes["weight"].view(torch.int16)[80] == 0x7FC0


def test_round_weight_bf16_matches_torch_except_for_ties():
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    master = bits.view(torch.float32)
    master = master[master.isfinite()].contiguous()
    before = master.clone()
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    reference.round_weight_(master, weight)
    double = before.double()  # the nearest bf16 value, ties to the even one, found by comparing distances
    low = (before.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    high_bits = (before.view(torch.int32) & ~0xFFFF) + 0x10000
    high = high_bits.view(torch.float32).double()
    inside = high.isfinite()
    nearest = torch.where((double - low).abs() < (high - double).abs(), low, high)
    tie = (double - low).abs() == (high - double).abs()
    check = inside & ~tie
    assert torch.equal(weight.double()[check], nearest[check])


def test_tie_rule_and_special_values_bits():
    cases = {  # fp32 bits -> (bf16 bits, fp32 bits afterwards)
        0x3F808000: (0x3F80, 0x3F807FFF),  # tie, even: nudged, rounds down
        0x3F818000: (0x3F82, 0x3F818000),  # tie, odd: rounds up, kept
        0x3F807FFF: (0x3F80, 0x3F807FFF),
        0x3F808001: (0x3F81, 0x3F808001),
        0xBF808000: (0xBF80, 0xBF807FFF),
        0x00008000: (0x0000, 0x00007FFF),
        0x00018000: (0x0002, 0x00018000),
        0x80000000: (0x8000, 0x80000000),
        0x00000001: (0x0000, 0x00000001),
        0x7F7FFFFF: (0x7F80, 0x7F7FFFFF),  # overflows to infinity as round-to-nearest does
        0x7F800000: (0x7F80, 0x7F800000),
        0xFF800000: (0xFF80, 0xFF800000),
    }
    master = torch.tensor([b - (1 << 32) if b >> 31 else b for b in cases], dtype=torch.int32).view(torch.float32)
    weight = torch.empty(len(cases), dtype=torch.bfloat16)
    reference.round_weight_(master, weight)
    assert [w & 0xFFFF for w in weight.view(torch.int16).tolist()] == [w for w, _ in cases.values()]
    assert [b & 0xFFFFFFFF for b in master.view(torch.int32).tolist()] == [b for _, b in cases.values()]
    nan = torch.tensor([math.nan, -math.nan])
    for dtype, code in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        weight = torch.empty(2, dtype=dtype)
        reference.round_weight_(nan.clone(), weight)
        assert weight.view(torch.int16).tolist() == [code, code]


def test_fp32_weights_are_the_master():
    planes = state(100, torch.float32)
    again = {k: t.clone() for k, t in planes.items()}
    grad = varied(100, 3)
    reference.adamw_(**planes, weight=planes["master"].view(-1), grad=grad, hyper=hyper())
    reference.adamw_(**again, grad=grad, hyper=hyper())
    assert all(torch.equal(planes[k], again[k]) for k in planes)


def slow_square_sums(x):
    out = []
    values = x.double().tolist()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        block += [0.0] * (BLOCK - len(block))
        lanes = [0.0] * 64
        for i, value in enumerate(block):
            lanes[i % 64] += value * value
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        out.append(lanes[0])
    return out


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 5, 70_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sums_follow_the_written_order(numel, dtype):
    x = varied(numel, 8).to(dtype)
    partials = reference.square_sums(x)
    assert partials.dtype == torch.float64 and partials.tolist() == slow_square_sums(x)


def test_square_sums_of_block_ranges_equal_the_whole():
    x = varied(20 * BLOCK + 77, 2)
    whole = reference.square_sums(x)
    parts = [reference.square_sums(x[a:b]) for a, b in ((0, BLOCK), (BLOCK, 17 * BLOCK), (17 * BLOCK, x.numel()))]
    assert torch.equal(whole, torch.cat(parts))
    norms = {reference.total_norm(order) for order in (parts, parts[::-1], [whole])}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(x.double().norm().item(), rel=1e-14)


def test_large_values_do_not_overflow_the_partials():
    x = torch.full((5,), 3e38)
    partials, bad = reference.check_square_sums(x)
    assert bad is None and math.isfinite(reference.total_norm([partials]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 4095, 4096, 70_000])
def test_first_nonfinite(dtype, value, index):
    x = varied(70_001, 5).to(dtype)
    x = torch.where(x.isfinite(), x, torch.ones_like(x))
    assert reference.check_square_sums(x)[1] is None and reference.first_nonfinite(x) is None
    x[index] = value
    x[-1] = math.nan
    assert reference.first_nonfinite(x) == index
    partials, bad = reference.check_square_sums(x)
    assert bad == index and not math.isfinite(partials[index // BLOCK])
    assert not math.isfinite(reference.total_norm([partials]))


@pytest.mark.parametrize("acc_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(acc_dtype, dtype):
    acc, x = varied(70_001, 1).to(acc_dtype), varied(70_001, 2).to(dtype)
    want = acc + x.to(acc_dtype)
    reference.accumulate_(acc, x)
    assert torch.equal(acc.nan_to_num(), want.nan_to_num())


def test_wrong_tensors_are_named():
    def call(**changes):
        planes = state(16, torch.bfloat16)
        reference.adamw_(**{**planes, "grad": torch.zeros(16), "hyper": hyper(), **changes})

    with pytest.raises(ValueError, match=r"exp_avg has dtype bfloat16; expected float32"):
        call(exp_avg=torch.zeros(16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"grad has 15 elements; expected 16"):
        call(grad=torch.zeros(15))
    with pytest.raises(ValueError, match=r"grad is not contiguous"):
        call(grad=torch.zeros(32)[::2])
    with pytest.raises(ValueError, match=r"weight must be a 1-D"):
        call(weight=torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"master has dtype float64"):
        call(master=torch.zeros(16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"exp_avg_sq is on the meta device"):
        call(exp_avg_sq=torch.zeros(16, device="meta"))
    with pytest.raises(ValueError, match=r"grad must be a torch.Tensor"):
        call(grad=[0.0] * 16)
    with pytest.raises(ValueError, match=r"contribution has 3 elements"):
        reference.accumulate_(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match=r"grad has dtype int32"):
        reference.square_sums(torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("eps", -1e-8),
        ("weight_decay", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("step", 0),
    ],
)
def test_hyperparameters_outside_their_domain(name, value):
    with pytest.raises(ValueError, match=name):
        hyper(**{name: value})


def test_formats_and_facade():
    fmt = get_format("fp32")
    assert fmt.bytes_per_parameter(torch.bfloat16) == 14 and fmt.bytes_per_parameter(torch.float32) == 12
    assert [p.name for p in fmt.planes(torch.float32)] == ["weight", "exp_avg", "exp_avg_sq"]
    with pytest.raises(ValueError, match=r"unknown state_format 'fp23'; known: .*fp32"):
        get_format("fp23")
    with pytest.raises(ValueError, match=r"cannot hold float64 weights"):
        fmt.planes(torch.float64)
    for dtype in DTYPES:
        planes = {p.name: torch.zeros(p.numel(500), dtype=p.dtype) for p in fmt.planes(dtype)}
        value = varied(500, 1)
        kernels.load_("fp32", planes, master=value)
        kernels.step_("fp32", planes, grad=varied(500, 2), hyper=hyper(step=1), grad_scale=0.5)
        twin = {"master": value.clone(), "exp_avg": torch.zeros(500), "exp_avg_sq": torch.zeros(500)}
        weight = torch.zeros(500, dtype=dtype)
        reference.round_weight_(twin["master"], weight)
        reference.adamw_(**twin, weight=weight, grad=varied(500, 2), hyper=hyper(step=1), grad_scale=0.5)
        read = kernels.read("fp32", planes)
        want = twin["master"] if dtype != torch.float32 else planes["weight"]
        assert torch.equal(read.master, want) and torch.equal(read.master, twin["master"])
        assert torch.equal(read.exp_avg, twin["exp_avg"]) and torch.equal(read.exp_avg_sq, twin["exp_avg_sq"])
        if dtype != torch.float32:
            assert torch.equal(planes["weight"], weight)
    with pytest.raises(ValueError, match=r"needs planes \['weight', 'exp_avg', 'exp_avg_sq'\]"):
        kernels.step_("fp32", {"weight": torch.zeros(4)}, grad=torch.zeros(4), hyper=hyper())
