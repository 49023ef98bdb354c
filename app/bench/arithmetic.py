"""How much arithmetic a token is, from a checkpoint's config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Multiply-adds of the linear operators, as floating point operations (two each)."""

    body: int
    """A token through all layers."""
    head: int
    """A token's logits, computed only where one is sampled."""
    vocabulary: int
    kv: int
    """Numbers that a token leaves in the KV cache."""

    def total(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Counts requests with so many tokens in all; that nothing follows the last token of each is ignored."""
        return self.body * (num_prompt_tokens + num_output_tokens) + self.head * num_output_tokens

    @property
    def per_output_token(self) -> int:
        return self.body + self.head


def read_arithmetic(model: Path) -> Arithmetic:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Arithmetic(
        body=2 * config["num_hidden_layers"] * (attention + mlp),
        head=2 * hidden * config["vocab_size"],
        vocabulary=config["vocab_size"],
        kv=2 * config["num_hidden_layers"] * kv_heads * head_dim,
    )
