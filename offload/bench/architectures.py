"""Trains small models of many architectures with and without offload and compares every bit: docs/models.md.

Needs `transformers`, and `peft` for the adapters. A cell says that weights, losses and answers were equal to those of
the same model trained by plain PyTorch with `optimizer_cpu.CPUAdamW`.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from optimizer_cpu import CPUAdamW

BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
PLACES = [(device, tier) for tier in ("device", "host", "nvme") for device in ("cpu", "sim")]
TEXT = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
WIDE = {**TEXT, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(1, 128, (2, 10), generator=torch.Generator().manual_seed(1))


def _library(name: str) -> Any:
    return importlib.import_module(name)


def text(kind: str, **changes: Any) -> Any:
    """A causal language model of a family of `transformers`."""
    transformers = _library("transformers")
    config = getattr(transformers, f"{kind}Config")(**{**WIDE, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gpt2() -> Any:
    transformers = _library("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    transformers = _library("transformers")
    return transformers.BertModel(transformers.BertConfig(**TEXT, intermediate_size=48))


def vit() -> Any:
    transformers = _library("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))


def lora() -> Any:
    peft = _library("peft")
    return peft.get_peft_model(text("Llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
ARCHITECTURES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "GPT-2": ("tied head, Conv1D", gpt2),
    "Llama": ("grouped-query attention", lambda: text("Llama")),
    "Qwen2": ("tied head, large vocabulary", lambda: text("Qwen2", vocab_size=4096, tie_word_embeddings=True)),
    "Qwen3-MoE": ("fused experts", lambda: text("Qwen3Moe", **EXPERTS)),
    "Mixtral": ("fused experts, router loss", lambda: text("Mixtral", num_local_experts=4, output_router_logits=True)),
    "Gemma": ("tied and scaled embedding", lambda: text("Gemma", head_dim=8)),
    "BERT": ("unused pooler", bert),
    "ViT": ("bare parameters, convolution", vit),
    "Llama + LoRA": ("adapters of PEFT on a frozen base", lora),
}


def loss_of(model: Any) -> Any:
    """A loss that fits the model; of BERT without the pooler."""
    name = type(getattr(model, "config", None)).__name__
    if name == "ViTConfig":
        pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
        return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    if name == "BertConfig":
        return model(input_ids=IDS).last_hidden_state.square().mean()
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def answer_of(model: Any) -> Any:
    """What the model says in evaluation: 8 generated tokens, or its output."""
    with torch.no_grad():
        if hasattr(model, "generate") and getattr(model, "can_generate", lambda: True)():
            return model.generate(input_ids=IDS[:, :4], max_new_tokens=8, do_sample=False)
        return loss_of(model)


def compile_blocks(model: nn.Module) -> None:
    for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        block.forward = torch.compile(block.forward, backend="aot_eager")


def checkpoint_blocks(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


MODES: dict[str, Callable[[nn.Module], None]] = {
    "train": lambda model: None,
    "checkpointing": checkpoint_blocks,
    "compiled blocks": compile_blocks,
}


def compare(build: Callable[[], nn.Module], mode: str, device: str, tier: str, folder: Path, steps: int = 2) -> None:
    """Trains both models and raises AssertionError where a loss, an answer or a weight differs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = build()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(plain)
    for each in (plain, model):
        MODES[mode](each)
    optimizer = CPUAdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    config = {
        "device": device,
        "memory": {"nvme_paths": [str(folder)]},
        "placement": {"parameters": tier, "gradients": tier, "optimizer": tier},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    }
    with offload.initialize(model, config) as engine:
        for _ in range(steps):
            losses = [loss_of(plain.train()), loss_of(model.train())]
            assert torch.equal(losses[0], losses[1].cpu()), "losses differ"
            losses[0].backward()
            engine.backward(losses[1])
            optimizer.step()
            engine.step()
            optimizer.zero_grad()
        # Generation grows its cache at every token: compiled blocks would only be compiled anew.
        answer = loss_of if mode == "compiled blocks" else answer_of
        assert torch.equal(answer(plain.eval()), answer(model.eval()).cpu()), "answers differ"
        twins = dict(plain.named_parameters())
        for name, value in engine.named_full_parameters():
            assert torch.equal(value, twins[name]), f"{name}: weights differ"


def run(say: Callable[[str], None], *, modes: Sequence[str] = tuple(MODES), write: Path | None = None) -> str:
    """The table in Markdown, which also replaces the one in `write`, between its two comment lines.

    Raises:
        ValueError: `write` has no such lines.
    """
    before = "" if write is None else write.read_text()
    if write is not None and (BEGIN not in before or END not in before):
        raise ValueError(f"{write}: no lines {BEGIN} and {END} to put the table between")
    lines = ["| model | | mode | " + " | ".join(f"{tier}, {device}" for device, tier in PLACES) + " |"]
    lines.append("|---" * (3 + len(PLACES)) + "|")
    with tempfile.TemporaryDirectory(prefix="offload-models-") as folder:
        for name, (what, build) in ARCHITECTURES.items():
            for mode in modes:
                cells = []
                for device, tier in PLACES:
                    try:
                        compare(build, mode, device, tier, Path(folder))
                        cells.append("equal")
                    except Exception as error:
                        cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
                    say(f"{name}, {mode}, {tier}, {device}: {cells[-1]}")
                lines.append(f"| {name} | {what} | {mode} | " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    if write is not None:
        write.write_text(f"{before.split(BEGIN)[0]}{BEGIN}\n{table}\n{END}{before.split(END)[1]}")
    return table
