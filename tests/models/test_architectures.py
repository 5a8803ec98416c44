"""Architectures of `transformers`, adapters of PEFT and compiled blocks against plain PyTorch.

`offload bench models` compares with `torch.equal`: losses, generated tokens and weights. The twin's optimizer is
`CPUAdamW`, which does the same arithmetic; that this is torch's AdamW within 1e-6 is tested for every model of these
tests and in `tests/optimizer_cpu`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.bench import architectures as table
from offload.randomness import seed_everything
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


def micro_batches(name: str) -> list[dict[str, Any]]:
    """Two micro-batches of keyword arguments."""
    if name == "ViT":
        pixels = torch.linspace(-1, 1, 4 * 3 * 16 * 16).view(2, 2, 3, 16, 16)
        return [{"pixel_values": pixels[k], "labels": torch.tensor([k, 1])} for k in range(2)]
    ids = [table.IDS, table.IDS.flip(1)]
    return [{"input_ids": x} if name == "BERT" else {"input_ids": x, "labels": x} for x in ids]


def loss_of(outputs: Any, _batch: Any) -> Any:
    return outputs.last_hidden_state.square().mean() if getattr(outputs, "loss", None) is None else outputs.loss


@pytest.mark.parametrize(("name", "case"), cover(NAMES))
def test_micro_batches_unit_by_unit(name: str, case: Case, swap_folder: Path) -> None:
    if "LoRA" in name:
        pytest.importorskip("peft")
    torch.manual_seed(0)
    model = table.ARCHITECTURES[name][1]().train()
    with duo(model, case, swap_folder, schedule={"micro_batch_order": "layer_major"}) as pair:
        for step in range(2):
            result = pair.engine.train_batch(micro_batches(name), loss_of)
            total = 0.0
            for index, batch in enumerate(micro_batches(name)):
                seed_everything(pair.engine.config.seed, step, index)
                loss = (
                    loss_of(pair.plain(**batch, **({} if name in ("ViT", "BERT") else {"use_cache": False})), batch) / 2
                )
                pair.reference.backward(loss)
                total += float(loss.detach())
            pair.reference.step()
            assert result.stepped and result.loss == total
            pair.states_equal()
            pair.nothing_resident()


@ordinarily(2, 4)
def test_adapters_are_merged_and_taken_out(case: Case, swap_folder: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)

    def logits(model: Any) -> Any:
        return model(input_ids=table.IDS).logits.detach()

    with duo(table.lora(), case, swap_folder) as pair:
        pair.train(table.loss_of, steps=1)
        for change in ("merge_adapter", "unmerge_adapter"):
            with pair.engine.gathered(modify=True):
                getattr(pair.offloaded, change)()
            getattr(pair.plain, change)()
            pair.both(logits)
        pair.train(table.loss_of, steps=1)
        with pair.engine.gathered(modify=True):
            ours = pair.offloaded.merge_and_unload()
        theirs = pair.plain.merge_and_unload()
        assert pair.engine.adopt() == []
        assert torch.equal(logits(ours), logits(theirs))


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
