"""What a decoder looks like: the facts of a checkpoint's config.json that the one decoder needs."""

from __future__ import annotations

from dataclasses import dataclass, replace


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json recommends where a request says nothing; None: no recommendation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is to be loaded. Everything has a default that suits the machine."""

    device: str = "auto"
    """"auto" (CUDA if there is some), "cpu" or "cuda"."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16" or "float16"; see `dtype.choose_dtype`."""
    num_threads: int | None = None
    """Threads of the model on a CPU; None: one for every core this process may use."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 256
    max_batch_tokens: int = 512
    """Of one step; 0: what suits the device."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None: as many as the model has positions."""
    num_blocks: int | None = None
    """KV blocks in the pool, block 0 included; None: what `kv_bytes` holds."""
    kv_bytes: int | None = None
    """Memory for the KV cache; None: a share of what the weights leave free, and no more than could ever be used."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use once the KV cache is there, whoever uses it."""
    cuda_graphs: bool = True
    """On a GPU: whether decode steps are captured once and replayed."""
    max_query_len: int = 1
    """On a GPU: tokens of each sequence in such a step; more than 1 is for drafts that are verified."""

    def for_device(self, kind: str) -> LoadOptions:
        """Decided where they leave it to the device: a GPU computes large steps better, a CPU is as fast with small."""
        return self if self.max_batch_tokens else replace(self, max_batch_tokens=_BATCH_TOKENS[kind])


_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
