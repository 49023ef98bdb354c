"""Weights on a grid as the compressed-tensors library stores them: its format "pack-quantized".

https://github.com/vllm-project/compressed-tensors; transformers and vLLM read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.quant.formats import NamedTensors
from engine.quant.grid import Grid, Rounded

METHOD, FORMAT = "compressed-tensors", "pack-quantized"

_WORD_BITS = 32


def stored_tensors(
    grid: Grid, out_features: int, in_features: int
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(suffix, shape, type) of the tensors of one linear map."""
    groups = in_features // grid.group_size_of(in_features)
    yield "weight_packed", (out_features, _num_words(in_features, grid)), torch.int32
    yield "weight_scale", (out_features, groups), grid.scale_dtype
    yield "weight_shape", (2,), torch.int64
    if not grid.symmetric:
        yield "weight_zero_point", (_num_words(out_features, grid), groups), torch.int32


def pack(rounded: Rounded, grid: Grid) -> NamedTensors:
    """The tensors that `stored_tensors` describes."""
    tensors = {
        "weight_packed": _words(rounded.integers, grid.bits),
        "weight_scale": rounded.levels.scale,
        "weight_shape": torch.tensor(rounded.integers.shape),
    }
    if not grid.symmetric:
        zeros = rounded.levels.zero.to(torch.int8)
        tensors["weight_zero_point"] = _words(zeros.T, grid.bits).T.contiguous()
    return tensors


def _num_words(count: int, grid: Grid) -> int:
    return -(-count * grid.bits // _WORD_BITS)


def _words(integers: Tensor, bits: int) -> Tensor:
    """[m, n] int8 -> [m, ceil(n * bits / 32)] int32: each as n + 2^(bits - 1), the lowest bits first."""
    per_word = _WORD_BITS // bits
    codes = integers.long() + (1 << (bits - 1))
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    shifts = torch.arange(0, _WORD_BITS, bits, device=integers.device)
    words = (torch.unflatten(codes, 1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


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
