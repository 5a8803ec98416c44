"""Native kernels against the torch reference, bit for bit."""

import itertools
import math
import random

import pytest
import torch

from optimizer_cpu import codecs, kernels, native, reference
from optimizer_cpu.formats import format_names, get_format
from optimizer_cpu.reference import AdamWHyper

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [*range(0, 68), 511, 512, 513, 4095, 4096, 4097]
LONG = 1_000_003

try:
    _module = native._import()
    ISAS = _module.supported_isas()
except ImportError:
    ISAS = []
pytestmark = pytest.mark.skipif(not ISAS, reason="native kernels are not built")


@pytest.fixture(autouse=True)
def restore():
    yield
    native.force(None)
    kernels.set_threads(None)


def values(numel, seed, low=-12, high=4):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=g) * 10 ** (torch.rand(numel, generator=g) * (high - low) + low)
    x[::17] = 1e-42
    x[3::19] = 0.0
    x[5::19] = -0.0
    return x


def gradient(numel, seed, dtype, nonfinite=False):
    g = values(numel, seed, -8, 3).to(dtype)
    if nonfinite and numel > 9:
        g[numel // 2] = math.inf
        g[numel // 3] = -math.inf
        g[numel // 5] = math.nan
    return g


def fresh(fmt, weight_dtype, numel, seed, offset=0):
    """Planes of a range that starts `offset` elements into larger buffers, so that alignment breaks."""
    planes = {}
    for plane in get_format(fmt).planes(weight_dtype):
        count = plane.numel(numel)
        planes[plane.name] = torch.zeros(count + offset, dtype=plane.dtype)[offset:]
    native.force("reference")
    m, v = values(numel, seed + 1, -9, 2), values(numel, seed + 2, -12, 2).abs()
    kernels.load_(fmt, planes, master=values(numel, seed), exp_avg=m, exp_avg_sq=v)
    return planes


def assert_same(a, b, what):
    assert a.keys() == b.keys()
    for name in a:
        x, y = a[name], b[name]
        if x.dtype == torch.float32:  # the payload of a NaN is unspecified
            assert torch.equal(x.isnan(), y.isnan()), (what, name)
            x, y = x.masked_fill(x.isnan(), 0), y.masked_fill(y.isnan(), 0)
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        assert torch.equal(x.view(size), y.view(size)), (what, name)


def hyper(step, **changes):
    base = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    return AdamWHyper(**{**base, **changes}, step=step)


def weight_dtypes(fmt):
    return get_format(fmt).weight_dtypes


CASES = [(fmt, w, g) for fmt in format_names() for w in get_format(fmt).weight_dtypes for g in DTYPES]


def case_id(value):
    return str(value).removeprefix("torch.")


def run(isa, fmt, planes, grad, h, scale=0.7):
    native.force(isa)
    kernels.step_(fmt, planes, grad=grad, hyper=h, grad_scale=scale)


# All instruction sets in one test: the reference, which takes longer than they, is computed once.


@pytest.mark.parametrize(("fmt", "weight_dtype", "grad_dtype"), CASES, ids=case_id)
def test_every_length(fmt, weight_dtype, grad_dtype):
    for numel in LENGTHS:
        offset = numel % 5
        want, *by_isa = (fresh(fmt, weight_dtype, numel, numel, offset) for _ in (None, *ISAS))
        grad = torch.zeros(numel + offset, dtype=grad_dtype)[offset:]
        for step in (1, 2, 7):
            grad.copy_(gradient(numel, 31 * step + numel, grad_dtype, nonfinite=step == 7))
            before = grad.clone()
            h = hyper(step, decoupled=numel % 3 != 0)
            run("reference", fmt, want, grad, h)
            for isa, ours in zip(ISAS, by_isa, strict=True):
                run(isa, fmt, ours, grad, h)
                assert torch.equal(grad.nan_to_num(1.0), before.nan_to_num(1.0)), isa
                assert_same(ours, want, (isa, numel, step))


@pytest.mark.parametrize(("fmt", "weight_dtype", "grad_dtype"), CASES, ids=case_id)
def test_a_hundred_steps_with_varied_gradients(fmt, weight_dtype, grad_dtype):
    numel = 5_000
    want, *by_isa = (fresh(fmt, weight_dtype, numel, 3) for _ in (None, *ISAS))
    for step in range(1, 101):
        grad = gradient(numel, step, grad_dtype) * (10.0 ** (step % 7 - 3))
        kernels.set_threads(1 + step % 4)
        h = hyper(step, lr=1e-3 / step)
        for isa, planes in zip(("reference", *ISAS), (want, *by_isa), strict=True):
            run(isa, fmt, planes, grad, h, scale=1.0 / step)
    for isa, ours in zip(ISAS, by_isa, strict=True):
        assert_same(ours, want, isa)


@pytest.mark.parametrize(("fmt", "weight_dtype", "grad_dtype"), CASES, ids=case_id)
def test_long_ranges_threads_and_splits(fmt, weight_dtype, grad_dtype):
    check_threads_and_splits(fmt, weight_dtype, grad_dtype, LONG, range(1, 9))


@pytest.mark.parametrize("fmt", format_names())
def test_threads_and_splits(fmt):
    check_threads_and_splits(fmt, torch.bfloat16, torch.bfloat16, 200_003, (1, 2, 3, 8))


def check_threads_and_splits(fmt, weight_dtype, grad_dtype, numel, thread_counts):
    multiple = get_format(fmt).range_multiple
    grad = gradient(numel, 5, grad_dtype, nonfinite=True)
    start = fresh(fmt, weight_dtype, numel, 1)
    want = {k: t.clone() for k, t in start.items()}
    run("reference", fmt, want, grad, hyper(4))
    rng = random.Random(0)
    inner = {rng.randrange(numel // multiple) * multiple for _ in range(6)} | {0, multiple, numel}
    edges = sorted(inner)
    planes = get_format(fmt).planes(weight_dtype)
    for isa in ISAS:
        for threads in thread_counts:
            kernels.set_threads(threads)
            whole = {k: t.clone() for k, t in start.items()}
            run(isa, fmt, whole, grad, hyper(4))
            assert_same(whole, want, (isa, threads))
        parts = {k: t.clone() for k, t in start.items()}
        for a, b in itertools.pairwise(edges):
            piece = {p.name: parts[p.name][p.slice_of(a, b)] for p in planes}
            run(isa, fmt, piece, grad[a:b], hyper(4))
        assert_same(parts, want, (isa, edges))


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
@pytest.mark.parametrize(("fmt", "weight_dtype", "grad_dtype"), CASES, ids=case_id)
def test_ranges_of_a_shard(isa, fmt, weight_dtype, grad_dtype):
    """Steps over ranges in one call are those over slices, and what is between the ranges stays as it is."""
    numel, ranges = 3 * 4096 + 17, [(0, 33), (64, 64), (96, 4100), (8192, 3 * 4096 + 17)]
    hypers = [hyper(3), hyper(3), hyper(7, lr=2e-3, weight_decay=0.0), hyper(3)]
    expected = fresh(fmt, weight_dtype, numel, 5)
    planes = {name: plane.clone() for name, plane in expected.items()}
    grads = [gradient(stop - start, 11 + start, grad_dtype) for start, stop in ranges]
    specs = get_format(fmt).planes(weight_dtype)
    for (start, stop), grad, h in zip(ranges, grads, hypers, strict=True):
        part = {spec.name: expected[spec.name][spec.slice_of(start, stop)] for spec in specs}
        run("reference", fmt, part, grad, h)
    native.force(isa)
    together, count = torch.cat(grads[:3]), [grad.numel() for grad in grads]
    places = [(together, 0), (together, count[0]), (together, count[0] + count[1]), (grads[3], 0)]
    parts = [(start, stop - start, *place, h) for (start, stop), place, h in zip(ranges, places, hypers, strict=True)]
    kernels.steps_(fmt, planes, iter(parts), grad_scale=0.7)
    assert_same(expected, planes, fmt)
    kernels.steps_(fmt, planes, [])
    kernels.steps_(fmt, planes, [(64, 0, grads[0], 33, hyper(1))])
    for bad in (
        (numel, 33, grads[0], 0, hyper(1)),
        (-32, 33, grads[0], 0, hyper(1)),
        (0, -1, grads[0], 1, hyper(1)),
        (0, 33, grads[0], 1, hyper(1)),
        (0, 33, grads[0], -1, hyper(1)),
    ):
        with pytest.raises(ValueError, match=rf"{bad[1]} elements from {bad[0]} on, with gradients from {bad[3]} on"):
            kernels.steps_(fmt, planes, [parts[0], bad])  # the good one is not made either
    if fmt == "compact":
        with pytest.raises(ValueError, match="multiples of 32"):
            kernels.steps_(fmt, planes, [(16, 33, grads[0], 0, hyper(1))])
    for wrong in (grads[2].view(-1, 1), grads[2].double(), grads[2].to("meta")):
        with pytest.raises(ValueError, match="grad"):
            kernels.steps_(fmt, planes, [parts[0], (0, 33, wrong, 0, hyper(1))])
    assert_same(expected, planes, fmt)


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("shift", (0, 1))
def test_a_copy_with_its_sums_of_squares_is_both(isa, dtype, shift):
    """At any length, aligned or not, and where a thread's range is long enough to pass the caches by. NaNs keep their
    bits.
    """
    native.force(isa)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for threads in (1, 3):
        kernels.set_threads(threads)
        for numel in (*LENGTHS, 300_003, 1 << 20):
            x = gradient(numel, numel, dtype)
            memory = torch.full((numel + 2,), 7.0, dtype=dtype)
            out = memory[shift : shift + numel]
            partials = kernels.copy_square_sums(out, x)
            assert torch.equal(partials.nan_to_num(), reference.square_sums(x).nan_to_num()), numel
            assert torch.equal(out.view(bits), x.view(bits)), numel
            assert (memory[:shift] == 7).all() and (memory[shift + numel :] == 7).all()
    assert torch.equal(kernels.copy_square_sums(x, x).nan_to_num(), reference.square_sums(x).nan_to_num())


def test_a_copy_to_other_memory_than_the_gradients_is_refused():
    x = torch.ones(10)
    for wrong in (torch.ones(9), torch.ones(10, dtype=torch.bfloat16), torch.ones(10, device="meta")):
        with pytest.raises(ValueError, match="out"):
            kernels.copy_square_sums(wrong, x)


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_square_sums_of_many_ranges(isa):
    """Those of each range alone, whatever lies beside it, of several planes and dtypes at once."""
    native.force(isa)
    planes = [torch.randn(100_000).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    planes[1][70_000] = math.inf
    cuts = [(0, 64), (64, 10), (128, 4096), (5, 0), (3, 4097), (1, 99_999), (70_000, 1)]
    parts = [(plane, start, count) for start, count in cuts for plane in planes]
    found = kernels.square_sums_of(parts)
    assert len(found) == len(parts) and kernels.square_sums_of([]) == []
    for sums, (plane, start, count) in zip(found, parts, strict=True):
        expected = reference.square_sums(plane[start : start + count])
        assert sums.dtype == torch.float64 and sums.shape == expected.shape
        assert torch.equal(sums.nan_to_num(), expected.nan_to_num()), (start, count)
    for start, count in ((-1, 5), (99_999, 2), (0, -1)):
        with pytest.raises(ValueError, match="a range of"):
            kernels.square_sums_of([(planes[0], start, count)])
    with pytest.raises(ValueError, match="contiguous"):
        kernels.square_sums_of([(planes[0][::2], 0, 5)])



@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_square_sums_and_first_bad_element(isa, dtype):
    for numel in [*LENGTHS, 100_003]:
        x = gradient(numel, numel, dtype)
        x = torch.where(x.isfinite(), x, torch.ones_like(x))
        native.force(isa)
        partials, bad = kernels.check_square_sums(x)
        assert bad is None and torch.equal(partials, reference.square_sums(x)), numel
        assert torch.equal(kernels.square_sums(x), partials)
        for value in (math.inf, math.nan):
            if numel:
                index = (numel * 7) // 11
                y = x.clone()
                y[index:] = value
                assert kernels.check_square_sums(y)[1] == index == reference.first_nonfinite(y)
    for threads in range(1, 9):
        kernels.set_threads(threads)
        x = gradient(300_003, 1, dtype)
        x = torch.where(x.isfinite(), x, torch.ones_like(x))
        assert torch.equal(kernels.square_sums(x), reference.square_sums(x))
        x[123_456] = -math.inf
        x[200_000] = math.nan
        assert kernels.check_square_sums(x)[1] == 123_456


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_accumulate_and_round(isa, dtype):
    native.force(isa)
    for numel in [*LENGTHS, 100_003]:
        acc, x = values(numel, 1), gradient(numel, 2, dtype)
        want = acc.clone()
        reference.accumulate_(want, x)
        kernels.accumulate_(acc, x)
        assert_same({"acc": acc}, {"acc": want}, numel)
        a = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.int32)
        a[::3] = (a[::3] & ~0xFFFF) | 0x8000  # ties
        a = a.view(torch.float32)
        b = a.clone()
        w, u = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        kernels.round_weight_(a, w)
        reference.round_weight_(b, u)
        assert_same({"master": a, "weight": w}, {"master": b, "weight": u}, numel)


@pytest.mark.parametrize("isa", ISAS)
def test_every_bf16_and_fp16_gradient(isa):
    for dtype in (torch.bfloat16, torch.float16):
        codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        acc, want = torch.full((65536,), -0.0), torch.full((65536,), -0.0)
        native.force(isa)
        kernels.accumulate_(acc, codes)
        reference.accumulate_(want, codes)
        assert_same({"x": acc}, {"x": want}, dtype)
        back, expected = torch.empty_like(codes), torch.empty_like(codes)
        kernels.round_weight_(acc, back)
        reference.round_weight_(want, expected)
        assert_same({"x": back}, {"x": expected}, dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_half_rounding_everywhere(isa):
    """All fp32 bit patterns near the boundaries of fp16: ties, denormals, overflow."""
    edges = torch.arange(0, 0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middles = (edges[:-1] + edges[1:]) / 2
    middles = middles[middles.isfinite()]
    bits = torch.cat([(middles.view(torch.int32) + d) for d in (-1, 0, 1)] + [edges.view(torch.int32)])
    x = torch.cat([bits, bits | -(2**31), torch.tensor([0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 1], dtype=torch.int32)])
    x = x.view(torch.float32)
    w, u = torch.zeros(x.numel(), dtype=torch.float16), torch.zeros(x.numel(), dtype=torch.float16)
    native.force(isa)
    kernels.round_weight_(x.clone(), w)
    reference.round_weight_(x.clone(), u)
    assert_same({"x": w}, {"x": u}, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["split", "compact"])
def test_conversions(isa, fmt):
    for numel in [*LENGTHS, 40_005]:
        m, v, p = values(numel, 1), values(numel, 2).abs(), values(numel, 3, -12, 30)
        if numel > 20:
            p[1], p[2], p[3] = math.inf, math.nan, -math.inf
            m[4], m[5], v[6], v[7], v[8], v[9] = math.nan, 1e30, math.inf, math.nan, -1.0, -0.0
        results = []
        for backend in (isa, "reference"):
            planes = fresh(fmt, torch.bfloat16, numel, 9)
            native.force(backend)
            kernels.load_(fmt, planes, master=p, exp_avg=m, exp_avg_sq=v)
            state = kernels.read(fmt, planes)
            results.append((planes, {"p": state.master, "m": state.exp_avg, "v": state.exp_avg_sq}))
        assert_same(results[0][0], results[1][0], numel)
        assert_same(results[0][1], results[1][1], numel)


@pytest.mark.parametrize("isa", ISAS)
def test_flushing_denormals_elsewhere_does_not_reach_the_kernels(isa):
    """Another library may have switched a thread to flush denormals; kernels keep them and put the mode back."""
    x = torch.full((300_000,), 1e-42)
    want = x.clone()
    reference.accumulate_(want, x)
    native.force(isa)
    kernels.set_threads(2)
    assert torch.set_flush_denormal(True) or pytest.skip("no flush mode here")
    try:
        acc = torch.full((300_000,), 0.0)
        kernels.accumulate_(acc, x)
        kernels.accumulate_(acc, x)
        assert bool((torch.ones(4) * 1e-42 == 0).all()), "the caller's mode was changed"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(acc, want)


def test_dither_of_the_reference_spans_its_range():
    for step in (1, 2, 1000, 2**40 + 3):
        offset = codecs.dither(step, torch.device("cpu"))
        pairs = ((offset.master, 1 << 8), (offset.exp_avg, 1 << 19), (offset.exp_avg_sq, 1 << 18))
        assert set(offset.tie.tolist()) == {-256, 256}
        for offsets, limit in pairs:
            assert offsets.min() >= 0 and offsets.max() < limit and offsets.unique().numel() > 20
