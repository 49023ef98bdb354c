"""What a decoder looks like: the facts of a checkpoint's config.json that the one decoder needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, Llama's half-split form (dimension i is rotated with i + head_dim / 2)."""

    theta: float = 10_000.0
    scaling: str = "default"
    """"default", "linear" or "llama3"."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder: pre-norm, RMSNorm, rotary, grouped-query attention, SwiGLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head, before the rotation (Qwen3)."""
    sliding_windows: tuple[int, ...] = ()
    """Per layer: a token sees itself and at most the window - 1 tokens before it; 0 sees all. Empty: all layers 0."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """What the checkpoint was saved in."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        return self.sliding_windows[layer] if self.sliding_windows else 0
