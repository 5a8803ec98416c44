"""Does a state format cost quality? Train a small language model with each of them and compare held-out losses.

    python -m offload.bench.quality --out docs

trains a byte-level Llama in bf16 on the text that ships with Python, for every format and seed, and writes
`state_format_quality.md` (the table) and `state_format_quality.svg` (the curves) into the given directory. Everything
but the state format is the same: initial weights and batches depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.data import TextData
from offload.models import Llama, LlamaConfig
from optimizer_cpu import CPUAdamW
from optimizer_cpu.formats import format_names

_COLOURS = {"fp32": "#1f77b4", "split": "#2ca02c", "compact": "#d62728"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run, apart from format and seed."""

    steps: int = 1500
    hidden: int = 128
    layers: int = 3
    batch: int = 8
    context: int = 96
    lr: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    eval_every: int = 150
    eval_batches: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Held-out losses of one run: `steps[i]` steps had been done at `losses[i]`."""

    state_format: str
    seed: int
    steps: list[int]
    losses: list[float]


def _evaluate(model: Llama, data: TextData, batches: int) -> float:
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in data.eval_batches(batches)]
    return sum(losses) / len(losses)


def train(state_format: str, seed: int, settings: Settings) -> Curve:
    """Train one model and return its held-out losses."""
    torch.manual_seed(seed)
    sizes = LlamaConfig(
        vocab_size=256, hidden_size=settings.hidden, layers=settings.layers, heads=4, max_positions=settings.context
    )
    model = Llama(sizes).to(torch.bfloat16)
    data = TextData(files=None, context=settings.context, batch_size=settings.batch, seed=seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = CPUAdamW(groups, lr=settings.lr, state_format=state_format)

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    curve = Curve(state_format=state_format, seed=seed, steps=[], losses=[])
    for step in range(settings.steps):
        optimizer.zero_grad()
        model(**data.train_batch(step, 0)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % settings.eval_every == 0 or step + 1 == settings.steps:
            curve.steps.append(step + 1)
            curve.losses.append(_evaluate(model, data, settings.eval_batches))
    return curve


def table(curves: Sequence[Curve], settings: Settings, command: str) -> str:
    """Markdown: final held-out loss by format and seed, means, and the distance from fp32 against the seeds' spread."""
    seeds = sorted({curve.seed for curve in curves})
    formats = [name for name in format_names() if any(curve.state_format == name for curve in curves)]
    final = {(curve.state_format, curve.seed): curve.losses[-1] for curve in curves}
    rows = [
        f"Held-out loss (nats per byte) after {settings.steps} steps of {settings.batch} x {settings.context} bytes, "
        f"a bf16 Llama of width {settings.hidden} and {settings.layers} layers, made by `{command}`.",
        "",
        "| format | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | mean - fp32 |",
        "|---|" + "---|" * (len(seeds) + 2),
    ]
    means = {name: statistics.mean(final[name, seed] for seed in seeds) for name in formats}
    base = means.get("fp32", math.nan)
    for name in formats:
        values = " | ".join(f"{final[name, seed]:.4f}" for seed in seeds)
        rows.append(f"| `{name}` | {values} | {means[name]:.4f} | {means[name] - base:+.4f} |")
    if "fp32" in means:
        spread = max(final["fp32", seed] for seed in seeds) - min(final["fp32", seed] for seed in seeds)
        rows += ["", f"Spread of `fp32` over the seeds (largest - smallest): {spread:.4f}."]
    if {"fp32", "split"} <= set(formats):
        same = all(a.losses == b.losses for a in curves for b in curves if _pair(a, b))
        rows.append(f"Every held-out loss of `split` equals `fp32`'s: {'yes' if same else 'NO'}.")
    return "\n".join(rows) + "\n"


def _read(path: Path) -> list[Curve]:
    return [Curve(**row) for row in json.loads(path.read_text())]


def _pair(a: Curve, b: Curve) -> bool:
    return a.seed == b.seed and a.state_format == "fp32" and b.state_format == "split"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low or 1.0) * (end - start)


def picture(curves: Sequence[Curve]) -> str:
    """SVG of held-out loss over steps: one line per run, coloured by format."""
    width, height, left, bottom = 720, 420, 60, 50
    steps = [step for curve in curves for step in curve.steps]
    losses = [loss for curve in curves for loss in curve.losses]
    x = _scale(0, max(steps), left, width - 20)
    y = _scale(min(losses), max(losses), height - bottom, 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} 30V{height - bottom}H{width - 20}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">optimizer steps</text>',
        f'<text x="16" y="{height / 2}" transform="rotate(-90 16 {height / 2})" text-anchor="middle">'
        "held-out loss (nats per byte)</text>",
    ]
    for i in range(6):
        value = min(losses) + (max(losses) - min(losses)) * i / 5
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = max(steps) * i // 5
        parts.append(f'<text x="{x(step):.1f}" y="{height - bottom + 16}" text-anchor="middle">{step}</text>')
    for curve in curves:
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(curve.steps, curve.losses, strict=True))
        # split lies exactly on fp32: dashes let both be seen
        dash = ' stroke-dasharray="5 5"' if curve.state_format == "split" else ""
        colour = _COLOURS.get(curve.state_format, "#777777")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
    for i, name in enumerate(dict.fromkeys(curve.state_format for curve in curves)):
        colour = _COLOURS.get(name, "#777777")
        parts.append(f'<text x="{width - 120}" y="{50 + 18 * i}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the table and write table and picture."""
    parser = argparse.ArgumentParser(description="Compare the quality of optimizer state formats.")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="directory for table and picture")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--formats", nargs="+", default=list(format_names()), choices=format_names())
    parser.add_argument("--curves", type=Path, default=None, help="also write the curves as JSON")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="take these curves too and train only what they lack"
    )
    parsed = parser.parse_args(arguments)
    settings = Settings(steps=parsed.steps)
    known = {(c.state_format, c.seed): c for path in parsed.merge for c in _read(path) if c.steps[-1] == parsed.steps}
    curves = []
    for seed in parsed.seeds:
        for name in parsed.formats:
            curves.append(known.get((name, seed)) or train(name, seed, settings))
            print(f"{name} seed {seed}: held-out loss {curves[-1].losses[-1]:.4f}", flush=True)
    command = f"python -m offload.bench.quality --steps {parsed.steps} --seeds {' '.join(map(str, parsed.seeds))}"
    text = table(curves, settings, command)
    parsed.out.mkdir(parents=True, exist_ok=True)
    (parsed.out / "state_format_quality.md").write_text(text)
    (parsed.out / "state_format_quality.svg").write_text(picture(curves))
    if parsed.curves is not None:
        rows = [{"state_format": c.state_format, "seed": c.seed, "steps": c.steps, "losses": c.losses} for c in curves]
        parsed.curves.write_text(json.dumps(rows))
    print(text)


if __name__ == "__main__":
    main()
