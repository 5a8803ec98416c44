"""Step time and peak memory on a 438M-parameter Llama of `transformers`: batch 1 x 256 tokens, bf16, clip 1.0.

    python examples/llama_438m.py offload --swap DIR     # parameters, gradients and optimizer states in swap files
    python examples/llama_438m.py plain                  # in memory: plain PyTorch, fused AdamW on fp32 masters

Run both in one sitting and compare the last lines. Needs the `hf` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import offload

VOCABULARY, LR, WEIGHT_DECAY, CLIP = 32000, 1e-3, 0.01, 1.0
MODEL = LlamaConfig(
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    vocab_size=VOCABULARY,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
Step = Callable[[torch.Tensor], float]


def plain() -> tuple[Step, Callable[[], None]]:
    """bf16 model, fp32 masters, the copies between them."""
    model = LlamaForCausalLM(MODEL).bfloat16()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = None
        return loss.item()

    return step, lambda: None


def offloaded(swap: str, state_format: str) -> tuple[Step, Callable[[], None]]:
    """Everything on nvme."""
    with offload.empty_init():
        model = LlamaForCausalLM(MODEL)
    engine = offload.initialize(
        model,
        {
            "device": "cpu",
            "memory": {"nvme_paths": [swap]},
            "placement": dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme"),
            "precision": {"compute_dtype": "bf16"},
            "optimizer": {
                "lr": LR,
                "weight_decay": WEIGHT_DECAY,
                "max_grad_norm": CLIP,
                "state_format": state_format,
            },
        },
    )
    print(engine.describe())

    parameters, before = sum(p.numel() for p in model.parameters()), engine.counters()

    def step(tokens: torch.Tensor) -> float:
        nonlocal before
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        now = engine.counters()
        read, written = ((now[k] - before[k]) / parameters for k in ("nvme_read_bytes", "nvme_write_bytes"))
        before = now
        print(f"disk: {read:.1f} bytes a parameter read, {written:.1f} written")
        return float(loss.detach())

    return step, engine.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["offload", "plain"])
    parser.add_argument("--swap", default=".", help="folder for the swap file")
    parser.add_argument("--state-format", default="fp32", choices=["fp32", "split", "compact"])
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    step, close = plain() if arguments.system == "plain" else offloaded(arguments.swap, arguments.state_format)
    generator, seconds = torch.Generator().manual_seed(1), []
    for index in range(arguments.steps):
        tokens = torch.randint(0, VOCABULARY, (1, 256), generator=generator)
        start = time.perf_counter()
        loss = step(tokens)
        seconds.append(time.perf_counter() - start)
        print(json.dumps({"step": index, "loss": round(loss, 4), "seconds": round(seconds[-1], 2)}), flush=True)
    close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    median = statistics.median(seconds[2:] or seconds)
    print(json.dumps({"system": arguments.system, "step_seconds_median": round(median, 2), "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
