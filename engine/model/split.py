"""The division of a model among the ranks that run it together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.gguf.container import is_gguf
from penstock.engine.spec import (
    Attention,
    Experts,
    GatedDelta,
    LatentAttention,
    Layer,
    Mamba2,
    Mixer,
    Mlp,
    ShortConv,
)

_Part = TypeVar("_Part", Mlp, Experts)

DATA_PARALLEL = "--data-parallel-attention"

TILE = 128
"""The rows of a weight that a product takes at a time: of fewer, it takes as long."""


def split_config(
    config: ModelConfig, num_ranks: int, rank: int = 0, expert_parallel: str = "auto"
) -> ModelConfig:
    """Returns the config of a rank: a decoder with fewer heads, and narrower feed-forward parts or fewer experts.

    Where there are fewer key-value heads than ranks, several ranks have the same one. The vocabulary keeps its size;
    see `ModelConfig.vocab_rows`.

    Args:
        expert_parallel: see `LoadOptions`.

    Raises:
        CheckpointError: the model cannot be divided among so many.
    """
    asked = f"--tensor-parallel {num_ranks}"
    for attention in config.attentions:
        if attention.num_heads % num_ranks:
            raise CheckpointError(
                f"{asked}: the model has {attention.num_heads} attention heads, which do not split"
            )
        if attention.num_kv_heads % num_ranks and num_ranks % attention.num_kv_heads:
            raise CheckpointError(
                f"{asked}: the model has {attention.num_kv_heads} key-value heads, which do not split"
            )
        for name, norm in attention.norms().items():
            if isinstance(attention, Attention) and norm.size != attention.head_dim:
                raise CheckpointError(
                    f"{asked}: {norm.name} norms all heads as one row, which ranks do not have ({name})"
                )
    layers = tuple(_part_of(layer, num_ranks, rank, expert_parallel) for layer in config.layers)
    part = replace(config, spec=replace(config.spec, layers=layers), num_ranks=num_ranks)
    if -(-config.vocab_size // part.vocab_rows) != num_ranks:
        raise CheckpointError(
            f"{asked}: the model has {config.vocab_size} tokens, which are too few to split"
        )
    return part


def _part_of(layer: Layer, num_ranks: int, rank: int, expert_parallel: str) -> Layer:
    own, narrow = layer.feed_forward, replace(layer, mixer=_mixer_part(layer.mixer, num_ranks))
    if own is None:
        return narrow
    if not isinstance(own, Experts):
        return replace(narrow, feed_forward=_narrower(own, num_ranks))
    shared = None if own.shared is None else _narrower(own.shared, num_ranks)
    if splits_whole(own, num_ranks, expert_parallel):
        count = own.router.num_experts // num_ranks
        return narrow.with_feed_forward(first=rank * count, num_own=count, shared=shared)
    return replace(
        narrow, feed_forward=replace(_narrower(own, num_ranks, "intermediate_size of experts"), shared=shared)
    )


def _mixer_part(mixer: Mixer | None, num_ranks: int) -> Mixer | None:
    """A rank's heads, or its channels; several ranks have the same keys and queries of Mamba-2 if there are fewer."""
    if isinstance(mixer, Attention):
        if mixer.is_grouped:
            _share(mixer.num_kv_heads, num_ranks, "key-value heads beside their queries")
        num_kv_heads = max(1, mixer.num_kv_heads // num_ranks)
        return replace(mixer, num_heads=mixer.num_heads // num_ranks, num_kv_heads=num_kv_heads)
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=mixer.num_heads // num_ranks)
    if isinstance(mixer, GatedDelta):
        num_keys = _share(mixer.num_key_heads, num_ranks, "key heads of a gated delta net")
        return replace(mixer, num_key_heads=num_keys, num_value_heads=mixer.num_value_heads // num_ranks)
    if isinstance(mixer, Mamba2):
        num_groups = _share(mixer.num_groups, num_ranks, "groups of Mamba heads")
        return replace(mixer, num_groups=num_groups, num_heads=mixer.num_heads // num_ranks)
    if isinstance(mixer, ShortConv):
        return replace(mixer, channels=_share(mixer.channels, num_ranks, "channels of a convolution"))
    return None


def _share(count: int, num_ranks: int, what: str) -> int:
    if count % num_ranks:
        raise CheckpointError(
            f"--tensor-parallel {num_ranks}: the model has {count} {what}, which do not split"
        )
    return count // num_ranks


def _narrower(part: _Part, num_ranks: int, field: str = "intermediate_size") -> _Part:
    """The part with a rank's share of its inner rows, of every expert."""
    if part.inner_size % num_ranks:
        raise CheckpointError(
            f"--tensor-parallel {num_ranks}: the model has an {field} of {part.inner_size}, which does not split"
        )
    return replace(part, inner_size=part.inner_size // num_ranks)


def splits_whole(experts: Experts, num_ranks: int, expert_parallel: str) -> bool:
    """Returns whether each rank has some of the experts, whole, rather than its rows of every expert.

    Rows of every expert put the same work on each rank, for any choice of experts. That is better, unless the part of
    an expert is so narrow that a product of it takes as long as one of `TILE` rows: "auto" splits the experts where the
    part is narrower, or its rows do not divide, and their number does.

    Raises:
        CheckpointError: expert_parallel is "on", and the ranks do not divide the experts.
    """
    count = experts.router.num_experts
    if expert_parallel == "on" and count % num_ranks:
        raise CheckpointError(
            f"--expert-parallel on: the model has {count} experts, which do not split among {num_ranks} ranks"
        )
    if expert_parallel != "auto":
        return expert_parallel == "on"
    rows, rest = divmod(experts.inner_size, num_ranks)
    return (rest > 0 or rows < TILE) and count % num_ranks == 0


def share_experts(config: ModelConfig, num_ranks: int, rank: int = 0) -> ModelConfig:
    """Returns the config of a rank that has whole experts of its own, and all else as every rank has it.

    Raises:
        CheckpointError: the model has no experts, or layers with a state, or the experts do not divide.
    """
    parts = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    if not parts:
        raise CheckpointError(f"{DATA_PARALLEL}: the model has no experts")
    if config.spec.states:
        raise CheckpointError(f"{DATA_PARALLEL}: the model has layers with a state, which it does not serve")
    for part in parts:
        if part.router.num_experts % num_ranks:
            raise CheckpointError(
                f"{DATA_PARALLEL}: the model has {part.router.num_experts} experts, which do not split among "
                f"{num_ranks} ranks"
            )
    layers = tuple(_with_own_experts(layer, num_ranks, rank) for layer in config.layers)
    return replace(config, spec=replace(config.spec, layers=layers))


def _with_own_experts(layer: Layer, num_ranks: int, rank: int) -> Layer:
    if not isinstance(layer.feed_forward, Experts):
        return layer
    count = layer.feed_forward.router.num_experts // num_ranks
    return layer.with_feed_forward(first=rank * count, num_own=count)


def check_shared_experts(
    path: Path, config: ModelConfig, num_ranks: int, num_stages: int = 1, expert_parallel: str = "auto"
) -> None:
    """Checks that ranks with sequences of their own can share out the experts of a checkpoint.

    Raises:
        CheckpointError: they cannot.
    """
    if num_ranks == 1:
        raise CheckpointError(f"{DATA_PARALLEL}: one process has all sequences; see --tensor-parallel")
    if num_stages > 1:
        raise CheckpointError(f"{DATA_PARALLEL}: the model cannot be cut by --pipeline-parallel as well")
    if expert_parallel == "off":
        raise CheckpointError(f"{DATA_PARALLEL}: it gives each rank whole experts; see --expert-parallel")
    check_files(path, config, DATA_PARALLEL)
    share_experts(config, num_ranks)


def check_split(path: Path, config: ModelConfig, num_ranks: int, expert_parallel: str = "auto") -> None:
    """Checks that a checkpoint can be shared out among so many ranks.

    Raises:
        CheckpointError: it cannot.
    """
    if expert_parallel == "on" and not any(
        isinstance(layer.feed_forward, Experts) for layer in config.layers
    ):
        raise CheckpointError("--expert-parallel on: the model has no experts")
    if num_ranks == 1:
        if expert_parallel == "on":
            raise CheckpointError("--expert-parallel on: one process has all experts; see --tensor-parallel")
        return
    check_files(path, config, f"--tensor-parallel {num_ranks}")
    split_config(config, num_ranks, expert_parallel=expert_parallel)


def check_files(path: Path, config: ModelConfig, option: str) -> None:
    """Checks that several processes can read a checkpoint, each its part.

    Args:
        option: the one that asks for several, with its value.

    Raises:
        CheckpointError: they cannot.
    """
    if is_gguf(path):
        raise CheckpointError(f"{option}: a GGUF file is served by one process only: {path}")
    if config.quantization is not None:
        method = config.quantization.text("quant_method")
        raise CheckpointError(
            f"{option}: a checkpoint that is quantized ({method}) is served by one process only; "
            "take one in floating point, and --quantize"
        )
