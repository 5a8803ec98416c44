"""Only the optimizer: CPUAdamW in a plain PyTorch loop, no engine.

    python examples/cpu_adamw.py --steps 100 --state-format compact

trains a small byte-level Llama in bf16 on the text that ships with Python, with a cosine schedule, gradient clipping
and a checkpoint in the middle that is loaded into a new optimizer.
"""

from __future__ import annotations

import argparse
import io

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from offload.data import TextData
from offload.models import Llama, LlamaConfig
from optimizer_cpu import CPUAdamW
from optimizer_cpu.formats import format_names


def groups(model: torch.nn.Module) -> list[dict]:
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
    others = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def evaluate(model: torch.nn.Module, data: TextData) -> float:
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in data.eval_batches(8)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--state-format", choices=format_names(), default="compact")
    parser.add_argument("--hidden", type=int, default=128)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = LlamaConfig(vocab_size=256, hidden_size=arguments.hidden, layers=2, heads=4, max_positions=64)
    model = Llama(sizes).to(torch.bfloat16)
    data = TextData(files=None, context=64, batch_size=8, seed=0)
    optimizer = CPUAdamW(groups(model), lr=3e-3, state_format=arguments.state_format)
    schedule = CosineAnnealingLR(optimizer, T_max=arguments.steps)

    print(f"held-out loss before: {evaluate(model, data):.3f}")
    for step in range(arguments.steps):
        if step == arguments.steps // 2:
            stored = io.BytesIO()
            torch.save(optimizer.state_dict(), stored)  # fp32 tensors: torch.optim.AdamW could load it too
            optimizer = CPUAdamW(groups(model), state_format=arguments.state_format)
            optimizer.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
            schedule.optimizer = optimizer
        optimizer.zero_grad()
        loss = model(**data.train_batch(step, 0)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    planes = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    kept = sum(plane.numel() * plane.element_size() for plane in planes)
    numel = sum(p.numel() for p in model.parameters())
    print(f"held-out loss after {arguments.steps} steps: {evaluate(model, data):.3f}")
    print(f"weights and optimizer state: {2 + kept / numel:.2f} bytes per parameter")


if __name__ == "__main__":
    main()
