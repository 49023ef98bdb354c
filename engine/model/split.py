"""How a model is shared out among the ranks that run it together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.model.gguf.container import is_gguf
from engine.spec import Experts, Layer


def split_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The config of what one of the ranks has: it is a decoder with fewer heads and a narrower feed-forward part.

    Where there are fewer key-value heads than ranks, several ranks have the same one. The vocabulary keeps its size;
    see `ModelConfig.vocab_rows`.

    Raises:
        CheckpointError: the model cannot be shared out among so many.
    """
    asked = f"--tensor-parallel {num_ranks}"
    for attention in (layer.attention for layer in config.layers):
        if attention.num_heads % num_ranks:
            raise CheckpointError(
                f"{asked}: the model has {attention.num_heads} attention heads, which do not split"
            )
        if attention.num_kv_heads % num_ranks and num_ranks % attention.num_kv_heads:
            raise CheckpointError(
                f"{asked}: the model has {attention.num_kv_heads} key-value heads, which do not split"
            )
    for inner in (inner for layer in config.layers for inner in _inner_sizes(layer)):
        if inner % num_ranks:
            raise CheckpointError(
                f"{asked}: the model has an intermediate_size of {inner}, which does not split"
            )
    for layer in config.layers:
        for name, norm in layer.attention.norms().items():
            if norm.size != layer.attention.head_dim:
                raise CheckpointError(
                    f"{asked}: {norm.name} norms all heads as one row, which ranks do not have ({name})"
                )
    layers = tuple(_part_of(layer, num_ranks) for layer in config.layers)
    part = replace(config, spec=replace(config.spec, layers=layers), num_ranks=num_ranks)
    if -(-config.vocab_size // part.vocab_rows) != num_ranks:
        raise CheckpointError(
            f"{asked}: the model has {config.vocab_size} tokens, which are too few to split"
        )
    return part


def _part_of(layer: Layer, num_ranks: int) -> Layer:
    attention, feed_forward = layer.attention, layer.feed_forward
    narrow = layer.with_attention(
        num_heads=attention.num_heads // num_ranks,
        num_kv_heads=max(1, attention.num_kv_heads // num_ranks),
    )
    changes: dict[str, object] = {"inner_size": feed_forward.inner_size // num_ranks}
    if isinstance(feed_forward, Experts) and (shared := feed_forward.shared) is not None:
        changes["shared"] = replace(shared, inner_size=shared.inner_size // num_ranks)
    return narrow.with_feed_forward(**changes)


def _inner_sizes(layer: Layer) -> Iterator[int]:
    own = layer.feed_forward
    yield own.inner_size
    if isinstance(own, Experts) and own.shared is not None:
        yield own.shared.inner_size


def check_split(path: Path, config: ModelConfig, num_ranks: int) -> None:
    """Checks that a checkpoint can be shared out among so many ranks.

    Raises:
        CheckpointError: it cannot.
    """
    if num_ranks == 1:
        return
    if is_gguf(path):
        raise CheckpointError(
            f"--tensor-parallel {num_ranks}: a GGUF file is served by one process only: {path}"
        )
    if config.quantization is not None:
        method = config.quantization.text("quant_method")
        raise CheckpointError(
            f"--tensor-parallel {num_ranks}: a checkpoint that is quantized ({method}) is served by one process only; "
            "take one in floating point, and --quantize"
        )
    split_config(config, num_ranks)
