"""Choice of the instruction set, and every way in which the extension can be unusable."""

import os
import warnings

import pytest
import torch

from optimizer_cpu import kernels, native, threads
from tests import programs

try:
    ISAS = native._import().supported_isas()
except ImportError:
    ISAS = []
needs_native = pytest.mark.skipif(not ISAS, reason="native kernels are not built")


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    yield
    monkeypatch.undo()
    if ISAS:
        native.force(None)
    kernels.set_threads(None)


def test_choice():
    compiled, supported = ["avx512", "avx2", "scalar"], ["avx2", "scalar"]
    assert native.choose_isa(None, compiled, supported) == "avx2"
    assert native.choose_isa("auto", compiled, supported) == "avx2"
    assert native.choose_isa("scalar", compiled, supported) == "scalar"
    with pytest.raises(ValueError, match="=avx512: this processor does not support it; usable here: auto, avx2"):
        native.choose_isa("avx512", compiled, supported)
    with pytest.raises(ValueError, match="OFFLOAD_ISA=sse9 is not a known instruction set"):
        native.choose_isa("sse9", compiled, supported)


@needs_native
def test_the_extension_refuses_what_it_cannot_run():
    module = native._import()
    with pytest.raises(ValueError, match="'neon9' is not supported here"):
        module.stream("neon9", 0, 1.0, 0, 1)
    with pytest.raises(ValueError, match="unknown code of gradient dtype"):
        module.accumulate(ISAS[0], 7, 0, 0, 0, 1)


def run_python(code, **env):
    """In a process that has loaded no kernels."""
    return programs.run("-c", code, env={**os.environ, **env})


def test_forced_unknown_isa_is_one_clear_error():
    result = run_python("from optimizer_cpu import kernels; kernels.active_isa()", OFFLOAD_ISA="avx1024")
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("ValueError: OFFLOAD_ISA=avx1024")


def test_forced_isas_work_in_a_fresh_process():
    for isa in [*ISAS[-1:], "reference"]:
        result = run_python("from optimizer_cpu import kernels; print(kernels.active_isa())", OFFLOAD_ISA=isa)
        assert result.stdout.strip() == isa and result.stderr == ""


def break_import(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(native, "_import", fail)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ModuleNotFoundError("no", name="optimizer_cpu._native"), "they were not built"),
        (ImportError("/x/_native.so: undefined symbol: _Z3foo"), "undefined symbol: _Z3foo"),
        (ModuleNotFoundError("No module named 'other'", name="other"), "No module named 'other'"),
    ],
)
def test_missing_or_broken_extension_warns_once_and_the_reference_serves(monkeypatch, error, cause):
    break_import(monkeypatch, error)
    monkeypatch.setattr(native, "_loaded", False)
    monkeypatch.setattr(native, "_backend", None)
    monkeypatch.delenv("OFFLOAD_ISA", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.active_isa() == "reference"
        acc = torch.zeros(5)
        kernels.accumulate_(acc, torch.ones(5))
        assert kernels.square_sums(acc).item() == 5.0
    assert len(caught) == 1 and cause in str(caught[0].message)
    with pytest.raises(ValueError, match="OFFLOAD_ISA=avx2, but the native kernels cannot be loaded"):
        native.load("avx2")


@needs_native
def test_an_extension_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(native, "INTERFACE", 10_000)
    with pytest.warns(RuntimeWarning, match=r"has interface \d+, these sources need 10000: reinstall"):
        assert native.load(None) is None


@needs_native
def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    right = native.Backend.step

    def wrong(self, state_format, **planes):
        right(self, state_format, **planes)
        planes["master"].add_(1.0)

    monkeypatch.setattr(native.Backend, "step", wrong)
    with pytest.warns(RuntimeWarning, match="do not reproduce the reference"):
        assert native.load(None) is None
    with pytest.raises(RuntimeError, match="do not reproduce the reference"):
        native.load(ISAS[0])


def test_wrong_tensors_never_reach_the_kernels():
    def planes(**changes):
        base = {
            "weight": torch.zeros(40, dtype=torch.bfloat16),
            "remainder": torch.zeros(40, dtype=torch.int8),
            "exp_avg": torch.zeros(40, dtype=torch.int8),
            "exp_avg_sq": torch.zeros(40, dtype=torch.uint8),
            "exp_avg_scale": torch.zeros(2, dtype=torch.bfloat16),
            "exp_avg_sq_scale": torch.zeros(2, dtype=torch.bfloat16),
        }
        return {**base, **changes}

    hyper = kernels.AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)
    kernels.step_("compact", planes(), grad=torch.zeros(40), hyper=hyper)
    cases = [
        ({"exp_avg": torch.zeros(40)}, "exp_avg has dtype float32; expected int8"),
        ({"remainder": torch.zeros(80, dtype=torch.int8)[::2]}, "remainder is not contiguous"),
        ({"exp_avg_scale": torch.zeros(3, dtype=torch.bfloat16)}, "exp_avg_scale has 3 elements .* needs 2"),
        ({"exp_avg_sq": torch.zeros(39, dtype=torch.uint8)}, "exp_avg_sq has 39 elements; expected 40"),
        ({"weight": torch.zeros(40, dtype=torch.float16)}, "'compact' cannot hold float16 weights"),
        ({"more": torch.zeros(1)}, "needs planes"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            kernels.step_("compact", planes(**changes), grad=torch.zeros(40), hyper=hyper)
    with pytest.raises(ValueError, match="grad has dtype int64"):
        kernels.step_("compact", planes(), grad=torch.zeros(40, dtype=torch.int64), hyper=hyper)
    with pytest.raises(ValueError, match="master has 39 elements"):
        kernels.load_("compact", planes(), master=torch.zeros(39))


def test_threads(monkeypatch, tmp_path):
    monkeypatch.delenv("OFFLOAD_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: None)
    assert threads.default_threads() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert threads.default_threads() == 3
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: 6.5)
    assert threads.default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert threads.default_threads() == 1
    monkeypatch.setenv("OFFLOAD_THREADS", "5")
    assert threads.default_threads() == 5
    monkeypatch.setenv("OFFLOAD_THREADS", "many")
    with pytest.raises(ValueError, match="OFFLOAD_THREADS='many' must be a whole number"):
        threads.default_threads()
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        kernels.set_threads(0)


def test_cgroup_quotas(tmp_path):
    root, entry = tmp_path / "fs", tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    entry.write_text("0::/a/b\n")
    assert threads.cgroup_cpus(root, entry) is None
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert threads.cgroup_cpus(root, entry) == 2.5
    v1 = root / "cpu" / "c"
    v1.mkdir(parents=True)
    (v1 / "cpu.cfs_quota_us").write_text("150000\n")
    (v1 / "cpu.cfs_period_us").write_text("100000\n")
    entry.write_text("7:cpu,cpuacct:/c\n3:memory:/c\n")
    assert threads.cgroup_cpus(root, entry) == 1.5
    assert threads.cgroup_cpus(root, tmp_path / "absent") is None


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_kernels_work_in_a_forked_child():
    code = """
        import os, torch
        from optimizer_cpu import kernels
        kernels.set_threads(4)
        x = torch.ones(400_000)
        assert kernels.square_sums(x).sum() == 400_000
        child = os.fork()
        if child == 0:
            os._exit(0 if kernels.square_sums(x).sum().item() == 400_000 else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
