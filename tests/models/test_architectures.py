"""Architectures of `transformers`, adapters of PEFT and compiled blocks against plain PyTorch.

`offload bench models` compares with `torch.equal`: losses, generated tokens and weights. The twin's optimizer is
`CPUAdamW`, which does the same arithmetic; that this is torch's AdamW within 1e-6 is tested for every model of these
tests and in `tests/optimizer_cpu`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from offload.bench import architectures as table
from tests.engine.common import Case
from tests.models.common import PLACES, cover, duo, ordinarily

pytest.importorskip("transformers")

NAMES = list(table.ARCHITECTURES)


def run(name: str, mode: str, case: Case, folder: Path) -> None:
    if "LoRA" in name:
        pytest.importorskip("peft")
    table.compare(table.ARCHITECTURES[name][1], mode, case.device, case.parameters, folder)


@pytest.mark.parametrize(("name", "case"), cover(NAMES))
def test_training_and_generation(name: str, case: Case, swap_folder: Path) -> None:
    run(name, "train", case, swap_folder)


@pytest.mark.parametrize(("name", "case"), cover(NAMES[::-1]))
def test_gradient_checkpointing(name: str, case: Case, swap_folder: Path) -> None:
    run(name, "checkpointing", case, swap_folder)


@pytest.fixture
def compiler() -> None:
    """The compiler's first use starts threads that stay; the check for threads that are left must not count them."""
    torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))
    assert threading.active_count() > 0


COMPILED = [
    pytest.param(
        name,
        case,
        marks=() if (name, case) in [("Llama", PLACES[5]), ("ViT", PLACES[2])] else (pytest.mark.acceptance,),
        id=f"{name}-{case.device}-{case.parameters}",
    )
    for name in NAMES
    for case in PLACES
]


@pytest.mark.parametrize(("name", "case"), COMPILED)
def test_compiled_blocks(compiler: None, name: str, case: Case, swap_folder: Path) -> None:
    run(name, "compiled blocks", case, swap_folder)


@ordinarily(2, 4)
def test_adapters_attached_later(case: Case, swap_folder: Path) -> None:
    """PEFT wraps modules of a model that is in training already: the engine takes the adapters over."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = table.text("Llama")
    model.requires_grad_(False)
    with duo(model, case, swap_folder) as pair:
        made = []
        for module in (pair.offloaded, pair.plain):
            torch.manual_seed(3)
            made.append(peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), module))
        pair.engine.adopt()
        pair.reference.add_group({"params": [p for p in pair.plain.parameters() if p.requires_grad]})
        assert pair.reference.steps and all("lora" in name for name in pair.reference.steps)
        pair.train(table.loss_of, steps=3)
        frozen = dict(pair.engine.named_full_states())["model.layers.0.self_attn.q_proj.base_layer.weight"]
        assert set(frozen) == {"parameter"}


def test_the_table_of_the_documentation_is_complete() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name in NAMES:
        for mode in table.MODES:
            assert any(line.startswith(f"| {name} |") and f"| {mode} |" in line for line in text.splitlines())
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert all(line.count("equal") == 6 for line in rows if line.split("|")[1].strip() in NAMES)
