"""Llama in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Every module that owns parameters initialises them in its own ``reset_parameters``, and no parent touches them
afterwards: a model made on the meta device can be created module by module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from offload.schedule.loss import chunked_cross_entropy

from .config import LlamaConfig

INIT_STD = 0.02
IGNORE_INDEX = -100


@dataclass  # without slots: hooks of other libraries read outputs through vars()
class LlamaOutput:
    """``loss``: fp32 scalar, or None without labels. ``logits``: (batch, time, vocabulary), or None where the loss was
    computed in chunks.
    """

    loss: Tensor | None
    logits: Tensor | None


# Code that looks for tensors in a model's outputs walks pytrees, which know no dataclasses of their own accord.
register_pytree_node(
    LlamaOutput,
    lambda output: ([output.loss, output.logits], None),
    lambda children, _: LlamaOutput(*children),
)


class Linear(nn.Linear):
    """A projection without bias whose weight starts as normal(0, std)."""

    def __init__(self, inputs: int, outputs: int, *, std: float = INIT_STD) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Token vectors that start as normal(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(hidden.dtype)


class Rotary(nn.Module):
    """Tables of rotary positions in fp32; they stay fp32 when the model is cast."""

    cos: Tensor  # (max_positions, head_width)
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.positions, self.width, self.theta = config.max_positions, config.head_width, config.rope_theta
        self._fill("cpu")

    def _fill(self, device: torch.device | str) -> None:
        # On the CPU in fp64, so that the same config gives the same bits on every device.
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width
        steps = torch.arange(self.positions, dtype=torch.float64, device="cpu")
        angles = torch.outer(steps, self.theta**-exponents).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().float().to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        module: Any = super()  # torch leaves _apply untyped
        module._apply(fn, recurse)
        self._fill(self.cos.device)  # a cast would round the tables, to_empty() would lose them
        return self

    def forward(self, time: int) -> tuple[Tensor, Tensor]:
        return self.cos[:time], self.sin[:time]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, heads, time, width) by its positions; tables are (time, width). Computed in the tables' dtype."""
    wide = heads.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_head_count, config.head_width
        self.dropout = config.dropout
        self.q_proj = Linear(config.hidden_size, self.heads * self.width)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.width)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.width)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, std=_residual_std(config))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = hidden.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, time, heads, self.width).transpose(1, 2)  # (batch, heads, time, width)

        queries = rotate(split(self.q_proj(hidden), self.heads), cos, sin)
        keys = rotate(split(self.k_proj(hidden), self.kv_heads), cos, sin)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            split(self.v_proj(hidden), self.kv_heads),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.heads != self.kv_heads,
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, self.heads * self.width))
        return output


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.mlp_width)
        self.up_proj = Linear(config.hidden_size, config.mlp_width)
        self.down_proj = Linear(config.mlp_width, config.hidden_size, std=_residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class LlamaBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.self_attn(self.input_layernorm(hidden), cos, sin))
        output: Tensor = hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        return output


class Llama(nn.Module):
    """The language model. With labels it returns the loss of predicting each next token."""

    loss_chunk: int | None = None
    """Tokens whose logits exist at a time in the loss; an engine sets it from ``schedule.loss_chunk``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> LlamaOutput:
        """``input_ids`` and ``labels``: int64 (batch, time). Labels are shifted here; -100 leaves a target out.

        ``ValueError`` for a sequence beyond ``max_positions`` or labels of another shape.
        """
        time = input_ids.shape[-1]
        if input_ids.dim() != 2 or time > self.config.max_positions:
            raise ValueError(
                f"input_ids must be (batch, time) with at most max_positions = {self.config.max_positions} tokens, "
                f"got shape {tuple(input_ids.shape)}"
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(labels.shape)}"
            )
        cos, sin = self.rotary(time)
        hidden = self.embed_tokens(input_ids)
        for block in self.layers:
            hidden = block(hidden, cos, sin)
        hidden = self.norm(hidden)
        if labels is not None and self.loss_chunk is not None:
            loss = chunked_cross_entropy(
                hidden[:, :-1], self.lm_head, labels[:, 1:], self.loss_chunk, ignore_index=IGNORE_INDEX
            )
            return LlamaOutput(loss, None)
        logits = self.lm_head(hidden)
        return LlamaOutput(None if labels is None else next_token_loss(logits, labels), logits)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        """Append the most likely token ``max_new_tokens`` times, recomputing the last ``max_positions`` each time.

        (batch, time) -> (batch, time + max_new_tokens). Dropout follows ``train()``/``eval()`` as in ``forward``.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
        for _ in range(max_new_tokens):
            logits: Tensor = self(input_ids[:, -self.config.max_positions :]).logits
            input_ids = torch.cat((input_ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return input_ids


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of logits (batch, time, vocabulary) at t against labels (batch, time) at t + 1."""
    predictions = logits[:, :-1].float()
    return F.cross_entropy(predictions.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)


def _residual_std(config: LlamaConfig) -> float:
    # Two additions a block: keeps the residual stream's variance from growing with depth (GPT-2).
    return INIT_STD / math.sqrt(2 * config.layers)
