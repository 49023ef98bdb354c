"""The facts of a checkpoint's config.json and generation_config.json, and the options that a model is loaded with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engine.fields import Fields
from penstock.engine.spec import Attention, LatentAttention, Layer, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: the description of its decoder, and further facts of its checkpoint."""

    architecture: str
    vocab_size: int
    max_position: int
    spec: ModelSpec
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The type that the checkpoint says it was saved in."""
    quantization: Fields | None = None
    """The model's quantization_config, which says how its linear maps are quantized; None if they are not."""
    num_ranks: int = 1
    """The ranks that have a part of each layer; with more than one, the spec describes one rank's part."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.spec.layers

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def attentions(self) -> tuple[Attention | LatentAttention, ...]:
        """The attention of each layer that has one, in the order of the layers."""
        return tuple(self.spec.attentions.values())

    @property
    def num_heads(self) -> int:
        """The query heads of the first layer with attention; the next two properties are of that layer, too."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attentions[0].head_dim

    @property
    def q_size(self) -> int:
        """The width of the widest queries; 0 without attention, as the next."""
        return max((attention.q_size for attention in self.attentions), default=0)

    @property
    def kv_size(self) -> int:
        """The width of the widest keys."""
        return max((attention.kv_size for attention in self.attentions), default=0)

    @property
    def intermediate_size(self) -> int:
        """The size of the widest feed-forward part; 0 if no layer has one."""
        parts = (layer.feed_forward for layer in self.layers)
        return max((part.inner_size for part in parts if part is not None), default=0)

    @property
    def vocab_rows(self) -> int:
        """The rows of embedding and output head that one rank has; the last one may have padding at the end."""
        return -(-self.vocab_size // self.num_ranks)

    @property
    def context_window(self) -> int:
        """The longest sliding window, if all layers of the model have one; else 0."""
        if self.spec.stage is not None:
            return self.spec.stage.context_window
        if self.spec.states:
            return 0
        windows = [attention.window for attention in self.attentions]
        return max(windows) if all(windows) else 0

    @property
    def longest_window(self) -> int:
        """The longest sliding window of a layer; 0 if no layer has one."""
        return max((attention.window for attention in self.attentions), default=0)

    @property
    def sees_chunks(self) -> bool:
        """Whether some layers see the tokens of their own chunk in place of a window."""
        return any(attention.reach < 0 for attention in self.attentions)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The sampling parameters that generation_config.json recommends; None where it recommends none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


MAX_THREADS = 1024
"""The most threads that a model may compute with on a CPU."""

MAX_RANKS = 64
"""The most processes that a model may be run by."""

QUANT_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "torchao", "mxfp4", "modelopt")
"""The values that `quant_method` of a quantization_config may have."""

MAX_DRAFTS = 8
"""The drafts of a sequence in a step: more of them are rarely all right."""

_VERIFIED_ROWS = 128
"""The rows of logits that there is room for where drafts are verified: more of them cost more than they bring."""

GROUP_SIZES = (32, 64, 128)
"""The numbers of inputs of a quantized row that may share a scale, unless a whole row does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a checkpoint. Every option has a default that suits the machine."""

    device: str = "auto"
    """The device: "cpu", "cuda", or "auto", which is CUDA where torch sees a GPU."""
    dtype: str = "auto"
    """The type of the weights: "float32", "bfloat16", "float16", or "auto"; see `dtype.choose_dtype`."""
    quantize: str | None = None
    """The type that linear maps are quantized to at load: "int8", "int4", "fp8", "nf4", or None for none."""
    quantize_group_size: int | None = None
    """The inputs of a row that share a scale; None stands for a default, see `Quantization.layer_format`."""
    keep_quantized: bool = False
    """Whether the weights that `quantize` makes are kept in the cache folder for the next start."""
    kv_dtype: str = "auto"
    """The type of the KV cache: "float32", "bfloat16", "float16", "int8", "fp8", which is int8, too, or "auto": that
    of the weights."""
    num_threads: int | None = None
    """The threads that compute on a CPU; None stands for one for each core that this process may use."""
    block_size: int = 16
    """The tokens of a KV block."""
    max_num_seqs: int = 256
    max_batch_tokens: int = 512
    """The most tokens of one step; 0 leaves it to the device."""
    max_model_len: int | None = None
    """The tokens of the longest sequence; None stands for as many as the model has positions."""
    kv_keep: int = 0
    """The tokens of a longer sequence whose keys and values are kept, so that it may be longer than the KV cache; 0 if
    all are. See `planning.keeping`."""
    num_blocks: int | None = None
    """The KV blocks of the pool, block 0 included; None stands for as many as `kv_bytes` holds."""
    kv_bytes: int | None = None
    """The memory of the KV cache, and of states where layers have some. None stands for a share of the memory that the
    weights leave free, but no more than could ever be used."""
    gpu_memory_utilization: float = 0.9
    """The share of a GPU's memory that may be in use once the KV cache is allocated, other processes included."""
    cuda_graphs: bool = True
    """Whether steps on a GPU are captured as CUDA graphs once and replayed."""
    max_drafts: int = MAX_DRAFTS
    """The most drafts of each sequence in a step; 0 stands for none."""
    own_drafts: bool = True
    """Whether a model's own layer of multi-token prediction drafts for it where no draft is given."""
    num_ranks: int = 1
    """The processes that have a part of each layer."""
    num_stages: int = 1
    """The stages that the layers are cut into, each with so many processes."""
    expert_parallel: str = "auto"
    """The way ranks share experts: "on", each has some of them; "off", each has some rows of every expert; "auto", the
    better one for their size, see `split.splits_whole`."""
    data_parallel_attention: bool = False
    """Whether ranks share out whole experts and nothing else, and each has sequences of its own."""

    def __post_init__(self) -> None:
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads must be between 1 and {MAX_THREADS}, not {self.num_threads}")

    @property
    def num_processes(self) -> int:
        """The processes that run the model together."""
        return self.num_stages * self.num_ranks

    @property
    def max_query_len(self) -> int:
        """The most tokens of a sequence in a step that verifies drafts."""
        return 1 + self.max_drafts

    @property
    def num_pending(self) -> int:
        """The rows after a state that its slot has room for: drafts, or the last tokens of a prompt, so that a prompt
        that leaves a state there finds it again, as a conversation's next turn does."""
        return max(self.max_drafts, MAX_DRAFTS)

    @property
    def max_rows(self) -> int:
        """The rows of logits of a step: one for each sequence that samples, and one more for each of its drafts."""
        rows = max(self.max_num_seqs, _VERIFIED_ROWS) if self.max_drafts else self.max_num_seqs
        return min(rows, self.max_batch_tokens)

    def for_device(self, kind: str) -> LoadOptions:
        """These options with `max_batch_tokens` set for the device, if it was left to it.

        A GPU is faster with large steps; a CPU is as fast with small ones.
        """
        return self if self.max_batch_tokens else replace(self, max_batch_tokens=_BATCH_TOKENS[kind])


_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
