"""Keeping a part of a long sequence's keys and values: those of its first tokens, and of the latest ones.

From time to time the oldest tokens after the first ones are dropped, by whole blocks, which go out of the block table;
those behind them move up. A token keeps the position that it has in its text. What it attends to follows from that
position alone: no step computes tokens on both sides of a place where some are dropped, so that the way in which a
prompt is cut into steps, and a preemption, change nothing.

After StreamingLLM (Xiao et al., "Efficient streaming language models with attention sinks", 2023), where positions are
counted anew in what is kept; here keys are rotated when they are stored, and the positions stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

_FIRST_TOKENS = 16
"""At least so many first tokens are kept: the first few draw much of the attention whatever they say."""
_ALIGNMENT = 64
"""Tokens are dropped in multiples of it, which kernels for recurrent layers count in."""
_LONGEST_STRIDE = 1024
"""The most tokens that are dropped at a time: longer chunks of a prompt are hardly faster."""


def num_attended(start: int, end: int) -> int:
    """The pairs of a token of `[start, end)` and a token that it attends to: itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, slots=True)
class Keeping:
    """The part that is kept, in tokens; all are whole blocks."""

    num_first: int
    """The first tokens, which are always kept."""
    num_kept: int
    """The tokens that are left when some are dropped, the first ones included."""
    stride: int
    """The tokens that are dropped at a time: as soon as there are so many more than `num_kept`."""

    @classmethod
    def of(cls, num_tokens: int, block_size: int) -> Keeping:
        """Keeps at least so many tokens, which may not be fewer than `least`."""
        unit = lcm(_ALIGNMENT, block_size)
        num_kept = -(-num_tokens // block_size) * block_size
        stride = max(1, min(num_kept // 2, _LONGEST_STRIDE) // unit) * unit
        return cls(_num_first(block_size), num_kept, stride)

    @property
    def most(self) -> int:
        """The most tokens that a sequence has keys and values of."""
        return self.num_kept + self.stride

    def num_dropped(self, position: int) -> int:
        """The tokens that were dropped before the one at this position was computed."""
        return max(0, (position - self.num_kept) // self.stride * self.stride)

    def num_attended(self, start: int, end: int) -> int:
        """About what `num_attended` says, of tokens that attend to what is kept; it is exact before any is dropped."""
        within = min(end, self.most)
        beyond = max(0, end - max(start, self.most))
        return num_attended(min(start, within), within) + beyond * (2 * self.num_kept + self.stride + 1) // 2


def least_kept(block_size: int, window: int) -> int:
    """The fewest tokens that can be kept: the first ones, a block, and what layers with a sliding window see.

    Args:
        window: the tokens that a token sees in the layers that see the most; 0 if no layer has a window.
    """
    return _num_first(block_size) + window + block_size


def _num_first(block_size: int) -> int:
    return -(-_FIRST_TOKENS // block_size) * block_size
