"""How models are cut into units."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.units import UnitSpec, split_units

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class OtherBlock(Block):
    pass


class Decoder(nn.Module):
    def __init__(self, blocks: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


def by_name(units: list[UnitSpec]) -> dict[str, UnitSpec]:
    return {unit.name: unit for unit in units}


def check(model: nn.Module, units: list[UnitSpec]) -> None:
    """Every parameter once, under its first name; indices in order; borrows point at the owner."""
    owned = [(name, p) for unit in units for name, p in unit.parameters]
    assert sorted(name for name, _ in owned) == sorted(name for name, _ in model.named_parameters())
    assert [unit.index for unit in units] == list(range(len(units)))
    assert len({id(unit.root) for unit in units}) == len(units)
    owners = {id(p): unit.index for unit in units for _, p in unit.parameters}
    for unit in units:
        below = {owners[id(p)] for p in unit.root.parameters()}
        assert set(unit.borrows) <= below - {unit.index}


def test_blocks_of_a_module_list_and_what_lies_around_them() -> None:
    model = Decoder()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert [unit.kind for unit in units] == ["rest", "block", "block", "block", "rest", "rest"]
    assert [name for name, _ in units[1].parameters] == [
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.0.linear.weight",
        "blocks.0.linear.bias",
    ]


def test_blocks_of_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(Block(), nn.ReLU(), Block()), nn.Linear(WIDTH, 4))
    units = split_units(model)
    check(model, units)
    assert names(units) == ["0", "1.0", "1.2", "2"]


def test_encoder_and_decoder_lists() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(5, WIDTH)
            self.encoder = nn.ModuleList([Block(), Block()])
            self.decoder = nn.ModuleList([OtherBlock(), OtherBlock(), OtherBlock()])
            self.head = nn.Linear(WIDTH, 5)

    model = Both()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["shared", *(f"encoder.{i}" for i in range(2)), *(f"decoder.{i}" for i in range(3)), "head"]


def test_a_list_with_a_few_special_layers_is_split_between_all_layers() -> None:
    """As in mixtures of experts whose first layer is dense: the experts within are not taken for the blocks."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Mixture(), Mixture()])
            self.head = nn.Linear(WIDTH, 4)

    model = Model()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["layers.0", "layers.1", "layers.2", "head"]


def test_experts_inside_a_block_stay_with_it() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x)

    model = nn.Sequential(nn.Linear(4, WIDTH), nn.ModuleList([Expert(), Expert()]))
    units = split_units(model)
    check(model, units)
    assert names(units) == ["0", "1.0", "1.1"]
    assert len(units[1].parameters) == 16


def test_lists_of_lists_are_split_at_what_is_called() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), Block()]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.layers:
                x = second(first(x))
            return x

    model = Pairs()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_no_unit_is_rooted_at_a_module_that_nobody_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 3, bias=False)})
            self.scales = nn.ParameterList([torch.ones(3), torch.ones(4)])
            self.mixed = nn.ModuleList([nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = Model()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["blocks.0", "blocks.1", "heads.a", "heads.b", "(root)", "mixed.0", "mixed.1"]
    root = by_name(units)["(root)"]
    assert root.kind == "container" and [name for name, _ in root.parameters] == ["scales.0", "scales.1"]


def test_class_names_given_by_the_user() -> None:
    model = Decoder()
    units = split_units(model, ["LayerNorm", "Linear"])
    check(model, units)
    assert "blocks.1.norm" in names(units) and "blocks.1.linear" in names(units)
    assert names(split_units(Decoder(), "Block")) == names(split_units(Decoder()))


def test_nested_classes_given_by_the_user_are_nested_units() -> None:
    model = Decoder()
    units = by_name(split_units(model, ["Block", "LayerNorm"]))
    check(model, list(units.values()))
    assert [name for name, _ in units["blocks.0"].parameters] == ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    assert len(units["blocks.0.norm"].parameters) == 2


def test_a_wrong_class_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"units\.wrap: no module of class Blok .* in Decoder; did you mean Block\?"):
        split_units(Decoder(), ["Blok"])
    with pytest.raises(ValueError, match=r"no module of class Zebra .*classes in the model: Block, Embedding, Layer"):
        split_units(Decoder(), ["Zebra"])
    with pytest.raises(ValueError, match="Decoder"):  # the model itself is no part of itself
        split_units(Decoder(), ["Decoder"])


def test_a_tied_parameter_belongs_to_its_first_unit_and_is_borrowed_by_the_other() -> None:
    model = Decoder(tied=True)
    units = by_name(split_units(model))
    check(model, list(units.values()))
    assert [name for name, _ in units["embedding"].parameters] == ["embedding.weight"]
    assert units["head"].parameters == [] and units["head"].borrows == [units["embedding"].index]
    assert units["norm"].borrows == []


def test_a_parameter_tied_within_a_unit_is_there_once() -> None:
    model = Decoder()
    model.blocks[0].extra = model.blocks[0].linear.weight
    units = by_name(split_units(model))
    assert [name for name, _ in units["blocks.0"].parameters].count("blocks.0.extra") == 1
    assert len(units["blocks.0"].parameters) == 4 and units["blocks.0"].borrows == []


def test_parameters_of_containers_are_units_of_their_own() -> None:
    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.ones(5))
            self.body = Container()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Model()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["(root)", "body", "body.blocks.0", "body.blocks.1"]
    assert [unit.kind for unit in units] == ["container", "container", "block", "block"]


def test_a_module_shared_by_two_units_is_borrowed_by_the_second() -> None:
    model = Decoder()
    model.blocks[2].norm = model.blocks[0].norm
    units = by_name(split_units(model))
    check(model, list(units.values()))
    assert "blocks.0.norm.weight" in dict(units["blocks.0"].parameters)
    assert units["blocks.2"].borrows == [units["blocks.0"].index]


def test_one_block_instance_in_two_places_is_one_unit() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block()
            self.first = nn.ModuleList([shared, Block()])
            self.second = nn.ModuleList([shared, Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in (*self.first, *self.second):
                x = block(x)
            return x

    model = Twice()
    units = split_units(model)
    check(model, units)
    assert names(units) == ["first.0", "first.1", "second.1"]


def test_models_without_blocks_become_one_unit_per_child() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(2, 3, 1)
            self.norm = nn.BatchNorm1d(3)
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(split_units(Plain())) == ["convolution", "norm", "linear"]


@pytest.mark.parametrize("depth", [1, 4])
def test_wrappers_around_the_model_change_nothing_but_names(depth: int) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    model: nn.Module = Decoder()
    for _ in range(depth):
        model = Wrapper(model)
    prefix = "inner." * depth
    units = split_units(model)
    check(model, units)
    assert names(units) == [prefix + name for name in names(split_units(Decoder()))]


def test_a_model_that_is_one_unit_is_named_with_the_remedy() -> None:
    with pytest.warns(UserWarning, match=r"the whole model is one unit \(\(root\), 72 parameters\).*units\.wrap"):
        units = split_units(nn.Linear(WIDTH, WIDTH))
    assert names(units) == ["(root)"]
    with pytest.warns(UserWarning, match="the whole model is one unit"):
        split_units(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))


def test_no_parameters_no_units() -> None:
    assert split_units(nn.ReLU()) == []
    assert split_units(nn.Sequential(nn.ReLU(), nn.Sequential())) == []


class Hinted(Decoder):
    _no_split_modules = ("Linear",)


def test_the_hint_of_the_model_wins_also_below_a_wrapper() -> None:
    units = split_units(nn.Sequential(Hinted()))
    assert "0.blocks.0.linear" in names(units)
    model = Hinted()
    model._no_split_modules = ("Nothing",)  # type: ignore[assignment]
    assert names(split_units(model)) == names(split_units(Decoder()))


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 31}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**small, intermediate_size=24, num_hidden_layers=3, num_key_value_heads=2)
    )
    units = split_units(llama)
    check(llama, units)
    assert names(units) == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "lm_head",
    ]
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=31))
    units = split_units(gpt2)
    check(gpt2, units)
    assert [unit.name for unit in units if unit.kind == "block"] == ["transformer.h.0", "transformer.h.1"]
    assert by_name(units)["lm_head"].borrows == [by_name(units)["transformer.wte"].index]
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **small, intermediate_size=24, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=3
        )
    )
    units = split_units(mixtral)
    check(mixtral, units)
    assert [unit.name for unit in units if unit.kind == "block"] == ["model.layers.0", "model.layers.1"]
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=31)
    )
    units = split_units(t5)
    check(t5, units)
    assert len([unit for unit in units if unit.kind == "block"]) == 4


def test_a_unit_larger_than_the_device_budget_is_named(swap_folder: Path) -> None:
    config = {
        "device": "cpu",
        "memory": {"device": "48KiB", "nvme_paths": [str(swap_folder)]},
        "placement": {"parameters": "host", "optimizer": "host", "gradients": "host"},
    }
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(Block(), Block()))
    with pytest.warns(UserWarning, match=r"unit 0 holds 80 KiB .* than memory\.device = 48 KiB.*units\.wrap"):
        offload.initialize(model, config).close()
    config["placement"]["parameters"] = "nvme"  # type: ignore[index]
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(Block(), Block()))
    said = r"exceeds memory\.device by 32 KiB.*smaller units \(units\.wrap\).*the largest unit, 0, holds 80 KiB"
    with pytest.raises(offload.PlanError, match=said):
        offload.initialize(model, config)


def test_units_as_split_train_like_the_model_itself(swap_folder: Path) -> None:
    """Shared modules, lists of lists and parameters of containers, on nvme, against plain torch."""

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.ParameterList([torch.ones(WIDTH)])
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), Block()]) for _ in range(2))
            self.layers[1][1].norm = self.layers[0][1].norm
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 3)})

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.layers:
                x = second(first(x)) * self.scale[0]
            return self.heads["a"](x)

    torch.manual_seed(0)
    model = Everything()
    twin = Everything()
    twin.load_state_dict(model.state_dict())
    twin.layers[1][1].norm = twin.layers[0][1].norm
    tiers = dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")
    config = {"device": "cpu", "memory": {"nvme_paths": [str(swap_folder)]}, "placement": tiers}
    with offload.initialize(model, config) as engine:
        x = torch.randn(5, WIDTH)
        engine.backward(engine(x).square().sum())
        twin(x).square().sum().backward()
        for name, parameter in twin.named_parameters():
            gradient = engine.get_full(name, "grad")
            assert gradient is not None and torch.equal(gradient, parameter.grad), name
        assert engine.step().stepped and engine.resident_units() == []
