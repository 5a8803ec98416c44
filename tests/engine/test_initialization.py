"""Models created unit by unit: values, memory, what is kept and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedModelError
from offload.models import Llama, LlamaConfig
from tests.engine.resources import run_anew

TIERS = ("parameters", "optimizer", "gradients")


def config(folder: Path, tier: str = "nvme", **sections: Any) -> dict[str, Any]:
    base = {"device": "cpu", "memory": {"nvme_paths": [str(folder)], "device": "256MiB"}}
    return {**base, "placement": dict.fromkeys(TIERS, tier), **sections}


def values(model: nn.Module, settings: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    with offload.initialize(model, settings, **options) as engine:
        return {name: value.clone() for name, value in engine.named_full_parameters()}


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    with offload.empty_init():
        model = build()
    assert all(p.device.type == "meta" for p in model.parameters())
    assert all(b.device.type != "meta" for b in model.buffers())
    return model


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Mixed(nn.Module):
    """Many kinds of modules, with buffers of both sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16, padding_idx=2)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Bilinear(16, 16, 13)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.encoder(self.recurrent(x)[0])
        return self.head(x, x)


def llama() -> nn.Module:
    return Llama(LlamaConfig(vocab_size=61, hidden_size=24, intermediate_size=40, layers=3, heads=3, max_positions=16))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_every_kind_of_torch_module_is_created_and_trains(swap_folder: Path) -> None:
    model = empty(Mixed)
    assert torch.equal(model.frequencies, torch.arange(4.0))
    with offload.initialize(model, config(swap_folder)) as engine:
        full = {name: value.clone() for name, value in engine.named_full_parameters()}
        assert all(torch.isfinite(value).all() for value in full.values())
        assert not full["embedding.weight"][2].any() and full["embedding.weight"].std() > 0.5
        assert torch.equal(full["norm.weight"], torch.ones(16)) and not full["norm.bias"].any()
        assert 0 < full["recurrent.weight_ih_l0"].abs().max() <= 0.25
        assert torch.equal(model.norm.running_var, torch.ones(16))
        tokens = torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(0))
        losses = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
            losses.append(float(loss.detach()))
            engine.backward(loss)
            assert engine.step().stepped
        assert losses[-1] < losses[0]
        assert model.norm.num_batches_tracked == 3


@pytest.mark.filterwarnings("ignore:the whole model is one unit", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("build", [Mixed, llama], ids=["mixed", "llama"])
def test_values_depend_on_nothing_but_seed_and_name(build: Callable[[], nn.Module], swap_folder: Path) -> None:
    base = values(empty(build), config(swap_folder))
    for settings in (
        config(swap_folder, "host"),
        config(swap_folder, "device"),
        config(swap_folder, device="sim"),
        config(swap_folder, units={"wrap": ["Linear"]}),
        config(swap_folder, swap={"engine": "aiofiles", "chunk": "16KiB", "staging": "256KiB"}),
        config(swap_folder, units={"persistent_below": "512B"}),
    ):
        torch.manual_seed(hash(str(settings)) % 1000)
        assert equal(values(empty(build), settings), base), settings
    other = values(empty(build), config(swap_folder, seed=1))
    assert not equal(other, base)
    assert len({float(v.flatten()[5]) for n, v in base.items() if v.dim() > 1 and v.std() > 0}) > 3


def test_draws_that_are_not_made_on_a_parameter_do_not_depend_on_the_units(swap_folder: Path) -> None:
    """A random tensor drawn in between must not depend on which other parameter had memory at that moment."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.empty(n)) for n in (5, 7, 9))
            self.inner = nn.Linear(3, 3)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.a.copy_(torch.randn(5))
                self.inner.weight.normal_()
                self.inner.weight.data[0] = torch.rand(3)
                noise = torch.randn(7)
                self.b.copy_(noise)
                self.c.data.copy_(torch.randn(9)).mul_(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([Odd(), Odd()])

        def forward(self, x: Tensor) -> Tensor:
            return self.list[1](self.list[0](x))

    together = values(empty(Model), config(swap_folder))
    apart = values(empty(Model), config(swap_folder, units={"wrap": ["Linear"]}))
    persistent = values(empty(Model), config(swap_folder, units={"persistent_below": "24B"}))
    assert equal(together, apart) and equal(together, persistent)
    assert len({round(float(t), 5) for v in together.values() for t in v.flatten()}) == 2 * (5 + 7 + 9 + 9 + 3)


@pytest.mark.filterwarnings("ignore:the whole model is one unit")
def test_ties_survive_the_meta_device(swap_folder: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    model = empty(Tied)
    assert model.head.weight is model.embedding.weight
    # Both initialisers write it, one after the other, as the constructors did.
    full = values(model, config(swap_folder))
    assert list(full) == ["embedding.weight"] and model.head.weight is model.embedding.weight


def test_one_parameter_registered_twice_stays_one_and_its_maker_keeps_the_value() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    with offload.empty_init():
        one, two, three = (nn.Linear(3, 3, bias=False) for _ in range(3))
        one.weight = parameter
        two.weight = parameter
        three.weight = one.weight
    assert one.weight is two.weight is three.weight and one.weight.device.type == "meta"
    assert torch.equal(parameter, torch.ones(3, 3))


def test_global_random_state_is_untouched(swap_folder: Path) -> None:
    torch.manual_seed(5)
    with offload.empty_init():
        model = llama()
    before = torch.random.get_rng_state()
    offload.initialize(model, config(swap_folder)).close()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_buffers_keep_what_the_user_put_there(swap_folder: Path) -> None:
    """reset_parameters of batch norm resets running statistics; loaded ones must stay."""
    model = empty(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model[1].running_mean.fill_(3.0)
    with offload.initialize(model, config(swap_folder)):
        assert torch.equal(model[1].running_mean, torch.full((4,), 3.0))


def test_groups_and_attributes_refer_to_the_same_objects_afterwards(swap_folder: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].weight.tag = "kept"
        model[1].bias.requires_grad_(False)
        return model

    model = empty(build)
    objects = {name: p for name, p in model.named_parameters()}
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias, model[1].weight]}]
    with offload.initialize(model, config(swap_folder), param_groups=groups) as engine:
        assert engine.optimizer.param_groups[0]["params"][0] is model[0].weight
        assert model[0].weight.tag == "kept"
        assert not model[1].bias.requires_grad
        assert all(objects[name] is p for name, p in model.named_parameters())
        before = engine.get_full("1.bias")
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert torch.equal(engine.get_full("1.bias"), before)


def test_dtype_of_parameters_is_kept(swap_folder: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.high = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x).float())

    full = values(empty(Both), config(swap_folder))
    assert full["low.weight"].dtype == torch.bfloat16 and full["high.weight"].dtype == torch.float32
    cast = values(empty(Both), config(swap_folder, precision={"compute_dtype": "bf16"}))
    assert cast["high.weight"].dtype == torch.bfloat16
    assert torch.equal(cast["high.weight"], full["high.weight"].bfloat16())


def test_init_fn_gives_the_values(swap_folder: Path) -> None:
    seen = []

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(module)
            nn.init.constant_(module.weight, 0.25)
            nn.init.uniform_(module.bias, 1, 2)

    model = empty(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))))
    full = values(model, config(swap_folder), init_fn=fill)
    assert torch.equal(full["0.weight"], torch.full((4, 4), 0.25))
    assert (full["1.0.bias"] >= 1).all() and seen
    with pytest.raises(UnsupportedModelError, match=r"1 \(LayerNorm\): parameter weight .*init_fn does not write it"):
        offload.initialize(
            empty(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))), config(swap_folder), init_fn=fill
        )


class Naked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_a_module_without_an_initialiser_is_named(swap_folder: Path) -> None:
    message = r"1\.0 \(Naked\): parameter gain is on the meta device and no reset_parameters\(\).*init_fn"
    with pytest.raises(UnsupportedModelError, match=message):
        offload.initialize(empty(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Naked()))), config(swap_folder))
    assert values(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Naked())), config(swap_folder))["1.0.gain"].sum() == 4


def test_an_initialiser_that_fails_is_named(swap_folder: Path) -> None:
    class Failing(Naked):
        def reset_parameters(self) -> None:
            raise KeyError("no such table")

    with pytest.raises(UnsupportedModelError, match=r"1 \(Failing\): its initialiser failed: 'no such table'"):
        offload.initialize(empty(lambda: nn.Sequential(nn.Linear(4, 4), Failing())), config(swap_folder))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: nn.init.normal_(w, 0, 0.02),
        lambda w: w.data.normal_(0, 0.02),
        lambda w: w.data.__setitem__(0, 1.0),
        lambda w: w.data[1:].zero_(),
        lambda w: w.detach().mul_(0.5),
        lambda w: w.data.__imul__(0.5),
    ],
    ids=["init", "data", "setitem", "view", "detach", "imul"],
)
def test_values_written_by_a_parent_are_refused_by_name(write: Callable[[Any], Any], swap_folder: Path) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            write(self.second.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    message = r"second \(Linear\): parameter weight was initialised outside reset_parameters\(\)"
    with pytest.raises(UnsupportedModelError, match=message):
        offload.initialize(empty(Parent), config(swap_folder))
    offload.initialize(empty(Parent), config(swap_folder), init_fn=_by_reset).close()


def _by_reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_lazy_and_foreign_parameters_are_refused_by_name(swap_folder: Path) -> None:
    with offload.empty_init():
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(UnsupportedModelError, match=r"parameter 1\.weight is a UninitializedParameter"):
        offload.initialize(model, config(swap_folder))


def test_buffers_on_the_meta_device_are_refused_by_name(swap_folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UnsupportedModelError, match=r"1 \(BatchNorm1d\): buffer running_mean is on the meta device"):
        offload.initialize(model, config(swap_folder))


def test_a_model_made_under_torch_device_meta_works_if_it_has_no_buffers(swap_folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twin = empty(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert equal(values(model, config(swap_folder)), values(twin, config(swap_folder)))


def test_partly_real_models_keep_what_is_real(swap_folder: Path) -> None:
    loaded = nn.Linear(4, 4)
    expected = loaded.weight.detach().clone()
    with offload.empty_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.append(loaded)
    full = values(model, config(swap_folder))
    assert torch.equal(full["2.weight"], expected)
    assert torch.equal(full["1.weight"], torch.ones(4))
    alone = values(empty(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), config(swap_folder))
    assert torch.equal(full["0.weight"], alone["0.weight"])


def test_the_context_nests_and_ends_with_exceptions() -> None:
    original = nn.Module.register_parameter
    with offload.empty_init():
        with offload.empty_init():
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    assert inner.weight.device.type == after.weight.device.type == "meta"
    with pytest.raises(RuntimeError, match="stop"), offload.empty_init():
        raise RuntimeError("stop")
    assert nn.Module.register_parameter is original
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_other_threads_are_not_affected() -> None:
    inside, done = threading.Event(), threading.Event()
    devices: list[str] = []

    def other() -> None:
        inside.wait(10)
        devices.append(nn.Linear(2, 2).weight.device.type)
        with offload.empty_init():
            devices.append(nn.Linear(2, 2).weight.device.type)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with offload.empty_init():
        inside.set()
        assert done.wait(10)
        devices.append(nn.Linear(2, 2).weight.device.type)
    thread.join()
    assert devices == ["cpu", "meta", "meta"]
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_transformers_models_are_created_from_their_config(swap_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    builders: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=24, num_key_value_heads=2)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        ),
    }
    for name, build in builders.items():
        model = empty(build)
        full = values(model, config(swap_folder))
        matrices = {n: v for n, v in full.items() if v.dim() > 1 and "c_proj" not in n}
        assert all(0.015 < float(v.std()) < 0.025 for v in matrices.values()), name
        if name == "gpt2":
            assert "lm_head.weight" not in full, "tied"
            projection = full["transformer.h.0.mlp.c_proj.weight"]  # the model scales it by 1 / sqrt(2 layers)
            assert 0.007 < float(projection.std()) < 0.013
        model = empty(build)
        with offload.initialize(model, config(swap_folder)) as engine:
            tokens = torch.arange(12).view(2, 6)
            loss = engine(input_ids=tokens, labels=tokens).loss
            assert 3.9 < float(loss.detach()) < 4.4  # log(61) = 4.11
            engine.backward(loss)
            assert engine.step().stepped
        finer = {"llama": "LlamaMLP", "gpt2": "LayerNorm"}[name]
        assert equal(values(empty(build), config(swap_folder, "host", units={"wrap": [finer]})), full)


MEMORY_SCRIPT = """
    import sys, threading, time
    import psutil, torch
    from torch import nn
    import offload

    def rss():
        return psutil.Process().memory_info().rss

    WIDTH, BLOCKS = 2560, 8  # 26.2 MB a block, 210 MB in all

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        def forward(self, x):
            return x

    torch.set_num_threads(1)
    warm = nn.Linear(8, 8)
    settings = {
        "device": "cpu",
        "memory": {"nvme_paths": [sys.argv[1]]},
        "placement": dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme"),
        "swap": {"staging": "4MiB"},
    }
    offload.initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), settings).close()

    def measure(model, before):
        built, peak, stop = rss(), [0], threading.Event()

        def watch():
            while not stop.wait(0.002):
                peak[0] = max(peak[0], rss())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        engine = offload.initialize(model, settings)
        stop.set()
        thread.join()
        after = rss()
        engine.close()
        print(built - before, peak[0] - before, after - before)

    before = rss()
    with offload.empty_init():
        model = Model()
    measure(model, before)
    del model
    before = rss()
    measure(Model(), before)
"""


def test_memory_while_a_model_is_taken_over(swap_folder: Path) -> None:
    """210 MB of weights in 8 units on nvme: one unit at a time under `empty_init`; a real model is given up."""
    ran = run_anew(MEMORY_SCRIPT, str(swap_folder), timeout=110)
    assert ran.returncode == 0, ran.stderr
    (built, peak, after), (real_built, real_peak, real_after) = (
        map(int, line.split()) for line in ran.stdout.splitlines()
    )
    unit = 2560 * 2560 * 4
    assert built < unit and peak < 3 * unit and after < 2 * unit, (built, peak, after)
    assert real_built > 7 * unit and real_peak < 11 * unit and real_after < 2 * unit, ran.stdout


def test_the_memory_of_a_model_built_normally_is_given_up(swap_folder: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    freed: list[str] = []
    for name, parameter in model.named_parameters():
        weakref.finalize(parameter.untyped_storage(), freed.append, name)
    with offload.initialize(model, config(swap_folder)):
        gc.collect()
        assert sorted(freed) == ["0.bias", "0.weight", "1.bias", "1.weight"]
