"""The cut of a model into stages: each has some consecutive layers, and hands its hidden states to the next.

A stage is a model of its own to whatever loads, plans or runs it: its layers are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from penstock.engine.config import MAX_RANKS, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.split import check_files
from penstock.engine.spec import Layer, Stage


def cut_config(config: ModelConfig, num_stages: int, number: int) -> ModelConfig:
    """Returns the config of a stage, whose layers are numbered from 0.

    The first stage has the embedding, the last one the final norm and the output head; both have the rows of a tied
    embedding. Layers are shared out so that the stage with the most weights has as few as can be.

    Args:
        config: the model's, or the part of it that a rank has of each layer.

    Raises:
        CheckpointError: the model cannot be cut into so many.
    """
    from penstock.engine.kernels.kv_cache import (
        KVLayout,  # it takes torch, without which checkpoints are read
    )

    spec, name = config.spec, f"--pipeline-parallel {num_stages}"
    if config.num_layers < num_stages:
        raise CheckpointError(f"{name}: the model has {config.num_layers} layers, which are too few")
    if spec.layer_embeddings is not None:
        raise CheckpointError(f"{name}: the model's layers have embeddings of their own, which are not cut")
    if any(attention.shares is not None for attention in config.attentions):
        raise CheckpointError(
            f"{name}: layers of the model read the keys of others, from which they are not cut"
        )
    sizes = [_num_weights(layer) for layer in config.layers]
    ends = config.vocab_rows * config.hidden_size
    sizes[0], sizes[-1] = sizes[0] + ends, sizes[-1] + ends
    first, end = (*stage_starts(sizes, num_stages), len(sizes))[number : number + 2]
    stage = Stage(
        number=number,
        count=num_stages,
        first_layer=first,
        windows=KVLayout.of(config, 1).windows,
        context_window=config.context_window,
    )
    return replace(config, spec=replace(spec, layers=spec.layers[first:end], stage=stage))


def stage_starts(sizes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Returns the first layer of each stage: the largest sum of sizes of a stage is the least that there can be."""
    before = list(accumulate(sizes, initial=0))
    best: dict[int, tuple[int, tuple[int, ...]]] = {end: (before[end], (0,)) for end in range(1, len(before))}
    """By number of layers, the largest of the stages that these are cut into, and where the stages start."""
    for num in range(2, num_stages + 1):
        best = {
            end: min(
                (max(best[start][0], before[end] - before[start]), (*best[start][1], start))
                for start in range(num - 1, end)
            )
            for end in range(num, len(before))
        }
    return best[len(sizes)][1]


def _num_weights(layer: Layer) -> int:
    """The numbers of a layer's linear maps."""
    return sum(map.in_features * sum(rows.count for rows in map.rows) for map in layer.maps().values())


def check_stages(path: Path, config: ModelConfig, num_stages: int, num_ranks: int = 1) -> None:
    """Checks that a checkpoint can be cut into so many stages, of so many ranks each.

    Raises:
        CheckpointError: it cannot.
    """
    if num_stages == 1:
        return
    if num_stages * num_ranks > MAX_RANKS:
        raise CheckpointError(
            f"--pipeline-parallel {num_stages}: with --tensor-parallel {num_ranks} there would be "
            f"{num_stages * num_ranks} processes, and {MAX_RANKS} are the most"
        )
    check_files(path, config, f"--pipeline-parallel {num_stages}")
    cut_config(config, num_stages, 0)
