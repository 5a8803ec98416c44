"""Sizes of the reference Llama, their validation, and named presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

DEFAULT_PRESET = "20m"
_MLP_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama. ``ValueError`` names the field that cannot be."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None = None
    """Width of the SwiGLU; by default 8/3 of ``hidden_size``, rounded up to a multiple of 64."""
    layers: int
    heads: int
    kv_heads: int | None = None
    """Key and value heads, a divisor of ``heads``; by default ``heads``."""
    max_positions: int = 2048
    """The longest sequence in tokens."""
    tie_embeddings: bool = False
    """Whether the head reads the embedding's weight."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    """Probability of dropping attention weights and outputs of sub-layers while training."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "max_positions"):
            value = getattr(self, name)
            if value is None and name in ("intermediate_size", "kv_heads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size = {self.hidden_size} must be a multiple of heads = {self.heads}")
        if self.head_width % 2:
            raise ValueError(
                f"heads = {self.heads} leaves {self.head_width} of hidden_size = {self.hidden_size} to each head; "
                "rotary positions need an even number"
            )
        if self.heads % self.kv_head_count:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.heads

    @property
    def kv_head_count(self) -> int:
        """``kv_heads`` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """``intermediate_size`` with its default filled in."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // (3 * _MLP_MULTIPLE)) * _MLP_MULTIPLE


def parameter_count(config: LlamaConfig) -> int:
    """Parameters of ``Llama(config)``, a tied head counted once."""
    hidden = config.hidden_size
    attention = 2 * hidden * hidden + 2 * hidden * config.kv_head_count * config.head_width
    block = attention + 3 * hidden * config.mlp_width + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return embeddings + config.layers * block + hidden


presets: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "20m": LlamaConfig(vocab_size=256, hidden_size=512, layers=6, heads=8, max_positions=1024),
        "110m": LlamaConfig(vocab_size=32000, hidden_size=768, layers=12, heads=12, tie_embeddings=True),
        "438m": LlamaConfig(vocab_size=32000, hidden_size=1536, layers=12, heads=12, max_positions=4096),
        "1b": LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            layers=22,
            heads=32,
            kv_heads=4,
            max_positions=4096,
        ),
        "10b": LlamaConfig(vocab_size=32000, hidden_size=4096, layers=48, heads=32, max_positions=4096),
    }
)


def llama_config(preset: str | None, overrides: Mapping[str, Any], *, context: int) -> LlamaConfig:
    """The sizes that ``build_model`` uses for a preset (by default 20m) and its overrides."""
    name = preset or DEFAULT_PRESET
    if name not in presets:
        raise ValueError(f"model.preset = {name!r}: must be one of {', '.join(presets)}")
    changes = dict(overrides)
    changes.setdefault("max_positions", max(context, presets[name].max_positions))
    try:
        config = dataclasses.replace(presets[name], **changes)
    except ValueError as error:
        raise ValueError(f"model.{error}") from None
    if config.max_positions < context:
        raise ValueError(f"model.max_positions = {config.max_positions} is less than data.context = {context}")
    if config.vocab_size < 256:
        raise ValueError(f"model.vocab_size = {config.vocab_size}: text in bytes needs at least 256 token ids")
    return config
