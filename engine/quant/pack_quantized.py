"""Weights on a grid as the compressed-tensors library stores them: its format "pack-quantized".

https://github.com/vllm-project/compressed-tensors; transformers and vLLM read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.grid import Grid, Rounded
from penstock.engine.quant.storages.compressed import packed_integers
from penstock.engine.quant.storages.packing import StoredIntegers

METHOD, FORMAT = "compressed-tensors", "pack-quantized"

_DTYPES = {"I32": torch.int32, "I64": torch.int64}


def _storage(grid: Grid) -> StoredIntegers:
    return packed_integers(grid.bits, grid.group_size, symmetric=grid.symmetric)


def stored_tensors(
    grid: Grid, out_features: int, in_features: int
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(suffix, shape, type) of the tensors of one linear map."""
    for tensor in _storage(grid).tensors(out_features, in_features):
        yield tensor.suffix, tensor.known_shape, _DTYPES.get(tensor.dtypes[0], grid.scale_dtype)


def pack(rounded: Rounded, grid: Grid) -> NamedTensors:
    """The tensors that `stored_tensors` describes."""
    storage = _storage(grid)
    tensors = {
        storage.weight.suffix: storage.weight.pack(rounded.integers),
        storage.scale: rounded.levels.scale,
        storage.shape: torch.tensor(rounded.integers.shape),
    }
    if storage.zeros is not None:
        tensors[storage.zeros.suffix] = storage.zeros.pack(rounded.levels.zero.to(torch.int8))
    return tensors


def quantization_config(
    groups: Sequence[tuple[list[str], Grid, bool]], ignored: list[str]
) -> dict[str, object]:
    """The entry `quantization_config` of config.json.

    Args:
        groups: (targets, grid, whether rounding went by activation). Targets are names of linear maps, regular
            expressions after "re:", or classes.
        ignored: the linear maps that are not quantized.
    """
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": _weights(grid, by_activation),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
            for i, (targets, grid, by_activation) in enumerate(groups)
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(grid: Grid, by_activation: bool) -> dict[str, object]:
    return {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "strategy": "channel" if grid.group_size is None else "group",
        "group_size": grid.group_size,
        "dynamic": False,
        "actorder": "weight" if by_activation else None,
    }
