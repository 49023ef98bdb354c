"""The tables of rotary embeddings, computed step for step as transformers does."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.spec import Attention, LatentAttention, ModelSpec, Rope

_UNMOVED = Rope(scaling="proportional", share=0.0)
"""All angles are 0."""


class RotaryTables:
    """The tables of positions that the layers of a model need."""

    def __init__(self, spec: ModelSpec, max_position: int, device: torch.device | None = None) -> None:
        device = device or torch.device("cpu")
        self._tables: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = {}
        self._q_scales: dict[tuple[float, int, int], Tensor] = {}
        for attention in spec.attentions.values():
            number, head_dim, by = attention.rope, attention.rotary_size, attention.temperature
            if (number, head_dim) not in self._tables:
                rope = _UNMOVED if number is None else spec.ropes[number]
                cos, sin = rotary_tables(rope, head_dim, max_position)
                self._tables[number, head_dim] = cos.to(device), sin.to(device)
            if by is not None and by not in self._q_scales:
                self._q_scales[by] = query_scales(by, max_position).to(device)

    def of(self, attention: Attention | LatentAttention) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos and sin, each [positions, rotary_size / 2], and the scales of queries [positions]."""
        cos, sin = self._tables[attention.rope, attention.rotary_size]
        return cos, sin, None if attention.temperature is None else self._q_scales[attention.temperature]


def query_scales(temperature: tuple[float, int, int], max_position: int) -> Tensor:
    """[max_position] float32; see `Attention.temperature`."""
    by, length, first = temperature
    return 1 + by * torch.log(1 + (torch.arange(max_position) + first) // length)


def rotary_tables(rope: Rope, head_dim: int, max_position: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [max_position, head_dim / 2], float32; dimensions that pass have angles of 0."""
    frequencies = inverse_frequencies(rope, head_dim, max_position)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.magnitude != 1.0:
        cos, sin = cos * rope.magnitude, sin * rope.magnitude
    passing = (0, head_dim // 2 - len(frequencies))
    return F.pad(cos, passing, value=1.0), F.pad(sin, passing)


def inverse_frequencies(rope: Rope, head_dim: int, max_position: int = 0) -> Tensor:
    """[d / 2] radians per position for d rotated dimensions, computed step for step as transformers does, in float32.

    Args:
        max_position: no sequence will be longer; some models have frequencies of their own for long ones.
    """
    if rope.scaling == "proportional":
        return _proportional(rope, head_dim)
    rotated = int(head_dim * rope.share)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    theta: float = rope.theta * _growth(rope, max_position) ** (rotated / max(1, rotated - 2))
    frequencies = 1.0 / (theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "factors":
        is_short = bool(rope.short_factors) and max_position <= rope.original_max_position
        factors = torch.tensor(rope.short_factors if is_short else rope.factors)
        return 1.0 / (factors * rope.theta**exponents) if rope.short_factors else frequencies / factors
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies)
    return _llama3(rope, frequencies) if rope.scaling == "llama3" else frequencies


def _growth(rope: Rope, max_position: int) -> float:
    """Returns the factor of theta in dynamic scaling: the longest sequence's, so that no key is ever rotated anew."""
    if rope.scaling != "dynamic":
        return 1.0
    return max(1.0, rope.factor * (max_position / rope.original_max_position - 1) + 1)


def _proportional(rope: Rope, head_dim: int) -> Tensor:
    """The first frequencies of the whole head, and zeros."""
    live = int(rope.share * head_dim // 2)
    exponents = torch.arange(0, 2 * live, 2, dtype=torch.float32) / head_dim
    return torch.cat((1.0 / (rope.theta**exponents), torch.zeros(head_dim // 2 - live))) / rope.factor


def _yarn(rope: Rope, frequencies: Tensor) -> Tensor:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023: frequencies that turn
    often in the original context are kept, slow ones divided by `factor`, frequencies in between blended."""
    size = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """The dimension that turns so often in the original context."""
        return (
            size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's: long waves are stretched by `factor`, short ones kept, waves in between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)
